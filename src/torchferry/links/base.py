"""What a link is: ordered channels of messages between this process and its peers.

A link moves flat byte buffers over a backend whose messages have tags, as those of torch's process groups:
a receive gets only messages of its tag, in order. Each transfer uses tags of its own, made from the sending
rank, the transfer's serial number and the message's position. A receiver's answer has a tag of its own, so
that it differs from all messages that this receiver sends.
"""

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any, ClassVar, Literal, Protocol

import torch

from torchferry.core.push import ABORT_BYTES, NONCE_BYTES, TransferId, decode_abort, encode_abort
from torchferry.errors import GroupBroken, LinkTimeout, PeerGaveUp

# Users pick small numbers for the tags of their own messages on the same group.
LENGTH_TAG = 0x54460000
FRAME_TAG = LENGTH_TAG + 1
PROBE_TAG = LENGTH_TAG + 2
_FIRST_MESSAGE_TAG = LENGTH_TAG + 16
FIRST_ANSWER_TAG = _FIRST_MESSAGE_TAG + (1 << 29)

# A tag has 31 bits. Above LENGTH_TAG there is room for 2**29 tags: 12 + 9 + 8 bits. The tags of a transfer
# repeat after 4,096 messages, which is harmless: messages with the same tag arrive in order.
_POSITIONS = 1 << 12
_SERIALS = 1 << 9
_ORIGINS = 1 << 8


class Hasher(Protocol):
    """Hashes a message piece by piece."""

    def update(self, data: Any, /) -> None:
        """Add the next piece."""


class Pending(Protocol):
    """A message that is being sent or received."""

    def wait(self, timeout_s: float) -> None:
        """Return when the buffer may be reused (sent) or read (received).

        A completed send does not mean that the peer has the message.

        Raises:
            LinkTimeout: it took longer than `timeout_s`.
            LinkBroken: the connection is gone.
        """


@dataclass(eq=False)
class SharedState:
    """What all links on one process group share.

    With `lasting=False`, failures are not remembered: the group is a wrapper, which may replace the process
    group inside it.
    """

    lasting: bool = True
    lock: threading.Lock = field(default_factory=threading.Lock)
    serial: int = 0
    broken: str | None = None
    frame_locks: dict[tuple[str, int], threading.Lock] = field(default_factory=dict)
    kept: dict[int, list[Pending]] = field(default_factory=dict)


class Link:
    """Channels to the peers of this process. A subclass implements what raises NotImplementedError here.

    A buffer is a one-dimensional contiguous tensor. It must not change until its message was waited for. The
    buffer of a receive has the size of the message, or more if the link `sends_short`.
    """

    rank: int | None = 0
    """This process's rank, if it is known."""
    size: int | None = None
    """How many ranks there are, if it is known."""
    device = torch.device("cpu")
    """The device of staging buffers."""
    sends_short = False
    """Whether a message may be shorter than the buffer that receives it. Aborts need that."""
    shares_memory = False
    """Whether a peer may be a process of this machine, with which this one can share memory."""

    def __init__(self, shared: SharedState | None = None) -> None:
        self._shared = shared or SharedState()

    def can_access(self, device: torch.device) -> bool:
        """Return whether the link can read and write memory of a device without a staging copy."""
        raise NotImplementedError

    def send(self, buffer: torch.Tensor, peer: int, tag: int) -> Pending:
        """Start to send a message; raises LinkBroken if the connection is gone."""
        raise NotImplementedError

    def recv(self, buffer: torch.Tensor, peer: int, tag: int) -> Pending:
        """Start to receive a message; raises LinkBroken if the connection is gone."""
        raise NotImplementedError

    def check_peer(self, peer: int) -> None:
        """Raise LinkBroken if a peer is gone. Return at once if it is alive, or if the backend can't tell."""
        raise NotImplementedError

    def close(self, peer: int) -> None:
        """Close the connection to a peer, if the backend can: waits end, no more bytes arrive.

        A backend may close all connections of this rank in its group, as gloo does. So the link can't be used
        with any peer afterwards. The peers notice. Never raises, and does not wait.
        """
        raise NotImplementedError

    def new_transfer(self) -> TransferId:
        """Return an identifier for a transfer that this process sends."""
        with self._shared.lock:
            self._shared.serial += 1
            return TransferId(self.rank or 0, self._shared.serial, os.urandom(NONCE_BYTES))

    def channel(self, peer: int, transfer: TransferId) -> "Channel":
        """Open the channel of one transfer to or from a peer."""
        first = _FIRST_MESSAGE_TAG + _slot(transfer) * _POSITIONS
        return Channel(self, peer, cycle(range(first, first + _POSITIONS)), transfer.nonce)

    def answers(self, peer: int, transfer: TransferId) -> "Channel":
        """Open the channel of the receiver's answer, which goes in the other direction."""
        return Channel(self, peer, cycle((FIRST_ANSWER_TAG + _slot(transfer),)), transfer.nonce)

    @contextmanager
    def frames(self, peer: int, way: Literal["send", "receive"], timeout_s: float) -> Iterator["Channel"]:
        """Hold the channel of lengths and frames; raises LinkTimeout if another transfer holds it."""
        with self._shared.lock:
            lock = self._shared.frame_locks.setdefault((way, peer), threading.Lock())
        if not lock.acquire(timeout=min(timeout_s, threading.TIMEOUT_MAX)):
            what = f"another transfer with rank {peer} still exchanges its frame after {timeout_s:g} s"
            raise LinkTimeout(what, peer=peer)
        try:
            yield Channel(self, peer, cycle((LENGTH_TAG, FRAME_TAG)))
        finally:
            lock.release()

    def keep(self, peer: int, messages: Sequence[Pending]) -> None:
        """Keep messages that are never waited for: if they were freed, gloo would lose later messages."""
        with self._shared.lock:
            self._shared.kept.setdefault(peer, []).extend(messages)

    def release(self, peer: int) -> None:
        """Forget the kept messages of a peer once a later frame was sent: messages are sent in order."""
        with self._shared.lock:
            self._shared.kept.pop(peer, None)

    def check_usable(self) -> None:
        """Raise GroupBroken if a transfer failed: its messages may still arrive."""
        if self._shared.broken is not None:
            raise GroupBroken(
                "an earlier transfer on this process group failed, and its messages may still arrive: create "
                "a new group (torch.distributed.new_group, or init_process_group with a new store prefix) "
                f"and a new PGTransport on it. The earlier failure: {self._shared.broken}"
            )

    def mark_broken(self, error: BaseException) -> None:
        """Remember that a transfer failed. The first failure counts."""
        with self._shared.lock:
            if self._shared.lasting and self._shared.broken is None:
                self._shared.broken = f"{type(error).__name__}: {error}".splitlines()[0]


@dataclass
class Channel:
    """Messages to or from one peer, in order. Each has the next of `tags`.

    A channel that `copies` hashes each message if it gets a hasher. Other channels take none.
    """

    copies: ClassVar[bool] = False

    link: Link
    peer: int
    tags: Iterator[int]
    nonce: bytes = b""

    def send(self, buffer: torch.Tensor, hasher: Hasher | None = None) -> Pending:
        """Start to send the next message; raises LinkBroken if the connection is gone."""
        assert hasher is None, "the link does not hash"
        return self.link.send(buffer, self.peer, next(self.tags))

    def recv(self, buffer: torch.Tensor, hasher: Hasher | None = None) -> Pending:
        """Start to receive the next message; raises LinkBroken if the connection is gone."""
        assert hasher is None, "the link does not hash"
        return self.link.recv(buffer, self.peer, next(self.tags))

    def send_abort(self, failed_rank: int, expected: Sequence[int]) -> list[Pending]:
        """Tell the peer of an abort. `expected` has the sizes of the messages that it still expects.

        The abort takes the place of the next one that is long enough. Messages before it are sent as
        zeros. If none is long enough, nothing is sent: the zeros would pass for the state.
        """
        place = next((place for place, nbytes in enumerate(expected) if nbytes >= ABORT_BYTES), None)
        if place is None or not self.link.sends_short:
            return []
        messages = [*map(bytes, expected[:place]), encode_abort(self.nonce, failed_rank)]
        return [self.send(to_buffer(message, self.link.device)) for message in messages]

    def flush(self) -> list[Pending]:
        """Return what to wait for after the last message: nothing."""
        return []

    def stop(self) -> None:
        """Do nothing: closing the link ends all waits."""

    def raise_if_aborted(self, head: bytes) -> None:
        """Raise PeerGaveUp if a received message is an abort, given its first ABORT_BYTES."""
        failed_rank = decode_abort(head, self.nonce)
        if failed_rank is not None:
            raise abort_of(self.peer, failed_rank)


def _slot(transfer: TransferId) -> int:
    return (transfer.origin % _ORIGINS) * _SERIALS + transfer.serial % _SERIALS


def abort_of(peer: int, failed_rank: int) -> PeerGaveUp:
    """Return the error for an abort that a peer sent."""
    whose = "its own" if failed_rank == peer else f"rank {failed_rank}'s"
    what = f"rank {peer} aborted the transfer because of a failure on {whose} side"
    return PeerGaveUp(what, failed_rank=failed_rank, peer=peer)


def to_buffer(data: bytes, device: torch.device) -> torch.Tensor:
    """Copy bytes to a buffer that a link can send."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
