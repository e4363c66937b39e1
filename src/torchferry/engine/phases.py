"""The phases of a transfer, and their times."""

import logging
import time

logger = logging.getLogger(__name__)


class Phases:
    """Times the phases of one transfer in real time, and logs them."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._phase = ""
        self._seconds: dict[str, float] = {}
        self._started = 0.0

    def _enter_phase(self, phase: str) -> None:
        if phase != self._phase:
            self._finish_phase()
            self._phase = phase
            self._started = time.perf_counter()
            logger.debug("%s: %s started", self._name, phase)

    def _finish_phase(self, outcome: str = "complete") -> dict[str, float]:
        """End the current phase, and return the seconds of each phase."""
        if self._phase:
            seconds = time.perf_counter() - self._started
            self._seconds[self._phase] = self._seconds.get(self._phase, 0.0) + seconds
            logger.debug("%s: %s %s after %.6f s", self._name, self._phase, outcome, seconds)
        return self._seconds
