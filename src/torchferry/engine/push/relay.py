"""Forwarding: a receiver passes each message on to the next receiver, from the memory that received it.

Forwarding is a lane of its own, so that a slow or dead next receiver does not delay this one. The receiving
lane offers messages as they arrive, and the forwarding lane sends them.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torchferry.engine.push.lanes import Progress, Steps
from torchferry.engine.push.transfer import InFlight, Window
from torchferry.engine.workspace import Staging
from torchferry.errors import LinkTimeout, PeerGaveUp
from torchferry.links.base import Channel


@dataclass(eq=False)
class Relay:
    """The messages that arrived here and go to `progress.peer`. `sizes` has the size of each."""

    channel: Channel
    sizes: Sequence[int]
    progress: Progress
    window_bytes: int
    staging: Staging
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _offers: deque[InFlight] = field(default_factory=deque)
    _staged_bytes: int = 0
    _failed_rank: int | None = None
    _over: bool = False

    def offer(self, message: InFlight) -> None:
        """Offer the next message. Its memory must not change. Staged memory goes back to the pool later."""
        with self._changed:
            self._staged_bytes += message.buffer.nbytes if message.staged else 0
            if self._over:
                self._release(message)
            else:
                self._offers.append(message)
            self._changed.notify_all()

    def wait_for_room(self, nbytes: int) -> Steps[None]:
        """Wait until so many more bytes may be staged: staged messages stay until they are forwarded."""
        limit = max(self.window_bytes, nbytes)
        yield Until(self._changed, lambda: self._over or self._staged_bytes + nbytes <= limit)

    def abort(self, failed_rank: int) -> None:
        """Send an abort after the messages that were offered, because no more arrive here."""
        with self._changed:
            if self._failed_rank is None:
                self._failed_rank = failed_rank
            self._changed.notify_all()

    def stop(self, failed_rank: int) -> None:
        """Stop forwarding, because the next receiver is lost. If it comes back, it gets an abort."""
        with self._changed:
            self._over = True
            while self._offers:
                self._release(self._offers.popleft())
            self.abort(failed_rank)

    def _release(self, message: InFlight) -> None:
        if message.staged:
            self._staged_bytes -= message.buffer.nbytes
            self.staging.give_back(message.buffer)

    def steps(self) -> Steps[None]:
        """Forward every message as it arrives; raises PeerGaveUp after an abort was sent instead."""
        window = Window(self._sent, self.window_bytes, self.window_bytes)
        for position, nbytes in enumerate(self.sizes):
            # The receiving lane may need the buffers of sent messages before it can offer another.
            while window and not self._offers and self._failed_rank is None:
                yield from window.complete_oldest()
            self.progress.idle = True
            yield Until(self._changed, lambda: bool(self._offers) or self._failed_rank is not None)
            self.progress.idle = False
            while self._offers and not window.has_room(nbytes, in_place=False):
                yield from window.complete_oldest()
            with self._changed:
                # `stop` may have removed the offers while this lane waited for room.
                offer = self._offers.popleft() if self._offers else None
            if offer is None:
                assert self._failed_rank is not None, "a relay aborts because some rank failed"
                yield from self.channel.send_abort(self._failed_rank, self.sizes[position:])
                raise PeerGaveUp("forwarding was aborted", failed_rank=self._failed_rank)
            window.add(offer, self.channel.send(offer.buffer))
        yield from window.complete_all()

    def _sent(self, message: InFlight) -> None:
        self.progress.add(message.buffer.nbytes)
        with self._changed:
            self._release(message)
            self._changed.notify_all()


@dataclass
class Until:
    """A `Pending` that completes when a condition holds, instead of when a message is sent or received."""

    changed: threading.Condition
    holds: Callable[[], bool]

    def wait(self, timeout_s: float) -> None:
        with self.changed:
            if not self.changed.wait_for(self.holds, min(timeout_s, threading.TIMEOUT_MAX)):
                raise LinkTimeout(f"no message to forward, or no room to stage one, for {timeout_s:g} s")
