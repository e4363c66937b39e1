"""The caller of a transfer sleeps while threads run the lanes."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from torchferry.engine.push.lanes import Cancellation, Lane, Progress, Runner


def one_lane() -> Lane[Any]:
    def steps() -> Any:
        yield from ()
        return "done"

    return Lane(Progress(1), Cancellation(), steps())


@contextmanager
def ctrl_c_before_line(number: int) -> Iterator[None]:
    """Raise KeyboardInterrupt before the given line of Python that is executed."""
    left = number

    def trace(frame: Any, event: str, arg: object) -> Any:
        nonlocal left
        left -= event == "line"
        if left == 0 and event == "line":
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


@pytest.fixture
def _nothing_is_collected() -> Iterator[None]:
    """Finalizers of other tests' objects would be counted and interrupted too."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_nothing_is_collected")
@pytest.mark.parametrize("number", range(1, 40))
@pytest.mark.slow
def test_ctrl_c_at_any_line_of_a_sleep_raises_keyboard_interrupt_and_breaks_nothing(number: int) -> None:
    runner, lane = Runner(), one_lane()
    until_s = time.monotonic() + 0.01
    try:
        with ctrl_c_before_line(number):
            runner.sleep([lane], until_s)
    except KeyboardInterrupt:
        pass
    runner.start(lane, time.monotonic() + 5.0)
    runner.sleep([lane], time.monotonic() + 5.0)
    assert lane.over, "the thread did not settle the lane"
    assert lane.value == "done"
