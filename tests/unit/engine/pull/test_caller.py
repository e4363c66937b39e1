"""Ctrl-C in the thread that called fetch, while another thread is being started for it."""

from __future__ import annotations

import threading

import pytest

from torchferry.core.pull import LeaseRequest
from torchferry.engine.pull.caller import Caller
from torchferry.engine.pull.sources import Sources

original = threading.Thread.start


@pytest.fixture
def caller() -> Caller:
    return Caller(Sources("fetch", [], LeaseRequest("state", "a receiver"), None, 0, None), None)


def test_work_that_has_begun_is_finished_before_ctrl_c_is_raised(
    monkeypatch: pytest.MonkeyPatch, caller: Caller
) -> None:
    begun, done = threading.Event(), []

    def start(thread: threading.Thread) -> None:
        original(thread)
        begun.wait(10)
        raise KeyboardInterrupt

    def work() -> None:
        begun.set()
        # Long enough for the caller to raise the exception, if it did not wait.
        threading.Event().wait(0.2)
        done.append(True)

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(KeyboardInterrupt):
        caller.run(work, finish=True)
    assert done == [True]


def test_work_that_has_not_begun_when_ctrl_c_is_raised_never_begins(
    monkeypatch: pytest.MonkeyPatch, caller: Caller
) -> None:
    started: list[threading.Thread] = []
    done: list[bool] = []

    def start(thread: threading.Thread) -> None:
        started.append(thread)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(KeyboardInterrupt):
        caller.run(lambda: done.append(True), finish=True)
    # The thread begins only now.
    original(started[0])
    started[0].join()
    assert done == []
