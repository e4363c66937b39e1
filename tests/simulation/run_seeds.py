"""Simulate seeds in a process of its own, on one core.

    python -m tests.simulation.run_seeds FIRST SEEDS CORE

A simulation consists of threads that take turns. Waking a thread on the same core takes a tenth of the time
that waking one on another core takes.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter

from torchferry.testing.simulation import simulate


def run_seeds(first: int, seeds: int) -> Counter[str]:
    """Simulate consecutive seeds, and count how the simulated processes end.

    Raises:
        CheckFailed: a check failed. The message has the seed.
    """
    endings: Counter[str] = Counter()
    for seed in range(first, first + seeds):
        endings += simulate(seed)
    return endings


def pin_to_core(core: int) -> None:
    """Keep this thread, and those that it starts, on one core, if the system supports that."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {core})


if __name__ == "__main__":
    pin_to_core(int(sys.argv[3]))
    print(json.dumps(run_seeds(int(sys.argv[1]), int(sys.argv[2]))))
