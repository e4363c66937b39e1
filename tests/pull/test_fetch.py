"""fetch: which version, what it reports, and what it raises."""

from __future__ import annotations

import errno
import gc
import itertools
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
import torch

import torchferry
from tests.support.proxy import Exchange, Proxy
from torchferry import ProgressEvent, Source, fetch, serve
from torchferry.core import leases, pull
from torchferry.engine.pull.fetch import _Fetch
from torchferry.engine.pull.history import history
from torchferry.engine.pull.landing import Landing
from torchferry.engine.sink import Sink

MIB = 1 << 20


def filled(value: int, nbytes: int = 4 * MIB) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((nbytes,), value, dtype=torch.uint8)}


# Which version.


def test_newer_than_waits_on_the_source_until_there_is_a_newer_version() -> None:
    with serve({"a": 7}, version=7) as source, ThreadPoolExecutor(1) as pool:
        fetching = pool.submit(fetch, source.address, newer_than=7, timeout=20)
        time.sleep(0.3)
        assert not fetching.done()
        source.publish({"a": 8}, version=8)
        got = fetching.result(timeout=10)
        assert (got.version, got.state) == (8, {"a": 8})
        assert got.report.phases_s["wait"] >= 0.2
        assert fetch(source.address, newer_than=7).version == 8


def test_newer_than_waits_for_a_name_that_is_not_there_yet() -> None:
    with Source() as source, ThreadPoolExecutor(1) as pool:
        fetching = pool.submit(fetch, source.address, newer_than=-1, timeout=20)
        source.publish({"a": 0}, version=0)
        assert fetching.result(timeout=10).version == 0


def test_newer_than_ends_after_the_timeout() -> None:
    with serve({"a": 7}, version=7) as source:
        began = time.monotonic()
        with pytest.raises(TimeoutError, match="above 7"):
            fetch(source.address, newer_than=7, timeout=0.5)
        assert 0.5 <= time.monotonic() - began < 1.5


def test_the_transfer_has_a_timeout_of_its_own_after_the_wait() -> None:
    state = filled(1)
    with serve({"weight": state["weight"] * 0}, version=1) as source, ThreadPoolExecutor(1) as pool:
        fetching = pool.submit(fetch, source.address, newer_than=1, timeout=1.0, on_progress=_slow_down)
        time.sleep(0.8)
        source.publish(state, version=2)
        assert fetching.result(timeout=10).version == 2


def _slow_down(event: ProgressEvent) -> None:
    if event.bytes_moved:
        time.sleep(0.5)


def test_the_wait_for_one_version_and_its_transfer_share_the_timeout() -> None:
    def on_exchange(exchange: Exchange) -> None:
        if exchange.step == "chunks":
            exchange.hold()
        exchange.relay()

    with Source() as source, Proxy(source.address, on_exchange) as proxy, ThreadPoolExecutor(1) as pool:
        began = time.monotonic()
        fetching = pool.submit(fetch, proxy.address, version=2, newer_than=1, timeout=1.0)
        time.sleep(0.6)
        source.publish(filled(1), version=2)
        with pytest.raises(TimeoutError):
            fetching.result(timeout=10)
        assert time.monotonic() - began < 1.5


def test_a_source_that_dies_ends_the_wait_for_a_newer_version() -> None:
    source = serve({"a": 7}, version=7)
    with ThreadPoolExecutor(1) as pool:
        fetching = pool.submit(fetch, source.address, newer_than=7, timeout=60)
        time.sleep(0.2)
        began = time.monotonic()
        source.close()
        with pytest.raises((ConnectionError, LookupError)):
            fetching.result(timeout=10)
        assert time.monotonic() - began < 1


def test_a_wanted_version_that_is_not_there_is_told_at_once() -> None:
    with serve({"a": 7}, version=7) as source:
        assert fetch(source.address, version=7).version == 7
        for version in (6, 8):
            began = time.monotonic()
            with pytest.raises(LookupError, match=f"has version 7 of 'state', not version {version}"):
                fetch(source.address, version=version, timeout=20)
            assert time.monotonic() - began < 1


def test_a_version_that_no_source_has_is_told_even_if_others_can_not_be_reached() -> None:
    dead = "http://127.0.0.1:9/#no-token-is-needed-here"
    with serve({"a": 7}, version=7) as source:
        with pytest.raises(LookupError, match="not version 8") as caught:
            fetch([dead, source.address], version=8, timeout=20)
        assert "127.0.0.1:9: Connection refused" in str(caught.value)
        with pytest.raises(PermissionError, match="does not accept the token"):
            fetch([dead, source.address + "x"], timeout=20)
        assert fetch([dead, source.address], version=7).version == 7


# What it returns and reports.


def test_a_fetch_that_is_complete_just_in_time_is_confirmed() -> None:
    began_s = time.monotonic()

    def use_up_the_time(event: ProgressEvent) -> None:
        if event.phase == "assemble":
            time.sleep(max(began_s + 1.05 - time.monotonic(), 0.0))

    with serve(filled(7), version=7) as source:
        assert fetch(source.address, timeout=1.0, on_progress=use_up_the_time).report.confirmed
        assert [reader.state for reader in source.status().readers] == ["confirmed"]


def test_into_may_be_a_state_or_a_function() -> None:
    local = filled(0)
    with serve(filled(5), version=1) as source:
        for into in (local, lambda: local):
            local["weight"].zero_()
            got = fetch(source.address, into=into)
            assert got.state["weight"] is local["weight"]
            assert local["weight"].unique().tolist() == [5]


def test_the_report_says_what_was_moved_and_from_whom() -> None:
    with serve(filled(5), version=9) as source:
        report = fetch(source.address, into=filled(0)).report
        assert (report.bytes_total, report.bytes_moved, report.bytes_skipped) == (4 * MIB, 4 * MIB, 0)
        assert report.verified
        assert report.confirmed
        (where,) = report.sources
        assert where in source.address
        assert (report.sources[where].bytes, report.sources[where].chunks) == (4 * MIB, 4)
        assert report.sources[where].failures == []
        assert report.bytes_per_second > 0
        plain = report.to_dict()
        assert plain["version"] == 9
        assert plain["sources"][where]["bytes"] == 4 * MIB
        assert plain["seconds"] == pytest.approx(sum(plain["phases_s"].values()))
        assert "version 9: 4,194,304 of 4,194,304 bytes moved" in str(report)
        assert not fetch(source.address, verify=False).report.verified


def test_one_line_is_logged_for_a_finished_fetch(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="torchferry")
    with serve(filled(5), version=9) as source:
        fetch(source.address)
        (line,) = [record.message for record in caplog.records if record.levelno >= logging.INFO]
        where = source.address.split("/")[2]
    assert "version 9" in line
    assert "4,194,304" in line
    assert where in line
    assert "MB/s" in line
    identity = line.split(":")[0]
    debug = [record.message for record in caplog.records if record.levelno == logging.DEBUG]
    assert any(message.startswith(identity) for message in debug)


def test_progress_is_reported_in_the_calling_thread_for_every_8_mib() -> None:
    events: list[tuple[threading.Thread, ProgressEvent]] = []
    with serve(filled(5, 64 * MIB), version=1) as source:
        fetch(source.address, on_progress=lambda event: events.append((threading.current_thread(), event)))
    assert {thread for thread, _ in events} == {threading.current_thread()}
    moved = [event.bytes_moved for _, event in events]
    assert moved == sorted(moved)
    assert moved[-1] == 64 * MIB
    assert max(after - before for before, after in itertools.pairwise(moved)) <= 8 * MIB
    receiving = [event for _, event in events if event.bytes_moved]
    assert {event.bytes_total for event in receiving} == {64 * MIB}
    assert receiving[-1].peer is not None
    assert receiving[-1].peer in source.address


def test_progress_is_reported_ten_times_a_second_while_nothing_comes() -> None:
    events: list[ProgressEvent] = []
    with serve({"a": 1}, version=1) as source, pytest.raises(TimeoutError):
        fetch(source.address, newer_than=1, timeout=1, on_progress=events.append)
    assert len(events) >= 8
    assert {event.phase for event in events} == {"wait"}


_MANY_TENSORS = """
import gc, sys, time, torch, torchferry

gc.disable()
state = {f"tensor {number}": torch.zeros(2) for number in range(50_000)}
times_s = []
with torchferry.serve(state, version=1) as source:
    into = {**state} if sys.argv[1] == "True" else None
    torchferry.fetch(source.address, into, on_progress=lambda event: times_s.append(time.monotonic()))
print(max(after - before for before, after in zip(times_s, times_s[1:])))
"""


@pytest.mark.slow
@pytest.mark.parametrize("in_place", [False, True])
def test_progress_is_reported_ten_times_a_second_while_many_tensors_are_compared(in_place: bool) -> None:
    # Without the garbage collector, which stops all threads for 0.1 s if there are so many objects.
    ended = subprocess.run(
        [sys.executable, "-c", _MANY_TENSORS, str(in_place)], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0, ended.stderr
    # 0.1 s, and a moment for the thread to be scheduled on a busy machine.
    assert float(ended.stdout) < 0.25


@pytest.mark.parametrize("in_place", [False, True])
def test_an_exception_in_on_progress_ends_the_fetch_and_propagates(in_place: bool) -> None:
    def fail(event: ProgressEvent) -> None:
        if event.bytes_moved:
            raise KeyError("enough")

    into = filled(0, 64 * MIB) if in_place else None
    with serve(filled(5, 64 * MIB), version=1) as source:
        with pytest.raises(KeyError, match="enough") as raised:
            fetch(source.address, into=into, on_progress=fail)
        if into is not None:
            assert "weight" in "".join(raised.value.__notes__)
        assert source.status().readers[-1].state == "failed"
        assert "enough" in source.status().readers[-1].reason
        assert fetch(source.address, into=into).state["weight"].unique().tolist() == [5]


def test_a_fetch_that_fails_when_all_is_written_says_that_all_is_whole() -> None:
    def fail(event: ProgressEvent) -> None:
        if event.phase == "confirm":
            raise KeyError("enough")

    # The second tensor overlaps itself, so it is received into scratch memory first.
    overlapping = torch.arange(20.0).as_strided((5, 6), (2, 1))
    with serve({**filled(5), "other": overlapping}, version=1) as source:
        local = {**filled(0), "other": torch.zeros(5, 6)}
        with pytest.raises(KeyError) as raised:
            fetch(source.address, local, on_progress=fail)
    assert torch.equal(local["other"], overlapping)
    assert "all 2 paths of the local state were overwritten" in "".join(raised.value.__notes__)


@pytest.mark.parametrize("is_local", [False, True])
def test_memory_that_is_short_or_freed_here_is_not_blamed_on_the_sources(
    monkeypatch: pytest.MonkeyPatch, is_local: bool
) -> None:
    def fail(*_: object) -> None:
        raise torchferry.StateError("no memory")

    monkeypatch.setattr(Sink, "write", fail)
    with (
        serve(filled(5), version=1) as source,
        pytest.raises(torchferry.StateError, match="no memory") as raised,
    ):
        fetch(source.address, filled(0) if is_local else None)
    assert not isinstance(raised.value, ConnectionError)


# What the source learns, and what it may not do.


def test_a_live_state_that_changes_is_told_to_the_reader() -> None:
    state = filled(1, 16 * MIB)
    local = filled(0, 16 * MIB)
    with serve(state, version=1, snapshot=False) as source:
        state["weight"][-1] = 2
        with pytest.raises(
            torchferry.PeerGaveUp, match=r"changed after it was published \(weight\)"
        ) as raised:
            fetch(source.address, into=local)
        assert not isinstance(raised.value, torchferry.TargetTorn)
        assert local["weight"].unique().tolist() == [0]


@pytest.mark.parametrize("verify", [True, False])
def test_a_live_state_that_changes_during_a_fetch_is_never_a_mixture(verify: bool) -> None:
    state, local = filled(1, 64 * MIB), filled(0, 64 * MIB)
    changed = threading.Event()

    def change(event: ProgressEvent) -> None:
        if event.bytes_moved and not changed.is_set():
            state["weight"].fill_(2)
            changed.set()

    def on_exchange(exchange: Exchange) -> None:
        # The first chunks are copied before the change, and the others afterwards.
        if exchange.chunks and 0 not in exchange.chunks:
            exchange.hold(changed)
        exchange.relay()

    with serve(state, version=1, snapshot=False) as source, Proxy(source.address, on_exchange) as proxy:
        with pytest.raises(torchferry.FerryError, match="changed after it was published") as raised:
            fetch(proxy.address, into=local, verify=verify, on_progress=change)
        assert isinstance(raised.value, torchferry.TargetTorn)
        assert raised.value.torn == ("weight",)


def test_a_write_that_torch_does_not_count_is_found_by_digest() -> None:
    state = filled(1, 4 * MIB)
    with serve(state, version=1, snapshot=False) as source:
        state["weight"].numpy()[3 * MIB] = 2
        with pytest.raises(torchferry.FerryError, match=r"changed after it was published \(weight\)"):
            fetch(source.address, into=filled(0))


def test_a_live_state_whose_memory_was_freed_is_told_to_the_reader() -> None:
    state = filled(1, 4 * MIB)
    with serve(state, version=1, snapshot=False) as source:
        state["weight"].untyped_storage().resize_(0)
        with pytest.raises(torchferry.FerryError, match=r"changed after it was published \(weight\)"):
            fetch(source.address, timeout=10)


def test_a_verified_fetch_is_complete_even_if_the_state_changes_before_it_is_confirmed() -> None:
    state, local = filled(1), filled(0)

    def change(event: ProgressEvent) -> None:
        if event.phase == "confirm" or event.bytes_moved == 4 * MIB:
            state["weight"].fill_(2)

    with serve(state, version=1, snapshot=False) as source:
        got = fetch(source.address, into=local, on_progress=change)
        assert got.state["weight"].unique().tolist() == [1]


# Arguments.


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"addresses": []}, "at least one"),
        ({"addresses": 5}, "at least one"),
        ({"addresses": "127.0.0.1:80"}, "not the address of a source"),
        ({"version": "1"}, "version must be"),
        ({"newer_than": 1.5}, "newer_than must be"),
        ({"timeout": 0}, "timeout must be"),
        ({"stall_timeout": -1}, "stall_timeout must be"),
        ({"verify": 1}, "verify must be"),
        ({"compare": 1}, "compare must be"),
        ({"extra": "keep"}, "extra must be"),
        ({"via": "carrier pigeon"}, "via must be"),
        ({"max_metadata_bytes": 0}, "max_metadata_bytes must be"),
        ({"on_progress": 3}, "on_progress must be"),
        ({"name": 3}, "name must be"),
    ],
)
def test_a_wrong_argument_is_named(keywords: dict[str, Any], message: str) -> None:
    addresses = keywords.pop("addresses", "http://127.0.0.1:1/#0123456789abcdef")
    with pytest.raises(ValueError, match=message):
        fetch(addresses, **keywords)


def test_paths_that_only_one_side_has_are_refused_dropped_or_fresh() -> None:
    sent = {"a": torch.ones(3), "b": torch.ones(5)}
    with serve(sent, version=1) as source:
        local: dict[str, Any] = {"a": torch.zeros(3), "c": torch.zeros(2)}
        with pytest.raises(torchferry.StateMismatch, match="no such path"):
            fetch(source.address, into=local)
        with pytest.raises(torchferry.StateMismatch, match="b: no such path here"):
            fetch(source.address, into=local, strict=False)
        dropped = fetch(source.address, into=local, strict=False, extra="drop").report
        assert (dropped.dropped, dropped.kept, dropped.fresh) == (("b",), ("c",), ())
        got = fetch(source.address, into=local, strict=False, extra="fresh")
        assert got.report.fresh == ("b",)
        assert got.state["b"].tolist() == [1.0] * 5


def test_only_what_is_needed_is_moved() -> None:
    sent = {"a": torch.ones(2 * MIB, dtype=torch.uint8), "b": torch.ones(8 * MIB, dtype=torch.uint8)}
    with serve(sent, version=1) as source:
        local = {"a": torch.zeros(2 * MIB, dtype=torch.uint8)}
        report = fetch(source.address, into=local, extra="drop").report
        assert (report.bytes_moved, report.bytes_skipped) == (2 * MIB, 8 * MIB)


def test_a_fetch_that_wrote_nothing_is_not_torn_even_if_some_bytes_were_equal() -> None:
    state, local = filled(1), filled(1)
    state["empty"] = local["empty"] = torch.empty(0)
    local["weight"][-1] = 0
    with serve(state, version=1, snapshot=False) as source:
        state["weight"].fill_(2)
        with pytest.raises(torchferry.PeerGaveUp, match="nothing was overwritten") as raised:
            fetch(source.address, into=local, compare=True)
        assert not isinstance(raised.value, torchferry.TargetTorn)


def test_an_atomic_fetch_that_is_not_verified_writes_no_mixture() -> None:
    state, local = filled(1, 64 * MIB), filled(0, 64 * MIB)

    def change(event: ProgressEvent) -> None:
        if event.bytes_moved and state["weight"][0] == 1:
            state["weight"].fill_(2)

    with serve(state, version=1, snapshot=False) as source:
        with pytest.raises(torchferry.PeerGaveUp, match="changed after it was published") as raised:
            fetch(source.address, into=local, verify=False, atomic=True, on_progress=change)
        assert not isinstance(raised.value, torchferry.TargetTorn)
    assert local["weight"].unique().tolist() == [0]


def test_a_receiver_that_compares_for_long_keeps_its_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "LEASE_S", 0.5)
    monkeypatch.setattr(pull, "ALIVE_S", 0.1)
    states: list[str] = []

    def take_long(event: ProgressEvent) -> None:
        if event.phase == "compare" and not states:
            time.sleep(1.5)
            states.append(source.status().readers[0].state)

    with serve(filled(1), version=1) as source:
        got = fetch(source.address, into=filled(0), compare=True, on_progress=take_long)
    assert states == ["reading"]
    assert got.report.confirmed


def test_a_mismatch_of_a_large_state_moves_less_than_a_hundredth_of_it() -> None:
    state = {"weight": torch.zeros(1 << 30, dtype=torch.uint8), "step": 3}
    with (
        serve(state, version=1, snapshot=False) as source,
        Proxy(source.address) as proxy,
        pytest.raises(torchferry.StateMismatch, match="weight: shape"),
    ):
        fetch(proxy.address, into={"weight": torch.zeros(5, dtype=torch.uint8), "step": 0})
    assert proxy.relayed_bytes < (1 << 30) / 100
    assert "chunks" not in {exchange.step for exchange in proxy.requests}


@pytest.mark.parametrize("atomic", [False, True])
def test_an_unverified_fetch_of_a_live_state_fails_if_its_source_can_t_be_asked_at_the_end(
    atomic: bool,
) -> None:
    state = filled(1, 16 * MIB)

    def refuse_results(exchange: Exchange) -> None:
        if exchange.step in ("confirm", "damaged"):
            exchange.reset()
        exchange.relay()

    with serve(state, version=1, snapshot=False) as source, Proxy(source.address, refuse_results) as proxy:
        local = filled(0, 16 * MIB)
        with pytest.raises(torchferry.FerryError):
            fetch(proxy.address, into=local, verify=False, atomic=atomic)
        assert not atomic or local["weight"].unique().tolist() == [0]
        assert not fetch(proxy.address, into=local).report.confirmed
        source.publish(state, version=2)
        assert not fetch(proxy.address, into=local, verify=False).report.confirmed


def test_a_failed_fetch_keeps_nothing_in_memory() -> None:
    def fail(event: ProgressEvent) -> None:
        if event.bytes_moved:
            raise KeyError("enough")

    gc.collect()
    gc.disable()
    try:
        with serve(filled(1, 64 * MIB), version=1) as source:
            for keywords in ({}, {"into": filled(0, 64 * MIB), "atomic": True}):
                with suppress(KeyError):
                    fetch(source.address, on_progress=fail, **keywords)  # type: ignore[arg-type]
                with suppress(LookupError):
                    fetch(source.address, name="other")
        with suppress(ConnectionError):
            fetch(source.address)
        left = [each for each in gc.get_objects() if isinstance(each, (_Fetch, Landing))]
        assert not left
    finally:
        gc.enable()


@pytest.mark.parametrize("name", ["\ud800", "", "x" * 201, 3])
def test_a_name_that_can_t_be_sent_is_refused(name: Any) -> None:
    with serve({"a": 1}, version=1) as source:
        with pytest.raises(ValueError, match="name must be"):
            fetch(source.address, name=name)
        with pytest.raises(ValueError, match="name must be"):
            source.publish({"a": 1}, 1, name=name)


def test_a_forked_child_can_fetch_whatever_its_parent_was_doing() -> None:
    state, local = filled(1), filled(0)
    with serve(state, version=1) as source:
        with history._lock:  # as if another thread held it
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    code = 0 if fetch(source.address, into=local, timeout=5).version == 1 else 2
                finally:
                    os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("other", ["hangs", "is as slow"])
def test_a_source_that_takes_longer_than_a_second_delivers_although_another_is_no_better(other: str) -> None:
    def late(exchange: Exchange) -> None:
        if exchange.step == "chunks":
            threading.Event().wait(1.3)
        exchange.relay()

    def hang(exchange: Exchange) -> None:
        exchange.hold() if exchange.step == "chunks" else exchange.relay()

    state = filled(3, 2 * MIB)
    with (
        serve(state, version=1) as one,
        serve(state, version=1) as two,
        Proxy(one.address, late) as slow,
        Proxy(two.address, hang if other == "hangs" else late) as second,
    ):
        got = fetch([slow.address, second.address], timeout=20)
    assert torch.equal(got.state["weight"], state["weight"])


@pytest.mark.parametrize("phase", ["assemble", "confirm"])
def test_progress_is_not_reported_any_more_once_an_atomic_state_is_written(phase: str) -> None:
    # If it raised, the fetch would fail with the new state in place.
    def fail(event: ProgressEvent) -> None:
        if event.phase == phase:
            raise KeyError("enough")

    local = filled(0)
    with serve(filled(3), version=1) as source, suppress(KeyError):
        fetch(source.address, local, atomic=True, on_progress=fail)
        assert torch.equal(local["weight"], filled(3)["weight"])
        return
    assert torch.equal(local["weight"], filled(0)["weight"])


def test_over_tcp_a_sandbox_may_forbid_what_makes_it_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    refused: list[str] = []

    def sendfile(*_: object) -> int:
        refused.append("sendfile")
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    class Socket(socket.socket):
        def setsockopt(self, level: int, option: int, *value: Any) -> None:
            if (level, option) == (socket.SOL_SOCKET, socket.SO_RCVLOWAT):
                refused.append("SO_RCVLOWAT")
                raise OSError(errno.ENOPROTOOPT, os.strerror(errno.ENOPROTOOPT))
            super().setsockopt(level, option, *value)

    monkeypatch.setattr(os, "sendfile", sendfile)
    monkeypatch.setattr(socket, "socket", Socket)
    state = {"w": torch.arange(1 << 20)}
    with serve(state, version=1) as source:
        got = fetch(source.address, via="tcp", timeout=20)
    assert torch.equal(got.state["w"], state["w"])
    assert {*refused} == {"sendfile", "SO_RCVLOWAT"}
