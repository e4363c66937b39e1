"""Receivers that forward to each other, with real processes: what arrives, and what a lost one costs whom."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.faults.directing import wait_until
from tests.faults.promised import shows
from tests.faults.scene import (
    Fault,
    fates_of,
    keep,
    new_group,
    new_state,
    old_state,
    suffering,
    unique_name,
)
from tests.support.cluster import Cluster, ClusterError, WorkerDied
from torchferry import PGTransport
from torchferry.errors import FerryError, GroupBroken, StateMismatch, TargetTorn
from torchferry.links.process_group import ProcessGroupLink, Work

RANKS = (0, 1, 2, 3)
LAYER_BYTES = 8 << 20
TIMEOUT_S = 20.0
FOUND_S = 1.0


@dataclass(frozen=True)
class Seen:
    """What became of one rank's part in a transfer along a chain."""

    ended_s: float
    error: FerryError | None
    fates: set[str]
    forwarded_to: int | None = None
    forwarded_by: int | None = None
    not_forwarded: str | None = None
    next_error: Exception | None = None


def take_part(rank: int, name: str, dies: int | None = None, refuses: int | None = None) -> Seen:
    """Send along a chain of three, or be one of them; `dies` is killed at its twentieth message."""
    group = new_group(rank, RANKS, name)
    keep(group)
    target: dict[str, Any] = old_state(LAYER_BYTES)
    if rank == refuses:
        target["model"]["layer0"] = torch.zeros(3)
    transport = PGTransport(group, TIMEOUT_S, "cpu", state_dict=lambda: target, relay=True)
    error: FerryError | None = None
    with pytest.MonkeyPatch.context() as patch:
        if rank == dies:
            patch.setattr(ProcessGroupLink, "recv", dying(20))
        try:
            if rank == 0:
                transport.send_checkpoint(list(RANKS[1:]), new_state(LAYER_BYTES))
            else:
                transport.recv_checkpoint(0)
        except FerryError as raised:
            error = raised
    ended_s = time.monotonic()
    report = transport.last_report
    return Seen(
        ended_s,
        error,
        set(fates_of(target, LAYER_BYTES).values()) if rank not in (0, refuses) else set(),
        report.forwarded_to if report else None,
        report.forwarded_by if report else None,
        report.not_forwarded if report else None,
        refusal_of_the_next(transport),
    )


def refusal_of_the_next(transport: PGTransport) -> Exception | None:
    """Say whether the group is called broken, without waiting for anything."""
    try:
        transport._link.check_usable()
    except GroupBroken as error:
        return error
    return None


def dying(at: int) -> Any:
    """Give a `recv` that ends the process when it is called for the n-th time."""
    posted = [0]
    recv = ProcessGroupLink.recv

    def and_die(self: ProcessGroupLink, buffer: torch.Tensor, peer: int, tag: int) -> Work:
        posted[0] += 1
        if posted[0] == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return recv(self, buffer, peer, tag)

    return and_die


def play(cluster: Cluster, *args: Any) -> list[Seen | ClusterError | None]:
    outcomes = cluster.start([(take_part, (unique_name(), *args))] * 4).outcomes()
    return [outcome.value or outcome.error for outcome in outcomes]


@shows(
    "three receivers that forward to each other (`relay=True`)",
    "each has the exact state, in its own tensors; its report says whom it forwarded to",
)
def test_a_state_goes_along_a_chain(quartet: Cluster) -> None:
    sender, *receivers = play(quartet)
    assert isinstance(sender, Seen)
    assert sender.error is None
    for rank, receiver in enumerate(receivers, 1):
        assert isinstance(receiver, Seen)
        assert receiver.error is None
        assert receiver.fates == {"new"}
        assert receiver.forwarded_to == (rank + 1 if rank < 3 else None)
        assert receiver.forwarded_by == (rank - 1 if rank > 1 else None)
        assert receiver.not_forwarded is None
        assert receiver.next_error is None


@shows(
    "one of them dies half-way",
    "those before it have the exact state, and its neighbour's report says that it was not forwarded; those "
    "after it raise `TargetTorn` within 1 s, naming it",
)
@pytest.mark.parametrize("dead", [1, 2])
def test_a_relay_that_dies_fails_those_after_it_and_nobody_else(dead: int, quartet: Cluster) -> None:
    seen = play(quartet, dead)
    assert isinstance(seen[dead], WorkerDied)
    ends = {rank: one for rank, one in enumerate(seen) if isinstance(one, Seen)}
    for rank in range(1, dead):
        assert ends[rank].error is None
        assert ends[rank].fates == {"new"}
    if dead > 1:
        assert f"rank {dead}" in (ends[dead - 1].not_forwarded or "")
        assert f"rank {dead}" in str(ends[dead - 1].next_error), "the group has lost a member"
    for rank in range(dead + 1, 4):
        error = ends[rank].error
        assert isinstance(error, TargetTorn)
        assert f"rank {dead}" in str(error)
        assert ends[rank].next_error is not None
    after = [ends[rank].ended_s for rank in range(dead + 1, 4)]
    assert max(after) - min(after) < FOUND_S


def come_late(rank: int, name: str, folder: str) -> str | None:
    """Be one of a chain in which rank 2 is dead, and rank 4 comes when rank 3 has given up and left."""
    group = new_group(rank, (0, 1, 2, 3, 4), name)
    keep(group)
    transport = PGTransport(group, TIMEOUT_S, "cpu", relay=True)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 4:
        wait_until((Path(folder) / "3").exists, "rank 3 has not given up")
    try:
        if rank == 0:
            transport.send_checkpoint([1, 2, 3, 4], new_state(LAYER_BYTES))
        else:
            transport.recv_checkpoint(0)
    except FerryError as error:
        return str(error)
    finally:
        (Path(folder) / str(rank)).touch()
    return None


@shows(
    "one of them is dead, and another comes so late that the one before it has given up and can't tell it",
    "an error that names the one before it, and those that this one depends on, the dead one among them",
)
def test_who_comes_too_late_to_be_told_knows_who_may_be_at_fault(octet: Cluster, tmp_path: Path) -> None:
    job = (come_late, (unique_name(), str(tmp_path)))
    seen = octet.start([*[job] * 5, None, None, None]).outcomes()
    assert isinstance(seen[2].error, WorkerDied)
    assert seen[1].value is None
    assert "rank 2" in seen[3].value
    assert "rank 3" in seen[4].value
    assert "Rank 3 has the state through rank 2, rank 1, rank 0" in seen[4].value


@shows(
    "one of them refuses the state",
    "it forwards all the same: the others have the exact state, and the sender does not notice",
)
def test_a_relay_that_refuses_still_forwards(quartet: Cluster) -> None:
    seen = [one for one in play(quartet, None, 2) if isinstance(one, Seen)]
    assert isinstance(seen[2].error, StateMismatch)
    assert seen[0].error is None
    assert all(seen[rank].error is None and seen[rank].fates == {"new"} for rank in (1, 3))
    assert all(one.next_error is None for one in seen)


@shows("the sender dies half-way", "each of them raises within 1 s")
def test_a_sender_that_dies_is_told_along_the_chain(quartet: Cluster, tmp_path: Path) -> None:
    name = unique_name()
    # The two headers and some of the payload, all of it complete.
    fault = Fault("kill", 18, str(tmp_path / "mark"), peer=1)
    running = quartet.start([(send_and_die, (name, fault)), *[(take_part, (name,))] * 3])
    sender, *receivers = running.outcomes()
    assert isinstance(sender.error, WorkerDied)
    died_s = float((tmp_path / "mark").read_text())
    for seen in (outcome.value for outcome in receivers):
        # One whose header had not been sent yet has nothing to be torn.
        assert isinstance(seen.error, TargetTorn) or (seen.error is not None and seen.fates == {"old"})
        assert seen.ended_s - died_s < FOUND_S


def send_and_die(rank: int, name: str, fault: Fault) -> None:
    """Send along a chain, and be killed on the way."""
    with suffering(fault, "send"):
        take_part(rank, name)
