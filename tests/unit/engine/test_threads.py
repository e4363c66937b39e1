"""The caller of a transfer, asleep while threads take the lanes' steps."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from torchferry.core.watch import Rules
from torchferry.engine.lanes import Lane
from torchferry.engine.meter import Meter
from torchferry.engine.threads import ThreadRunner


def one_lane() -> Lane[Any]:
    def steps() -> Any:
        yield from ()
        return "done"

    return Lane(Meter(1, "send"), steps())


@contextmanager
def ctrl_c_before_line(number: int) -> Iterator[None]:
    """Raise what Ctrl-C raises, just before so many lines of Python have been run."""
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
    """Finalizers of what other tests have left would be counted, and interrupted, too."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_nothing_is_collected")
@pytest.mark.parametrize("number", range(1, 40))
def test_ctrl_c_at_any_line_of_a_sleep_is_nothing_but_ctrl_c(number: int) -> None:
    runner, lane = ThreadRunner(), one_lane()
    until_s = time.monotonic() + 0.01
    try:
        with ctrl_c_before_line(number):
            runner.sleep([lane], until_s)
    except KeyboardInterrupt:
        pass
    runner.start(lane, Rules(time.monotonic() + 5.0))
    runner.sleep([lane], time.monotonic() + 5.0)
    assert lane.over, "the thread can't say that it has ended"
    assert lane.value == "done"
