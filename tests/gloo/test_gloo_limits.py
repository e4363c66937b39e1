"""Limits of gloo that torchferry can't work around. SECURITY.md lists them."""

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


def wait_and_time(work: Any, timeout_s: float) -> tuple[str, float]:
    """Wait, and return the error, empty on success, and the duration."""
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
        target=lambda work: results.append(wait_and_time(work, 2.0)), args=(pg.recv([held], 1, 2),)
    )
    waiting.start()
    while not held[0]:
        time.sleep(0.0005)
    os.kill(int(victim), signal.SIGKILL)
    time.sleep(1.0)
    silent = not results
    waiting.join(20)
    return {"torn": not bool(held[-1]), "silent": silent, "ended": results[0]}


def test_a_receiver_is_not_woken_when_the_sender_dies_in_the_middle_of_a_message(doomed: Cluster) -> None:
    """Therefore silent peers are probed, and the caller's thread never waits in the backend."""
    survivor, dead = doomed.start([(die_while_sending, ())] * 2).outcomes()
    assert isinstance(dead.error, WorkerDied)
    assert survivor.error is None, survivor.error
    assert survivor.value["torn"], "the message was complete before the sender could be killed"
    assert survivor.value["silent"]
    error, seconds = survivor.value["ended"]
    assert error
    assert seconds > 1.5


def send_a_long_message_to_a_short_buffer(rank: int) -> str:
    pg: Any = dist.group.WORLD
    held = torch.zeros(100 if rank else 200, dtype=torch.uint8)
    return wait_and_time(pg.recv([held], 0, 1) if rank else pg.send([held], 1, 1), 3.0)[0]


def test_a_message_longer_than_its_receive_buffer_aborts_the_receiver(doomed: Cluster) -> None:
    """Therefore both sides derive all sizes from one plan. A hostile peer can still do this."""
    sender, receiver = doomed.start([(send_a_long_message_to_a_short_buffer, ())] * 2).outcomes()
    assert sender.error is None, sender.error
    assert isinstance(receiver.error, WorkerDied)
    assert receiver.error.exitcode == -signal.SIGABRT
