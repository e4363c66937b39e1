"""torchferry.torchft.Transport: what torchft's Manager relies on, one promise at a time."""

from __future__ import annotations

import logging
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any
from unittest import TestCase

import pytest
import torch
from torchft.checkpointing.transport import CheckpointTransport
from torchft.checkpointing.transport_test import run_multi_recovery_test

import torchferry
from tests.support.children import child, wait_until
from tests.support.equality import assert_same
from torchferry.torchft import Transport

TOKEN = "a-token-of-all-replicas"
MIB = 1 << 20
SOON = timedelta(seconds=10)


@pytest.fixture(autouse=True)
def _no_settings_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "TORCHFT_LIGHTHOUSE", "MASTER_ADDR", "TORCHFERRY_TOKEN"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    wait_until(lambda: not any(each.name.startswith("torchferry-http") for each in threading.enumerate()))


@contextmanager
def transport(timeout: float = 10, **options: Any) -> Iterator[Transport]:
    created = Transport(timeout, **options)
    try:
        yield created
    finally:
        created.shutdown(wait=False)


@pytest.fixture
def source() -> Iterator[Transport]:
    with transport() as created:
        yield created


@pytest.fixture
def receiver() -> Iterator[Transport]:
    with transport() as created:
        yield created


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as executor:
        yield executor


def manager_state(step: int = 3, layer_bytes: int = 2 * MIB) -> dict[str, Any]:
    weight = torch.arange(layer_bytes // 4, dtype=torch.float32) + step
    user = {"model": {"weight": weight, "tied": weight}, "optim": {"lr": 0.1, "betas": (0.9, 0.99)}}
    return {"user": {"default": user}, "torchft": {"step": step, "batches_committed": 2 * step}}


def test_it_is_a_checkpoint_transport_of_torchft(source: Transport) -> None:
    assert isinstance(source, CheckpointTransport)
    generic = Transport[dict[str, object]](timedelta(seconds=1))  # type: ignore[misc]
    generic.shutdown()
    assert isinstance(generic, Transport)


def test_torchfts_own_test_of_a_transport_passes() -> None:
    run_multi_recovery_test(TestCase(), lambda rank, size: Transport(SOON), torch.device("cpu"))


def test_a_state_arrives_exactly(source: Transport, receiver: Transport) -> None:
    state = manager_state()
    source.send_checkpoint([1], 3, state, SOON)
    assert_same(receiver.recv_checkpoint(0, source.metadata(), 3, SOON), state)
    assert receiver.last_report is not None
    assert receiver.last_report.bytes_moved == 2 * MIB


def test_a_receive_waits_for_the_step(
    source: Transport, receiver: Transport, pool: ThreadPoolExecutor
) -> None:
    source.send_checkpoint([1], 2, manager_state(2), SOON)
    waiting = pool.submit(receiver.recv_checkpoint, 0, source.metadata(), 3, SOON)
    with pytest.raises(TimeoutError):
        waiting.result(0.3)
    source.send_checkpoint([1], 3, manager_state(3), SOON)
    assert waiting.result(10)["torchft"]["step"] == 3


@pytest.mark.parametrize("served", [None, 2, 4])
def test_a_step_that_does_not_come_times_out(
    source: Transport, receiver: Transport, served: int | None
) -> None:
    if served is not None:
        source.send_checkpoint([1], served, manager_state(served), SOON)
    began_s = time.monotonic()
    with pytest.raises(RuntimeError, match="timed out") as raised:
        receiver.recv_checkpoint(0, source.metadata(), 3, timedelta(milliseconds=200))
    assert 0.15 < time.monotonic() - began_s < 2
    assert isinstance(raised.value, torchferry.CheckpointTimeout)
    assert isinstance(raised.value, TimeoutError)
    assert isinstance(raised.value.__cause__, torchferry.LinkTimeout)


@pytest.mark.parametrize("waits", [True, False])
def test_a_receiver_learns_at_once_why_the_step_can_not_be_sent(
    source: Transport, receiver: Transport, pool: ThreadPoolExecutor, waits: bool
) -> None:
    if waits:
        waiting = pool.submit(receiver.recv_checkpoint, 0, source.metadata(), 3, SOON)
        other_step = pool.submit(receiver.recv_checkpoint, 0, source.metadata(), 4, SOON)
        with pytest.raises(TimeoutError):
            waiting.result(0.3)
    with pytest.raises(torchferry.Unsendable):
        source.send_checkpoint([1], 3, {"user": {"lock": threading.Lock()}}, SOON)
    if not waits:
        waiting = pool.submit(receiver.recv_checkpoint, 0, source.metadata(), 3, SOON)
    with pytest.raises(torchferry.PeerGaveUp, match=r"can't send step 3: user\.lock: .*lock"):
        waiting.result(2)
    # The step may be sent again, and others are not affected.
    source.disallow_checkpoint()
    with pytest.raises(torchferry.CheckpointTimeout, match="timed out"):
        receiver.recv_checkpoint(0, source.metadata(), 3, timedelta(milliseconds=100))
    source.send_checkpoint([1], 3, {"w": 1}, SOON)
    assert receiver.recv_checkpoint(0, source.metadata(), 3, SOON) == {"w": 1}
    if waits:
        source.send_checkpoint([1], 4, {"w": 2}, SOON)
        assert other_step.result(10) == {"w": 2}


def test_a_receive_outlives_a_source_that_can_not_send(
    source: Transport, receiver: Transport, pool: ThreadPoolExecutor
) -> None:
    with transport() as other:
        both = f"{source.metadata()} {other.metadata()}"
        waiting = pool.submit(receiver.recv_checkpoint, 0, both, 3, SOON)
        with pytest.raises(torchferry.Unsendable):
            source.send_checkpoint([1], 3, {"lock": threading.Lock()}, SOON)
        other.send_checkpoint([1], 3, {"w": 1}, SOON)
        assert waiting.result(10) == {"w": 1}


def test_without_a_timeout_that_of_the_transport_holds(source: Transport) -> None:
    with transport(0.2) as receiver:
        for none in (None, timedelta(0), 0):
            with pytest.raises(torchferry.CheckpointTimeout, match="timed out"):
                receiver.recv_checkpoint(0, source.metadata(), 3, none)


def test_a_step_may_be_sent_again_and_a_lower_one_too(source: Transport, receiver: Transport) -> None:
    for content, step in enumerate((3, 3, 1)):
        if content:
            source.disallow_checkpoint()
        # Twice in a row as well.
        source.send_checkpoint([1], step, {"content": -1}, SOON)
        source.send_checkpoint([1], step, {"content": content}, SOON)
        assert receiver.recv_checkpoint(0, source.metadata(), step, SOON) == {"content": content}


def test_after_disallow_nothing_is_served(source: Transport, receiver: Transport) -> None:
    source.send_checkpoint([1], 3, manager_state(), SOON)
    source.disallow_checkpoint()
    source.disallow_checkpoint()
    with pytest.raises(torchferry.CheckpointTimeout):
        receiver.recv_checkpoint(0, source.metadata(), 3, timedelta(milliseconds=100))


def test_small_tensors_may_change_after_the_send_and_large_ones_are_not_copied(
    source: Transport, receiver: Transport
) -> None:
    mean, large = torch.ones(MIB // 4), torch.ones(MIB)
    source.send_checkpoint([1], 3, {"mean": mean, "again": mean, "large": large}, SOON)
    mean.zero_()
    got = receiver.recv_checkpoint(0, source.metadata(), 3, SOON)
    assert torch.equal(got["mean"], torch.ones(MIB // 4))
    assert got["mean"] is got["again"]
    large.zero_()
    with pytest.raises(torchferry.PeerGaveUp, match=r"changed after it was published \(large\)"):
        receiver.recv_checkpoint(0, source.metadata(), 3, SOON)


def test_a_snapshot_may_change_as_a_whole(receiver: Transport) -> None:
    state = {"large": torch.ones(MIB)}
    with transport(snapshot=True) as source:
        source.send_checkpoint([1], 3, state, SOON)
        state["large"].zero_()
        got = receiver.recv_checkpoint(0, source.metadata(), 3, SOON)
    assert torch.equal(got["large"], torch.ones(MIB))


@contextmanager
def slow_reader(source: Transport, pool: ThreadPoolExecutor) -> Iterator[tuple[threading.Event, Future[Any]]]:
    """A fetch that reads until the event is set."""
    go_on, reads = threading.Event(), threading.Event()

    def hold(progress: torchferry.ProgressEvent) -> None:
        if progress.phase == "receive tensors":
            reads.set()
            go_on.wait(20)

    fetched = pool.submit(torchferry.fetch, source.metadata(), on_progress=hold, via="tcp", timeout=20)
    try:
        assert reads.wait(10)
        yield go_on, fetched
    finally:
        go_on.set()


def test_disallow_waits_for_readers(source: Transport, pool: ThreadPoolExecutor) -> None:
    state = manager_state(layer_bytes=32 * MIB)
    source.send_checkpoint([1], 3, state, SOON)
    with slow_reader(source, pool) as (go_on, fetched):
        disallowed = pool.submit(source.disallow_checkpoint)
        with pytest.raises(TimeoutError):
            disallowed.result(0.3)
        go_on.set()
        disallowed.result(10)
        assert fetched.result(10).version == 3


def test_disallow_drops_readers_after_its_timeout_and_never_raises(
    pool: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    with transport(0.3) as source:
        source.send_checkpoint([1], 3, manager_state(layer_bytes=32 * MIB), SOON)
        with slow_reader(source, pool):
            began_s = time.monotonic()
            source.disallow_checkpoint()
            assert 0.25 < time.monotonic() - began_s < 3
            warnings = [each for each in caplog.records if each.levelno == logging.WARNING]
            assert "readers are disconnected after 0.3 s" in warnings[0].getMessage()
            assert socket.gethostname() in warnings[0].getMessage()
            assert [each.state for each in source._source.status().readers] == ["dropped"]


def test_after_shutdown_nothing_is_served_and_disallow_does_not_raise(
    source: Transport, receiver: Transport
) -> None:
    source.send_checkpoint([1], 3, manager_state(), SOON)
    source.shutdown()
    source.shutdown(wait=False)
    source.disallow_checkpoint()
    with pytest.raises(torchferry.SourcesLost):
        receiver.recv_checkpoint(0, source.metadata(), 3, SOON)


def test_a_shutdown_that_does_not_wait_drops_readers(pool: ThreadPoolExecutor) -> None:
    with transport(60) as source:
        source.send_checkpoint([1], 3, manager_state(layer_bytes=32 * MIB), SOON)
        with slow_reader(source, pool):
            began_s = time.monotonic()
            source.shutdown(wait=False)
            assert time.monotonic() - began_s < 3


def test_a_receive_writes_in_place_and_paths_that_are_missing_here_are_fresh(
    source: Transport,
) -> None:
    state = manager_state()
    state["user"]["default"]["optim"]["moments"] = {"weight": torch.ones(5)}
    source.send_checkpoint([1], 3, state, SOON)
    here = torch.zeros(MIB // 2)
    local = {"user": {"default": {"model": {"weight": here, "tied": here}}}}
    with transport(state_dict=lambda: local) as receiver:
        got = receiver.recv_checkpoint(0, source.metadata(), 3, SOON)
    assert_same(got, state)
    assert got["user"]["default"]["model"]["weight"] is here


def test_a_receive_takes_parts_from_several_sources_and_outlives_one(
    source: Transport, receiver: Transport
) -> None:
    state = {"weight": torch.arange(4 * MIB)}
    with transport() as other, transport(sources=[other.metadata()]) as knows_other:
        for each in (source, other):
            each.send_checkpoint([1], 3, state, SOON)
        both = f"{source.metadata()} {other.metadata()}"
        for here, metadata in ((receiver, both), (knows_other, source.metadata())):
            assert torch.equal(here.recv_checkpoint(0, metadata, 3, SOON)["weight"], state["weight"])
            assert here.last_report is not None
            assert len(here.last_report.sources) == 2
        source.shutdown(wait=False)
        assert torch.equal(receiver.recv_checkpoint(0, both, 3, SOON)["weight"], state["weight"])


def test_without_a_shared_token_it_is_in_the_metadata(source: Transport) -> None:
    assert len(source.metadata().partition("/#")[2]) >= 32


@pytest.mark.parametrize("given", ["argument", "environment"])
def test_a_shared_token_is_not_in_the_metadata(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"token": TOKEN} if given == "argument" else {}
    with transport() as stranger:
        if given == "environment":
            monkeypatch.setenv("TORCHFERRY_TOKEN", TOKEN)
        with transport(**options) as source, transport(**options) as receiver:
            assert TOKEN not in source.metadata()
            assert "#" not in source.metadata()
            source.send_checkpoint([1], 3, {"w": 1}, SOON)
            assert receiver.recv_checkpoint(0, source.metadata(), 3, SOON) == {"w": 1}
            with pytest.raises(torchferry.NotAuthorized, match="set TORCHFERRY_TOKEN") as raised:
                stranger.recv_checkpoint(0, source.metadata(), 3, SOON)
            assert TOKEN not in str(raised.value)


def test_it_listens_where_the_lighthouse_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("TORCHFT_LIGHTHOUSE", "http://[::1]:29510")
    with transport() as source, transport() as receiver:
        assert source.metadata().startswith("http://[::1]:")
        source.send_checkpoint([1], 3, {"w": 1}, SOON)
        assert receiver.recv_checkpoint(0, source.metadata(), 3, SOON) == {"w": 1}
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with transport() as source:
        assert source.metadata().startswith("http://127.0.0.1:")
    with transport(host="::1") as source:
        assert source.metadata().startswith("http://[::1]:")


@pytest.mark.parametrize(
    "options",
    [{"timeout": 0}, {"state_dict": {}}, {"snapshot": 1}, {"token": "short"}, {"sources": "http://a:1"}],
)
def test_an_invalid_argument_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(torchferry.BadArgument):
        Transport(**{"timeout": 1, **options})


def test_torchft_is_imported_by_nobody_else_and_not_needed() -> None:
    code = """
import sys
import torchferry
assert "torchferry.torchft" not in sys.modules and "torchft" not in sys.modules
sys.modules["torchft"] = None  # importing it fails from here on
from torchferry.torchft import Transport
one, two = Transport(5), Transport(5)
one.send_checkpoint([1], 3, {"w": 1}, 5)
assert two.recv_checkpoint(0, one.metadata(), 3, 5) == {"w": 1}
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def read_until_stopped(pipe: Connection, metadata: str) -> None:
    """Fetch, and stop in the middle: say so, and wait for ever."""

    def hold(progress: torchferry.ProgressEvent) -> None:
        if progress.phase == "receive tensors":
            pipe.send("reads")
            threading.Event().wait()

    torchferry.fetch(metadata, on_progress=hold)


@pytest.mark.usefixtures("_fork_server")
@pytest.mark.parametrize(("how", "at_most_s"), [(signal.SIGKILL, 1.0), (signal.SIGSTOP, 3.0)])
def test_a_reader_that_was_killed_or_stopped_does_not_hold_up_training(
    how: signal.Signals, at_most_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    with transport(1.5) as source:
        source.send_checkpoint([1], 3, manager_state(layer_bytes=32 * MIB), SOON)
        with child(read_until_stopped, source.metadata()) as reader:
            assert reader.receive() == "reads"
            reader.signal(how)
            began_s = time.monotonic()
            source.disallow_checkpoint()
            assert time.monotonic() - began_s < at_most_s
            assert ("readers are disconnected" in caplog.text) == (how is signal.SIGSTOP)
        # The source is as good as new.
        source.send_checkpoint([1], 4, {"w": 1}, SOON)
        assert source.recv_checkpoint(0, source.metadata(), 4, SOON) == {"w": 1}
