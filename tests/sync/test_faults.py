"""A rank is killed or stopped in each step of sync: the others notice in a second, and finish or raise."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import torchferry
from tests.support.children import Child, child, unused_port, wait_until
from tests.support.cluster import Cluster, Outcome, WorkerDied
from torchferry.engine.pull.published import Published
from torchferry.engine.pull.version_store import VersionStore
from torchferry.engine.sync import bundles
from torchferry.engine.sync.coordination import Member
from torchferry.links.http_client import HttpConnection
from torchferry.serving import Source

NOTICED_S = 1.0
# By how much a call may exceed its timeout.
LATE_S = 0.9
STEPS = ("join", "inventory", "ready", "done")
# While bytes are moved: a source grants a lease, or reads the state, or a receiver begins.
MOVES: dict[str, tuple[Any, str]] = {
    "serve": (VersionStore, "lease"),
    "read": (Published, "read"),
    "fetch": (bundles, "fetch_state"),
}
# Ranks 0, 1 and 3 have the version, and ranks 2 and 4 do not.
SOURCES, RANKS = (0, 1, 3), 5


@pytest.fixture
def five(_fork_server: None) -> Iterator[Cluster]:
    with Cluster(RANKS, start_method="forkserver") as cluster:
        cluster.run(import_this)
        yield cluster


def import_this(rank: int) -> None:
    """Import what the test needs: that takes seconds on a busy machine, and at each rank another time."""


def strike(folder: str, how: int) -> None:
    """End or stop this process, and note when."""
    Path(folder, "struck").write_text(str(time.monotonic()))
    os.kill(os.getpid(), how)


def strike_at(owner: Any, name: str, folder: str, how: int) -> None:
    """End or stop this process when it next calls a function."""
    call = getattr(owner, name)

    def strike_and_call(*args: Any, **options: Any) -> Any:
        setattr(owner, name, call)
        strike(folder, how)
        return call(*args, **options)

    setattr(owner, name, strike_and_call)


def take_part(
    rank: int, victims: list[int], step: str, when: str, how: int, folder: str, timeout_s: float
) -> dict[str, Any]:
    """Sync. The victims are struck before or after they say something, or while bytes are moved."""
    if rank in victims and step in STEPS:
        post = Member.post

        def strike_and_post(self: Member, **fields: Any) -> Any:
            if step in fields:
                Member.post = post  # type: ignore[method-assign]
                if when == "before":
                    strike(folder, how)
                else:
                    # When it waits for the answer.
                    strike_at(HttpConnection, "_receive", folder, how)
            return post(self, **fields)

        Member.post = strike_and_post  # type: ignore[method-assign]
    elif rank in victims:
        strike_at(*MOVES[step], folder, how)
    size = 1 << (22 if step == "read" else 18)
    state = {"w": torch.full((size,), 5.0 if rank in SOURCES else 0.0), "step": 5}
    begin_s = time.monotonic()
    try:
        result = torchferry.sync(state, 5 if rank in SOURCES else None, timeout=timeout_s)
        found: dict[str, Any] = {"role": result.role, "failed": result.failed}
    except torchferry.FerryError as error:
        found = {"error": f"{type(error).__name__}: {error}", "late": isinstance(error, TimeoutError)}
    values = state["w"].unique().tolist()  # type: ignore[attr-defined]
    return {**found, "values": values, "ended_s": time.monotonic(), "seconds": time.monotonic() - begin_s}


def outcomes_of(
    cluster: Cluster,
    folder: Path,
    victims: list[int],
    step: str,
    *,
    when: str = "before",
    how: signal.Signals = signal.SIGKILL,
    timeout_s: float = 20.0,
) -> list[Outcome]:
    arguments = (victims, step, when, how, str(folder), timeout_s)
    return cluster.start([(take_part, arguments)] * RANKS, timeout_s=40).outcomes()


def check_the_living(
    outcomes: list[Outcome], folder: Path, victims: list[int], *, named: bool = True
) -> None:
    """All others finish, within a second after the victims died, and name them."""
    struck_s = float((folder / "struck").read_text())
    takers = {outcome.rank for outcome in outcomes} - {*SOURCES, *victims}
    for outcome in outcomes:
        if outcome.rank in victims:
            assert isinstance(outcome.error, WorkerDied), outcome
            continue
        assert outcome.error is None, outcome.error
        found = outcome.value
        assert found["values"] == [5.0], found
        assert "error" not in found, found
        serving = ("source",) if takers else ("source", "idle")  # its only receiver may not have begun
        assert found["role"] in (serving if outcome.rank in SOURCES else ("receiver",)), found
        assert not named or set(victims) <= set(found["failed"]), found
        assert found["ended_s"] - struck_s < NOTICED_S + 2.0, found


# A source that coordinates, and a receiver.
def rare(case: object) -> Any:
    """Mark a case that only `make faults` runs."""
    return pytest.param(case, marks=pytest.mark.slow_fault)


@pytest.mark.parametrize(("victim", "step"), [(0, "inventory"), (2, "done")])
def test_a_killed_rank_does_not_keep_the_others(
    five: Cluster, tmp_path: Path, victim: int, step: str
) -> None:
    check_the_living(outcomes_of(five, tmp_path, [victim], step), tmp_path, [victim])


@pytest.mark.slow
@pytest.mark.parametrize("victims", [[0], rare([1]), [2], [0, 1], rare([0, 2]), rare([3, 4])])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", STEPS[1:])
def test_killed_ranks_do_not_keep_the_others_in_any_step(
    five: Cluster, tmp_path: Path, victims: list[int], step: str, when: str
) -> None:
    outcomes = outcomes_of(five, tmp_path, victims, step, when=when)
    check_the_living(outcomes, tmp_path, victims, named=is_noticed(victims[0], step, when))


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "step"), [(0, "serve"), (1, "serve"), (0, "read"), (4, "fetch")])
def test_a_rank_that_is_killed_while_bytes_move_does_not_keep_the_others(
    five: Cluster, tmp_path: Path, victim: int, step: str
) -> None:
    outcomes = outcomes_of(five, tmp_path, [victim], step)
    check_the_living(outcomes, tmp_path, [victim], named=is_noticed(victim, step))


def is_noticed(victim: int, step: str, when: str = "before") -> bool:
    """Return whether all others must have noticed the death of a rank when they return.

    A rank that dies when it has confirmed, and all others too, may not be noticed. Nor may a source that
    dies when it is asked for bytes, if others have delivered them all meanwhile.
    """
    return (step, when) != ("done", "after") and (victim, step) not in ((1, "serve"), (1, "read"))


@pytest.mark.slow
def test_a_rank_that_is_killed_while_others_have_not_joined_does_not_hide_who_is_absent(
    five: Cluster, tmp_path: Path
) -> None:
    arguments = ([0], "join", "after", signal.SIGKILL, str(tmp_path), 3.0)
    jobs = [(take_part, arguments) if rank != 3 else None for rank in range(RANKS)]
    outcomes = five.start(jobs, timeout_s=40).outcomes()
    for outcome in outcomes:
        if outcome.rank in (1, 2, 4):
            assert outcome.value["late"]
            assert "rank 3 did not call sync in time" in outcome.value["error"]
            assert outcome.value["seconds"] < 5


@pytest.fixture
def three(_fork_server: None) -> Iterator[Cluster]:
    """Ranks 0 and 1 have the version, and rank 2 does not."""
    with Cluster(3, start_method="forkserver") as cluster:
        cluster.run(import_this)
        yield cluster


SWEEP = [
    *((victim, step, when) for victim in (0, 1, 2) for step in STEPS for when in ("before", "after")),
    *((victim, step, "before") for victim in (0, 1) for step in ("serve", "read")),
    (2, "fetch", "before"),
]


@pytest.mark.slow
@pytest.mark.slow_fault
@pytest.mark.parametrize(("victim", "step", "when"), SWEEP)
def test_two_of_three_ranks_finish_without_the_killed_one(
    three: Cluster, tmp_path: Path, victim: int, step: str, when: str
) -> None:
    arguments = ([victim], step, when, signal.SIGKILL, str(tmp_path), 20.0)
    outcomes = three.start([(take_part, arguments)] * 3, timeout_s=40).outcomes()
    check_the_living(outcomes, tmp_path, [victim], named=is_noticed(victim, step, when))


@pytest.mark.slow
@pytest.mark.slow_fault
@pytest.mark.parametrize(("victim", "step", "when"), SWEEP)
def test_three_ranks_finish_although_one_was_stopped_for_a_second(
    three: Cluster, tmp_path: Path, victim: int, step: str, when: str
) -> None:
    arguments = ([victim], step, when, signal.SIGSTOP, str(tmp_path), 20.0)
    running = three.start([(take_part, arguments)] * 3, timeout_s=40)
    wait_until((tmp_path / "struck").exists)
    time.sleep(1.0)  # longer than anything that notices a killed rank takes
    three.kill(victim, signal.SIGCONT)
    for outcome in running.outcomes():
        assert outcome.error is None, outcome
        found = outcome.value
        assert (found.get("failed"), found["values"]) == ({}, [5.0]), found
        assert found["role"] == ("receiver" if outcome.rank == 2 else "source"), found
        assert found["seconds"] < 5, found


def call_late(rank: int, late: int, by_s: float, victim: int, absent: int, timeout_s: float) -> Any:
    """Sync, one rank later than the others. Meanwhile the victim is killed."""
    dist.barrier()  # new workers start at different times
    if rank == absent:
        return None
    if rank == late:
        time.sleep(by_s)
    if rank == victim:
        threading.Timer(by_s / 2, os.kill, (os.getpid(), signal.SIGKILL)).start()
    state, begin_s = {"w": torch.full((1000,), 5.0 if rank == 0 else 0.0)}, time.monotonic()
    try:
        result = torchferry.sync(state, 5 if rank == 0 else None, timeout=timeout_s)
    except TimeoutError as error:
        return str(error)
    return state["w"][0].item(), [*result.failed], time.monotonic() - begin_s


def test_a_rank_that_is_killed_before_the_coordinator_calls_does_not_keep_the_others(five: Cluster) -> None:
    outcomes = five.start([(call_late, (0, 1.6, 2, -1, 20.0))] * RANKS, timeout_s=40).outcomes()
    for outcome in outcomes:
        if outcome.rank != 2:
            value, failed, seconds = outcome.value
            assert (value, failed) == (5.0, [2])
            assert seconds < (0.0 if outcome.rank == 0 else 1.6) + NOTICED_S + 1.0


def test_every_rank_names_the_absent_one_also_if_the_coordinator_calls_later(quad: Cluster) -> None:
    outcomes = quad.start([(call_late, (0, 1.6, -1, 2, 3.0))] * 4, timeout_s=20).outcomes()
    for outcome in outcomes:
        if outcome.rank != 2:
            assert "rank 2 did not call sync in time; nothing was written" in outcome.value


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, rare(1), 2])
@pytest.mark.parametrize("step", [*STEPS, "serve"])
def test_a_stopped_rank_keeps_the_others_until_the_timeout_at_most(
    five: Cluster, tmp_path: Path, victim: int, step: str
) -> None:
    if step == "serve" and victim == 2:
        return
    timeout_s = 3.0
    arguments = ([victim], step, "before", signal.SIGSTOP, str(tmp_path), timeout_s)
    outcomes = five.start([(take_part, arguments)] * RANKS, timeout_s=timeout_s + 3).outcomes()
    for outcome in outcomes:
        if outcome.rank != victim:
            assert outcome.error is None, getattr(outcome.error, "__notes__", outcome)
            found, earlier = outcome.value, [5.0 if outcome.rank in SOURCES else 0.0]
            assert found["seconds"] < timeout_s + LATE_S, found
            if step in ("done", "serve") and not (victim == 0 and "error" in found):
                assert found["values"] == [5.0], found
            else:
                # A coordinator that stops itself may not have told all others to begin.
                assert found["late"], found
                assert found["values"] == earlier, found


@pytest.mark.slow
def test_sources_return_when_a_receiver_is_stopped(five: Cluster, tmp_path: Path) -> None:
    arguments = ([2], "fetch", "before", signal.SIGSTOP, str(tmp_path), 2.0)
    outcomes = five.start([(take_part, arguments)] * RANKS, timeout_s=6).outcomes()
    for rank in (0, 1, 3, 4):
        assert outcomes[rank].value["failed"] == {2: "it did not confirm in time"}
        assert outcomes[rank].value["values"] == [5.0]


def join_over_tcp(pipe: Any, rank: int, port: int) -> None:
    """The store is in the process of rank 0."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=3)
    pipe.send("ready")
    version, dies = pipe.recv()
    connect = Member._connect
    if dies:
        # It has described its state, and is about to serve it.
        Source.publish = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]

    def connect_and_tell(self: Member) -> Any:
        connection = connect(self)
        pipe.send("connected")
        return connection

    Member._connect = connect_and_tell  # type: ignore[method-assign]
    try:
        state = {"w": torch.full((1000,), float(version or 0))}
        result = torchferry.sync(state, version, timeout=20)
        pipe.send((result.role, result.failed, state["w"][0].item()))
    except torchferry.FerryError as error:
        pipe.send((type(error).__name__, str(error), time.monotonic()))


def take_part_over_tcp(pipe: Any, rank: int, port: int, step: str, folder: str) -> None:
    """Take part in a sync of three ranks, and then in another. The store is in the process of rank 0."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=3)
    pipe.send("ready")
    for victims, timeout_s in (([0], 2.0), ([], 20.0)):
        pipe.recv()
        pipe.send(take_part(rank, victims, step, "before", signal.SIGSTOP, folder, timeout_s))


@contextmanager
def stopped_with_the_store(folder: Path, step: str) -> Iterator[list[Child]]:
    """Three ranks that take part in a sync. Rank 0, which coordinates and has the store, stops itself."""
    arguments = unused_port(), step, str(folder)
    with ExitStack() as stack:
        ranks = [stack.enter_context(child(take_part_over_tcp, rank, *arguments)) for rank in range(3)]
        for rank in ranks:
            assert rank.receive() == "ready"
        for rank in ranks:
            rank.send("go")
        yield ranks


@pytest.mark.slow
@pytest.mark.usefixtures("_fork_server")
@pytest.mark.parametrize("step", [*STEPS, "serve"])
def test_the_timeout_holds_if_the_coordinator_is_stopped_with_the_store(tmp_path: Path, step: str) -> None:
    with stopped_with_the_store(tmp_path, step) as ranks:
        for rank in ranks[1:]:
            found = rank.receive()
            assert found["seconds"] < 2.0 + LATE_S, found
            assert "error" not in found or found["late"], found


@pytest.mark.slow
@pytest.mark.usefixtures("_fork_server")
@pytest.mark.parametrize("step", ["join", "inventory"])
def test_the_next_call_succeeds_when_the_store_answers_again(tmp_path: Path, step: str) -> None:
    with stopped_with_the_store(tmp_path, step) as ranks:
        for rank in ranks[1:]:
            assert rank.receive()["late"]
        ranks[0].signal(signal.SIGCONT)
        ranks[0].receive()
        for rank in ranks:
            rank.send("again")
        for rank in ranks:
            found = rank.receive()
            assert (found.get("failed"), found["values"]) == ({}, [5.0]), found


@pytest.mark.usefixtures("_fork_server")
def test_a_rank_that_dies_with_the_store_is_noticed_within_a_second() -> None:
    port = unused_port()
    with (
        child(join_over_tcp, 0, port) as zero,
        child(join_over_tcp, 1, port) as one,
        child(join_over_tcp, 2, port) as two,
    ):
        for process in (zero, one, two):
            assert process.receive() == "ready"
        zero.send((3, False))
        one.send((None, False))
        assert one.receive() == "connected"
        killed_s = zero.signal()
        name, text, raised_s = one.receive()
        assert name == "LinkBroken"
        assert "store" in text
        assert raised_s - killed_s < NOTICED_S + 0.5


@pytest.mark.usefixtures("_fork_server")
def test_ranks_that_have_joined_need_no_store() -> None:
    port = unused_port()
    with (
        child(join_over_tcp, 0, port) as zero,
        child(join_over_tcp, 1, port) as one,
        child(join_over_tcp, 2, port) as two,
    ):
        for process in (zero, one, two):
            assert process.receive() == "ready"
        for process, version in ((zero, 3), (one, 3), (two, None)):
            process.send((version, process is zero))
        for process, role in ((one, "source"), (two, "receiver")):
            while (found := process.receive()) == "connected":
                pass
            assert found[0] == role, found
            assert [*found[1]] == [0]
            assert found[2] == 3.0


def test_an_interrupted_receiver_leaves_and_the_others_return(pair: Cluster) -> None:
    source, receiver = pair.run(interrupt_the_receiver)
    assert receiver == "interrupted"
    assert source == {1: "KeyboardInterrupt"}


def interrupt_the_receiver(rank: int) -> Any:
    state = {"w": torch.zeros(1000)}
    if rank == 0:
        return torchferry.sync(state, 1, timeout=20).failed

    def interrupt(*_: Any) -> None:
        signal.raise_signal(signal.SIGUSR2)
        time.sleep(5)

    def raise_interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    earlier = signal.signal(signal.SIGUSR2, raise_interrupt)
    try:
        with mock.patch.object(bundles, "fetch_state", interrupt), pytest.raises(KeyboardInterrupt):
            torchferry.sync(state, None, timeout=20)
    finally:
        signal.signal(signal.SIGUSR2, earlier)
    return "interrupted"


def threads_of_torchferry(rank: int) -> list[str]:
    torchferry.sync({"w": torch.zeros(1000)}, rank, timeout=20)
    wait_until(lambda: not running_threads(), 3.0)
    return running_threads()


def running_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("torchferry")]


def test_no_thread_is_left(pair: Cluster) -> None:
    assert pair.run(threads_of_torchferry) == [[], []]
