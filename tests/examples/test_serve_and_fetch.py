"""The examples of serve and fetch tell their stories, are short, and leave nothing behind."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.examples.running import ROOT, Run, running

EXAMPLES = ["inference_follows_trainer.py", "join_from_outside.py", "resume.py", "torchft_train.py"]
MAX_LINES = 80


def assert_passed(run: Run, *story: str) -> None:
    """Check that the example ended well, and that its output has these patterns in this order."""
    assert run.finish() == 0, run.output
    assert re.search(".*?".join([*story, "PASSED"]), run.output, re.DOTALL), run.output
    assert "Traceback" not in run.output
    assert run.left_behind() == []


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_is_short(example: str) -> None:
    assert len(Path(ROOT, "examples", example).read_text().splitlines()) <= MAX_LINES


@pytest.mark.slow
def test_a_fetch_resumes_after_its_source_was_killed() -> None:
    with running("resume.py") as run:
        assert_passed(
            run,
            r"the first source is killed at [\d,]+ of 201,326,592 bytes",
            r"TornAndBroken: \d+ tensors are new, \d+ mixed, \d+ old",
            r"the second fetch moved \d\d%: version 7: [\d,]+ of 201,326,592 bytes moved",
        )


@pytest.mark.slow
def test_a_process_outside_of_the_group_takes_the_newest_state() -> None:
    with running("join_from_outside.py") as run:
        assert_passed(run, r"step \d+: the loss is (0\.\d+) at the ranks, \1 here", "step 30: the loss is")


@pytest.mark.slow
def test_followers_have_the_last_version_and_the_trainer_does_not_wait_for_them() -> None:
    with running("inference_follows_trainer.py") as run:
        assert_passed(run, "trainer: step 1, publishing took", "trainer: step 30, publishing took")
        for follower in ("fast", "slow", "unlucky, restarted"):
            assert f"{follower}: has version 30, after" in run.output
        assert "unlucky: has version" not in run.output


@pytest.mark.slow
def test_a_replica_group_of_torchft_is_killed_and_its_replacement_healed() -> None:
    with running("torchft_train.py") as run:
        assert_passed(
            run,
            r"group 1 was killed after step 5, and is started again",
            r"its replacement was healed: version \d+: 1,618,720 of 1,618,720 bytes moved",
        )
