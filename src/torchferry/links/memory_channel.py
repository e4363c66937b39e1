"""A channel through memory, for the payload of one transfer between two processes of one machine.

The sender listens on an abstract Unix socket and offers its name. A receiver that takes the offer connects,
and sends the nonce of the transfer. The sender sends it the descriptor of a ring, a sealed file in memory.

A message takes one or more of the ring's slots, in order. A process that ends is noticed at once: its socket
is closed.
"""

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch

from torchferry.core.push import NONCE_BYTES
from torchferry.errors import LinkBroken, LinkError, LinkTimeout, StateError
from torchferry.links.base import Hasher, Pending, abort_of
from torchferry.links.endings import close_after_fork
from torchferry.links.ring import MAX_SLOT_BYTES, SLOTS, Ring
from torchferry.links.shared_memory import SharedBlock, close_all, map_received, populate
from torchferry.links.sockets import close_descriptor, connect_locally, listen_locally, shut_down, user_of

_PAGE_BYTES = 4096
_ALL_RINGS_BYTES = 32 << 20
"""The most memory of all rings of one sender, however many receivers it has."""

# The bytes that the two ends send each other.
_RING, _NO_RING = b"\x01", b"\x02"
_ABORT = b"\x02"  # where a signal for a slot could be

_STOP_S = 0.25
"""How long to wait for a thread that copies a slot."""
_MAX_WAIT_S = 3600.0
"""A socket's timeout has an upper limit; longer waits are repeated."""


def ring_bytes(payload_bytes: int, receivers: int) -> int:
    """Return the size of each receiver's ring. For a small payload, creating a large ring would not pay.

    >>> ring_bytes(1 << 30, 1), ring_bytes(1 << 30, 64), ring_bytes(8 << 20, 1)
    (4194304, 524288, 1048576)
    """
    most_bytes = min(_ALL_RINGS_BYTES // receivers, payload_bytes // 8)
    slot_bytes = min(MAX_SLOT_BYTES, most_bytes // SLOTS)
    return SLOTS * max(slot_bytes // _PAGE_BYTES, 1) * _PAGE_BYTES


def _name(token: bytes, receiver: int) -> str:
    return f"{token.hex()}-{receiver}"


class MemoryOffer:
    """A sender's offer to one receiver, which connects if it takes it.

    Raises OSError or AttributeError if this machine has no such sockets or memory.
    """

    def __init__(self, token: bytes, receiver: int) -> None:
        _ = os.memfd_create, socket.SO_PEERCRED  # raises AttributeError where they do not exist
        self._receiver = receiver
        self._listener = listen_locally(_name(token, receiver))
        self._listener.setblocking(False)
        close_after_fork(self)

    def accept(self, nonce: bytes) -> "MemoryChannel":
        """Return the channel to the receiver, which has connected; raises LinkBroken if it has not."""
        try:
            while True:
                sock, _ = self._listener.accept()
                # Other processes may connect too. The receiver sent the nonce before it took the offer.
                with suppress(OSError):
                    sock.setblocking(False)
                    if user_of(sock) == os.geteuid() and sock.recv(NONCE_BYTES) == nonce:
                        return MemoryChannel(sock, self._receiver)
                sock.close()
        except OSError as error:
            what = f"rank {self._receiver} took the offer of memory, but did not connect ({error})"
            raise LinkBroken(what, peer=self._receiver) from error

    def close(self) -> None:
        """Stop listening."""
        self._listener.close()

    def close_inherited(self) -> None:
        """Close the socket in a forked child."""
        close_descriptor(self._listener)


def take_offer(
    token: bytes, nonce: bytes, *, sender: int, receiver: int, timeout_s: float
) -> "MemoryChannel":
    """Connect to a sender of the same user on this machine; raises OSError, which says why that failed."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(min(timeout_s, _MAX_WAIT_S))
        connect_locally(sock, _name(token, receiver))
        sock.sendall(nonce)
    except BaseException:
        sock.close()
        raise
    return MemoryChannel(sock, sender)


class MemoryChannel:
    """One end of the channel. A message is copied while it is waited for, in the order of `send` or `recv`.

    A message is hashed while its bytes are in the cache, if there is a hasher for it.

    Both ends first open it: the sender with `send_ring`, the receiver with `receive_ring`. If there is no
    memory for the ring, `is_open` is False afterwards, on both ends.
    """

    copies: ClassVar[bool] = True

    def __init__(self, sock: socket.socket, peer: int) -> None:
        self.peer = peer
        self._sock = sock
        self._ring: Ring | None = None
        self._failed_rank: int | None = None
        self._waiting = threading.Lock()
        close_after_fork(self)

    @property
    def is_open(self) -> bool:
        """Whether both ends have the ring."""
        return self._ring is not None

    def send_ring(self, nbytes: int) -> Pending:
        """Create the ring, and wait until the receiver has it."""
        return _Step(self, partial(self._send_ring, nbytes))

    def _send_ring(self, nbytes: int, deadline_s: float) -> None:
        try:
            memory = SharedBlock(nbytes)
        except OSError:
            self._send(_NO_RING)
            return
        populate(memory.address, nbytes, writable=True)
        socket.send_fds(self._sock, [_RING], [memory.descriptor], socket.MSG_NOSIGNAL)
        if self._read(1, deadline_s) == _RING:
            self._ring = Ring(self._sock, memory, fills=True)

    def receive_ring(self) -> Pending:
        """Wait for the ring, and map it."""
        return _Step(self, self._receive_ring)

    def _receive_ring(self, deadline_s: float) -> None:
        self._set_timeout(deadline_s)
        data, descriptors, _, _ = socket.recv_fds(self._sock, 1, 1, socket.MSG_CMSG_CLOEXEC)
        if data != _RING or not descriptors:
            close_all(descriptors)
            if data == _NO_RING:
                return
            raise self._gone("the peer sent no ring")
        try:
            memory = map_received(descriptors[0])
            if memory.nbytes >= SLOTS:
                self._ring = Ring(self._sock, memory, fills=False)
        except OSError:
            pass
        finally:
            close_all(descriptors)
        self._send(_RING if self.is_open else _NO_RING)
        if self.is_open:
            populate(memory.address, memory.nbytes, writable=False)

    def send(self, buffer: torch.Tensor, hasher: Hasher | None = None) -> Pending:
        """Start to send the next message."""
        return _Step(self, partial(self._fill, buffer, hasher))

    def recv(self, buffer: torch.Tensor, hasher: Hasher | None = None) -> Pending:
        """Start to receive the next message."""
        return _Step(self, partial(self._empty, buffer, hasher))

    def flush(self) -> Pending:
        """Wait until the receiver has copied every message that was sent."""
        return _Step(self, self._flush)

    def send_abort(self, failed_rank: int, expected: Sequence[int]) -> list[Pending]:
        """Tell the receiver that a rank failed. An abort goes over the socket, so it needs no slot."""
        abort = _ABORT + failed_rank.to_bytes(8, "little")
        return [_Step(self, lambda deadline_s: self._send(abort))]

    def raise_if_aborted(self, head: bytes) -> None:
        """Do nothing: an abort does not take the place of a message."""

    def _fill(self, buffer: torch.Tensor, hasher: Hasher | None, deadline_s: float) -> None:
        ring, wait = self._opened_ring, partial(self._wait_for_free, deadline_s)
        for start in range(0, buffer.nbytes, ring.slot_bytes):
            ring.fill(*_piece(buffer, start, ring.slot_bytes), wait, hasher)

    def _flush(self, deadline_s: float) -> None:
        self._opened_ring.flush(partial(self._wait_for_free, deadline_s))

    def _wait_for_free(self, deadline_s: float, most: int) -> int:
        return len(self._read(most, deadline_s))

    def _empty(self, buffer: torch.Tensor, hasher: Hasher | None, deadline_s: float) -> None:
        ring, wait = self._opened_ring, partial(self._wait_for_filled, deadline_s)
        for start in range(0, buffer.nbytes, ring.slot_bytes):
            ring.empty(*_piece(buffer, start, ring.slot_bytes), wait, hasher)

    def _wait_for_filled(self, deadline_s: float, most: int) -> int:
        if self._failed_rank is not None:
            raise abort_of(self.peer, self._failed_rank)
        # An abort has 9 bytes.
        filled, abort, rank = self._read(most + 9, deadline_s).partition(_ABORT)
        self._failed_rank = int.from_bytes(rank[:8], "little") if abort else None
        return len(filled)

    @property
    def _opened_ring(self) -> Ring:
        if self._ring is None:
            raise self._gone("this process has closed the ring")
        return self._ring

    def _send(self, data: bytes) -> None:
        self._sock.send(data, socket.MSG_NOSIGNAL)

    def _read(self, max_bytes: int, deadline_s: float) -> bytes:
        while True:
            self._set_timeout(deadline_s)
            with suppress(TimeoutError):
                data = self._sock.recv(max_bytes)
                if not data:
                    raise self._gone("the peer has closed the socket")
                return data

    def _set_timeout(self, deadline_s: float) -> None:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise self._late()
        self._sock.settimeout(min(left_s, _MAX_WAIT_S))

    def _late(self) -> LinkTimeout:
        return LinkTimeout(f"rank {self.peer} did not copy or send the next bytes in time", peer=self.peer)

    def _gone(self, why: object) -> LinkBroken:
        return LinkBroken(
            f"the connection to rank {self.peer} through memory is gone ({why})", peer=self.peer
        )

    def stop(self) -> None:
        """End all waits. Does not wait itself."""
        if self._ring is not None:
            self._ring.is_stopped = True
        shut_down(self._sock)

    def close(self) -> None:
        """End all waits, and free socket and memory. Nothing is copied afterwards."""
        self.stop()
        # If a thread is stuck, socket and memory are freed with the last reference to this object.
        if self._waiting.acquire(timeout=_STOP_S):
            self._sock.close()
            if self._ring is not None:
                self._ring.close()
            self._ring = None
            self._waiting.release()

    def close_inherited(self) -> None:
        """Close the socket in a forked child."""
        close_descriptor(self._sock)


@dataclass
class _Step:
    """A `Pending` that does its work while it is waited for. The argument of `work` is its deadline."""

    channel: MemoryChannel
    work: Callable[[float], None]

    def wait(self, timeout_s: float) -> None:
        channel = self.channel
        with channel._waiting:
            try:
                self.work(time.monotonic() + timeout_s)
            except LinkError:
                raise
            except TimeoutError as error:
                raise channel._late() from error
            except OSError as error:
                raise channel._gone(error) from error


def _piece(buffer: torch.Tensor, start: int, max_bytes: int) -> tuple[int, int]:
    """Return the address and the size of a piece of a flat buffer; raises StateError if it was freed."""
    held, end = buffer.untyped_storage().nbytes(), int(buffer.storage_offset()) + buffer.nbytes
    if end > held:
        raise StateError(
            f"the memory of a tensor was freed during the transfer: its storage holds {held} bytes of the "
            f"{end} that are used"
        )
    return buffer.data_ptr() + start, min(buffer.nbytes - start, max_bytes)
