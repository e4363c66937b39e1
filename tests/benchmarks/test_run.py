"""A run between real ranks. A system that delivers wrong data, fails or refuses does not affect others."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.run import Event, Measured, Plan, RoundDone, run
from benchmarks.systems import SYSTEMS
from benchmarks.systems.session import Session, Setup, System
from benchmarks.workloads import FERRY, MEMCPY, RAW, TORCH, Size
from tests.support.cluster import Cluster


def measure(rank: int, how: str) -> list[tuple[str, int, str | None, bool]]:
    """Run the smallest workload, with one of the systems replaced by one that misbehaves."""
    original = SYSTEMS[RAW]
    SYSTEMS[RAW] = _misbehaving(how)
    try:
        events = _events(1, (FERRY, TORCH, RAW))
    finally:
        SYSTEMS[RAW] = original
    found = [event.measurement for event in events if isinstance(event, Measured)]
    return [(one.system, len(one.rounds), one.problem, one.failed) for one in found]


def order(rank: int) -> list[str]:
    """Run two systems, and return the order of their rounds."""
    return [event.system for event in _events(2, (FERRY, MEMCPY)) if isinstance(event, RoundDone)]


def _events(repeats: int, systems: tuple[str, ...]) -> list[Event]:
    events: list[Event] = []
    with tempfile.TemporaryDirectory() as folder:
        run(Plan(Size.SMOKE, ("big-in-place",), systems, repeats), Path(folder), events.append)
        dist.barrier()
    return events


def _misbehaving(how: str) -> System:
    def open_(setup: Setup) -> Session:
        if how == "can't open":
            raise OSError("no such thing here")
        session = SYSTEMS[FERRY].open(setup)
        if how == "raises":
            return dataclasses.replace(session, send=_raise, receive=_raise)
        if how == "sends nothing":
            return dataclasses.replace(session, send=lambda: None, receive=lambda: setup.target)
        if how == "flips a bit" and not setup.sends:

            def receive() -> object:
                received = session.receive()
                assert isinstance(received, dict)
                next(iter(received.values())).view(torch.uint8)[5] ^= 1
                return received

            return dataclasses.replace(session, receive=receive)
        return session

    refuses = (lambda case, one_host: "not supported") if how == "refuses" else SYSTEMS[RAW].refuses
    return System(RAW, "a system that misbehaves", "transport", open_, refuses=refuses)


def _raise() -> None:
    raise ValueError("it fell over")


def only_one_has_a_problem(pair: Cluster, how: str, problem: str, *, failed: bool = True) -> None:
    ferry, torchs, other = pair.run(measure, how)[0]
    assert other[1] == 0
    assert problem in (other[2] or "")
    assert other[3] is failed
    assert ferry == (FERRY, 1, None, False)
    assert torchs == (TORCH, 1, None, False)


class TestASystemThat:
    def test_delivers_nothing_fails(self, pair: Cluster) -> None:
        only_one_has_a_problem(
            pair, "sends nothing", "rank 1: the received state differs from the sent state at tensor000000"
        )

    def test_flips_one_bit_fails(self, pair: Cluster) -> None:
        only_one_has_a_problem(
            pair, "flips a bit", "the received state differs from the sent state at tensor000000"
        )

    def test_raises_fails_and_the_others_go_on(self, pair: Cluster) -> None:
        only_one_has_a_problem(pair, "raises", "rank 0: ValueError: it fell over")

    def test_can_not_be_opened_fails_and_the_others_go_on(self, pair: Cluster) -> None:
        only_one_has_a_problem(pair, "can't open", "rank 0: OSError: no such thing here")

    def test_does_not_support_a_case_has_not_failed(self, pair: Cluster) -> None:
        only_one_has_a_problem(pair, "refuses", "not supported", failed=False)


def test_systems_are_interleaved_in_changing_order_after_a_warm_up(pair: Cluster) -> None:
    sender, receiver = pair.run(order)
    rounds = [sender[n : n + 2] for n in range(0, len(sender), 2)]
    assert len(rounds) == 3
    assert all(sorted(one) == sorted([FERRY, MEMCPY]) for one in rounds)
    assert [FERRY, MEMCPY] in rounds
    assert [MEMCPY, FERRY] in rounds
    assert receiver == []
