"""The phases of a transfer: each is timed, logged, and named in the errors that happen in it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torchferry.errors import FerryError, LinkStalled, LinkTimeout, SendFailed, TargetTorn

logger = logging.getLogger(__name__)


class Phases:
    """How long each phase of one transfer took, in real time, and when all must be over, by `now_s`."""

    def __init__(self, what: str, timeout_s: float, now_s: Callable[[], float]) -> None:
        self.seconds: dict[str, float] = {}
        self._timeout_s = timeout_s
        self.deadline_s = now_s() + timeout_s
        self._what = what
        self._now_s = now_s

    def left_s(self) -> float:
        """Say how much time is left; 0 if none is."""
        return max(self.deadline_s - self._now_s(), 0.0)

    @contextmanager
    def phase(self, name: str, peer: int | None = None) -> Iterator[None]:
        """Time what happens inside, and give errors the phase and peer if they have none."""
        start = time.perf_counter()
        try:
            with timed(f"{self._what}: {name}"):
                yield
        except FerryError as error:
            error.phase = error.phase or name
            error.peer = peer if error.peer is None else error.peer
            if _ran_out(error):
                error.what += (
                    f"{'' if error.what.endswith('?') else '.'} The timeout was {self._timeout_s:g} s"
                )
            raise
        finally:
            seconds = time.perf_counter() - start
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds


def _ran_out(error: BaseException | None) -> bool:
    """Say whether an error is, or comes of, a deadline that passed: a peer may stall long before."""
    if isinstance(error, SendFailed):
        return any(map(_ran_out, error.failed.values()))
    if isinstance(error, TargetTorn):
        return _ran_out(error.__cause__)
    return isinstance(error, LinkTimeout) and not isinstance(error, LinkStalled)


@contextmanager
def timed(name: str) -> Iterator[None]:
    """Log at DEBUG that something started, and that it is complete or failed, with its seconds."""
    logger.debug("%s started", name)
    start = time.perf_counter()
    outcome = "failed"
    try:
        yield
        outcome = "complete"
    finally:
        logger.debug("%s %s after %.6f s", name, outcome, time.perf_counter() - start)
