"""Lanes: the work of a transfer with one peer, watched by the caller until it ends.

A backend waits in native code, where Ctrl-C does not reach it and a dead peer may never end it. So lanes run
in threads, and the caller sleeps where it can be woken. It checks every lane by the rules of `core.watch`,
and cancels a lane whose peer is dead, stalled or late.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from math import inf
from typing import Any, Generic, Protocol

from torchferry.core.watch import Action, Limits, next_action
from torchferry.engine.progress import Cancellation, Progress
from torchferry.engine.window import Steps, T
from torchferry.errors import LinkError, LinkStalled, LinkTimeout
from torchferry.links.base import Link

_STOP_S = 0.25
"""How long the caller waits for a cancelled lane to finish the few chunks that it is writing."""


class Lane(Generic[T]):
    """Work with one peer. When it is `over`, it has either an `error` or a `value`.

    `on_failure` is called with the error. `ends_s` is an earlier deadline for this lane alone. `lost` is the
    link's error about a dead peer, found at `lost_s`. The runner holds `at_work` unless the lane waits.
    """

    def __init__(
        self,
        progress: Progress,
        cancellation: Cancellation,
        steps: Steps[T],
        on_failure: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        self.progress = progress
        self.cancellation = cancellation
        self.steps = steps
        self.over = False
        self.error: BaseException | None = None
        self.value: T | None = None
        self.probed_s = 0.0
        self.lost: LinkError | None = None
        self.lost_s: float | None = None
        self.ends_s = inf
        self.at_work = threading.Lock()
        self._on_failure = on_failure
        self._lock = threading.Lock()

    def settle(self, value: T | None, error: BaseException | None) -> None:
        """End the lane. Only the first call counts."""
        with self._lock:
            if self.over:
                return
            self.value, self.error, self.over = value, error, True
        if error is not None:
            self._on_failure(error)

    def result(self) -> T:
        """Return the value of a lane that is over.

        Raises:
            BaseException: the lane's error.
        """
        if self.error is not None:
            raise self.error
        return self.value  # type: ignore[return-value]


class Runner(Protocol):
    """Runs lanes: `threads.ThreadRunner` with the real clock, the simulation with a clock of its own."""

    def now_s(self) -> float:
        """Return the time."""

    def start(self, lane: Lane[Any], limits: Limits) -> None:
        """Start to run a lane; settle it when it ends."""

    def sleep(self, lanes: Sequence[Lane[Any]], until_s: float) -> None:
        """Return when one of the lanes is over, or at the given time."""

    def end(self, lanes: Sequence[Lane[Any]]) -> None:
        """Wait a moment for cancelled lanes to end."""


def run_lanes(link: Link, lanes: Sequence[Lane[Any]], limits: Limits, runner: Runner) -> None:
    """Run lanes side by side until each is over. Errors stay in the lanes.

    Raises:
        BaseException: an exception that interrupts the caller, such as KeyboardInterrupt. The link is closed
            first, so that peers notice and waits end.
    """
    try:
        for lane in lanes:
            runner.start(lane, limits)
        while running := [lane for lane in lanes if not lane.over]:
            next_s = min(_watch(lane, link, limits, runner.now_s()) for lane in running)
            _await_stop([lane for lane in running if lane.cancellation.is_set])
            if not any(lane.over for lane in running):
                runner.sleep(running, next_s)
    except BaseException as interrupt:
        for lane in lanes:
            lane.settle(None, interrupt)
        # The link closes first. A cancelled lane sends an abort, and some peers would get one and others not.
        for lane in lanes:
            link.close(lane.progress.peer)
        for lane in lanes:
            lane.cancellation.set()
        _await_stop(lanes)
        runner.end(lanes)
        raise


def _await_stop(lanes: Sequence[Lane[Any]]) -> None:
    """Wait until cancelled lanes stop working, so that nothing is written after the error is raised."""
    ends_s = time.monotonic() + _STOP_S
    for lane in lanes:
        if lane.at_work.acquire(timeout=max(ends_s - time.monotonic(), 0.0)):
            lane.at_work.release()


def _watch(lane: Lane[Any], link: Link, limits: Limits, now_s: float) -> float:
    """Do what the rules ask for now, and return when to check again."""
    progress = lane.progress
    # An idle lane waits for another lane, so its peer has not stalled.
    stall_s = None if progress.idle else limits.stall_s
    action, again_s = next_action(
        Limits(min(limits.deadline_s, lane.ends_s), stall_s),
        now_s,
        waiting_since_s=progress.waiting_since_s,
        probed_s=lane.probed_s,
        lost_s=lane.lost_s,
    )
    error: LinkError | None = None
    if action is Action.PROBE:
        lane.probed_s = now_s
        try:
            link.check_peer(progress.peer)
        except LinkError as gone:
            lane.lost, lane.lost_s = gone, now_s
    elif action is Action.GIVE_UP_DEAD:
        error = lane.lost
    elif action is Action.GIVE_UP_STALLED:
        error = LinkStalled(f"no message completed for {limits.stall_s:g} s", peer=progress.peer)
    elif action is Action.GIVE_UP_LATE:
        error = deadline_passed(progress.peer)
    if error is not None:
        lane.cancellation.set()
        lane.settle(None, error)
    return again_s


def deadline_passed(peer: int) -> LinkTimeout:
    """Return the error for a deadline that passed."""
    return LinkTimeout("the transfer did not finish within its timeout", peer=peer)
