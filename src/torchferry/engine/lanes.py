"""Lanes: one for each peer, watched by the caller until each is over.

A backend's wait blocks in native code: Ctrl-C does not reach it, and a peer that dies in the middle of a
message may never end it. So nobody who matters waits there. The caller sleeps where it can be woken, looks
after every lane in turn (`core.watch`), and leaves behind a lane that can't be saved.

How lanes run and how time passes is a Runner's business: threads and the clock in earnest (`threads`), one
scheduler with a clock of its own in the simulation.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from math import inf
from typing import Any, Generic, Protocol

from torchferry.core.watch import Rules, Verdict, look
from torchferry.engine.meter import Meter
from torchferry.engine.window import Steps, T
from torchferry.errors import LinkError, LinkStalled, LinkTimeout
from torchferry.links.base import Link

_REST_S = 0.25
"""How long a lane that is given up may take to come to rest: until it is done with its next few chunks."""


class Lane(Generic[T]):
    """Work with one peer. When it is over, either `error` is set or `value` is there.

    `on_failure` is told of an error as soon as there is one. `ends_s` is when the lane is given up, if that
    is before the deadline of all. `lost` is what the link says of a peer that is gone, since `lost_s`.

    Whoever takes its steps holds `at_work` meanwhile, and lets go of it while it waits.
    """

    def __init__(
        self, meter: Meter, steps: Steps[T], on_failure: Callable[[BaseException], None] | None = None
    ) -> None:
        self.meter = meter
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
        """End the lane; only the first end counts."""
        with self._lock:
            if self.over:
                return
            self.value, self.error, self.over = value, error, True
        if error is not None and self._on_failure is not None:
            self._on_failure(error)

    def give_up(self, error: BaseException) -> None:
        """End the lane from outside. It may still be at work, but begins nothing more."""
        self.meter.given_up = True
        self.settle(None, error)


class Runner(Protocol):
    """Takes the steps of lanes, and lets the caller sleep meanwhile."""

    def now_s(self) -> float:
        """Give the time."""

    def start(self, lane: Lane[Any], rules: Rules) -> None:
        """Begin to take a lane's steps; settle it when they end."""

    def sleep(self, lanes: Sequence[Lane[Any]], until_s: float) -> None:
        """Return when one of the lanes is over, or at the given time."""

    def end(self, lanes: Sequence[Lane[Any]]) -> None:
        """Wait a little for what was given up, so that no more is left behind than must be."""


def run_lanes(link: Link, lanes: Sequence[Lane[T]], rules: Rules, runner: Runner) -> None:
    """Run lanes side by side until each is over, by itself or given up. Errors stay in the lanes.

    Raises:
        BaseException: what interrupts the caller, such as KeyboardInterrupt; the link is broken off then,
            so that peers are told and waits end.
    """
    try:
        for lane in lanes:
            runner.start(lane, rules)
        while open_lanes := [lane for lane in lanes if not lane.over]:
            again_s = min(_look_after(lane, link, rules, runner.now_s()) for lane in open_lanes)
            _let_rest([lane for lane in open_lanes if lane.meter.given_up])
            if not any(lane.over for lane in open_lanes):
                runner.sleep(open_lanes, again_s)
    except BaseException as interrupt:
        for lane in lanes:
            lane.settle(None, interrupt)
        # Before they are given up, or some would say farewell, and others not: who leaves is gone.
        for lane in lanes:
            link.break_off(lane.meter.peer)
        for lane in lanes:
            lane.give_up(interrupt)
        _let_rest(lanes)
        runner.end(lanes)
        raise


def _let_rest(lanes: Sequence[Lane[Any]]) -> None:
    """Wait until lanes that were given up do no more work: for all together as long as one may take."""
    ends_s = time.monotonic() + _REST_S
    for lane in lanes:
        if lane.at_work.acquire(timeout=max(ends_s - time.monotonic(), 0.0)):
            lane.at_work.release()


def _look_after(lane: Lane[Any], link: Link, rules: Rules, now_s: float) -> float:
    """Do what the rules ask for now, and say when to look again."""
    peer = lane.meter.peer
    # Who has nothing to do with its peer at the moment can't be kept waiting by it.
    stall_s = None if lane.meter.idle else rules.stall_s
    own = Rules(min(rules.deadline_s, lane.ends_s), stall_s)
    verdict, again_s = look(
        own, now_s, waits_s=lane.meter.waits_s, probed_s=lane.probed_s, lost_s=lane.lost_s
    )
    if verdict is Verdict.PROBE:
        lane.probed_s = now_s
        try:
            link.probe(peer)
        except LinkError as error:
            lane.lost, lane.lost_s = error, now_s
    elif verdict is Verdict.GONE and lane.lost is not None:
        lane.give_up(lane.lost)
    elif verdict is Verdict.STALLED:
        lane.give_up(LinkStalled(f"no message was completed for {rules.stall_s:g} s", peer=peer))
    elif verdict is Verdict.LATE:
        lane.give_up(late(peer))
    return again_s


def late(peer: int) -> LinkTimeout:
    """Give the error for a deadline that has passed."""
    return LinkTimeout("the transfer did not finish within its timeout", peer=peer)
