"""Runs lanes in threads, while the caller sleeps on a queue where Ctrl-C can wake it.

The caller does not sleep on a condition: a condition releases and acquires its lock in Python code, and
Ctrl-C between the two raises an error about the lock. A thread that is stuck in the backend is left behind.
It is a daemon, and ends when the link closes or at the deadline.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from torchferry.core.watch import Limits
from torchferry.engine.lanes import Lane, deadline_passed
from torchferry.engine.window import T
from torchferry.errors import FerryError, LinkBroken
from torchferry.links.base import Pending

_JOIN_S = 0.5
"""How long an interrupted caller waits for threads: Ctrl-C is to end a transfer within a second."""


class ThreadRunner:
    """Runs the lanes of one transfer, each in a thread."""

    def __init__(self) -> None:
        self._ended: SimpleQueue[None] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def now_s(self) -> float:
        """Return the time."""
        return time.monotonic()

    def start(self, lane: Lane[Any], limits: Limits) -> None:
        """Run a lane in a new thread."""
        thread = threading.Thread(
            target=self._run,
            args=(lane, limits.deadline_s),
            name=f"torchferry-lane-{lane.progress.peer}",
            daemon=True,
        )
        self._threads.append(thread)
        thread.start()

    def sleep(self, lanes: Sequence[Lane[Any]], until_s: float) -> None:
        """Sleep until a lane is over, or until the given time."""
        if any(lane.over for lane in lanes):
            return
        left_s = max(until_s - time.monotonic(), 0.0)
        with suppress(Empty):
            self._ended.get(timeout=min(left_s, threading.TIMEOUT_MAX))

    def end(self, lanes: Sequence[Lane[Any]]) -> None:
        """Wait for the threads, but not for one that is stuck."""
        ends_s = time.monotonic() + _JOIN_S
        for thread in self._threads:
            thread.join(max(ends_s - time.monotonic(), 0.0))

    def _run(self, lane: Lane[Any], deadline_s: float) -> None:
        value: object = None
        error: BaseException | None = None
        try:
            value = _run_steps(lane, deadline_s)
        except BaseException as raised:
            error = raised
        lane.settle(value, error)
        self._ended.put(None)


def _run_steps(lane: Lane[T], deadline_s: float) -> T:
    """Run a lane, and wait for each message that it yields until the deadline.

    Raises:
        FerryError: as the lane does.
    """
    step: Callable[[], Pending] = partial(next, lane.steps)
    while True:
        with lane.at_work:
            try:
                pending = step()
            except StopIteration as stop:
                return stop.value  # type: ignore[no-any-return]
        try:
            lane.progress.waiting_since_s = time.monotonic()
            _wait(pending, deadline_s, lane.progress.peer)
            step = partial(next, lane.steps)
        except FerryError as error:
            step = partial(lane.steps.throw, error)
        finally:
            lane.progress.waiting_since_s = None


def _wait(pending: Pending, deadline_s: float, peer: int) -> None:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise deadline_passed(peer)
    try:
        pending.wait(left_s)
    except LinkBroken as error:
        # When the wait of one lane times out, gloo closes the connections of all lanes.
        if time.monotonic() >= deadline_s:
            raise deadline_passed(peer) from error
        raise
