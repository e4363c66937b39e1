"""The ground, where it gives way: what gloo does that no code above it can mend. SECURITY.md says so too."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests.support.cluster import Cluster, WorkerDied

LONG = timedelta(seconds=20)
LARGE_BYTES = 256 << 20


def ended(work: Any, timeout_s: float) -> tuple[str, float]:
    """Wait, and say how it ended and after how long; nothing if it ended well."""
    start = time.monotonic()
    try:
        work.wait(timedelta(seconds=timeout_s))
    except RuntimeError as error:
        return str(error), time.monotonic() - start
    return "", time.monotonic() - start


def die_while_sending(rank: int) -> dict[str, Any] | None:
    pg: Any = dist.group.WORLD
    if rank == 1:
        pg.send([torch.tensor([os.getpid()])], 0, 1).wait(LONG)
        pg.send([torch.ones(LARGE_BYTES, dtype=torch.uint8)], 0, 2).wait(LONG)
        time.sleep(20)
        return None
    victim = torch.zeros(1, dtype=torch.int64)
    pg.recv([victim], 1, 1).wait(LONG)
    held = torch.zeros(LARGE_BYTES, dtype=torch.uint8)
    results: list[tuple[str, float]] = []
    waiting = threading.Thread(
        target=lambda work: results.append(ended(work, 2.0)), args=(pg.recv([held], 1, 2),)
    )
    waiting.start()
    while not held[0]:
        time.sleep(0.0005)
    os.kill(int(victim), signal.SIGKILL)
    time.sleep(1.0)
    silent = not results
    waiting.join(20)
    return {"torn": not bool(held[-1]), "silent": silent, "ended": results[0]}


def test_a_sender_that_dies_in_a_message_wakes_nobody(doomed: Cluster) -> None:
    """Why a peer that is quiet is probed, and why nobody who matters waits in the backend."""
    survivor, dead = doomed.start([(die_while_sending, ())] * 2).outcomes()
    assert isinstance(dead.error, WorkerDied)
    assert survivor.error is None, survivor.error
    assert survivor.value["torn"], "the message was complete before the sender could be killed"
    assert survivor.value["silent"]
    said, seconds = survivor.value["ended"]
    assert said
    assert seconds > 1.5


def long_into_short(rank: int) -> str:
    pg: Any = dist.group.WORLD
    held = torch.zeros(100 if rank else 200, dtype=torch.uint8)
    return ended(pg.recv([held], 0, 1) if rank else pg.send([held], 1, 1), 3.0)[0]


def test_a_message_longer_than_its_receive_aborts_the_receiver(doomed: Cluster) -> None:
    """Why both ends derive all sizes from one plan. A peer that means harm need not."""
    sender, receiver = doomed.start([(long_into_short, ())] * 2).outcomes()
    assert sender.error is None, sender.error
    assert isinstance(receiver.error, WorkerDied)
    assert receiver.error.exitcode == -signal.SIGABRT
