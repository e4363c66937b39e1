"""Lanes: one for each peer, each in a thread that waits, watched by the caller, who can always be woken.

A backend's wait blocks in native code: Ctrl-C does not reach it, and a peer that dies in the middle of a
message may never end it. So nobody who matters waits there. The caller sleeps on a condition, looks after
every lane in turn (`core.watch`), and leaves behind a lane that can't be saved: its thread is a daemon, and
ends when the backend lets it go, at the deadline at the latest.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Generic

from torchferry.core.watch import Rules, Verdict, look
from torchferry.engine.meter import Meter
from torchferry.engine.window import Steps, T
from torchferry.errors import FerryError, LinkError, LinkStalled, LinkTimeout
from torchferry.links.base import Link

_JOIN_S = 1.0


class Lane(Generic[T]):
    """Work with one peer. When it is over, either `error` is set or `value` is there."""

    def __init__(self, meter: Meter, steps: Steps[T]) -> None:
        self.meter = meter
        self.over = False
        self.error: BaseException | None = None
        self.value: T | None = None
        self._steps = steps
        self._thread: threading.Thread | None = None
        self._probed_s = 0.0

    def start(self, changed: threading.Condition, deadline_s: float) -> None:
        """Let a thread take the steps."""
        self._thread = threading.Thread(
            target=self._run,
            args=(changed, deadline_s),
            name=f"torchferry-lane-{self.meter.peer}",
            daemon=True,
        )
        self._thread.start()

    def _run(self, changed: threading.Condition, deadline_s: float) -> None:
        value: T | None = None
        error: BaseException | None = None
        try:
            value = take_steps(self._steps, deadline_s)
        except BaseException as raised:
            error = raised
        self._settle(changed, value, error)

    def _settle(self, changed: threading.Condition, value: T | None, error: BaseException | None) -> None:
        with changed:
            if not self.over:
                self.over, self.value, self.error = True, value, error
            changed.notify_all()

    def give_up(self, changed: threading.Condition, error: BaseException) -> None:
        """End the lane from outside; what its thread still does no longer counts."""
        self._settle(changed, None, error)

    def look_after(self, link: Link, rules: Rules, changed: threading.Condition) -> float:
        """Do what the rules ask for now, and say when to look again."""
        now_s = time.monotonic()
        verdict, again_s = look(rules, now_s, self.meter.moved_s, self._probed_s)
        if verdict is Verdict.PROBE:
            self._probed_s = now_s
            try:
                link.probe(self.meter.peer)
            except LinkError as error:
                self.give_up(changed, error)
        elif verdict is Verdict.STALLED:
            self.give_up(changed, LinkStalled(f"no byte moved for {rules.stall_s:g} s", peer=self.meter.peer))
        elif verdict is Verdict.LATE:
            self.give_up(changed, late())
        return again_s

    def join(self, timeout_s: float) -> None:
        """Wait for the thread, but not for ever."""
        if self._thread is not None:
            self._thread.join(timeout_s)


def take_steps(steps: Steps[T], deadline_s: float) -> T:
    """Take steps one after the other, waiting for each message no longer than the deadline.

    Raises:
        FerryError: as the steps do.
    """
    try:
        pending = next(steps)
        while True:
            try:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    raise late()
                pending.wait(left_s)
            except FerryError as error:
                pending = steps.throw(error)
            else:
                pending = next(steps)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]


def late() -> LinkTimeout:
    """Give the error for a deadline that has passed."""
    return LinkTimeout("the transfer did not finish within its timeout")


def run_lanes(link: Link, lanes: Sequence[Lane[T]], rules: Rules) -> None:
    """Run lanes side by side until each is over, by itself or given up. Errors stay in the lanes.

    Raises:
        BaseException: what interrupts the caller, such as KeyboardInterrupt; the link is broken off then,
            so that peers are told and no thread stays behind.
    """
    changed = threading.Condition()
    try:
        for lane in lanes:
            lane.start(changed, rules.deadline_s)
        while True:
            with changed:
                open_lanes = [lane for lane in lanes if not lane.over]
            if not open_lanes:
                break
            again_s = min(lane.look_after(link, rules, changed) for lane in open_lanes)
            with changed:
                if all(not lane.over for lane in open_lanes):
                    changed.wait(max(again_s - time.monotonic(), 0.0))
    except BaseException as interrupt:
        for lane in lanes:
            lane.give_up(changed, interrupt)
            link.break_off(lane.meter.peer)
        for lane in lanes:
            lane.join(_JOIN_S)
        raise
