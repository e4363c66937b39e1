"""Lanes that end, and lanes that are cancelled."""

from __future__ import annotations

import threading
import time

import pytest

from torchferry.core.watch import Limits
from torchferry.engine.push import lanes
from torchferry.engine.push.lanes import Cancellation, Lane, Progress, Runner, Steps, run_lanes
from torchferry.errors import LinkBroken, LinkStalled, LinkTimeout
from torchferry.links.base import Pending
from torchferry.testing import MemoryLink, MemoryNetwork


class Never:
    """A message that never completes. A wait for it ends when the test sets `stop`."""

    def __init__(self) -> None:
        self.stop = threading.Event()

    def wait(self, timeout_s: float) -> None:
        if not self.stop.wait(timeout_s):
            raise LinkTimeout("it did not complete")


def one_wait(pending: Pending) -> Steps[str]:
    yield pending
    return "done"


def test_only_the_first_end_of_a_lane_counts() -> None:
    failures: list[BaseException] = []
    lane: Lane[str] = Lane(Progress(1), Cancellation(), one_wait(Never()), on_failure=failures.append)
    first, second = LinkStalled("first"), LinkTimeout("second")
    lane.settle(None, first)
    lane.settle(None, second)
    lane.settle("value", None)
    assert (lane.error, lane.value, failures) == (first, None, [first])


def test_cancelled_lanes_are_waited_for_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three lanes work when their deadline passes, and none of them stops."""
    monkeypatch.setattr(lanes, "_STOP_S", 0.3)
    stop = threading.Event()

    def works() -> Steps[None]:
        stop.wait(10)
        yield Never()

    busy: list[Lane[None]] = [Lane(Progress(peer), Cancellation(), works()) for peer in (1, 2, 3)]
    runner = Runner()
    limits = Limits(runner.now_s())
    started_s = time.monotonic()
    run_lanes(MemoryNetwork().link(0), busy, limits, runner)
    waited_s = time.monotonic() - started_s
    stop.set()
    assert [type(lane.error) for lane in busy] == [LinkTimeout] * 3
    assert all(lane.cancellation.is_set for lane in busy)
    assert 0.3 <= waited_s < 0.9


def test_a_link_that_breaks_at_the_deadline_counts_as_late() -> None:
    """When the first wait times out, the backend closes all connections, and the other waits fail."""

    class Breaking:
        def wait(self, timeout_s: float) -> None:
            time.sleep(timeout_s)
            raise LinkBroken("closed, because another wait timed out")

    runner = Runner()
    lane = Lane(Progress(1), Cancellation(), one_wait(Breaking()))
    run_lanes(MemoryNetwork().link(0), [lane], Limits(runner.now_s() + 0.05), runner)
    assert type(lane.error) is LinkTimeout


def test_a_wait_that_begins_after_the_deadline_reaches_the_backend() -> None:
    """Gloo closes its connections when a wait times out. Without that wait, the peer would not notice."""
    waits_s: list[float] = []

    class Recorded:
        def wait(self, timeout_s: float) -> None:
            waits_s.append(timeout_s)
            raise LinkTimeout("it did not complete")

    runner = Runner()
    lane = Lane(Progress(1), Cancellation(), one_wait(Recorded()))
    run_lanes(MemoryNetwork().link(0), [lane], Limits(runner.now_s() - 0.01), runner)
    assert type(lane.error) is LinkTimeout
    assert waits_s == [0.0]


def test_a_link_that_breaks_before_the_deadline_counts_as_broken() -> None:
    class Broken:
        def wait(self, timeout_s: float) -> None:
            raise LinkBroken("gone")

    runner = Runner()
    lane = Lane(Progress(1), Cancellation(), one_wait(Broken()))
    run_lanes(MemoryNetwork().link(0), [lane], Limits(runner.now_s() + 20), runner)
    assert type(lane.error) is LinkBroken


def test_an_interrupted_caller_closes_the_link_and_then_cancels_every_lane(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    never = [Never(), Never()]
    waiting = [Lane(Progress(peer), Cancellation(), one_wait(each)) for peer, each in enumerate(never, 1)]

    def interrupted(self: Runner, lanes: object, until_s: float) -> None:
        raise KeyboardInterrupt

    class Watching(MemoryLink):
        def close(self, peer: int) -> None:
            closed.append((peer, any(lane.cancellation.is_set for lane in waiting)))

    closed: list[tuple[int, bool]] = []
    monkeypatch.setattr(lanes.Runner, "sleep", interrupted)
    runner = Runner()
    with pytest.raises(KeyboardInterrupt):
        run_lanes(Watching(MemoryNetwork(), 0), waiting, Limits(runner.now_s() + 20), runner)
    for each in never:
        each.stop.set()
    assert [type(lane.error) for lane in waiting] == [KeyboardInterrupt] * 2
    assert all(lane.cancellation.is_set for lane in waiting)
    # A cancelled lane sends an abort, which must not reach the peer any more.
    assert closed == [(1, False), (2, False)]
