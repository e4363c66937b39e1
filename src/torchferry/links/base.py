"""What a link is: it moves flat byte buffers between this process and a peer, in messages with a tag.

A link does not decide anything. It starts a message when told to, waits when told to, no longer than it
is told, and turns its backend's exceptions into ours, once, here at the edge.
"""

from __future__ import annotations

from typing import Protocol

import torch


class Pending(Protocol):
    """A message under way."""

    def wait(self, timeout_s: float) -> None:
        """Return once the buffer may be reused (sent) or read (received).

        For a send this says nothing of the peer: a message may be complete here and never arrive.

        Raises:
            LinkTimeout: it took longer than `timeout_s`.
            LinkBroken: the connection is gone.
        """


class Link(Protocol):
    """Moves messages. A buffer is a one-dimensional contiguous tensor on a device that it takes."""

    @property
    def device(self) -> torch.device:
        """Where buffers are made for it."""

    def takes(self, device: torch.device) -> bool:
        """Say whether memory on a device can be handed over as it is, without a staging copy."""

    @property
    def sends_short(self) -> bool:
        """Say whether a message may be shorter than the buffer that it is received into."""

    def send(self, buffer: torch.Tensor, peer: int, tag: int) -> Pending:
        """Start sending a buffer. It must not change until the message has been waited for.

        Raises:
            LinkBroken: the connection is gone.
        """

    def recv(self, buffer: torch.Tensor, peer: int, tag: int) -> Pending:
        """Start receiving into a buffer, which has exactly the message's size.

        Raises:
            LinkBroken: the connection is gone.
        """

    def probe(self, peer: int) -> None:
        """Find out whether a peer is still there, without waiting; say nothing if that can't be told.

        Raises:
            LinkBroken: it is gone.
        """

    def break_off(self, peer: int) -> None:
        """End all that is under way with a peer, if the backend can: waits end, no byte lands any more.

        The peer is told, too, and the link is of no more use. Never raises, and does not wait.
        """
