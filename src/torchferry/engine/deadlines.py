"""Deadlines: the times, by `time.monotonic()`, at which something has to be over."""

import threading
import time
from collections.abc import Callable

_STEP_S = 0.1
"""The longest single wait. A thread that was stopped just before a wait is late by at most this."""


def left_s(deadline_s: float) -> float:
    """Return how many seconds are left until a deadline; 0 if it has passed."""
    return max(deadline_s - time.monotonic(), 0.0)


def wait_until(changed: threading.Condition, is_done: Callable[[], bool], deadline_s: float) -> None:
    """Wait until something is done, or until a deadline. The caller holds `changed`."""
    while not is_done() and (wait_s := left_s(deadline_s)):
        changed.wait(min(wait_s, _STEP_S))
