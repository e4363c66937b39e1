"""The deadline of a transfer, and how long each of its phases took."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

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
