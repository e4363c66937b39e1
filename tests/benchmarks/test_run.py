"""A run between real ranks. A system that delivers wrong data, fails or refuses does not affect others."""

from __future__ import annotations

import dataclasses
import itertools
import tempfile
import time
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

import benchmarks.run
from benchmarks import rounds
from benchmarks.results import Measurement
from benchmarks.run import Event, Measured, Plan, RoundDone, run
from benchmarks.states import Uniform
from benchmarks.systems import SYSTEMS
from benchmarks.systems.session import Session, Setup, System
from benchmarks.workloads import (
    FERRY,
    FETCH_MEMORY,
    FETCH_RESHARE,
    FETCH_TCP,
    MEMCPY,
    PUBLISH,
    RAW,
    TORCH,
    Case,
    Size,
    Workload,
)
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


def measure_case(rank: int, case: Case) -> list[Measurement]:
    """Run one case by its systems."""
    known = [Workload("one", "one case", (case,))]
    with mock.patch.object(benchmarks.run, "workloads", return_value=known):
        events = _events(1, case.systems, "one")
    return [event.measurement for event in events if isinstance(event, Measured)]


def pause(rank: int, stopped_s: float) -> float:
    """Let this process be stopped, and return its longest pause."""
    stopper = rounds._stop_soon(stopped_s)
    times = [time.monotonic()]
    while stopper.poll() is None:
        time.sleep(0.005)
        times.append(time.monotonic())
    return max(later - earlier for earlier, later in itertools.pairwise(times))


def _events(repeats: int, systems: tuple[str, ...], workload: str = "big-in-place") -> list[Event]:
    events: list[Event] = []
    with tempfile.TemporaryDirectory() as folder:
        run(Plan(Size.SMOKE, (workload,), systems, repeats), Path(folder), events.append)
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


STATE = Uniform(4, 2**20)
FETCH_CASE = Case("one", STATE, (FETCH_TCP,), in_place=True)


def problems(cluster: Cluster, case: Case) -> list[str | None]:
    return [one.problem for one in cluster.run(measure_case, case)[0]]


class TestACase:
    def test_may_have_several_sources(self, quad: Cluster) -> None:
        case = dataclasses.replace(FETCH_CASE, sources=2, receivers=2)
        (measured,) = quad.run(measure_case, case)[0]
        assert measured.problem is None
        assert len(measured.rounds) == 1
        assert "receive" in measured.rounds[0].phases_s

    def test_may_have_a_receiver_that_is_killed_in_every_round(self, quad: Cluster) -> None:
        case = dataclasses.replace(FETCH_CASE, receivers=3, killed=True, timed=(1, 2))
        assert problems(quad, case) == [None]

    def test_may_have_a_receiver_that_is_stopped(self, quad: Cluster) -> None:
        case = dataclasses.replace(FETCH_CASE, receivers=3, stopped_s=0.1, timed=(1, 2))
        assert problems(quad, case) == [None]

    def test_may_have_a_receiver_that_has_the_state(self, pair: Cluster) -> None:
        case = dataclasses.replace(FETCH_CASE, systems=(FETCH_MEMORY, TORCH), unchanged=True)
        assert problems(pair, case) == [None, None]

    def test_of_publishing_delivers_every_version(self, pair: Cluster) -> None:
        case = dataclasses.replace(FETCH_CASE, systems=(PUBLISH,), timed=(0,))
        assert problems(pair, case) == [None]

    def test_of_what_fetch_does_not_have_yet_is_not_available(self, pair: Cluster) -> None:
        case = dataclasses.replace(FETCH_CASE, systems=(FETCH_RESHARE,))
        with_it = SYSTEMS[FETCH_RESHARE].refuses(case, False) is None
        assert problems(pair, case) == [None if with_it else "not available: fetch has no parameter reshare"]


def test_a_fetch_of_an_unchanged_state_that_moves_bytes_fails(pair: Cluster) -> None:
    (problem,) = pair.run(measure_changed)[0]
    assert problem == "rank 1: AssertionError: 1,048,576 bytes were moved, although nothing had changed"


def measure_changed(rank: int) -> list[str | None]:
    """Run a case of an unchanged state, but change one byte at the receiver."""
    system = SYSTEMS[FETCH_TCP]

    def open_(setup: Setup) -> Session:
        for value in list((setup.target or {}).values())[:1]:
            assert isinstance(value, torch.Tensor)
            value.view(torch.uint8)[7] ^= 1
        return system.open(setup)

    with mock.patch.dict(SYSTEMS, {FETCH_TCP: dataclasses.replace(system, open=open_)}):
        found = measure_case(rank, dataclasses.replace(FETCH_CASE, unchanged=True))
    return [one.problem for one in found]


def test_a_stopped_process_pauses_and_continues(pair: Cluster) -> None:
    assert min(pair.run(pause, 0.3)) >= 0.25
