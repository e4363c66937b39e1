"""Fetches between processes of one machine: bytes go through memory, or over TCP if that can't be."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import gc
import mmap
import os
import re
import resource
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import pytest
import torch

import torchferry
from tests.pull.local_readers import (
    LocalClient,
    LocalReader,
    bytes_of,
    passed_descriptor,
    shared_memory_of,
    unix_sockets,
)
from tests.support.children import Child, child, wait_until
from tests.support.equality import assert_same
from tests.support.http_peers import Asked, forwarding, response
from tests.support.proxy import Exchange, Proxy
from tests.support.pull import (
    LAYERS,
    PATHS,
    Resources,
    _sources,
    bytes_sent,
    close_source,
    fetch_into,
    is_idle,
    serve_state,
)
from tests.support.solo import Solos
from torchferry import fetch, serve, serving
from torchferry.core import leases
from torchferry.errors import FerryError, SourcesLost
from torchferry.links import http_server, shared_memory, sockets
from torchferry.links.address import parse_address
from torchferry.links.ring import MAX_SLOT_BYTES
from torchferry.links.shared_memory import SharedBlock

MIB = 1 << 20


def filled(value: int, nbytes: int = 4 * MIB) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((nbytes,), value, dtype=torch.uint8)}


def report_of(got: torchferry.Fetched) -> Any:
    (report,) = got.report.sources.values()
    return report


# What arrives.


def states() -> dict[str, Any]:
    base = torch.arange(600_000.0)
    return {
        "one tensor": {"w": torch.arange(MIB + 3, dtype=torch.int16)},
        "packed": {f"p{n}": torch.full((n,), n, dtype=torch.int32) for n in range(300)},
        "small and large": {
            "big": torch.arange(400_000),
            "n": 3,
            "small": [torch.ones(3), torch.zeros(2, 2)],
        },
        "empty tensors": {"e": torch.empty(0), "f": torch.empty(3, 0), "w": torch.ones(5)},
        "only empty tensors": {"e": torch.empty(0)},
        "no tensors": {"step": 3, "name": "x"},
        "nothing": {},
        "strided": {"t": torch.arange(900_000.0).reshape(900, 1000).t(), "s": base[::2], "same": base},
        "bytes": {"odd": torch.arange(MIB + 7).to(torch.uint8), "flags": torch.ones(9, dtype=torch.bool)},
    }


def zeroed(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return torch.zeros_like(state)
    if isinstance(state, dict):
        return {key: zeroed(value) for key, value in state.items()}
    return [zeroed(value) for value in state] if isinstance(state, list) else state


@pytest.mark.parametrize("snapshot", [True, False], ids=["snapshot", "live"])
@pytest.mark.parametrize("kind", states())
def test_every_kind_of_state_arrives_exactly_through_memory(kind: str, snapshot: bool) -> None:
    state = states()[kind]
    with serve(state, 1, snapshot=snapshot) as source:
        for verify in (True, False):
            fresh = fetch(source.address, via="memory", verify=verify)
            assert_same(fresh.state, state)
            assert report_of(fresh).via == ("memory" if fresh.report.bytes_moved else "")
            if kind == "strided":
                continue  # its tensors share memory, which zeros do not
            for atomic in (False, True):
                local = zeroed(state)
                got = fetch(source.address, local, via="memory", verify=verify, atomic=atomic)
                assert_same(got.state, state)
                assert got.report.confirmed
                assert report_of(got).why_tcp == ""


def test_memory_is_used_if_nothing_is_said() -> None:
    with serve(filled(3), 1) as source:
        assert report_of(fetch(source.address)).via == "memory"
        over_tcp = report_of(fetch(source.address, via="tcp"))
        assert (over_tcp.via, over_tcp.why_tcp) == ("tcp", "")
        with Proxy(source.address) as proxy:
            behind = report_of(fetch(proxy.address))
            assert behind.via == "tcp"
            assert "a proxy is in between" in behind.why_tcp


def test_a_state_that_spans_many_requests_arrives_in_another_process(solos: Solos) -> None:
    source, receiver = solos.get("source-0"), solos.get("receiver")
    address = source.run(serve_state, 4 * MIB)
    got = receiver.run(partial(fetch_into, [address], 4 * MIB, via="memory"))
    assert (got.error, got.contents, got.left) == (None, dict.fromkeys(PATHS, "new"), "")
    # status() counts what went through memory.
    assert source.run(bytes_sent) == LAYERS * 4 * MIB


def test_two_receivers_and_the_source_itself_may_fetch_at_the_same_time() -> None:
    state = {"w": torch.arange(2 * MIB)}
    with serve(state, 1) as source, ThreadPoolExecutor(3) as pool:
        fetching = [pool.submit(fetch, source.address, via="memory") for _ in range(3)]
        for each in fetching:
            assert torch.equal(each.result(20).state["w"], state["w"])
        assert {reader.bytes_sent for reader in source.status().readers} == {16 * MIB}


def test_a_later_version_is_fetched_only_where_it_differs() -> None:
    state, local = filled(1, 16 * MIB), filled(0, 16 * MIB)
    with serve(state, 1) as source:
        fetch(source.address, local, via="memory")
        state["weight"][5 * MIB] = 9
        source.publish(state, 2)
        got = fetch(source.address, local, via="memory")
        assert_same(local, state)
        assert got.report.bytes_moved == MIB


# Sources whose memory can't be used.


def assert_falls_back(address: str, state: Any, reason: str) -> None:
    """Check that a fetch uses TCP and says why, and that one that insists on memory fails."""
    before = Resources.now()
    got = fetch(address, timeout=10)
    assert_same(got.state, state)
    assert (report_of(got).via, got.report.confirmed) == ("tcp", True)
    assert re.search(reason, report_of(got).why_tcp), report_of(got).why_tcp
    with pytest.raises(SourcesLost, match=reason) as caught:
        fetch(address, timeout=10, via="memory")
    assert "memory can't be used" in str(caught.value)
    del caught, got
    assert before.wait_for_return() == ""


def test_a_source_without_a_unix_socket_is_read_over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_name: str) -> None:
        raise OSError(errno.EPERM, "no")

    monkeypatch.setattr(serving, "listen_locally", fail)
    with serve(filled(3), 1) as source:
        assert_falls_back(source.address, filled(3), "does not offer its memory")


def test_a_source_without_enough_memory_to_share_is_read_over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "_available_bytes", lambda: MIB)
    with serve(filled(3), 1) as source:
        assert_falls_back(source.address, filled(3), "does not offer its memory")


@pytest.mark.parametrize("function", ["memfd_create", "posix_fallocate"])
def test_a_source_that_can_t_share_memory_is_read_over_tcp(
    monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOMEM, "no memory")

    monkeypatch.setattr(os, function, fail)
    before = Resources.now()
    with serve(filled(3), 1) as source:
        assert_falls_back(source.address, filled(3), "does not offer its memory")
    assert before.wait_for_return() == ""


def test_chunks_of_a_live_state_come_over_the_unix_socket_if_there_is_no_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOMEM, "no memory")

    monkeypatch.setattr(os, "memfd_create", fail)
    with serve(filled(3), 1, snapshot=False) as source:
        assert_same(fetch(source.address).state, filled(3))


_CLONE_NEWNET = 0x40000000


def _serve_in_another_namespace(pipe: Connection) -> None:
    """Serve over TCP in the network namespace of the test, with the Unix socket in another one."""
    listen_locally = sockets.listen_locally

    def listen(name: str) -> Any:
        if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET):
            pipe.send(os.strerror(ctypes.get_errno()))
        return listen_locally(name)

    serving.listen_locally = listen  # type: ignore[attr-defined]
    with serve(filled(3), 1) as source:
        pipe.send(source.address)
        pipe.recv()


@pytest.mark.usefixtures("_fork_server")
def test_a_source_in_another_network_namespace_is_read_over_tcp() -> None:
    with child(_serve_in_another_namespace) as process:
        address = process.receive()
        if not address.startswith("http"):
            pytest.skip(f"no network namespace can be created: {address}")
        assert_falls_back(address, filled(3), "in another network namespace")


NOBODY = 65534


def _serve_as_nobody(pipe: Connection) -> None:
    serve(filled(3), 1).close()  # imports what this user may not read
    os.setresuid(NOBODY, NOBODY, NOBODY)
    with serve(filled(3), 1) as source:
        pipe.send(source.address)
        pipe.recv()


@pytest.mark.usefixtures("_fork_server")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_source_of_another_user_is_read_over_tcp_and_not_told_the_token() -> None:
    with child(_serve_as_nobody) as process:
        assert_falls_back(process.receive(), filled(3), f"runs as user {NOBODY}, this process as 0")


def _ask_as_nobody(pipe: Connection, address: str, name: str, path: str) -> None:
    os.setresuid(NOBODY, NOBODY, NOBODY)
    with LocalClient(name) as client:
        try:
            pipe.send(client.ask("GET", path, parse_address(address).token))
        except ConnectionError:
            pipe.send((b"", []))
    pipe.recv()


@pytest.mark.usefixtures("_fork_server")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_told_nothing_even_with_the_token_and_a_lease() -> None:
    with serve(filled(3), 1) as source, LocalReader(source) as reader:
        path = f"/v1/leases/{reader.grant.lease}/chunks/0-1"
        with child(_ask_as_nobody, source.address, reader.grant.memory, path) as process:
            assert process.receive() == (b"", [])


# Sources that lie about their memory. The proxy stands on the Unix socket, as such a source.


def _memfd(nbytes: int, seals: int | None) -> int:
    descriptor = os.memfd_create("lie", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, nbytes)
    if seals is not None:
        fcntl.fcntl(descriptor, 1033, seals)
    return descriptor


def _file() -> int:
    with tempfile.TemporaryFile() as file:
        file.truncate(4 * MIB)
        return os.dup(file.fileno())


def _pipe_end() -> int:
    reads, writes = os.pipe()
    os.close(writes)
    return reads


ALL_SEALS = 0x1 | 0x2 | 0x4 | 0x10
_sealed = partial(_memfd, 4 * MIB, ALL_SEALS)


def _at(offset: int) -> bytes:
    return msgspec.msgpack.encode({"offset": offset})


AT_0 = _at(0)

LIES: dict[str, tuple[Callable[[], int] | None, bytes, str]] = {
    "no descriptor": (None, AT_0, "sent no descriptor"),
    "not sealed": (partial(_memfd, 4 * MIB, None), AT_0, "not sealed"),
    "may shrink": (partial(_memfd, 4 * MIB, 0x1 | 0x4 | 0x10), AT_0, "not sealed"),
    "may be written": (partial(_memfd, 4 * MIB, 0x1 | 0x2 | 0x4), AT_0, "not sealed"),
    "too small": (partial(_memfd, 4096, ALL_SEALS), AT_0, "the source's memory has 4096"),
    "of no bytes": (partial(_memfd, 0, ALL_SEALS), AT_0, "the source's memory has 0"),
    "a file": (_file, AT_0, "Invalid argument"),
    "a pipe": (_pipe_end, AT_0, "Invalid argument"),
    "offset at the end": (_sealed, _at(4 * MIB), "has"),
    "offset 2**62": (_sealed, _at(2**62), "has|decoded"),
    "offset 2**63": (_sealed, _at(2**63), "decoded"),
    "offset -1": (_sealed, _at(-1), "decoded"),
    "another field": (_sealed, msgspec.msgpack.encode({"x": 1}), "decoded"),
    "not msgpack": (_sealed, b"\xc1", "decoded"),
    "nothing": (_sealed, b"", "decoded"),
    "too long": (_sealed, bytes(70_000), "decoded"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_about_memory_is_an_error_or_tcp_is_used(lie: str) -> None:
    make, body, reason = LIES[lie]

    def on_exchange(exchange: Exchange) -> None:
        if not exchange.is_local:
            exchange.relay()
            return
        descriptors = [make()] if make else []
        try:
            exchange.respond(response(202, body), descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    with serve(filled(3), 1) as source, Proxy(source.address, on_exchange, memory=True) as proxy:
        assert_falls_back(proxy.address, filled(3), reason)


def test_wrong_bytes_in_memory_are_never_delivered_as_verified() -> None:
    def on_exchange(exchange: Exchange) -> None:
        if not exchange.is_local:
            exchange.relay()
            return
        block = SharedBlock(4 * MIB)
        exchange.respond(response(202, AT_0), [block.descriptor])

    local = filled(1)
    with (
        serve(filled(3), 1) as source,
        Proxy(source.address, on_exchange, memory=True) as proxy,
        pytest.raises(FerryError, match=r"damaged|digest") as caught,
    ):
        fetch(proxy.address, local, timeout=10)
    assert isinstance(caught.value, (torchferry.Corrupted, torchferry.TargetTorn))


def test_chunks_before_a_damaged_one_in_memory_are_not_asked_for_again() -> None:
    asked: list[range] = []

    def on_exchange(exchange: Exchange) -> None:
        if not exchange.is_local:
            exchange.relay()
            return
        asked.append(exchange.chunks)
        if len(asked) > 1:
            exchange.relay()
            return
        block = SharedBlock(4 * MIB)
        block.tensor.fill_(3)
        block.tensor[2 * MIB] = 4
        exchange.respond(response(202, AT_0), [block.descriptor])

    local = filled(1)
    with serve(filled(3), 1) as source, Proxy(source.address, on_exchange, memory=True) as proxy:
        got = fetch(proxy.address, local, timeout=20)
    assert_same(local, filled(3))
    assert asked == [range(4), range(2, 4)]
    assert report_of(got).chunks == 4


def test_an_answer_in_memory_over_tcp_is_an_error_and_not_asked_for_again() -> None:
    def change(asked: Asked, _status: int, _body: bytes) -> bytes | None:
        return response(202, AT_0) if "/chunks/" in asked.path else None

    with serve(filled(3), 1) as source, forwarding(source.address, change) as server:
        for via in (None, "tcp"):
            with pytest.raises(FerryError, match="HTTP status 202"):
                fetch(server.address, timeout=5, via=via)
        assert sum("/chunks/" in asked.path for asked in server.asked) <= 4


def test_a_source_that_sends_many_descriptors_does_not_exhaust_those_of_the_receiver() -> None:
    most = 0

    def on_exchange(exchange: Exchange) -> None:
        nonlocal most
        if not exchange.is_local:
            exchange.relay()
            return
        block = SharedBlock(4 * MIB)
        for byte in response(202, AT_0, "X: " + "x" * 500):
            exchange.respond(bytes([byte]), [block.descriptor])
            most = max(most, len(os.listdir("/proc/self/fd")))

    before = len(os.listdir("/proc/self/fd"))
    with serve(filled(0), 1) as source, Proxy(source.address, on_exchange, memory=True) as proxy:
        assert_same(fetch(proxy.address, timeout=20).state, filled(0))
    # Those that are on their way belong to no process.
    assert most < before + 40


# What the Unix socket tells, and to whom.


def test_the_unix_socket_tells_nothing_without_the_token() -> None:
    with serve(filled(3), 1) as source, LocalReader(source) as reader:
        assert reader.grant.memory is not None
        path = f"/v1/leases/{reader.grant.lease}/chunks/0-1"
        for token in (None, "wrong-0123456789abcdef", reader.address.token + "x"):
            with LocalClient(reader.grant.memory) as client:
                answer, descriptors = client.ask("GET", path, token)
                assert answer.startswith(b"HTTP/1.1 401")
                assert answer.endswith(b"\r\n\r\n")
                assert descriptors == []
                assert client.sock.recv(1) == b""


def test_the_unix_socket_grants_no_lease_and_gives_nothing_but_chunks() -> None:
    with serve(filled(3), 1) as source, LocalReader(source) as reader:
        assert reader.grant.memory is not None
        wanted = msgspec.msgpack.encode({"name": "state", "receiver": "x"})
        lease = f"/v1/leases/{reader.grant.lease}"
        with LocalClient(reader.grant.memory) as client:
            for method, path, body in (
                ("POST", "/v1/leases", wanted),
                ("GET", f"{lease}/manifest", b""),
                ("GET", f"{lease}/digests", b""),
                ("POST", f"{lease}/alive", b""),
                ("POST", f"{lease}/damaged/0-1", b""),
                ("POST", f"{lease}/result", msgspec.msgpack.encode({"outcome": "confirmed"})),
                ("GET", f"{lease}/chunks/0-5", b""),
                ("GET", f"/v1/leases/{'0' * 32}/chunks/0-1", b""),
            ):
                answer, descriptors = client.ask(method, path, reader.address.token, body)
                assert int(answer.split()[1]) in (400, 404, 410), (method, path)
                assert descriptors == []
        assert [each.state for each in source.status().readers] == ["reading"]


@pytest.fixture
def _many_files() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[1] != resource.RLIM_INFINITY and limits[1] < 4096:
        pytest.skip(f"this process may open only {limits[1]} files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(4096, limits[0]), limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.usefixtures("_many_files")
def test_a_thousand_idle_local_connections_do_not_stop_an_honest_fetch() -> None:
    with serve(filled(3), 1) as source, contextlib.ExitStack() as stack:
        reader = stack.enter_context(LocalReader(source))
        assert reader.grant.memory is not None
        threads = threading.active_count()
        for _ in range(1000):
            stack.enter_context(LocalClient(reader.grant.memory))
        began_s = time.monotonic()
        assert report_of(fetch(source.address, via="memory", timeout=10)).bytes == 4 * MIB
        assert time.monotonic() < began_s + 2.0
        assert threading.active_count() <= threads + 4


# The memory of a version.


def test_a_receiver_can_not_write_to_the_memory_nor_change_its_size() -> None:
    with serve(filled(3), 1) as source, LocalReader(source) as reader:
        descriptor = passed_descriptor(reader)
        try:
            with pytest.raises(PermissionError):
                mmap.mmap(descriptor, 4 * MIB, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
            for size in (0, MIB, 8 * MIB):
                with pytest.raises(PermissionError):
                    os.ftruncate(descriptor, size)
            with pytest.raises(PermissionError):
                os.write(descriptor, b"x")
            with pytest.raises(PermissionError):
                fcntl.fcntl(descriptor, 1033, 0x8)
            # Nor through the name that /proc gives it.
            with open(f"/proc/self/fd/{descriptor}", "r+b", buffering=0) as again:
                with pytest.raises(PermissionError):
                    again.write(b"x")
                with pytest.raises(PermissionError):
                    again.truncate(0)
        finally:
            os.close(descriptor)
        assert_same(fetch(source.address).state, filled(3))


def test_memory_whose_reader_was_dropped_is_never_written_again() -> None:
    with serve(filled(1), 1) as source, LocalReader(source) as reader:
        reader.request(0, 4, 4 * MIB)
        for version in (2, 3, 4, 5):
            source.publish(filled(version), version, readers="drop", timeout=5)
        assert [each.state for each in source.status().readers] == ["dropped"]
        assert reader.shared_bytes() == bytes([1]) * 4 * MIB
        assert_same(fetch(source.address).state, filled(5))


@pytest.mark.parametrize("how", ["closed", "silent"])
def test_memory_whose_reader_was_lost_is_never_written_again(
    monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    with serve(filled(1), 1) as source, LocalReader(source) as reader:
        reader.request(0, 4, 4 * MIB)
        file = os.dup(reader.file() or -1)
        if how == "closed":
            reader.close()
        else:
            monkeypatch.setattr(leases, "LEASE_S", -1.0)
        wait_until(lambda: [each.state for each in source.status().readers] == ["lost"])
        monkeypatch.undo()
        for version in (2, 3, 4):
            source.publish(filled(version), version)
        assert bytes_of(file) == bytes([1]) * 4 * MIB
        os.close(file)


@pytest.mark.parametrize("outcome", ["confirmed", "failed", "refused"])
def test_memory_whose_readers_have_finished_is_used_again(outcome: str) -> None:
    with serve(filled(1), 1) as source:
        with LocalReader(source) as reader:
            reader.request(0, 4, 4 * MIB)
            first = reader.inode()
            assert reader.tell(outcome)
        source.publish(filled(2), 2)
        source.publish(filled(3), 3)
        with LocalReader(source) as reader:
            reader.request(0, 4, 4 * MIB)
            assert reader.inode() == first
            assert reader.read(4 * MIB) == bytes([3]) * 4 * MIB


def test_a_version_that_one_reader_finished_and_another_lost_is_not_used_again() -> None:
    with serve(filled(1), 1) as source, LocalReader(source) as slow:
        slow.request(0, 4, 4 * MIB)
        fetch(source.address)
        for version in (2, 3, 4):
            source.publish(filled(version), version, readers="drop", timeout=5)
        assert slow.shared_bytes() == bytes([1]) * 4 * MIB


def test_nothing_is_shared_any_more_when_a_source_is_closed() -> None:
    gc.collect()
    before = shared_memory_of()
    with serve(filled(1), 1) as source:
        with LocalReader(source) as reader:
            name = reader.grant.memory
            assert unix_sockets(name) > 0
        source.publish({"x": torch.ones(MIB)}, 1, name="live", snapshot=False)
        fetch(source.address)
        fetch(source.address, name="live")
        assert len(shared_memory_of()) > len(before)
    wait_until(lambda: len(shared_memory_of()) == len(before), 5.0)
    assert unix_sockets(name) == 0


# Live states.


@pytest.mark.parametrize("atomic", [False, True])
@pytest.mark.parametrize("verify", [True, False])
def test_a_live_state_that_changes_during_a_fetch_is_never_a_mixture(verify: bool, atomic: bool) -> None:
    state, local = filled(1, 64 * MIB), filled(0, 64 * MIB)

    changed = threading.Event()

    def change(event: torchferry.ProgressEvent) -> None:
        if event.bytes_moved and not changed.is_set():
            state["weight"].fill_(2)
            changed.set()

    def on_exchange(exchange: Exchange) -> None:
        # The first chunks are copied before the change, and the others afterwards.
        if exchange.is_local and 0 not in exchange.chunks:
            exchange.hold(changed)
        exchange.relay()

    with serve(state, 1, snapshot=False) as source, Proxy(source.address, on_exchange, memory=True) as proxy:
        with pytest.raises(FerryError, match="changed after it was published"):
            fetch(proxy.address, local, verify=verify, atomic=atomic, on_progress=change, timeout=20)
        assert atomic is (local["weight"].unique().tolist() == [0])
        assert any(exchange.is_local for exchange in proxy.requests)


def test_the_rings_of_live_states_are_limited_and_freed() -> None:
    state = filled(7, 64 * MIB)
    limit = http_server._MAX_RINGS
    with serve(state, 1, snapshot=False) as source, LocalReader(source) as reader:
        reader.connections += [reader.connect() for _ in range(limit + 1)]
        before = sum("/memfd:torchferry" in each for each in shared_memory_of())
        for number, connection in enumerate(reader.connections):
            reader.request(0, 8, 8 * MIB, connection)
            assert (reader.file(connection) is not None) == (number < limit)
            assert connection.read(8 * MIB) == bytes([7]) * 8 * MIB
        # The same connections use the same rings again.
        for connection in reader.connections[:limit]:
            file = reader.inode(connection)
            reader.request(8, 16, 8 * MIB, connection)
            assert reader.inode(connection) == file
            connection.read(8 * MIB)
        # One that is gone leaves room for the next.
        reader.connections.pop(0).close()

        def has_room() -> bool:
            reader.request(0, 8, 8 * MIB, reader.connections[-1])
            reader.connections[-1].read(8 * MIB)
            return reader.file(reader.connections[-1]) is not None

        wait_until(has_room, 5.0)
        for connection in reader.connections:
            connection.close()
        wait_until(lambda: len(shared_memory_of()) <= before, 5.0)


def test_a_ring_that_is_too_large_is_not_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    # The receiver would allocate all of it.
    monkeypatch.setattr(http_server, "MAX_SLOT_BYTES", 2 * MAX_SLOT_BYTES)
    with serve(filled(7), 1, snapshot=False) as source:
        got = fetch(source.address, timeout=20)
        assert_same(got.state, filled(7))
        assert report_of(got).via == "tcp"
        assert "ring has" in report_of(got).why_tcp


# Processes that die, fork, are interrupted.


def _fetch_again_and_again(pipe: Connection, address: str) -> None:
    pipe.send("begins")
    while True:
        fetch(address, via="memory", timeout=20)
        pipe.send("fetched")


@pytest.mark.parametrize(
    "snapshot", [pytest.param(True, id="snapshot"), pytest.param(False, id="live", marks=pytest.mark.slow)]
)
@pytest.mark.usefixtures("_fork_server")
def test_a_receiver_that_is_killed_at_any_moment_leaves_nothing_in_the_source(snapshot: bool) -> None:
    forkserver.ensure_running()  # it has descriptors here
    with serve(filled(3, 32 * MIB), 1, snapshot=snapshot) as source:
        before = Resources.now()
        for moment in range(3):
            with child(_fetch_again_and_again, source.address) as receiver:
                assert receiver.receive() == "begins"
                assert receiver.receive() == "fetched"
                killed = moment * 0.008
                began_s = time.monotonic()
                wait_until(lambda: time.monotonic() > began_s + killed)  # noqa: B023
                receiver.signal(signal.SIGKILL)
                receiver.wait()
            assert before.wait_for_return() == ""
            wait_until(lambda: all(each.state != "reading" for each in source.status().readers), 1.0)
        assert fetch(source.address, via="memory").report.confirmed


def _serve_until_killed(pipe: Connection, nbytes: int) -> None:
    source = serve(filled(3, nbytes), 1)
    pipe.send(source.address)
    pipe.recv()


@pytest.mark.usefixtures("_fork_server")
def test_a_source_that_is_killed_at_any_moment_leaves_nothing_in_the_receiver() -> None:
    forkserver.ensure_running()  # it has descriptors here
    before = Resources.now()
    for killed_at in (0, 16 * MIB, 48 * MIB):
        with child(_serve_until_killed, 64 * MIB) as source:
            address = source.receive()
            with LocalReader(address) as reader:
                name = reader.grant.memory
            killed: list[float] = []

            def kill(event: torchferry.ProgressEvent) -> None:
                if event.bytes_moved >= killed_at and event.phase == "receive tensors" and not killed:  # noqa: B023
                    killed.append(source.signal(signal.SIGKILL))  # noqa: B023

            local = filled(0, 64 * MIB)
            with contextlib.suppress(ConnectionError):
                got = fetch(address, local, via="memory", timeout=20, on_progress=kill)
                # All bytes were mapped and verified. Only the source does not know.
                assert torch.equal(local["weight"], filled(3, 64 * MIB)["weight"])
                assert not got.report.confirmed
            assert time.monotonic() < killed[0] + 1.0
        assert before.wait_for_return() == ""
        assert unix_sockets(name) == 0


def _kept_in_a_forked_child() -> list[str]:
    """Fork, and return which shared memory the child has."""
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writes, msgspec.json.encode(shared_memory_of()))
            os._exit(0)
        finally:
            os._exit(1)
    os.close(writes)
    with open(reads, "rb") as file:
        found: list[str] = msgspec.json.decode(file.read())
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    return found


def test_a_forked_child_of_a_source_has_none_of_its_memory() -> None:
    with serve(filled(1), 1) as source, LocalReader(source) as reader:
        source.publish(filled(2), 2)
        source.publish(filled(5), 1, name="live", snapshot=False)
        with LocalReader(source, "live") as live:
            live.request(0, 4, 4 * MIB)
            reader.request(0, 4, 4 * MIB)
            assert shared_memory_of()
            assert _kept_in_a_forked_child() == []
            assert reader.shared_bytes() == bytes([1]) * 4 * MIB
        assert_same(fetch(source.address, via="memory").state, filled(2))


def test_a_child_that_is_forked_during_a_fetch_has_none_of_the_memory() -> None:
    kept: list[list[str]] = []

    def fork(event: torchferry.ProgressEvent) -> None:
        if event.bytes_moved:
            kept.append(_kept_in_a_forked_child())

    with serve(filled(3, 64 * MIB), 1) as source:
        got = fetch(source.address, via="memory", on_progress=fork)
        assert torch.equal(got.state["weight"], filled(3, 64 * MIB)["weight"])
    assert len(kept) >= 8
    assert kept == [[]] * len(kept)


def test_a_child_that_is_forked_while_memory_is_allocated_has_none_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept: list[list[str]] = []
    allocate = os.posix_fallocate

    def fork_meanwhile(descriptor: int, offset: int, nbytes: int) -> None:
        allocate(descriptor, offset, nbytes)
        kept.append(_kept_in_a_forked_child())

    monkeypatch.setattr(os, "posix_fallocate", fork_meanwhile)
    with serve(filled(3), 1) as source:
        assert_same(fetch(source.address, via="memory").state, filled(3))
    assert kept == [[]]


@pytest.mark.parametrize("snapshot", [True, False], ids=["snapshot", "ring"])
def test_a_child_that_is_forked_when_a_descriptor_has_just_arrived_has_none_of_the_memory(
    monkeypatch: pytest.MonkeyPatch, snapshot: bool
) -> None:
    kept: list[list[str]] = []
    receive = socket.recv_fds

    def fork_afterwards(*args: Any) -> Any:
        received = receive(*args)
        if received[1]:
            kept.append(_kept_in_a_forked_child())
        return received

    monkeypatch.setattr(socket, "recv_fds", fork_afterwards)
    with serve(filled(3), 1, snapshot=snapshot) as source:
        assert_same(fetch(source.address, via="memory").state, filled(3))
    assert kept
    assert kept == [[]] * len(kept)


def _fetch_until_interrupted(pipe: Connection, address: str, options: dict[str, Any]) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    pipe.send("begins")
    try:
        fetch(address, timeout=60, **options)
    except KeyboardInterrupt:
        pipe.send((time.monotonic(), shared_memory_of()))
    pipe.recv()


def _interrupt(process: Child) -> float:
    sent_s = process.signal(signal.SIGINT)
    ended_s, left = process.receive()
    assert left == []
    return float(ended_s - sent_s)


@pytest.mark.parametrize("options", [{}, {"verify": False}])
@pytest.mark.usefixtures("_fork_server")
def test_ctrl_c_ends_a_fetch_over_memory(options: dict[str, Any]) -> None:
    waits = threading.Event()
    asked = count()

    def on_exchange(exchange: Exchange) -> None:
        if exchange.is_local and next(asked) >= 3:
            waits.set()
            exchange.hold()
        exchange.relay()

    with (
        serve(filled(3, 64 * MIB), 1) as source,
        Proxy(source.address, on_exchange, memory=True) as proxy,
        child(_fetch_until_interrupted, proxy.address, options) as receiver,
    ):
        receiver.receive()
        assert waits.wait(20)
        assert _interrupt(receiver) < 1.0
        wait_until(lambda: [reader.state for reader in source.status().readers] == ["failed"])


@pytest.mark.slow
@pytest.mark.usefixtures("_fork_server")
def test_ctrl_c_while_bytes_are_copied_ends_the_fetch() -> None:
    with (
        serve(filled(3, 512 * MIB), 1) as source,
        child(_fetch_until_interrupted, source.address, {"via": "memory"}) as receiver,
    ):
        receiver.receive()
        wait_until(lambda: any(reader.bytes_sent for reader in source.status().readers))
        assert _interrupt(receiver) < 1.0


@pytest.mark.parametrize("snapshot", [True, False], ids=["snapshot", "live"])
def test_fifty_fetches_leave_no_descriptor_and_no_mapping_on_either_side(
    solos: Solos, snapshot: bool
) -> None:
    source, receiver = solos.get("source-0"), solos.get("receiver")
    address = source.run(_serve, snapshot)
    baseline = source.run(Resources.now)
    assert receiver.run(_fetch_often, address, 50) == ""
    assert source.run(is_idle, baseline) == ""


def _serve(snapshot: bool) -> str:
    close_source()
    _sources.append(serve(filled(3), 1, snapshot=snapshot))
    return _sources[-1].address


def _fetch_often(address: str, times: int) -> str:
    fetch(address, via="memory")
    before = Resources.now()
    for _ in range(times):
        fetch(address, via="memory")
    return before.wait_for_return()
