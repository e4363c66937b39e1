"""Receivers that forward to each other, with real processes, and the failure of one of them."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.faults.controller import wait_until
from tests.faults.jobs import (
    Fault,
    contents_by_path,
    injected,
    keep_alive,
    new_group,
    new_state,
    old_state,
    unique_name,
)
from tests.faults.promise import promises
from tests.support.cluster import Cluster, ClusterError, WorkerDied
from torchferry import PGTransport
from torchferry.errors import FerryError, GroupBroken, StateMismatch, TargetTorn
from torchferry.links.process_group import ProcessGroupLink, Work

RANKS = (0, 1, 2, 3)
LAYER_BYTES = 8 << 20
TIMEOUT_S = 20.0
DETECTION_S = 1.0


@dataclass(frozen=True)
class ChainResult:
    """How one rank's transfer in a chain ended."""

    ended_s: float
    error: FerryError | None
    contents: set[str]
    forwarded_to: int | None = None
    forwarded_by: int | None = None
    not_forwarded: str | None = None
    next_error: Exception | None = None


def transfer_along_the_chain(
    rank: int, name: str, dies: int | None = None, rejects: int | None = None
) -> ChainResult:
    """Send to a chain of three receivers, or receive in it. Rank `dies` is killed at its message 20."""
    group = new_group(rank, RANKS, name)
    keep_alive(group)
    target: dict[str, Any] = old_state(LAYER_BYTES)
    if rank == rejects:
        target["model"]["layer0"] = torch.zeros(3)
    transport = PGTransport(group, TIMEOUT_S, "cpu", state_dict=lambda: target, relay=True)
    error: FerryError | None = None
    with pytest.MonkeyPatch.context() as patch:
        if rank == dies:
            patch.setattr(ProcessGroupLink, "recv", recv_that_dies(20))
        try:
            if rank == 0:
                transport.send_checkpoint(list(RANKS[1:]), new_state(LAYER_BYTES))
            else:
                transport.recv_checkpoint(0)
        except FerryError as raised:
            error = raised
    ended_s = time.monotonic()
    report = transport.last_report
    return ChainResult(
        ended_s,
        error,
        set(contents_by_path(target, LAYER_BYTES).values()) if rank not in (0, rejects) else set(),
        report.forwarded_to if report else None,
        report.forwarded_by if report else None,
        report.not_forwarded if report else None,
        error_of_the_next_call(transport),
    )


def error_of_the_next_call(transport: PGTransport) -> Exception | None:
    """Return the GroupBroken that the next transfer would raise, or None."""
    try:
        transport._link.check_usable()
    except GroupBroken as error:
        return error
    return None


def recv_that_dies(at: int) -> Any:
    """Return a `recv` that kills the process at its n-th call."""
    posted = [0]
    recv = ProcessGroupLink.recv

    def recv_or_die(self: ProcessGroupLink, buffer: torch.Tensor, peer: int, tag: int) -> Work:
        posted[0] += 1
        if posted[0] == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return recv(self, buffer, peer, tag)

    return recv_or_die


def run_chain(cluster: Cluster, *args: Any) -> list[ChainResult | ClusterError | None]:
    outcomes = cluster.start([(transfer_along_the_chain, (unique_name(), *args))] * 4).outcomes()
    return [outcome.value or outcome.error for outcome in outcomes]


@promises(
    "three receivers that forward to each other (`relay=True`)",
    "each has the exact state, in its own tensors; its report has the rank that it forwarded to",
)
def test_a_state_arrives_at_every_receiver_of_a_chain(quartet: Cluster) -> None:
    sender, *receivers = run_chain(quartet)
    assert isinstance(sender, ChainResult)
    assert sender.error is None
    for rank, receiver in enumerate(receivers, 1):
        assert isinstance(receiver, ChainResult)
        assert receiver.error is None
        assert receiver.contents == {"new"}
        assert receiver.forwarded_to == (rank + 1 if rank < 3 else None)
        assert receiver.forwarded_by == (rank - 1 if rank > 1 else None)
        assert receiver.not_forwarded is None
        assert receiver.next_error is None


@promises(
    "with `relay=True`, a receiver dies half-way",
    "the receivers before it have the exact state, and the report of its predecessor says that the state was "
    "not forwarded; the receivers after it raise `TargetTorn` within 1 s, which names the dead rank",
)
@pytest.mark.parametrize("dead", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_relay_that_dies_fails_only_the_receivers_after_it(dead: int, quartet: Cluster) -> None:
    outcomes = run_chain(quartet, dead)
    assert isinstance(outcomes[dead], WorkerDied)
    results = {rank: one for rank, one in enumerate(outcomes) if isinstance(one, ChainResult)}
    for rank in range(1, dead):
        assert results[rank].error is None
        assert results[rank].contents == {"new"}
    if dead > 1:
        assert f"rank {dead}" in (results[dead - 1].not_forwarded or "")
        assert f"rank {dead}" in str(results[dead - 1].next_error), (
            "the group is not broken, but it has lost a member"
        )
    for rank in range(dead + 1, 4):
        error = results[rank].error
        assert isinstance(error, TargetTorn)
        assert f"rank {dead}" in str(error)
        assert results[rank].next_error is not None
    ended_s = [results[rank].ended_s for rank in range(dead + 1, 4)]
    assert max(ended_s) - min(ended_s) < DETECTION_S


def receive_late(rank: int, name: str, folder: str) -> str | None:
    """Take part in a chain in which rank 2 is dead, and rank 4 calls after rank 3 has failed."""
    group = new_group(rank, (0, 1, 2, 3, 4), name)
    keep_alive(group)
    transport = PGTransport(group, TIMEOUT_S, "cpu", relay=True)
    (Path(folder) / f"joined-{rank}").touch()
    if rank == 2:
        # A rank that dies earlier would break the connections that the others are still making.
        joined = [Path(folder) / f"joined-{member}" for member in range(5)]
        wait_until(lambda: all(path.exists() for path in joined), "not all ranks have joined the group")
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 4:
        wait_until((Path(folder) / "3").exists, "rank 3 has not failed")
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


@promises(
    "with `relay=True`, a receiver is dead, and a later one calls only after its predecessor has failed",
    "its error names the predecessor, and the ranks that it depends on, among them the dead rank",
)
def test_the_error_of_a_late_receiver_lists_the_ranks_that_may_have_failed(
    octet: Cluster, tmp_path: Path
) -> None:
    job = (receive_late, (unique_name(), str(tmp_path)))
    outcomes = octet.start([*[job] * 5, None, None, None]).outcomes()
    assert isinstance(outcomes[2].error, WorkerDied)
    assert outcomes[1].value is None
    assert "rank 2" in outcomes[3].value
    assert "rank 3" in outcomes[4].value
    assert "Rank 3 gets the state through rank 2, rank 1, rank 0" in outcomes[4].value


@promises(
    "with `relay=True`, a receiver rejects the state",
    "it still forwards: the others have the exact state, and the sender finishes",
)
def test_a_relay_that_rejects_the_state_still_forwards(quartet: Cluster) -> None:
    results = [one for one in run_chain(quartet, None, 2) if isinstance(one, ChainResult)]
    assert isinstance(results[2].error, StateMismatch)
    assert results[0].error is None
    assert all(results[rank].error is None and results[rank].contents == {"new"} for rank in (1, 3))
    assert all(one.next_error is None for one in results)


@promises("with `relay=True`, the sender dies half-way", "every receiver raises an error within 1 s")
def test_every_receiver_of_a_chain_raises_when_the_sender_dies(quartet: Cluster, tmp_path: Path) -> None:
    name = unique_name()
    # Position 18: the length, the frame and some messages are complete.
    fault = Fault("kill", 18, str(tmp_path / "fault"), peer=1)
    running = quartet.start([(send_and_die, (name, fault)), *[(transfer_along_the_chain, (name,))] * 3])
    sender, *receivers = running.outcomes()
    assert isinstance(sender.error, WorkerDied)
    died_s = float((tmp_path / "fault").read_text())
    for result in (outcome.value for outcome in receivers):
        # A receiver that had not got the frame yet has an unchanged state.
        assert isinstance(result.error, TargetTorn) or (
            result.error is not None and result.contents == {"old"}
        )
        assert result.ended_s - died_s < DETECTION_S


def send_and_die(rank: int, name: str, fault: Fault) -> None:
    """Send to the chain, and be killed half-way."""
    with injected(fault, "send"):
        transfer_along_the_chain(rank, name)
