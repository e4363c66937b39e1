"""What the demo does when what goes wrong is not what it planned."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.demo import troubles
from tests.demo.running import ENVIRONMENT, ROOT
from torchferry.demo.worker import choose_source


@pytest.fixture(scope="module")
def scenes() -> dict[str, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", troubles.__name__],
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    # In torch 2.9, gloo prints lines of its own before it.
    return json.loads(done.stdout[done.stdout.index("{") :])  # type: ignore[no-any-return]


def test_a_survivor_that_is_a_step_behind_heals_from_the_one_ahead(
    scenes: dict[str, dict[str, Any]],
) -> None:
    scene = scenes["a_survivor_is_a_step_behind"]
    ((source, step, payload_bytes),) = scene["healed"]
    assert (source, step) == (0, troubles.HELD_STEP)
    assert payload_bytes > 4_000_000
    assert scene["identical"]


def test_a_survivor_that_gets_no_error_is_called_out_by_the_coordinator(
    scenes: dict[str, dict[str, Any]],
) -> None:
    scene = scenes["a_survivor_hears_nothing"]
    assert scene["blocked"] == [scene["survivor"]]
    assert scene["identical"]


def test_a_death_that_was_not_planned_fails_the_demo(scenes: dict[str, dict[str, Any]]) -> None:
    scene = scenes["a_worker_dies_that_should_not"]
    assert "ended unexpectedly: SIGKILL" in scene["failure"]


def test_a_deadline_that_passes_fails_the_demo_at_once(scenes: dict[str, dict[str, Any]]) -> None:
    scene = scenes["time_runs_out"]
    assert "not finished after 0 s" in scene["failure"]
    assert scene["seconds"] < 5


def test_an_error_in_a_worker_fails_the_demo_with_its_traceback(
    scenes: dict[str, dict[str, Any]],
) -> None:
    scene = scenes["nobody_has_a_state"]
    assert "no worker has a state to go on from" in scene["failure"]
    assert "Traceback" in scene["failure"]


def test_no_worker_is_left_in_any_case(scenes: dict[str, dict[str, Any]]) -> None:
    assert {scene["left"] for scene in scenes.values()} == {0}


@pytest.mark.parametrize(
    ("steps", "source", "behind"),
    [([5, -1], 0, [1]), ([-1, 5], 1, [0]), ([4, 5, -1, 5], 1, [0, 2]), ([0, -1, 0], 0, [1])],
)
def test_the_most_advanced_sends_to_all_behind_it(steps: list[int], source: int, behind: list[int]) -> None:
    assert choose_source(steps) == (source, behind)


def test_without_a_state_there_is_no_source() -> None:
    with pytest.raises(ValueError, match="nobody survived"):
        choose_source([-1, -1])
