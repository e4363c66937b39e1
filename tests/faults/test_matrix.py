"""Faults at exact points of a transfer of 64 MiB between real processes, and what the survivors see of it."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import pytest

from tests.faults.cases import (
    BEFORE_METADATA,
    IN_METADATA,
    ONE_OF_THREE,
    PAIRS,
    SENDER_OF_THREE,
    Case,
)
from tests.faults.directing import (
    assert_truthful,
    wait_for_mark,
    wait_until_stopped,
    wait_until_stuck,
)
from tests.faults.scene import (
    LAYER_BYTES,
    LAYERS,
    PATHS,
    Aftermath,
    Boom,
    Fault,
    Part,
    Sight,
    go_on,
    look_around,
    message,
    perform,
    unique_name,
)
from tests.support.cluster import Cluster, Job, Outcome, WorkerDied
from torchferry.errors import FerryError, GroupBroken, SendBroken, SendFailed, SendLate, TargetTorn

TIMEOUT_S = {"stop": 2.0, "cut": 3.0}
"""Where it is what ends the transfer, or a thread that gloo holds in the middle of a message; elsewhere it
is far off, so that nothing can be owed to it."""
FAR_S = 10.0
PAUSE_S = 0.4
"""Long enough for the survivor to probe the one that is silent."""
DEATH_S = 1.0
LATE_S = 0.5


def parametrised(cases: list[Case]) -> pytest.MarkDecorator:
    marks = {True: (), False: (pytest.mark.slow_fault,)}
    return pytest.mark.parametrize(
        "case", [pytest.param(case, id=case.name, marks=marks[case.quick]) for case in cases]
    )


class Play:
    """One case, played by a cluster: rank 0 sends, the ranks after it receive."""

    def __init__(self, cluster: Cluster, case: Case, folder: Path) -> None:
        self.cluster = cluster
        self.case = case
        self.ranks = tuple(range(case.receivers + 1))
        self.victim = 0 if case.victim == "sender" else min(2, case.receivers)
        self.survivors = [rank for rank in self.ranks if rank != self.victim]
        self.timeout_s = TIMEOUT_S.get(case.fault, FAR_S)
        if case.victim == "sender" and case.receivers > 1:
            # Those who are not at the exact point may be in the middle of a message.
            self.timeout_s = min(self.timeout_s, TIMEOUT_S["cut"])
        self._name = unique_name()
        self._mark = folder / "fault"
        self._ended = {rank: folder / f"ended-{rank}" for rank in self.ranks}
        # A message is cut by letting its receiver stop in it, whoever is killed then.
        self.actor = 1 if case.fault == "cut" and self.victim == 0 else self.victim
        peer = 1 if self.actor == 0 else None
        self._fault = Fault(case.fault, case.point.place, str(self._mark), peer)
        jobs = [self._job(rank) if rank in self.ranks else None for rank in range(cluster.world_size)]
        self._pending = cluster.start(jobs)
        self.at_s = wait_for_mark(self._mark)

    def _job(self, rank: int) -> Job:
        part = Part(
            self._name,
            self.ranks,
            "send" if rank == 0 else "receive",
            self.timeout_s,
            fault=self._fault if rank == self.actor else None,
            ended=str(self._ended[rank]),
            narrow=self.case.fault == "cut",
        )
        return perform, (part,)

    def cut(self) -> None:
        """Kill the victim in the middle of a message, and let the one that stopped go on if it is not it."""
        wait_until_stuck(self.cluster.pids[0])
        self.cluster.kill(self.victim)
        self.at_s = time.monotonic()
        if self.actor != self.victim:
            self.cluster.kill(self.actor, signal.SIGCONT)

    def wait_for_survivors(self) -> None:
        for rank in self.survivors:
            wait_for_mark(self._ended[rank])

    def outcomes(self) -> list[Outcome]:
        return self._pending.outcomes()

    def sights(self, outcomes: list[Outcome]) -> list[Sight]:
        """What the survivors saw: they all live to tell."""
        assert [outcomes[rank].error for rank in self.survivors] == [None] * len(self.survivors)
        return [outcomes[rank].value for rank in self.survivors]


def play(cluster: Cluster, case: Case, folder: Path) -> tuple[Play, list[Outcome]]:
    """Play a case to its end. One that was stopped goes on when it is too late, or else in time."""
    scene = Play(cluster, case, folder)
    if case.fault in ("stop", "pause", "cut"):
        wait_until_stopped(cluster.pids[scene.actor])
    if case.fault == "cut":
        scene.cut()
    elif case.fault in ("stop", "pause"):
        if case.fault == "stop":
            scene.wait_for_survivors()
        else:
            time.sleep(PAUSE_S)
        cluster.kill(scene.victim, signal.SIGCONT)
    return scene, scene.outcomes()


def assert_told(scene: Play, sight: Sight, error: BaseException | None, peer: int, *, receives: bool) -> None:
    """Check an error of the link: its type, its time, and what it says of peer, phase, path and bytes."""
    case = scene.case
    assert isinstance(error, FerryError), error
    assert type(error).__name__ in case.errors, error
    if case.fault == "stop":
        assert scene.timeout_s <= sight.seconds < scene.timeout_s + LATE_S
        assert isinstance(error, TimeoutError)
    else:
        assert sight.ended_s - scene.at_s < DEATH_S
        assert isinstance(error, ConnectionError)
    assert error.peer == peer
    in_metadata = case.point in (BEFORE_METADATA, IN_METADATA)
    if receives and in_metadata:
        assert (error.phase, error.path) == ("receive metadata", None)
    else:
        assert error.phase == ("receive tensors" if receives else "send tensors")
        place = case.point.place
        assert place is not None
        total = LAYERS * LAYER_BYTES
        done = re.search(rf"([\d,]+) of {total:,} bytes done, last at {error.path}", str(error))
        assert done is not None, str(error)
        layers = int(done[1].replace(",", "")) // LAYER_BYTES
        assert layers <= max(place - message(0), 0)
        assert error.path == PATHS[min(layers, LAYERS - 1)]


def assert_over(scene: Play, sights: dict[int, Sight]) -> None:
    """Check that the old group is called broken, that nothing moved since, and that no thread is left."""
    ranks = sorted(sights)
    patience_s = max(sight.began_s for sight in sights.values()) + scene.timeout_s + LATE_S - time.monotonic()
    jobs = [(look_around, (patience_s,)) if r in ranks else None for r in range(scene.cluster.world_size)]
    found = scene.cluster.start(jobs).outcomes()
    for rank in ranks:
        after: Aftermath = found[rank].value
        assert isinstance(after.error, GroupBroken), after.error
        assert "make a new group" in str(after.error)
        assert after.fates == sights[rank].fates, "bytes landed after the error"
        assert after.lanes_gone_s is not None, "a thread outlives the deadline"


def assert_the_living_go_on(cluster: Cluster, living: list[int]) -> None:
    part = (tuple(living), unique_name())
    jobs = [(go_on, part) if r in living else None for r in range(cluster.world_size)]
    assert all(outcome.value for outcome in cluster.start(jobs).outcomes() if outcome.rank in living)


def assert_victim_met_its_fate(case: Case, outcome: Outcome) -> None:
    if not lives(case):
        assert isinstance(outcome.error, WorkerDied), outcome
        assert outcome.error.exitcode == {"exit": 9, "leave": 7}.get(case.fault, -signal.SIGKILL)
        return
    sight: Sight = outcome.value
    if case.survives:
        assert sight.error is None, sight.error
    elif case.fault == "raise":
        known = sight.cause if isinstance(sight.error, TargetTorn) else sight.error
        assert isinstance(known, Boom), sight.error
    else:
        # It wakes up when its own time is over too, or finds that it was given up.
        assert isinstance(sight.error, (TimeoutError, ConnectionError)), sight.error
    if sight.fates and sight.error is not None:
        assert_truthful(sight)


def lives(case: Case) -> bool:
    return case.fault not in ("kill", "exit", "leave", "cut")


@parametrised(PAIRS)
def test_a_fault_of_one_side_is_told_to_the_other(case: Case, trio: Cluster, tmp_path: Path) -> None:
    scene, outcomes = play(trio, case, tmp_path)
    (sight,) = scene.sights(outcomes)
    survivor = scene.survivors[0]
    receives = survivor != 0
    assert_victim_met_its_fate(case, outcomes[scene.victim])
    if case.survives:
        assert sight.error is None, sight.error
        assert not receives or sight.fates == dict.fromkeys(PATHS, "new")
        assert sight.ended_s - sight.began_s < FAR_S
    else:
        assert_told(scene, sight, sight.error, scene.victim, receives=receives)
        if receives:
            assert_truthful(sight)
            assert case.fault != "cut" or "mixed" in sight.fates.values(), "no message was cut"
        assert_over(scene, {survivor: sight})
    assert_the_living_go_on(trio, [0, 1, 2] if lives(case) else [survivor, 2])


@parametrised(ONE_OF_THREE)
def test_a_fault_of_one_receiver_leaves_the_others_whole(
    case: Case, quartet: Cluster, tmp_path: Path
) -> None:
    scene, outcomes = play(quartet, case, tmp_path)
    sender, *others = scene.sights(outcomes)
    assert_victim_met_its_fate(case, outcomes[scene.victim])
    for other in others:
        assert other.error is None
        assert other.fates == dict.fromkeys(PATHS, "new")
    if case.survives:
        assert sender.error is None
    else:
        error = sender.error
        assert isinstance(error, SendFailed)
        assert type(error) is (SendLate if case.fault == "stop" else SendBroken)
        assert (error.delivered, list(error.failed)) == ((1, 3), [2])
        assert_told(scene, sender, error.failed[2], 2, receives=False)
        assert_over(scene, {0: sender})
    assert_the_living_go_on(quartet, [0, 1, 2, 3] if lives(case) else [0, 1, 3])


@parametrised(SENDER_OF_THREE)
def test_a_fault_of_the_sender_is_told_to_every_receiver(
    case: Case, quartet: Cluster, tmp_path: Path
) -> None:
    scene, outcomes = play(quartet, case, tmp_path)
    sights = dict(zip(scene.survivors, scene.sights(outcomes), strict=True))
    if case.survives:
        assert all(sight.fates == dict.fromkeys(PATHS, "new") for sight in sights.values())
    else:
        # The fault is placed by rank 1's messages. The others have their own pace, and may be through.
        for sight in sights.values():
            if sight.error is None:
                assert sight.fates == dict.fromkeys(PATHS, "new")
            else:
                assert isinstance(sight.error, TimeoutError if case.fault == "stop" else ConnectionError)
                assert_truthful(sight)
        assert_told(scene, sights[1], sights[1].error, 0, receives=True)
        assert_over(scene, {rank: sight for rank, sight in sights.items() if sight.error is not None})
    assert_the_living_go_on(quartet, [0, 1, 2, 3] if lives(case) else [1, 2, 3])
