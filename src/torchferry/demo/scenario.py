"""What one demo is about: how many workers, who is killed, and when."""

from __future__ import annotations

import random
from dataclasses import dataclass

STEPS = 60
# Each worker is a process with all of torch in it: more would try the patience of a small machine.
MOST_WORKERS = 8


@dataclass(frozen=True)
class Scenario:
    """The plot of a demo; equal scenarios end with equal weights.

    Raises:
        ValueError: a number outside its range.
    """

    workers: int
    kill_at: int
    seed: int

    def __post_init__(self) -> None:
        if not 2 <= self.workers <= MOST_WORKERS:
            raise ValueError(f"workers must be 2 to {MOST_WORKERS}, not {self.workers}")
        # Not the last step: after it there would be no training left to go on with.
        if not 1 <= self.kill_at < STEPS:
            raise ValueError(f"kill_at must be 1 to {STEPS - 1}, not {self.kill_at}")
        if self.seed < 0:
            raise ValueError(f"seed must not be negative, but is {self.seed}")

    @property
    def victim(self) -> int:
        """The rank that is killed. The seed picks it, for no rank is special, rank 0 included."""
        return random.Random(self.seed).randrange(self.workers)


@dataclass(frozen=True)
class Seat:
    """A worker's place in the group. A replacement takes the seat of the one it replaces."""

    rank: int
    size: int
    store_port: int
