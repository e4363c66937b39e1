"""Progress and cancellation with one peer, and the deadline and phases of the whole transfer."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from torchferry.core.manifest import Manifest
from torchferry.core.outcome import paths_of
from torchferry.core.plan import Plan
from torchferry.errors import Corrupted, FerryError, LinkError, LinkStalled, LinkTimeout, PeerGaveUp

logger = logging.getLogger(__name__)


class Phases:
    """Times the phases of one transfer in real time. The deadline is on the clock `now_s`."""

    def __init__(self, transfer: str, timeout_s: float, now_s: Callable[[], float]) -> None:
        self.timeout_s = timeout_s
        self.deadline_s = now_s() + timeout_s
        self.current = ""
        self._now_s = now_s
        self._transfer = transfer
        self._seconds: dict[str, float] = {}
        self._started = 0.0

    def left_s(self) -> float:
        """Return how much time is left; 0 if none."""
        return max(self.deadline_s - self._now_s(), 0.0)

    def enter(self, phase: str) -> None:
        """End the current phase and begin another."""
        if phase != self.current:
            self._end("complete")
            self.current = phase
            self._started = time.perf_counter()
            logger.debug("%s: %s started", self._transfer, phase)

    def finish(self, *, failed: bool = False) -> dict[str, float]:
        """End the last phase, and return the seconds of each phase."""
        self._end("failed" if failed else "complete")
        return self._seconds

    def _end(self, outcome: str) -> None:
        if self.current:
            seconds = time.perf_counter() - self._started
            self._seconds[self.current] = self._seconds.get(self.current, 0.0) + seconds
            logger.debug("%s: %s %s after %.6f s", self._transfer, self.current, outcome, seconds)


@dataclass
class Progress:
    """Progress with one peer. The lane that moves bytes writes it, the caller that watches the lane reads it.

    `contacted` is False until a message to or from the peer has completed. `waiting_since_s` is None while
    the lane works by itself. `idle` means that the lane waits for another lane, not for the peer.
    """

    peer: int
    bytes_due: int = 0
    bytes_done: int = 0
    messages_done: int = 0
    contacted: bool = True
    idle: bool = False
    waiting_since_s: float | None = None

    def add(self, nbytes: int) -> None:
        """Count one completed message."""
        self.bytes_done += nbytes
        self.messages_done += 1


@dataclass
class Cancellation:
    """Cancels a lane. A cancelled lane writes nothing more."""

    is_set: bool = False

    def set(self) -> None:
        """Cancel the lane."""
        self.is_set = True

    def raise_if_cancelled(self) -> None:
        """Stop a cancelled lane.

        Raises:
            LinkTimeout: the lane is cancelled. The caller has its error already and never sees this one.
        """
        if self.is_set:
            raise LinkTimeout("the transfer was cancelled")


def with_progress(
    error: FerryError,
    progress: Progress,
    phase: str,
    *,
    timeout_s: float,
    question: str,
    content: tuple[Manifest, Plan] | None,
) -> FerryError:
    """Return an error with its peer, its phase, and how far the transfer got before the link failed.

    `question` is asked if a deadline passed and the peer was never heard of. `content` is what was being
    transferred, if that is known.
    """
    path, more = None, ""
    is_failed_link = isinstance(error, (LinkError, PeerGaveUp)) and not isinstance(error, Corrupted)
    if is_failed_link and content is not None:
        manifest, plan = content
        more = f"; {progress.bytes_done:,} of {progress.bytes_due:,} bytes done"
        if plan.messages:
            message = plan.messages[min(progress.messages_done, len(plan.messages) - 1)]
            path = next(iter(paths_of(manifest, plan, {message.first})), None)
            more += f", last at {path}" if path else ""
        if not progress.contacted:
            more += " (the metadata was not sent)"
    if isinstance(error, LinkTimeout):
        if question and not progress.contacted:
            more += f". {question.format(peer=progress.peer)}"
        if not isinstance(error, LinkStalled):
            more += f"{'' if more.endswith('?') else '.'} The timeout was {timeout_s:g} s"
    return error.with_context(peer=progress.peer, path=path, phase=phase, more=more)
