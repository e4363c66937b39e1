"""Lanes that are given up: the first end counts, and whoever gives up several waits for all at once."""

from __future__ import annotations

import threading
import time

import pytest

from torchferry.core.watch import Rules
from torchferry.engine import lanes, threads
from torchferry.engine.lanes import Lane, run_lanes
from torchferry.engine.meter import Meter
from torchferry.engine.threads import ThreadRunner
from torchferry.engine.window import Steps
from torchferry.errors import LinkBroken, LinkStalled, LinkTimeout
from torchferry.links.base import Pending
from torchferry.testing import MemoryLink, MemoryNetwork


class Never:
    """Something that does not come, and is waited for until somebody says so."""

    def __init__(self) -> None:
        self.stop = threading.Event()

    def wait(self, timeout_s: float) -> None:
        if not self.stop.wait(timeout_s):
            raise LinkTimeout("it did not come")


def one_wait(pending: Pending) -> Steps[str]:
    yield pending
    return "done"


def test_only_the_first_end_counts() -> None:
    told: list[BaseException] = []
    lane: Lane[str] = Lane(Meter(1, "test"), one_wait(Never()), on_failure=told.append)
    first, second = LinkStalled("first"), LinkTimeout("second")
    lane.give_up(first)
    lane.settle(None, second)
    lane.settle("value", None)
    assert (lane.error, lane.value, told) == (first, None, [first])


def test_those_who_are_given_up_together_are_waited_for_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three lanes are at work when their deadline passes, and none of them stops for it."""
    monkeypatch.setattr(lanes, "_REST_S", 0.3)
    enough = threading.Event()

    def works() -> Steps[None]:
        enough.wait(10)
        yield Never()

    busy: list[Lane[None]] = [Lane(Meter(peer, "test"), works()) for peer in (1, 2, 3)]
    runner = ThreadRunner()
    rules = Rules(runner.now_s())
    began_s = time.monotonic()
    run_lanes(MemoryNetwork().link(0), busy, rules, runner)
    waited_s = time.monotonic() - began_s
    enough.set()
    assert [type(lane.error) for lane in busy] == [LinkTimeout] * 3
    assert all(lane.meter.given_up for lane in busy)
    assert 0.3 <= waited_s < 0.9


def test_a_link_that_breaks_at_the_deadline_is_late_and_not_broken() -> None:
    """The backend closes all connections when the first wait expires, and the others' waits end so, too."""

    class Breaking:
        def wait(self, timeout_s: float) -> None:
            time.sleep(timeout_s)
            raise LinkBroken("closed, because another wait was let expire")

    runner = ThreadRunner()
    lane = Lane(Meter(1, "test"), one_wait(Breaking()))
    run_lanes(MemoryNetwork().link(0), [lane], Rules(runner.now_s() + 0.05), runner)
    assert type(lane.error) is LinkTimeout


def test_a_link_that_breaks_before_the_deadline_is_broken() -> None:
    class Broken:
        def wait(self, timeout_s: float) -> None:
            raise LinkBroken("gone")

    runner = ThreadRunner()
    lane = Lane(Meter(1, "test"), one_wait(Broken()))
    run_lanes(MemoryNetwork().link(0), [lane], Rules(runner.now_s() + 20), runner)
    assert type(lane.error) is LinkBroken


def test_an_interrupted_caller_breaks_off_and_then_gives_up_every_lane(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    never = [Never(), Never()]
    waiting = [Lane(Meter(peer, "test"), one_wait(each)) for peer, each in enumerate(never, 1)]

    def interrupted(self: ThreadRunner, lanes: object, until_s: float) -> None:
        raise KeyboardInterrupt

    class Watching(MemoryLink):
        def break_off(self, peer: int) -> None:
            broken_off.append((peer, any(lane.meter.given_up for lane in waiting)))

    broken_off: list[tuple[int, bool]] = []
    monkeypatch.setattr(threads.ThreadRunner, "sleep", interrupted)
    runner = ThreadRunner()
    with pytest.raises(KeyboardInterrupt):
        run_lanes(Watching(MemoryNetwork(), 0), waiting, Rules(runner.now_s() + 20), runner)
    for each in never:
        each.stop.set()
    assert [type(lane.error) for lane in waiting] == [KeyboardInterrupt] * 2
    assert all(lane.meter.given_up for lane in waiting)
    # A lane that is given up says farewell, and its peer would take this process for one that is still there.
    assert broken_off == [(1, False), (2, False)]
