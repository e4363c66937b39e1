"""Faults at exact points of a transfer of 64 MiB between real processes, and the errors of the survivors."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import pytest

from tests.faults.cases import (
    AFTER_LAST,
    BEFORE_METADATA,
    IN_METADATA,
    ONE_OF_THREE,
    PAIRS,
    SENDER_OF_THREE,
    Case,
    through_memory,
)
from tests.faults.controller import (
    assert_error_matches_state,
    wait_for_timestamp,
    wait_until_blocked_in_send,
    wait_until_stopped,
)
from tests.faults.jobs import (
    LAYER_BYTES,
    LAYERS,
    PATHS,
    AfterFailure,
    CallbackError,
    Fault,
    Role,
    TransferResult,
    inspect_after_failure,
    message,
    run_transfer,
    transfer_on_new_group,
    unique_name,
)
from tests.support.cluster import Cluster, Job, Outcome, WorkerDied
from torchferry.errors import FerryError, GroupBroken, SendBroken, SendFailed, SendLate, TargetTorn

TIMEOUT_S = {"stop": 2.0, "cut": 3.0}
"""The timeout of faults that end at the deadline, or that leave a thread blocked in gloo until the deadline.
Other faults get FAR_S, which can't be the cause of an error."""
FAR_S = 10.0
PAUSE_S = 0.4
"""Long enough for the survivor to probe the silent peer."""
FILL_S = 0.2
DETECTION_S = 1.0
LATE_S = 0.5


MARKS = {"test": [], "test-all": [pytest.mark.slow], "faults": [pytest.mark.slow_fault]}


def parametrized_by(cases: list[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "case",
        [
            pytest.param(case, id=case.name, marks=MARKS[case.runs_in])
            for case in (*cases, *through_memory(cases))
        ],
    )


class CaseRun:
    """One case on a cluster: rank 0 sends, the other ranks receive."""

    def __init__(self, cluster: Cluster, case: Case, folder: Path) -> None:
        self.cluster = cluster
        self.case = case
        self.ranks = tuple(range(case.receivers + 1))
        self.victim = 0 if case.victim == "sender" else min(2, case.receivers)
        self.survivors = [rank for rank in self.ranks if rank != self.victim]
        self.timeout_s = TIMEOUT_S.get(case.fault, FAR_S)
        if case.victim == "sender" and case.receivers > 1:
            # The other receivers may be in the middle of a message.
            self.timeout_s = min(self.timeout_s, TIMEOUT_S["cut"])
        self._name = unique_name()
        self._timestamp = folder / "fault"
        self._end_timestamps = {rank: folder / f"ended-{rank}" for rank in self.ranks}
        # A message is cut by stopping its receiver. Then the victim, sender or receiver, is killed.
        self.injected_rank = 1 if case.fault == "cut" and self.victim == 0 else self.victim
        peer = 1 if self.injected_rank == 0 else None
        self._fault = Fault(case.fault, case.point.position, str(self._timestamp), peer)
        jobs = [self._job(rank) if rank in self.ranks else None for rank in range(cluster.world_size)]
        self._pending = cluster.start(jobs)
        self.fault_s = wait_for_timestamp(self._timestamp)

    def _job(self, rank: int) -> Job:
        role = Role(
            self._name,
            self.ranks,
            "send" if rank == 0 else "receive",
            self.timeout_s,
            fault=self._fault if rank == self.injected_rank else None,
            end_timestamp_file=str(self._end_timestamps[rank]),
            small_socket_buffers=self.case.fault == "cut",
            same_host=self.case.via == "memory",
        )
        return run_transfer, (role,)

    def cut(self) -> None:
        """Kill the victim in the middle of a message. If it is the sender, continue the stopped receiver."""
        if self.case.via == "memory":
            # The sender fills the ring with a part of the message.
            time.sleep(FILL_S)
        else:
            wait_until_blocked_in_send(self.cluster.pids[0])
        self.cluster.kill(self.victim)
        self.fault_s = time.monotonic()
        if self.injected_rank != self.victim:
            self.cluster.kill(self.injected_rank, signal.SIGCONT)

    def wait_for_survivors(self) -> None:
        for rank in self.survivors:
            wait_for_timestamp(self._end_timestamps[rank])

    def outcomes(self) -> list[Outcome]:
        return self._pending.outcomes()

    def results(self, outcomes: list[Outcome]) -> list[TransferResult]:
        """Return the survivors' results; none of them died."""
        assert [outcomes[rank].error for rank in self.survivors] == [None] * len(self.survivors)
        return [outcomes[rank].value for rank in self.survivors]


def run_case(cluster: Cluster, case: Case, folder: Path) -> tuple[CaseRun, list[Outcome]]:
    """Run a case to its end. A stopped victim continues after the deadline, a paused victim before it."""
    run = CaseRun(cluster, case, folder)
    if case.fault in ("stop", "pause", "cut"):
        wait_until_stopped(cluster.pids[run.injected_rank])
    if case.fault == "cut":
        run.cut()
    elif case.fault in ("stop", "pause"):
        if case.fault == "stop":
            run.wait_for_survivors()
        else:
            time.sleep(PAUSE_S)
        cluster.kill(run.victim, signal.SIGCONT)
    return run, run.outcomes()


def assert_link_error(
    run: CaseRun, result: TransferResult, error: BaseException | None, peer: int, *, receives: bool
) -> None:
    """Check an error of the link: its type, time, peer, phase, path and byte count."""
    case = run.case
    assert isinstance(error, FerryError), error
    assert type(error).__name__ in case.errors, error
    if case.fault == "stop":
        assert run.timeout_s <= result.seconds < run.timeout_s + LATE_S
        assert isinstance(error, TimeoutError)
    else:
        assert result.ended_s - run.fault_s < DETECTION_S
        assert isinstance(error, ConnectionError)
    assert error.peer == peer
    in_metadata = case.point in (BEFORE_METADATA, IN_METADATA)
    if receives and in_metadata:
        phase = "wait" if case.point is BEFORE_METADATA else "receive metadata"
        assert (error.phase, error.path) == (phase, None)
    else:
        assert error.phase == ("receive tensors" if receives else "send tensors")
        position = case.point.position
        assert position is not None
        total = LAYERS * LAYER_BYTES
        done = re.search(rf"([\d,]+) of {total:,} bytes done, last at {error.path}", str(error))
        assert done is not None, str(error)
        layers = int(done[1].replace(",", "")) // LAYER_BYTES
        assert layers <= max(position - message(0), 0)
        assert error.path == PATHS[min(layers, LAYERS - 1)]


def assert_group_is_broken(run: CaseRun, results: dict[int, TransferResult]) -> None:
    """Check that the old group raises GroupBroken, that no byte was written since, and that lanes ended."""
    ranks = sorted(results)
    patience_s = (
        max(result.started_s for result in results.values()) + run.timeout_s + LATE_S - time.monotonic()
    )
    jobs = [
        (inspect_after_failure, (patience_s,)) if r in ranks else None for r in range(run.cluster.world_size)
    ]
    outcomes = run.cluster.start(jobs).outcomes()
    for rank in ranks:
        after: AfterFailure = outcomes[rank].value
        assert isinstance(after.error, GroupBroken), after.error
        assert "create a new group" in str(after.error)
        assert after.contents == results[rank].contents, "bytes were written after the error"
        assert after.lanes_ended_s is not None, "a lane is still running after the deadline"


def assert_new_group_works(cluster: Cluster, living: list[int]) -> None:
    args = (tuple(living), unique_name())
    jobs = [(transfer_on_new_group, args) if r in living else None for r in range(cluster.world_size)]
    assert all(outcome.value for outcome in cluster.start(jobs).outcomes() if outcome.rank in living)


def assert_victim_outcome(case: Case, outcome: Outcome) -> None:
    if not victim_survives(case):
        assert isinstance(outcome.error, WorkerDied), outcome
        assert outcome.error.exitcode == {"os_exit": 9, "sys_exit": 7}.get(case.fault, -signal.SIGKILL)
        return
    result: TransferResult = outcome.value
    if case.survives:
        assert result.error is None, result.error
    elif case.fault == "raise":
        known = result.cause if isinstance(result.error, TargetTorn) else result.error
        assert isinstance(known, CallbackError), result.error
    elif result.error is None:
        # The last message may be in the ring when the victim stops. Then it is whole when it continues.
        assert (case.point, case.via) == (AFTER_LAST, "memory")
        assert result.contents == dict.fromkeys(PATHS, "new")
    else:
        # It continues after its own deadline, or after the peer has closed the connection.
        assert isinstance(result.error, (TimeoutError, ConnectionError)), result.error
    if result.contents and result.error is not None:
        assert_error_matches_state(result)


def victim_survives(case: Case) -> bool:
    return case.fault not in ("kill", "os_exit", "sys_exit", "cut")


@parametrized_by(PAIRS)
def test_a_fault_of_one_side_raises_an_error_on_the_other(case: Case, trio: Cluster, tmp_path: Path) -> None:
    run, outcomes = run_case(trio, case, tmp_path)
    (result,) = run.results(outcomes)
    survivor = run.survivors[0]
    receives = survivor != 0
    assert_victim_outcome(case, outcomes[run.victim])
    if case.survives:
        assert (result.error, result.via) == (None, case.via)
        assert not receives or result.contents == dict.fromkeys(PATHS, "new")
        assert result.ended_s - result.started_s < FAR_S
    else:
        assert_link_error(run, result, result.error, run.victim, receives=receives)
        if receives:
            assert_error_matches_state(result)
            assert case.fault != "cut" or "mixed" in result.contents.values(), "no message was cut"
        assert_group_is_broken(run, {survivor: result})
    assert_new_group_works(trio, [0, 1, 2] if victim_survives(case) else [survivor, 2])


@parametrized_by(ONE_OF_THREE)
def test_a_fault_of_one_receiver_does_not_affect_the_others(
    case: Case, quartet: Cluster, tmp_path: Path
) -> None:
    run, outcomes = run_case(quartet, case, tmp_path)
    sender, *others = run.results(outcomes)
    assert_victim_outcome(case, outcomes[run.victim])
    for other in others:
        assert other.error is None
        assert other.contents == dict.fromkeys(PATHS, "new")
    if case.survives:
        assert sender.error is None
    else:
        error = sender.error
        assert isinstance(error, SendFailed)
        assert type(error) is (SendLate if case.fault == "stop" else SendBroken)
        assert (error.delivered, list(error.failed)) == ((1, 3), [2])
        assert_link_error(run, sender, error.failed[2], 2, receives=False)
        assert_group_is_broken(run, {0: sender})
    assert_new_group_works(quartet, [0, 1, 2, 3] if victim_survives(case) else [0, 1, 3])


@parametrized_by(SENDER_OF_THREE)
def test_a_fault_of_the_sender_raises_an_error_on_every_receiver(
    case: Case, quartet: Cluster, tmp_path: Path
) -> None:
    run, outcomes = run_case(quartet, case, tmp_path)
    results = dict(zip(run.survivors, run.results(outcomes), strict=True))
    if case.survives:
        assert all(result.contents == dict.fromkeys(PATHS, "new") for result in results.values())
    else:
        # The fault happens at a message to rank 1. The other receivers may already have the whole state.
        for result in results.values():
            if result.error is None:
                assert result.contents == dict.fromkeys(PATHS, "new")
            else:
                assert isinstance(result.error, TimeoutError if case.fault == "stop" else ConnectionError)
                assert_error_matches_state(result)
        assert_link_error(run, results[1], results[1].error, 0, receives=True)
        assert_group_is_broken(
            run, {rank: result for rank, result in results.items() if result.error is not None}
        )
    assert_new_group_works(quartet, [0, 1, 2, 3] if victim_survives(case) else [1, 2, 3])
