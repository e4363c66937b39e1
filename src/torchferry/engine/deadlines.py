"""Deadlines: the times, by `time.monotonic()`, at which something has to be over."""

import time


def left_s(deadline_s: float) -> float:
    """Return how many seconds are left until a deadline; 0 if it has passed."""
    return max(deadline_s - time.monotonic(), 0.0)
