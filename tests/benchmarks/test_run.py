"""A run between real ranks: systems that lie, fail or refuse are found out, and harm nobody else."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.results import Series
from benchmarks.run import Event, Measured, Plan, Took, perform
from benchmarks.systems import SYSTEMS, Session, Site, System
from benchmarks.works import FERRY, MEMCPY, RAW, TORCH, Size
from tests.support.cluster import Cluster


def measure(rank: int, how: str, repeats: int) -> list[tuple[str, int, str | None, bool]]:
    """Run the smallest works, with one of the systems replaced by one that misbehaves."""
    kept = SYSTEMS[RAW]
    SYSTEMS[RAW] = _misbehaving(how)
    try:
        return [(one.system, len(one.takes), one.problem, one.failed) for one in _run(rank, repeats)]
    finally:
        SYSTEMS[RAW] = kept


def order(rank: int) -> list[str]:
    """Run two systems, and return who took when."""
    heard: list[Event] = []
    _perform(rank, 2, heard, systems=(FERRY, MEMCPY))
    return [event.system for event in heard if isinstance(event, Took)]


def _run(rank: int, repeats: int) -> list[Series]:
    heard: list[Event] = []
    _perform(rank, repeats, heard, systems=(FERRY, TORCH, RAW))
    return [event.series for event in heard if isinstance(event, Measured)]


def _perform(rank: int, repeats: int, heard: list[Event], systems: tuple[str, ...]) -> None:
    plan = Plan(Size.SMOKE, ("big-in-place",), systems, repeats)
    with tempfile.TemporaryDirectory() as folder:
        perform(plan, Path(folder), heard.append)
        dist.barrier()


def _misbehaving(how: str) -> System:
    def open_(site: Site) -> Session:
        if how == "can't open":
            raise OSError("no such thing here")
        session = SYSTEMS[FERRY].open(site)
        if how == "raises":
            return dataclasses.replace(session, send=_raise, receive=_raise)
        if how == "says nothing":
            return dataclasses.replace(session, send=lambda: None, receive=lambda: site.target)
        if how == "flips a bit" and not site.sends:

            def receive() -> object:
                arrived = session.receive()
                assert isinstance(arrived, dict)
                next(iter(arrived.values())).view(torch.uint8)[5] ^= 1
                return arrived

            return dataclasses.replace(session, receive=receive)
        return session

    refuses = (lambda case, one_host: "not made for this") if how == "refuses" else SYSTEMS[RAW].refuses
    return System(RAW, "a system that misbehaves", "peer", open_, refuses=refuses)


def _raise() -> None:
    raise ValueError("it fell over")


def only_the_one_is_at_fault(pair: Cluster, how: str, problem: str, *, failed: bool = True) -> None:
    ferry, torchs, other = pair.run(measure, how, 1)[0]
    assert other[1] == 0
    assert problem in (other[2] or "")
    assert other[3] is failed
    assert ferry == (FERRY, 1, None, False)
    assert torchs == (TORCH, 1, None, False)


class TestASystemThat:
    def test_delivers_nothing_is_found_out(self, pair: Cluster) -> None:
        only_the_one_is_at_fault(
            pair, "says nothing", "rank 1: what arrived is not what was sent: tensor000000"
        )

    def test_flips_one_bit_is_found_out(self, pair: Cluster) -> None:
        only_the_one_is_at_fault(pair, "flips a bit", "what arrived is not what was sent: tensor000000")

    def test_raises_is_reported_and_the_others_go_on(self, pair: Cluster) -> None:
        only_the_one_is_at_fault(pair, "raises", "rank 0: ValueError: it fell over")

    def test_can_not_be_set_up_is_reported_and_the_others_go_on(self, pair: Cluster) -> None:
        only_the_one_is_at_fault(pair, "can't open", "rank 0: OSError: no such thing here")

    def test_is_not_made_for_a_case_says_so_and_is_not_at_fault(self, pair: Cluster) -> None:
        only_the_one_is_at_fault(pair, "refuses", "not made for this", failed=False)


def test_systems_take_turns_and_warm_up_first(pair: Cluster) -> None:
    first, second = pair.run(order)
    rounds = [first[n : n + 2] for n in range(0, len(first), 2)]
    assert len(rounds) == 3
    assert all(sorted(one) == sorted([FERRY, MEMCPY]) for one in rounds)
    assert [FERRY, MEMCPY] in rounds, "nobody is always the first"
    assert [MEMCPY, FERRY] in rounds
    assert second == []
