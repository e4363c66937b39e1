"""The command line: options, exit codes, and what it says when it can't do what it should."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest
from rich.console import Console
from typer.testing import CliRunner

from torchferry import __version__, cli
from torchferry.demo import coordinator, happenings
from torchferry.demo.command import perform
from torchferry.demo.happenings import Watcher
from torchferry.demo.proof import Verdict, compare
from torchferry.demo.scenario import Scenario
from torchferry.demo.show import Show

SCENARIO = Scenario(workers=2, kill_at=3, seed=0)


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli._build_app(), arguments, env={"COLUMNS": "200", "TERM": "dumb"})
    return result.exit_code, result.output


def play_by(ending: Callable[[], Verdict], monkeypatch: pytest.MonkeyPatch) -> tuple[int, str]:
    """The exit code and the output of a demo that ends in this way, without its processes."""

    def play(scenario: Scenario, watch: Watcher) -> Verdict:
        watch(happenings.Starting(scenario.workers))
        return ending()

    monkeypatch.setattr(coordinator, "play", play)
    output = io.StringIO()
    return perform(SCENARIO, Show(Console(file=output, width=200))), output.getvalue()


def verdict_on(disturbed: bytes, undisturbed: bytes) -> Verdict:
    return compare({0: {"model.weight": disturbed}}, {0: {"model.weight": undisturbed}})


class TestTheOptions:
    @pytest.mark.parametrize(
        ("arguments", "complaint"),
        [
            (["--workers", "1"], "--workers"),
            (["--workers", "9"], "--workers"),
            (["--workers", "many"], "--workers"),
            (["--kill-at", "0"], "--kill-at"),
            (["--kill-at", "60"], "--kill-at"),
            (["--seed", "-1"], "--seed"),
            (["--colour"], "--colour"),
        ],
    )
    def test_that_make_no_sense_are_refused_by_name(self, arguments: list[str], complaint: str) -> None:
        code, output = invoke("demo", *arguments)
        assert code == 2
        assert complaint in output
        assert "Traceback" not in output

    def test_are_listed_with_their_ranges(self) -> None:
        code, output = invoke("demo", "--help")
        assert code == 0
        for text in ("--workers", "2<=x<=8", "--kill-at", "1<=x<=59", "--seed"):
            assert text in output

    def test_none_at_all_is_a_question_for_help_and_no_mistake(self) -> None:
        code, output = invoke()
        assert (code, output) == invoke("--help")
        assert code == 0
        assert "demo" in output

    @pytest.mark.parametrize("command", [[], ["demo"], ["bench"], ["bench-cluster"]])
    def test_that_take_no_value_are_shown_without_a_type(self, command: list[str]) -> None:
        code, output = invoke(*command, "--help")
        assert code == 0
        assert "--help" in output
        assert "bool" not in output

    def test_include_the_version(self) -> None:
        assert invoke("--version") == (0, f"torchferry {__version__}\n")

    @pytest.mark.parametrize(
        ("workers", "kill_at", "seed"), [(1, 3, 0), (9, 3, 0), (2, 0, 0), (2, 60, 0), (2, 3, -1)]
    )
    def test_are_checked_by_the_scenario_too(self, workers: int, kill_at: int, seed: int) -> None:
        with pytest.raises(ValueError, match="must"):
            Scenario(workers, kill_at, seed)

    def test_pick_any_worker_as_the_victim(self) -> None:
        assert {Scenario(4, 3, seed).victim for seed in range(30)} == {0, 1, 2, 3}


class TestTheExitCode:
    def test_is_0_if_the_weights_are_identical(self, monkeypatch: pytest.MonkeyPatch) -> None:
        code, output = play_by(lambda: verdict_on(b"same", b"same"), monkeypatch)
        assert code == 0
        assert "PROVED" in output

    def test_is_1_if_they_differ_and_says_where(self, monkeypatch: pytest.MonkeyPatch) -> None:
        code, output = play_by(lambda: verdict_on(b"some", b"same"), monkeypatch)
        assert code == 1
        assert "NOT IDENTICAL" in output
        assert "model.weight: 1 of 4 bytes differ" in output
        assert "PROVED" not in output

    def test_is_1_if_the_demo_fails(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail() -> Verdict:
            raise coordinator.DemoFailed("worker 1 [pid 7] is gone")

        code, output = play_by(fail, monkeypatch)
        assert code == 1
        assert "The demo failed: worker 1 [pid 7] is gone" in output

    def test_is_130_after_ctrl_c(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupt() -> Verdict:
            raise KeyboardInterrupt

        code, output = play_by(interrupt, monkeypatch)
        assert code == 130
        assert "Interrupted" in output
