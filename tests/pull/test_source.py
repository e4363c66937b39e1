"""Source: versions, snapshots, readers that hold them, and who has confirmed what."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch

import torchferry
from tests.faults.controller import wait_until
from tests.pull.readers import slow_reader
from torchferry import Source, fetch, serve
from torchferry.core.pull import Result
from torchferry.engine.pull import published
from torchferry.engine.source import digest
from torchferry.errors import LinkError

MIB = 1 << 20


def filled(value: int, nbytes: int = 4 * MIB) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((nbytes,), value, dtype=torch.uint8)}


def values(state: Any) -> set[int]:
    return set(state["weight"].unique().tolist())


def test_a_source_serves_until_it_is_closed() -> None:
    with serve({"step": 3}, version=3) as source:
        assert source.address.startswith("http://127.0.0.1:")
        got = fetch(source.address)
        assert (got.state, got.version) == ({"step": 3}, 3)
    with pytest.raises(ConnectionError, match="refused"):
        fetch(source.address, timeout=5)
    source.close()


def test_a_source_without_a_state_has_no_version() -> None:
    with Source() as source:
        with pytest.raises(LookupError, match="it serves nothing"):
            fetch(source.address, timeout=5)
        source.publish({"step": 1}, 1)
        assert fetch(source.address).version == 1


def test_a_new_version_replaces_the_earlier_one_for_new_readers() -> None:
    with serve(filled(1), version=1) as source:
        source.publish(filled(2), version=2)
        got = fetch(source.address)
        assert (got.version, values(got.state)) == (2, {2})
        with pytest.raises(LookupError, match="has version 2 of 'state', not version 1"):
            fetch(source.address, version=1)


def test_a_reader_of_the_earlier_version_finishes_undisturbed() -> None:
    with serve(filled(1), version=1) as source, slow_reader(source) as reader:
        source.publish(filled(2), version=2)
        reader.request(0, 4, 4 * MIB)
        assert set(reader.read(4 * MIB)) == {1}
        assert reader.confirm()
        assert [entry.state for entry in source.status().readers] == ["confirmed"]


def test_versions_must_grow_until_the_name_is_withdrawn() -> None:
    with serve({"a": 1}, version=7) as source:
        for version in (7, 6, -1):
            with pytest.raises(ValueError, match="is not above the current version 7"):
                source.publish({"a": 2}, version=version)
        assert fetch(source.address).state == {"a": 1}
        source.withdraw()
        with pytest.raises(LookupError):
            fetch(source.address)
        source.publish({"a": 3}, version=-1)
        assert fetch(source.address).version == -1


@pytest.mark.parametrize("version", [np.int64(3), np.uint8(3)])
def test_whatever_is_an_index_is_a_version_and_becomes_an_int(version: Any) -> None:
    with serve({"a": 1}, version) as source:
        source.publish({"a": 2}, version + 1)
        source.withdraw()
        source.publish({"a": 3}, version)
        got = fetch(source.address, version=version, newer_than=version - 1)
        source.wait(version)
        assert (got.version, type(got.version)) == (3, int)
        assert source.status().versions == {"state": 3}


@pytest.mark.parametrize("version", [1.0, "1", True, None, 2**63, np.True_, np.float64(1), torch.tensor(3)])
def test_a_version_is_an_int_of_64_bits(version: Any) -> None:
    with Source() as source, pytest.raises(ValueError, match="version must be an int"):
        source.publish({}, version=version)


def test_several_names_are_independent() -> None:
    with serve({"a": 1}, version=5) as source:
        source.publish({"b": 2}, version=1, name="ema")
        assert fetch(source.address, name="ema").state == {"b": 2}
        assert source.status().versions == {"state": 5, "ema": 1}
        source.withdraw("state")
        assert fetch(source.address, name="ema").version == 1
        with pytest.raises(LookupError, match="no 'state'; it serves 'ema'"):
            fetch(source.address)


def test_a_snapshot_is_what_was_published_whatever_happens_to_the_state() -> None:
    state = filled(1)
    with serve(state, version=1) as source:
        state["weight"].fill_(9)
        assert values(fetch(source.address).state) == {1}


def test_the_memory_of_a_snapshot_is_used_again() -> None:
    addresses = []
    with serve(filled(0), version=0) as source:
        for version in range(1, 6):
            source.publish(filled(version), version=version)
            (current,) = source._versions._leases.current.values()
            assert current.block is not None
            addresses.append(current.block.tensor.data_ptr())
    assert len(set(addresses)) == 2


def test_a_third_version_waits_for_the_oldest_reader() -> None:
    with serve(filled(1), version=1) as source, slow_reader(source) as reader:
        source.publish(filled(2), version=2)
        with pytest.raises(TimeoutError, match="version 1, reading") as raised:
            source.publish(filled(3), version=3, timeout=0.2)
        assert isinstance(raised.value, torchferry.ReadersRemain)
        assert len(raised.value.readers) == 1
        assert fetch(source.address).version == 2
        with ThreadPoolExecutor(1) as pool:
            publishing = pool.submit(source.publish, filled(3), version=3, timeout=10)
            assert reader.confirm()
            publishing.result(timeout=10)
        assert values(fetch(source.address).state) == {3}


def test_a_third_version_drops_the_oldest_reader_if_told_to() -> None:
    nbytes = 64 * MIB  # more than the kernel's buffers hold
    with serve(filled(1, nbytes), version=1) as source, slow_reader(source) as reader:
        reader.request(0, 64, nbytes)
        source.publish(filled(2, nbytes), version=2)
        source.publish(filled(3, nbytes), version=3, readers="drop", timeout=10)
        source.publish(filled(4, nbytes), version=4, timeout=10)
        received = b""
        with suppress(LinkError):
            while len(received) < nbytes:
                received += reader.read(65536)
        assert len(received) < nbytes
        assert set(received) <= {1}, "memory was used again while it was being sent"
        assert [entry.state for entry in source.status().readers] == ["dropped"]


def test_withdraw_returns_when_no_reader_is_left() -> None:
    with serve(filled(1), version=1) as source:
        with slow_reader(source), pytest.raises(TimeoutError, match="state version 1, reading"):
            source.withdraw(timeout=0.2)
        source.withdraw(timeout=10)
        assert source.status().readers[0].state == "lost"


def test_withdraw_can_drop_readers() -> None:
    with serve(filled(1), version=1) as source, slow_reader(source) as reader:
        source.withdraw(readers="drop")
        with pytest.raises(LinkError):
            reader.request(0, 1, MIB)


def test_close_drops_readers_after_its_timeout() -> None:
    source = serve(filled(1), version=1)
    with slow_reader(source):
        began = time.monotonic()
        source.close(timeout=0.3)
        assert 0.3 <= time.monotonic() - began < 5
    assert source.status().readers[0].state == "dropped"
    with pytest.raises(ValueError, match="closed"):
        source.publish({}, 2)


def test_a_live_state_that_is_replaced_has_no_readers_afterwards() -> None:
    state = filled(1)
    with serve(state, version=1, snapshot=False) as source, slow_reader(source):
        with pytest.raises(TimeoutError):
            source.publish(filled(2), version=2, timeout=0.2)
        assert fetch(source.address).version == 2
        source.publish(filled(3), version=3, readers="drop")
        assert values(fetch(source.address).state) == {3}


def test_status_says_who_reads_what_and_how_far() -> None:
    with serve(filled(1), version=1) as source, slow_reader(source) as reader:
        reader.request(0, 2, 2 * MIB)
        reader.read(2 * MIB)
        fetch(source.address)
        reading, done = source.status().readers
        assert (reading.state, reading.version, reading.name) == ("reading", 1, "state")
        assert (reading.bytes_sent, reading.bytes_total) == (2 * MIB, 4 * MIB)
        assert (done.state, done.bytes_sent) == ("confirmed", 4 * MIB)
        assert str(reading.version) in str(source.status())
        assert source.status().to_dict()["readers"][1]["state"] == "confirmed"


@pytest.mark.slow
def test_status_keeps_the_last_thousand_entries() -> None:
    with serve({"a": 1}, version=1) as source:
        for _ in range(1003):
            with slow_reader(source) as reader:
                reader.confirm()
        readers = source.status().readers
    assert len(readers) == 1000
    assert {reader.state for reader in readers} == {"confirmed"}


def test_wait_returns_when_enough_receivers_have_confirmed() -> None:
    with serve({"a": 1}, version=1) as source, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(source.wait, 1, receivers=2, timeout=10)
        fetch(source.address)
        assert not waiting.done()
        fetch(source.address)
        waiting.result(timeout=10)
        source.publish({"a": 2}, version=2)
        source.wait(1, receivers=2, timeout=0.1)


def test_a_fetch_is_confirmed_if_the_source_is_closed_as_soon_as_wait_returns() -> None:
    for _ in range(50):
        source = serve({"step": 1}, version=1)
        with ThreadPoolExecutor(1) as pool:
            fetching = pool.submit(fetch, source.address)
            source.wait(1)
            source.close()
            assert fetching.result().report.confirmed


def test_a_fetch_that_waits_for_a_version_when_the_source_is_closed_has_lost_its_source() -> None:
    before = {*threading.enumerate()}
    source = serve({"step": 1}, version=1)

    def is_answering() -> bool:
        return any(thread.name == "torchferry-http-1" for thread in {*threading.enumerate()} - before)

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(fetch, source.address, newer_than=1, timeout=10)
        wait_until(is_answering, "the fetch did not connect")
        source.close()
        with pytest.raises(ConnectionError, match="the source is closed"):
            waiting.result()


def test_wait_names_those_who_have_not_confirmed() -> None:
    with serve({"a": 1}, version=1) as source, slow_reader(source):
        fetch(source.address)
        with pytest.raises(TimeoutError, match="1 of 3 receivers confirmed version 1") as raised:
            source.wait(1, receivers=3, timeout=0.1)
        assert "reading" in str(raised.value)


def test_confirmations_of_a_withdrawn_version_do_not_count_for_the_next() -> None:
    with serve({"a": 1}, version=1) as source:
        fetch(source.address)
        source.withdraw()
        source.publish({"a": 2}, version=1)
        with pytest.raises(TimeoutError):
            source.wait(1, timeout=0.1)


def test_a_state_that_can_t_be_sent_is_refused_and_the_earlier_version_stays() -> None:
    with serve({"a": 1}, version=1) as source:
        with pytest.raises(torchferry.Unsendable, match="bad"):
            source.publish({"bad": object()}, version=2)
        assert fetch(source.address).version == 1
        source.publish({"a": 2}, version=2)


@pytest.mark.parametrize("snapshot", [True, False])
def test_a_state_that_changes_while_it_is_published_is_refused(
    snapshot: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = filled(1)

    def change_then_hash(buffer: torch.Tensor) -> int:
        state["weight"][0] = 2
        return digest(buffer)

    with serve({"weight": torch.zeros(1)}, version=1) as source:
        monkeypatch.setattr(published, "digest", change_then_hash)
        with pytest.raises(torchferry.StateChanged, match=r"published \(weight\)"):
            source.publish(state, version=2, snapshot=snapshot)
        assert fetch(source.address).version == 1


def test_serve_leaves_nothing_behind_if_the_state_can_t_be_sent() -> None:
    before = set(threading.enumerate())
    with pytest.raises(torchferry.Unsendable):
        serve({"bad": object()}, version=1)
    assert set(threading.enumerate()) <= before


def test_threads_may_publish_fetch_and_ask_at_the_same_time() -> None:
    """Every fetch gets one version as a whole, whatever is published meanwhile."""
    with serve(filled(0), version=0) as source, ThreadPoolExecutor(4) as pool:
        stop = threading.Event()

        def follow() -> int:
            count = 0
            while not stop.is_set():
                got = fetch(source.address, timeout=20, verify=False)
                assert values(got.state) == {got.version % 200}
                source.status()
                count += 1
            return count

        followers = [pool.submit(follow) for _ in range(2)]
        for version in range(1, 40):
            source.publish(filled(version % 200), version=version, timeout=20)
        stop.set()
        assert all(follower.result(timeout=20) > 0 for follower in followers)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"host": "no-such-interface0"}, "can't listen on host 'no-such-interface0'"),
        ({"port": -1}, "port must be"),
        ({"port": "80"}, "port must be"),
        ({"token": "short"}, "token must be at least 16"),
        ({"token": "with a space in the middle"}, "token must be at least 16"),
        ({"advertise": "host:99999"}, "advertise must be"),
        ({"advertise": "http://host"}, "advertise must be"),
        ({"tls": "yes"}, "tls must be"),
        ({"name": ""}, "name must be"),
        ({"snapshot": 1}, "snapshot must be"),
    ],
)
def test_a_wrong_argument_is_named(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        serve({"a": 1}, version=1, **keywords)


@pytest.mark.parametrize("readers", ["keep", None, True])
def test_readers_is_wait_or_drop(readers: Any) -> None:
    with Source() as source, pytest.raises(ValueError, match="readers must be"):
        source.publish({}, 1, readers=readers)


def test_the_address_names_what_advertise_says() -> None:
    with Source(advertise="trainer.example") as source:
        port = source._server._listeners[0].getsockname()[1]
        assert source.address.startswith(f"http://trainer.example:{port}/#")
    with Source(advertise="[2001:db8::7]:8000") as source:
        assert source.address.startswith("http://[2001:db8::7]:8000/#")


def test_a_source_on_all_addresses_names_one_that_peers_can_reach() -> None:
    with serve({"a": 1}, version=1, host="0.0.0.0") as source:
        assert "0.0.0.0" not in source.address
        assert fetch(source.address, timeout=10).state == {"a": 1}


def test_a_reader_that_finishes_while_the_source_is_closed_is_confirmed() -> None:
    source = serve(filled(1, 64 * MIB), version=1)
    with ThreadPoolExecutor(1) as pool:
        began = threading.Event()

        def wait_for_close(event: torchferry.ProgressEvent) -> None:
            if event.bytes_moved and not began.is_set():
                began.set()
                time.sleep(0.5)

        fetching = pool.submit(fetch, source.address, on_progress=wait_for_close)
        assert began.wait(10)
        source.close(timeout=20)
        assert fetching.result(timeout=10).report.confirmed
    assert [reader.state for reader in source.status().readers] == ["confirmed"]


def test_a_publish_that_waits_for_another_one_obeys_its_own_timeout() -> None:
    with serve(filled(1), version=1) as source, slow_reader(source), ThreadPoolExecutor(1) as pool:
        source.publish(filled(2), version=2)
        first = pool.submit(source.publish, filled(3), version=3, timeout=1.5)
        time.sleep(0.3)
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            source.publish(filled(4), version=4, timeout=0.3)
        assert time.monotonic() - began < 0.9
        with pytest.raises(TimeoutError):
            first.result(timeout=10)


def test_a_name_that_is_withdrawn_while_it_is_published_is_still_published_by_one_thread_at_a_time() -> None:
    began, go_on = threading.Event(), threading.Event()

    class Slow:
        def state_dict(self) -> dict[str, torch.Tensor]:
            began.set()
            assert go_on.wait(10)
            return filled(1)

        def load_state_dict(self, state: object) -> None:
            raise NotImplementedError

    with torchferry.Source() as source, ThreadPoolExecutor(1) as pool:
        publishing = pool.submit(source.publish, {"slow": Slow()}, version=1)
        assert began.wait(10)
        source.withdraw()
        with pytest.raises(torchferry.ReadersRemain, match="another thread is publishing 'state'"):
            source.publish(filled(2), version=2, timeout=0.1)
        go_on.set()
        publishing.result(timeout=10)
        assert source.status().versions == {"state": 1}


def test_withdraw_and_close_free_the_memory_of_snapshots() -> None:
    with serve(filled(1), version=1) as source:
        source.publish(filled(2), version=2)
        block = weakref.ref(source._versions._leases.current["state"].block[0])  # type: ignore[index]
        source.withdraw()
        assert block() is None
        source.publish(filled(2), version=2)
        block = weakref.ref(source._versions._leases.current["state"].block[0])  # type: ignore[index]
    assert block() is None


def test_an_entry_of_a_reader_keeps_nothing_of_its_version() -> None:
    with serve(filled(1), version=1) as source:
        held = weakref.ref(source._versions._leases.current["state"])
        fetch(source.address)
        source.publish(filled(2), version=2)
        source.publish(filled(3), version=3)
        _wait_until(lambda: held() is None)
        assert source.status().readers[0].version == 1


def _wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_wait_names_each_receiver_that_is_missing_once() -> None:
    with serve(filled(1), version=1) as source:
        fetch(source.address)
        source.publish(filled(2), version=2)
        with pytest.raises(torchferry.ReadersRemain, match="0 of 1 receivers") as raised:
            source.wait(2, timeout=0.1)
        assert len(raised.value.readers) == 1
        with slow_reader(source) as reader:
            reader.remote.tell(Result("failed", "no"), 5)
        fetch(source.address)
        with pytest.raises(torchferry.ReadersRemain, match="1 of 2 receivers") as raised:
            source.wait(2, receivers=2, timeout=0.1)
        (missing,) = raised.value.readers
        assert "failed" in missing


def test_wait_ends_when_the_source_is_closed() -> None:
    source = serve(filled(1), version=1)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(source.wait, 1, timeout=60)
        source.close()
        with pytest.raises(TimeoutError, match="before the source was closed"):
            waiting.result(timeout=5)


_ENDS_WHILE_SERVING = """
import sys, torch, torchferry
state = {"w": torch.zeros(4096, 4096).t()[:, :4000], "x": torch.zeros(8000, 4000)[:, ::2]}
source = torchferry.serve(state, 1, snapshot=False)
print(source.address, flush=True)
sys.stdin.readline()
"""


@pytest.mark.slow
def test_a_process_that_ends_while_it_serves_ends_normally() -> None:
    """Torch aborts a process that ends while a thread copies strided tensors."""
    with subprocess.Popen(
        [sys.executable, "-c", _ENDS_WHILE_SERVING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        with ThreadPoolExecutor(3) as pool:
            begun = threading.Event()

            def note(event: torchferry.ProgressEvent) -> None:
                if event.bytes_moved:
                    begun.set()

            fetching = [pool.submit(fetch, address, timeout=20, on_progress=note) for _ in range(3)]
            assert begun.wait(10)
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.wait(10) == 0
            for each in fetching:
                with suppress(ConnectionError):
                    each.result(timeout=10)


def test_timeouts_may_be_longer_than_a_lock_can_wait() -> None:
    with serve(filled(1), version=1) as source:
        fetch(source.address)
        source.wait(1, timeout=timedelta.max)
        source.publish(filled(2), version=2, timeout=timedelta.max)
        source.withdraw(timeout=timedelta.max)


def test_a_source_that_is_not_used_is_told_so_and_keeps_no_reader() -> None:
    with serve(filled(1), version=1) as old, serve(filled(2), version=2) as new:
        assert fetch([old.address, new.address]).version == 2
        wait_until(lambda: [reader.state for reader in old.status().readers] == ["failed"], "it is not told")
        assert "not used: it serves version 1, not 2" in old.status().readers[0].reason


def test_small_tensors_of_a_live_state_may_change_if_they_are_copied() -> None:
    state = {"mean": torch.ones(8), "weight": torch.ones(MIB)}
    with torchferry.Source() as source:
        with pytest.raises(torchferry.BadArgument, match="copy_up_to"):
            source.publish(state, version=1, copy_up_to=-1)
        source.publish(state, version=1, snapshot=False, copy_up_to=1024)
        state["mean"].zero_()
        assert torchferry.fetch(source.address).state["mean"].tolist() == [1.0] * 8
        state["weight"].zero_()
        with pytest.raises(torchferry.PeerGaveUp, match="weight"):
            torchferry.fetch(source.address)
