"""What a link is: ordered channels of messages between this process and its peers.

A link moves flat byte buffers. It starts a message when it is told to and waits no longer than it is told,
and it translates the exceptions of its backend. Deadlines, windows and the order of messages are the
engine's.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Literal, Protocol

import torch

from torchferry.core.push import TransferId


class Pending(Protocol):
    """A message that is being sent or received."""

    def wait(self, timeout_s: float) -> None:
        """Return when the buffer may be reused (sent) or read (received).

        A completed send does not mean that the peer has the message.

        Raises:
            LinkTimeout: it took longer than `timeout_s`.
            LinkBroken: the connection is gone.
        """


class Channel(Protocol):
    """Messages to or from one peer, in order. A buffer is a one-dimensional contiguous tensor."""

    def send(self, buffer: torch.Tensor) -> Pending:
        """Start to send the next message. The buffer must not change until the message was waited for.

        Raises:
            LinkBroken: the connection is gone.
        """

    def recv(self, buffer: torch.Tensor) -> Pending:
        """Start to receive the next message. The buffer has exactly its size.

        Raises:
            LinkBroken: the connection is gone.
        """

    def send_abort(self, failed_rank: int, expected: Sequence[int]) -> list[Pending]:
        """Tell the peer that no more messages follow. `expected` has the sizes of those it still expects.

        Returns nothing if the peer can't be told.

        Raises:
            LinkBroken: the connection is gone.
        """

    def raise_if_aborted(self, head: bytes) -> None:
        """Check whether a received message is an abort, given its first ABORT_BYTES.

        Raises:
            PeerGaveUp: it is.
        """


class Link(Protocol):
    """Channels to the peers of this process."""

    @property
    def device(self) -> torch.device:
        """The device of staging buffers."""

    def takes(self, device: torch.device) -> bool:
        """Return whether the link can read and write memory of a device without a staging copy."""

    def new_transfer(self) -> TransferId:
        """Return an identifier for a transfer that this process sends."""

    def channel(self, peer: int, transfer: TransferId) -> Channel:
        """Open the channel of one transfer to or from a peer."""

    def frames(
        self, peer: int, way: Literal["send", "receive"], timeout_s: float
    ) -> AbstractContextManager[Channel]:
        """Hold the channel of the frames to or from a peer: a length and a frame for each transfer.

        Raises:
            LinkTimeout: another transfer held the channel for `timeout_s`.
        """

    def keep(self, peer: int, messages: Sequence[Pending]) -> None:
        """Keep messages that nobody waits for, until the peer has received a later frame."""

    def release(self, peer: int) -> None:
        """Forget the messages that were kept for a peer, because it has received a later frame."""

    def check_peer(self, peer: int) -> None:
        """Return at once if a peer is alive, or if the backend can't tell.

        Raises:
            LinkBroken: it is gone.
        """

    def close(self, peer: int) -> None:
        """End everything that is pending with a peer, if the backend can: waits end, no more bytes arrive.

        The peer notices. The link can't be used afterwards. Never raises, and does not wait.
        """

    def check_usable(self) -> None:
        """Refuse to be used after a failed transfer.

        Raises:
            GroupBroken: a transfer failed, and its messages may still arrive.
        """

    def mark_broken(self, error: BaseException) -> None:
        """Remember that a transfer failed. The first failure counts."""
