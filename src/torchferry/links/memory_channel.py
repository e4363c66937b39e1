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
from typing import ClassVar, TypeAlias

import torch

from torchferry.core.extents import check_held
from torchferry.core.push import NONCE_BYTES
from torchferry.errors import LinkBroken, LinkError, LinkTimeout
from torchferry.links.base import Channel, Hasher, Pending, abort_of
from torchferry.links.lifecycle import close_after_fork
from torchferry.links.ring import MAX_SLOT_BYTES, SLOTS, Ring, create_ring, map_ring
from torchferry.links.shared_memory import close_all, close_memfds
from torchferry.links.sockets import (
    close_descriptor,
    connect_locally,
    listen_locally,
    shut_down,
    timeout_of,
    user_of,
)

_PAGE_BYTES = 4096
_ALL_RINGS_BYTES = 32 << 20
"""The most memory of all rings of one sender, however many receivers it has."""

# The bytes that the two ends send each other.
_RING, _NO_RING = b"\x01", b"\x02"
_ABORT = b"\x02"  # where a signal for a slot could be

_STOP_S = 0.25
"""How long to wait for a thread that copies a slot."""


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
        sock.settimeout(timeout_of(timeout_s))
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
        self._deadline_s = 0.0  # of the wait that holds the lock
        close_after_fork(self)

    @property
    def is_open(self) -> bool:
        """Whether both ends have the ring."""
        return self._ring is not None

    def send_ring(self, nbytes: int) -> Pending:
        """Create the ring, and wait until the receiver has it."""
        return _Step(self, partial(self._send_ring, nbytes))

    def receive_ring(self) -> Pending:
        """Wait for the ring, and map it."""
        return _Step(self, self._receive_ring)

    def send(self, buffer: torch.Tensor, hasher: Hasher | None = None) -> Pending:
        """Start to send the next message."""
        return _Step(self, lambda: self._opened_ring.fill(partial(_find, buffer), buffer.nbytes, hasher))

    def recv(self, buffer: torch.Tensor, hasher: Hasher | None = None) -> Pending:
        """Start to receive the next message."""
        return _Step(self, lambda: self._opened_ring.empty(partial(_find, buffer), buffer.nbytes, hasher))

    def flush(self) -> list[Pending]:
        """Return what to wait for after the last message: until the receiver has copied all."""
        return [_Step(self, lambda: self._opened_ring.flush())]

    def send_abort(self, failed_rank: int, expected: Sequence[int]) -> list[Pending]:
        """Tell the receiver that a rank failed. An abort goes over the socket, so it needs no slot."""
        return [_Step(self, partial(self._send, _ABORT + failed_rank.to_bytes(8, "little")))]

    def raise_if_aborted(self, head: bytes) -> None:
        """Do nothing: an abort does not take the place of a message."""

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
        """Close the descriptors in a forked child."""
        close_descriptor(self._sock)
        close_memfds()

    def _send_ring(self, nbytes: int) -> None:
        try:
            ring = create_ring(self._sock, nbytes, lambda most: len(self._read(most)))
        except OSError:
            self._send(_NO_RING)
            return
        socket.send_fds(self._sock, [_RING], [ring.descriptor], socket.MSG_NOSIGNAL)
        if self._read(1) == _RING:
            self._ring = ring

    def _receive_ring(self) -> None:
        self._set_timeout()
        data, descriptors, _, _ = socket.recv_fds(self._sock, 1, 1, socket.MSG_CMSG_CLOEXEC)
        try:
            if data == _NO_RING:
                return
            if data != _RING or not descriptors:
                raise ConnectionError("the peer sent no ring")
            with suppress(OSError):
                self._ring = map_ring(self._sock, descriptors[0], self._wait_for_filled)
        finally:
            close_all(descriptors)
        self._send(_RING if self.is_open else _NO_RING)

    def _wait_for_filled(self, most: int) -> int:
        if self._failed_rank is not None:
            raise abort_of(self.peer, self._failed_rank)
        # An abort has 9 bytes.
        filled, abort, rank = self._read(most + 9).partition(_ABORT)
        self._failed_rank = int.from_bytes(rank[:8], "little") if abort else None
        return len(filled)

    @property
    def _opened_ring(self) -> Ring:
        if self._ring is None:
            raise ConnectionError("this process has closed the ring")
        return self._ring

    def _send(self, data: bytes) -> None:
        self._sock.send(data, socket.MSG_NOSIGNAL)

    def _read(self, max_bytes: int) -> bytes:
        self._set_timeout()
        data = self._sock.recv(max_bytes)
        if not data:
            raise ConnectionError("the peer has closed the socket")
        return data

    def _set_timeout(self) -> None:
        left_s = self._deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        self._sock.settimeout(timeout_of(left_s))


AnyChannel: TypeAlias = Channel | MemoryChannel
"""What a payload is sent over."""


@dataclass
class _Step:
    """A `Pending` that does its work while it is waited for."""

    channel: MemoryChannel
    work: Callable[[], None]

    def wait(self, timeout_s: float) -> None:
        peer = self.channel.peer
        with self.channel._waiting:
            self.channel._deadline_s = time.monotonic() + timeout_s
            try:
                self.work()
            except LinkError:
                raise
            except TimeoutError as error:
                raise LinkTimeout(
                    f"rank {peer} did not copy or send the next bytes in time", peer=peer
                ) from error
            except OSError as error:
                what = f"the connection to rank {peer} through memory is gone ({error})"
                raise LinkBroken(what, peer=peer) from error


def _find(buffer: torch.Tensor) -> int:
    """Return the address of a flat buffer; raises StateError if it was freed."""
    check_held(buffer.untyped_storage().nbytes(), int(buffer.storage_offset()) + buffer.nbytes)
    return buffer.data_ptr()
