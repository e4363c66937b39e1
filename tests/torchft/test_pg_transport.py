"""torchferry.torchft.PGTransport: over torchft's groups, with torchft's timeouts and errors."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import TestCase

import pytest
import torch
import torch.distributed as dist
from torchft.checkpointing.transport import CheckpointTransport
from torchft.checkpointing.transport_test import run_multi_recovery_test
from torchft.process_group import (
    ErrorSwallowingProcessGroupWrapper,
    FakeProcessGroupWrapper,
    ProcessGroupGloo,
)

import torchferry
from tests.support.equality import assert_same
from torchferry.torchft import PGTransport

SOON = timedelta(seconds=10)
CPU = torch.device("cpu")


@pytest.fixture
def store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def configure(group: ProcessGroupGloo, store: dist.TCPStore, prefix: str, rank: int, size: int) -> None:
    group.configure(f"127.0.0.1:{store.port}/{prefix}", f"replica-{rank}", rank, size)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as executor:
        yield executor


@pytest.fixture
def groups(store: dist.TCPStore, pool: ThreadPoolExecutor) -> Iterator[list[ProcessGroupGloo]]:
    """Two ranks of a group whose own timeout is 10 s."""
    found = [ProcessGroupGloo(timeout=SOON) for _ in range(2)]
    list(pool.map(lambda rank: configure(found[rank], store, "first", rank, 2), range(2)))
    yield found
    for group in found:
        group.shutdown()


def test_it_is_a_checkpoint_transport_of_torchft(groups: list[ProcessGroupGloo]) -> None:
    transport = PGTransport[dict[str, object]](groups[0], timeout=SOON, device=CPU)  # type: ignore[misc]
    assert isinstance(transport, CheckpointTransport)
    assert transport.metadata()
    transport.disallow_checkpoint()
    transport.shutdown()


def test_a_wrong_device_is_a_bad_argument(groups: list[ProcessGroupGloo]) -> None:
    with pytest.raises(torchferry.BadArgument, match="device must be"):
        PGTransport(groups[0], timeout=SOON, device="nonsense")


def test_torchfts_own_test_of_a_transport_passes(store: dist.TCPStore) -> None:
    def new_transport(rank: int, size: int) -> Any:
        group = ProcessGroupGloo()
        configure(group, store, "own", rank, size)
        return PGTransport(group, SOON, CPU)

    run_multi_recovery_test(TestCase(), new_transport, CPU)


def exchange(pool: ThreadPoolExecutor, one: Any, two: Any, step: int, timeout: Any = SOON) -> object:
    """Send a state from rank 0 to rank 1."""
    state = {"user": {"weight": torch.full((1000,), float(step))}, "torchft": {"step": step}}
    sent = pool.submit(one.send_checkpoint, [1], step, state, timeout)
    got = two.recv_checkpoint(0, one.metadata(), step, timeout)
    sent.result(10)
    assert_same(got, state)
    return got


@pytest.mark.parametrize("wraps", [False, True])
def test_a_group_may_be_reconfigured(
    groups: list[ProcessGroupGloo], store: dist.TCPStore, pool: ThreadPoolExecutor, wraps: bool
) -> None:
    used: list[Any] = list(groups)
    if wraps:
        used = [FakeProcessGroupWrapper(ErrorSwallowingProcessGroupWrapper(group)) for group in groups]
    one, two = (PGTransport(group, SOON, "cpu") for group in used)
    exchange(pool, one, two, step=1)
    # The ranks change places.
    list(pool.map(lambda rank: configure(groups[1 - rank], store, "second", rank, 2), range(2)))
    exchange(pool, two, one, step=2)


def test_a_group_works_again_after_a_timeout_and_a_new_configuration(
    groups: list[ProcessGroupGloo], store: dist.TCPStore, pool: ThreadPoolExecutor
) -> None:
    one, two = (PGTransport(group, SOON, "cpu") for group in groups)
    with pytest.raises(RuntimeError, match="timed out"):
        two.recv_checkpoint(0, "", 1, timedelta(milliseconds=10))
    list(pool.map(lambda rank: configure(groups[rank], store, "again", rank, 2), range(2)))
    exchange(pool, one, two, step=1)


@pytest.mark.parametrize("which", ["omitted", "None", "given"])
@pytest.mark.parametrize("direction", ["send", "receive"])
def test_a_timeout_is_that_of_the_call_or_of_the_transport(
    groups: list[ProcessGroupGloo], direction: str, which: str
) -> None:
    short = timedelta(milliseconds=100)
    transport = PGTransport(groups[0], SOON if which == "given" else short, "cpu")
    options: Any = {"omitted": {}, "None": {"timeout": None}, "given": {"timeout": short}}[which]
    call: Any = {
        "send": lambda: transport.send_checkpoint([1], 1, {"w": torch.ones(4)}, **options),
        "receive": lambda: transport.recv_checkpoint(1, "", 1, **options),
    }[direction]
    began_s = time.monotonic()
    with pytest.raises(torchferry.CheckpointTimeout, match="timed out") as raised:
        call()
    assert time.monotonic() - began_s < 5
    assert isinstance(raised.value, TimeoutError)
    assert isinstance(raised.value, RuntimeError)
    assert raised.value.peer == 1


def test_zero_is_the_timeout_of_the_group(groups: list[ProcessGroupGloo], pool: ThreadPoolExecutor) -> None:
    one, two = (PGTransport(group, timedelta(milliseconds=20), "cpu") for group in groups)
    received = pool.submit(two.recv_checkpoint, 0, "", 1, timedelta(0))
    with pytest.raises(TimeoutError):
        received.result(0.2)
    one.send_checkpoint([1], 1, {"w": 1}, timedelta(0))
    assert received.result(10) == {"w": 1}
    # Also for the transport.
    one, two = (PGTransport(group, timedelta(0), "cpu") for group in groups)
    exchange(pool, one, two, step=2, timeout=None)


def test_zero_really_ends(store: dist.TCPStore, pool: ThreadPoolExecutor) -> None:
    groups = [ProcessGroupGloo(timeout=timedelta(milliseconds=300)) for _ in range(2)]
    list(pool.map(lambda rank: configure(groups[rank], store, "short", rank, 2), range(2)))
    with pytest.raises(torchferry.CheckpointTimeout):
        PGTransport(groups[0], SOON, "cpu").recv_checkpoint(1, "", 1, timedelta(0))
    for group in groups:
        group.shutdown()


def test_a_receive_writes_in_place_and_paths_that_are_missing_here_are_fresh(
    groups: list[ProcessGroupGloo], pool: ThreadPoolExecutor
) -> None:
    here = torch.zeros(1000)
    one = PGTransport(groups[0], SOON, "cpu")
    for local in ({"user": {"weight": here}}, dict[str, Any]()):
        two = PGTransport(groups[1], SOON, "cpu", state_dict=partial(dict, local))
        got: Any = exchange(pool, one, two, step=1)
        assert (got["user"]["weight"] is here) == bool(local)


def test_another_step_is_refused(groups: list[ProcessGroupGloo], pool: ThreadPoolExecutor) -> None:
    one, two = (PGTransport(group, SOON, "cpu") for group in groups)
    sent = pool.submit(one.send_checkpoint, [1], 2, {"w": 1}, SOON)
    with pytest.raises(torchferry.StepMismatch):
        two.recv_checkpoint(0, "", 1, SOON)
    sent.result(10)


def test_buffers_may_change_while_a_state_is_sent(
    groups: list[ProcessGroupGloo], pool: ThreadPoolExecutor
) -> None:
    one, two = (PGTransport(group, SOON, "cpu") for group in groups)
    mean, weight = torch.ones(100), torch.ones(1 << 20)
    sent = pool.submit(one.send_checkpoint, [1], 1, {"mean": mean, "weight": weight}, SOON)
    # The receiver is not there yet, so the send has described the state and waits.
    with pytest.raises(TimeoutError):
        sent.result(0.5)
    mean.add_(1)
    got = two.recv_checkpoint(0, "", 1, SOON)
    sent.result(10)
    assert got["mean"].tolist() == [1.0] * 100
