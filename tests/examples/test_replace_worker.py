"""`make demo` replaces a killed worker, its proof can fail, and every failure ends it in time."""

from __future__ import annotations

import os
import re
import signal
import time

import pytest
import torch

from examples.replace_worker import SEED, Training, catch_up, differences, fingerprint, parse_options
from tests.examples.running import Run, running
from tests.support.cluster import Cluster, RemoteError

EXAMPLE = "replace_worker.py"
# The run never reaches the step at which the example kills a rank.
ENDLESS = ("--workers", "2", "--steps", "1000000")


def assert_passed(run: Run, *, workers: int, steps: int, killed: int) -> None:
    assert run.finish() == 0, run.output
    in_order = [
        rf"rank {killed}: started in generation 0, pid (\d+)",
        rf"rank {killed}: killed with SIGKILL, exit code -9",
        rf"rank {killed}: started in generation 1, pid (\d+)",
        rf"rank {killed}: caught up with rank \d+: [\d,]+ bytes",
        rf"rank 0: step {steps} of {steps}",
        "second run",
        rf"rank 0: step {steps} of {steps}",
        "PASSED",
    ]
    found = re.search(".*?".join(in_order), run.output, re.DOTALL)
    assert found, run.output
    assert found[1] != found[2], "the replacement has the pid of the killed worker"
    # One replacement in the first run, none in the second.
    assert run.output.count(": started in generation ") == 2 * workers + 1
    assert "Traceback" not in run.output
    assert run.left_behind() == []


def pid_of(rank: int, run: Run) -> int:
    found = re.search(rf"rank {rank}: started in generation 0, pid (\d+)", run.output)
    assert found, run.output
    return int(found[1])


class TestTheExample:
    def test_replaces_rank_0_and_ends_with_the_same_bits(self) -> None:
        with running(EXAMPLE, "--workers", "2", "--steps", "20", "--kill-rank", "0") as run:
            assert_passed(run, workers=2, steps=20, killed=0)

    @pytest.mark.slow
    def test_replaces_one_of_four_workers_without_options(self) -> None:
        with running(EXAMPLE) as run:
            assert_passed(run, workers=4, steps=60, killed=1)

    @pytest.mark.slow
    def test_fails_if_a_worker_ends_that_the_example_did_not_kill(self) -> None:
        with running(EXAMPLE, *ENDLESS) as run:
            run.read_until("step 10 of")
            os.kill(pid_of(0, run), signal.SIGKILL)
            assert run.finish() == 1
            assert "FAILED: rank 0 ended with exit code -9" in run.output
            assert "PASSED" not in run.output
            assert run.left_behind() == []

    @pytest.mark.slow
    def test_fails_at_its_deadline_if_a_worker_hangs(self) -> None:
        with running(EXAMPLE, *ENDLESS, "--timeout", "2") as run:
            run.read_until("rank 1: started")
            os.kill(pid_of(0, run), signal.SIGSTOP)
            begin = time.monotonic()
            assert run.finish() == 1
            assert time.monotonic() - begin < 25, (
                "the timeout of the process group ended it, not the deadline"
            )
            assert "FAILED: not finished after 2 s" in run.output
            assert run.left_behind() == []

    @pytest.mark.slow
    def test_ends_on_ctrl_c_with_130_and_without_a_traceback(self) -> None:
        with running(EXAMPLE, *ENDLESS) as run:
            run.read_until("step 10 of")
            os.killpg(run.process.pid, signal.SIGINT)
            assert run.finish() == 130
            assert "Interrupted; all workers have ended." in run.output
            assert "Traceback" not in run.output
            assert run.left_behind() == []

    @pytest.mark.slow
    def test_leaves_no_worker_if_the_coordinator_is_killed(self) -> None:
        with running(EXAMPLE, *ENDLESS) as run:
            run.read_until("step 10 of")
            assert len(run.processes()) == 3
            run.process.kill()
            # The workers hold stdout open, so `finish` returns after the last worker has ended.
            assert run.finish() == -signal.SIGKILL
            assert run.processes() == []

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--workers", "1"], "--workers must be at least 2"),
            (["--steps", "2"], "--steps at least 3"),
            (["--workers", "2", "--kill-rank", "2"], "--kill-rank must be 0 to 1, not 2"),
            (["--colour"], "unrecognized arguments: --colour"),
        ],
    )
    def test_rejects_a_bad_option_with_2(
        self,
        options: list[str],
        message: str,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.setattr("sys.argv", [EXAMPLE, *options])
        with pytest.raises(SystemExit) as raised:
            parse_options()
        assert raised.value.code == 2
        assert message in capsys.readouterr().err


class TestTheProof:
    def test_accepts_equal_states(self) -> None:
        state = fingerprint(Training(SEED).state())
        assert differences({0: state, 1: state}, {0: state, 1: state}) == []
        assert {"state.model.0.weight", "state.rng", "state.step", "state.position"} <= state.keys()
        assert {"state.optimizer.state.0.exp_avg", "state.optimizer.param_groups"} <= state.keys()

    @pytest.mark.parametrize("path", [("model", "0.weight"), ("optimizer", "state", 3, "exp_avg"), ("rng",)])
    def test_finds_a_single_different_bit_and_names_rank_and_path(self, path: tuple[str | int, ...]) -> None:
        state = Training(SEED).state()
        expected = fingerprint(state)
        leaf = state
        for key in path:
            leaf = leaf[key]  # type: ignore[index]
        torch.as_tensor(leaf).view(torch.uint8).view(-1)[-1] ^= 1
        found = differences({0: expected, 1: fingerprint(state)}, {0: expected, 1: expected})
        assert found == [f"rank 1 of the disturbed run: {'.'.join(map(str, ('state', *path)))}"]

    def test_finds_a_different_number(self) -> None:
        training = Training(SEED)
        expected = fingerprint(training.state())
        training.position += 1
        found = differences({0: fingerprint(training.state())}, {0: expected})
        assert found == ["rank 0 of the disturbed run: state.position"]

    def test_finds_a_missing_leaf(self) -> None:
        assert differences({0: {}}, {0: {"state.step": "a"}}) == ["rank 0 of the disturbed run: state.step"]

    def test_finds_ranks_that_differ_in_the_undisturbed_run(self) -> None:
        states = {0: {"state.step": "a"}, 1: {"state.step": "b"}}
        assert len(differences(states, states)) == 2


class TestCatchUp:
    def test_brings_a_rank_that_is_one_step_behind_to_the_newest_state(self, pair: Cluster) -> None:
        first, second = pair.run(catch_up_from_rank_1)
        assert first["state.step"] == second["state.step"] == fingerprint(1)["state"]
        assert differences({0: first}, {0: second}) == []

    def test_raises_if_no_rank_has_a_state(self, pair: Cluster) -> None:
        with pytest.raises(RemoteError, match="no rank has a state to continue from"):
            pair.run(catch_up_without_a_state)


def catch_up_from_rank_1(rank: int) -> dict[str, str]:
    training = Training(SEED)
    if rank == 1:
        gradients, _ = training.compute_gradients(rank)
        training.apply_gradients(gradients, world_size=1)
    catch_up(training)
    return fingerprint(training.state())


def catch_up_without_a_state(rank: int) -> None:
    catch_up(Training(seed=None))
