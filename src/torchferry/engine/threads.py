"""Lanes in earnest: a thread for each, and the caller asleep on a queue, where Ctrl-C can wake it.

Not on a condition: that gives up its lock and takes it again in Python, and Ctrl-C in between comes out as
a complaint about the lock.

A thread that is stuck in the backend is left behind. It is a daemon, and ends when the backend lets it go:
when the link is broken off, or at the deadline.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from torchferry.core.watch import Rules
from torchferry.engine.lanes import Lane, late
from torchferry.engine.window import T
from torchferry.errors import FerryError, LinkBroken
from torchferry.links.base import Pending

_JOIN_S = 0.5
"""How long an interrupted caller waits for threads: Ctrl-C is to end a transfer within a second."""


class ThreadRunner:
    """Runs the lanes of one transfer."""

    def __init__(self) -> None:
        self._ended: SimpleQueue[None] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def now_s(self) -> float:
        """Give the time."""
        return time.monotonic()

    def start(self, lane: Lane[Any], rules: Rules) -> None:
        """Let a thread take the lane's steps."""
        thread = threading.Thread(
            target=self._take,
            args=(lane, rules),
            name=f"torchferry-lane-{lane.meter.peer}",
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
        """Wait for the threads, but not for one that can't be woken."""
        ends_s = time.monotonic() + _JOIN_S
        for thread in self._threads:
            thread.join(max(ends_s - time.monotonic(), 0.0))

    def _take(self, lane: Lane[Any], rules: Rules) -> None:
        value: object = None
        error: BaseException | None = None
        try:
            value = _take_steps(lane, rules.deadline_s)
        except BaseException as raised:
            error = raised
        lane.settle(value, error)
        self._ended.put(None)


def _take_steps(lane: Lane[T], deadline_s: float) -> T:
    """Take a lane's steps one after the other, waiting for each message no longer than the deadline.

    Raises:
        FerryError: as the steps do.
    """
    peer = lane.meter.peer
    step: Callable[[], Pending] = partial(next, lane.steps)
    while True:
        with lane.at_work:
            try:
                pending = step()
            except StopIteration as stop:
                return stop.value  # type: ignore[no-any-return]
        try:
            lane.meter.waits_s = time.monotonic()
            _wait(pending, deadline_s, peer)
            step = partial(next, lane.steps)
        except FerryError as error:
            step = partial(lane.steps.throw, error)
        finally:
            lane.meter.waits_s = None


def _wait(pending: Pending, deadline_s: float, peer: int) -> None:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise late(peer)
    try:
        pending.wait(left_s)
    except LinkBroken as error:
        # Another lane's wait was the first to end at the deadline, and the backend closes all at once.
        if time.monotonic() >= deadline_s:
            raise late(peer) from error
        raise
