"""The demo from end to end, as a user runs it, with real processes and real kills."""

from __future__ import annotations

import os
import re
import signal

from tests.demo.running import Run, running

DIGESTS = re.compile(r"│ (\d+) +│ ([0-9a-f]{16}) +│ ([0-9a-f]{16}) +│ identical")


def assert_proved(run: Run, *, workers: int, victim: int, step: int) -> None:
    """Exit code 0, the whole story in the right order, the proof, and nothing left behind."""
    code = run.finish()
    assert code == 0, run.output
    story = [
        f"SIGKILL to worker {victim}",
        f"worker {victim}     died of SIGKILL",
        rf"worker {victim}     healed from worker \d+: state of step ({step - 1}|{step}), \d.\d MB",
        "step 60 of 60.*the disturbed run is done",
        "undisturbed, in group 2",
        "step 60 of 60.*the undisturbed run is done",
        "PROVED",
    ]
    assert re.search(".*".join(story), run.output, re.DOTALL), run.output
    rows = DIGESTS.findall(run.output)
    assert [int(rank) for rank, _, _ in rows] == list(range(workers)), run.output
    assert len({digest for _, *digests in rows for digest in digests}) == 1
    assert "Traceback" not in run.output
    assert run.living() == []
    assert run.files() == []


def test_four_workers_one_killed_and_the_weights_do_not_show_it() -> None:
    with running() as run:
        assert_proved(run, workers=4, victim=3, step=25)
        # Who else noticed is told too, of each survivor: by gloo's error or by the coordinator.
        assert len(re.findall("all-reduce of step|still blocked", run.output)) >= 1


def test_two_workers_and_rank_0_killed_in_the_very_first_step() -> None:
    with running("--workers", "2", "--kill-at", "1", "--seed", "1") as run:
        assert_proved(run, workers=2, victim=0, step=1)


def test_ctrl_c_ends_all_of_it_without_a_traceback() -> None:
    with running("--workers", "2", "--kill-at", "59") as run:
        run.read_until("step 10 of 60")
        os.killpg(run.process.pid, signal.SIGINT)
        assert run.finish() == 130
        assert "Interrupted; all workers have been stopped." in run.output
        assert "Traceback" not in run.output
        assert run.living() == []
        assert run.files() == []


def test_a_coordinator_that_is_killed_leaves_no_worker() -> None:
    with running("--workers", "2", "--kill-at", "59") as run:
        run.read_until("step 10 of 60")
        assert len(run.living(patience_s=0)) >= 3
        run.process.kill()
        assert run.finish() == -signal.SIGKILL
        assert run.living() == []
