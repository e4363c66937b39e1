"""Forwarding: a receiver sends what it receives on to the next receiver, from the same memory.

Forwarding is a lane of its own, so that a slow or dead next receiver does not delay this one. The receiving
lane offers messages as they arrive, and the forwarding lane sends them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from torchferry.engine.lanes import Steps, Window
from torchferry.engine.progress import Progress
from torchferry.errors import LinkTimeout, PeerGaveUp
from torchferry.links.base import Channel


class _Offer(NamedTuple):
    buffer: torch.Tensor
    staged: bool


@dataclass(eq=False)
class Relay:
    """The messages that arrived here and go to `progress.peer`. `sizes` has the size of each."""

    channel: Channel
    sizes: Sequence[int]
    progress: Progress
    window_bytes: int
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _offers: deque[_Offer] = field(default_factory=deque)
    _used: list[torch.Tensor] = field(default_factory=list)
    _staged_bytes: int = 0
    _failed_rank: int | None = None
    _over: bool = False

    def offer(self, buffer: torch.Tensor, *, staged: bool) -> None:
        """Offer the next message. Its memory must not change; `take_used` returns staged buffers."""
        with self._changed:
            if self._over and staged:
                self._used.append(buffer)
            elif not self._over:
                self._staged_bytes += buffer.nbytes if staged else 0
                self._offers.append(_Offer(buffer, staged))
            self._changed.notify_all()

    def wait_for_room(self, nbytes: int) -> Steps[None]:
        """Wait until so many more bytes may be staged: staged messages stay until they are forwarded."""
        limit = max(self.window_bytes, nbytes)
        yield _Until(self._changed, lambda: self._over or self._staged_bytes + nbytes <= limit)

    def take_used(self) -> list[torch.Tensor]:
        """Return the staging buffers that are not used any more."""
        with self._changed:
            used, self._used = self._used, []
        return used

    def abort(self, failed_rank: int) -> None:
        """Send an abort after the messages that were offered, because no more arrive here."""
        with self._changed:
            if self._failed_rank is None:
                self._failed_rank = failed_rank
            self._changed.notify_all()

    def stop(self, failed_rank: int) -> None:
        """Stop to forward, because the next receiver is lost. If it comes back, it gets an abort."""
        with self._changed:
            self._over = True
            if self._failed_rank is None:
                self._failed_rank = failed_rank
            self._used.extend(offer.buffer for offer in self._offers if offer.staged)
            self._offers.clear()
            self._changed.notify_all()

    def steps(self) -> Steps[None]:
        """Forward every message as it arrives, or an abort.

        Raises:
            LinkError: the next receiver can't be reached, or not in time.
            PeerGaveUp: an abort was sent.
        """
        window: Window[_Offer] = Window(self.window_bytes)
        for position, nbytes in enumerate(self.sizes):
            # The receiving lane may need the buffers of sent messages before it can offer another.
            while window and not self._offers and self._failed_rank is None:
                self._sent((yield from window.pop()))
            self.progress.idle = True
            yield _Until(self._changed, lambda: bool(self._offers) or self._failed_rank is not None)
            self.progress.idle = False
            while self._offers and not window.has_room(nbytes):
                self._sent((yield from window.pop()))
            with self._changed:
                # `stop` may have removed the offers while this lane waited for room.
                offer = self._offers.popleft() if self._offers else None
            if offer is None:
                yield from self._send_abort(position)
                return
            window.add(self.channel.send(offer.buffer), nbytes, offer)
        while window:
            self._sent((yield from window.pop()))

    def _send_abort(self, position: int) -> Steps[None]:
        assert self._failed_rank is not None, "a relay aborts because some rank failed"
        yield from self.channel.send_abort(self._failed_rank, self.sizes[position:])
        raise PeerGaveUp("there is no more to forward", failed_rank=self._failed_rank)

    def _sent(self, offer: _Offer) -> None:
        self.progress.add(offer.buffer.nbytes)
        if offer.staged:
            with self._changed:
                self._staged_bytes -= offer.buffer.nbytes
                self._used.append(offer.buffer)
                self._changed.notify_all()


@dataclass
class _Until:
    """Completes when a condition holds, like a message that a lane waits for."""

    changed: threading.Condition
    holds: Callable[[], bool]
    error: None = None

    @property
    def over(self) -> bool:
        """Whether the condition holds. The simulation asks this instead of waiting."""
        return self.holds()

    def wait(self, timeout_s: float) -> None:
        """Wait for the condition.

        Raises:
            LinkTimeout: it took longer than `timeout_s`.
        """
        with self.changed:
            if not self.changed.wait_for(self.holds, min(timeout_s, threading.TIMEOUT_MAX)):
                raise LinkTimeout("nothing was forwarded in time")
