"""Whatever happens has words, and they tell who, from whom, how much and how long."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from torchferry.demo import happenings
from torchferry.demo.happenings import Happening
from torchferry.demo.show import Show, describe


@pytest.mark.parametrize(
    ("happening", "who", "words"),
    [
        (happenings.Starting(4), "coordinator", ["4 workers"]),
        (happenings.Started(2, 77, replacement=False), "worker 2", ["pid 77"]),
        (happenings.Started(2, 78, replacement=True), "worker 2", ["replacement", "pid 78"]),
        (happenings.Training(0, disturbed=True), "coordinator", ["group 0"]),
        (happenings.Training(1, disturbed=True), "coordinator", ["survivors", "group 1"]),
        (happenings.Training(2, disturbed=False), "coordinator", ["undisturbed", "group 2"]),
        (happenings.Stepped(10, 0.5), "all", ["step 10", "0.5000"]),
        (happenings.Killed(2, 77, 25), "coordinator", ["SIGKILL", "worker 2", "step 25"]),
        (happenings.Died(2, "SIGKILL", 0.012), "worker 2", ["SIGKILL", "12 ms"]),
        (happenings.Noticed(1, 25, "gone", 0.05), "worker 1", ["step 25", "50 ms", "gone"]),
        (happenings.StillBlocked((1, 3), 1.05), "coordinator", ["1050 ms", "workers 1, 3"]),
        (
            happenings.CaughtUp(2, 0, 24, 9_500_000, 0.0151, replacement=True),
            "worker 2",
            ["healed from worker 0", "step 24", "9.5 MB", "0.015 s"],
        ),
        (
            happenings.CaughtUp(3, 0, 25, 9_500_000, 0.0151, replacement=False),
            "worker 3",
            ["a step behind", "from worker 0"],
        ),
        (happenings.Completed(60, 0.1, disturbed=True), "all", ["step 60", "the disturbed run"]),
    ],
)
def test_a_happening_is_told(happening: Happening, who: str, words: list[str]) -> None:
    teller, what, _ = describe(happening)
    assert teller == who
    for word in words:
        assert word in what


def test_a_line_is_one_line_in_a_log_and_brackets_in_an_error_survive() -> None:
    output = io.StringIO()
    show = Show(Console(file=output, width=40))
    reason = "Connection closed by peer [127.0.0.1]:22 " + "and so on " * 10
    show(happenings.Noticed(1, 25, reason.strip(), 0.05))
    (line,) = output.getvalue().splitlines()
    assert line.endswith(reason.strip())
