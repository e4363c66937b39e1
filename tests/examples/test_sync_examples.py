"""The examples of `sync` heal and grow a job, and their proofs pass."""

from __future__ import annotations

import re

import pytest

from tests.examples.running import ROOT, running

NAMES = ["heal_ddp.py", "heal_hsdp.py", "elastic_join.py"]


def output_of(example: str) -> str:
    with running(example, deadline_s=120.0) as run:
        assert run.finish() == 0, run.output
        assert "PASSED" in run.output
        assert "Traceback" not in run.output
        assert run.left_behind() == []
        return run.output


def test_a_killed_worker_of_ddp_is_healed() -> None:
    output = output_of("heal_ddp.py")
    assert "generation 1, rank 0: source, at step 6" in output
    assert "generation 1, rank 1: receiver, at step 6" in output


@pytest.mark.slow
def test_a_killed_rank_of_hsdp_is_healed_by_its_twin() -> None:
    output = output_of("heal_hsdp.py")
    assert "generation 1, rank 3: receiver, at step 4" in output
    assert output.count("left the group") == 3


@pytest.mark.slow
def test_a_third_replica_joins() -> None:
    assert re.search(r"3 ranks, rank 2: receiver, at step \d\d", output_of("elastic_join.py"))


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_short_and_readme_links_to_it(name: str) -> None:
    assert (ROOT / "examples" / name).read_text().count("\n") <= 80
    first_screen = (ROOT / "README.md").read_text()[:5000]
    assert f"(examples/{name})" in first_screen
