"""Play seeds in a process of their own, on one core.

    python -m tests.simulation.play FIRST SEEDS CORE

A simulated world is threads that take turns. To hand on the turn to a thread on the same core takes a tenth
of the time that it takes to wake one on another.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter

from torchferry.testing.simulation import simulate


def play(first: int, seeds: int) -> Counter[str]:
    """Play seeds one after the other, and count how they end.

    Raises:
        Broken: something did not hold; names the seed.
    """
    happened: Counter[str] = Counter()
    for seed in range(first, first + seeds):
        happened += simulate(seed)
    return happened


def stay_on(core: int) -> None:
    """Keep this thread, and those that it starts, on one core, where the system can do that."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {core})


if __name__ == "__main__":
    stay_on(int(sys.argv[3]))
    print(json.dumps(play(int(sys.argv[1]), int(sys.argv[2]))))
