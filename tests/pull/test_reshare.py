"""Receivers that take chunks from each other: who sends what, and what a dead, slow or hostile one costs."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import trustme

import torchferry
from benchmarks import hosts
from tests.faults.controller import wait_until_stopped
from tests.pull.test_security import Everything
from tests.support.children import wait_until
from tests.support.equality import assert_same
from tests.support.http_peers import Asked, connect, exchange, forwarding, request, response, status_of
from tests.support.proxy import BlackHole, Exchange, Proxy
from tests.support.pull import (
    LAYERS,
    MIB,
    PATHS,
    FetchResult,
    Resources,
    bytes_sent,
    fetch_into,
    new_state,
    old_state,
    serve_state,
)
from tests.support.solo import Solo, SoloError, Solos
from torchferry.core.pull import Grant, LeaseRequest
from torchferry.core.report import FetchReport
from torchferry.engine.pull.caller import ProgressEvent
from torchferry.engine.pull.fetch import Fetched
from torchferry.errors import BadArgument, FerryError, SourcesLost, StateMismatch
from torchferry.links.address import parse_address
from torchferry.serving import Source

LAYER_BYTES = 2 * MIB
TOTAL_BYTES = LAYERS * LAYER_BYTES
NEW = dict.fromkeys(PATHS, "new")
RATE = TOTAL_BYTES / 0.8
"""Of a source's link, so that a fetch takes long enough to do something meanwhile."""


# Receivers in this process, each in a thread.


@dataclass
class Running:
    """A fetch in a thread."""

    thread: threading.Thread
    results: list[Any] = field(default_factory=list)

    def result(self) -> Fetched:
        self.thread.join(30.0)
        assert not self.thread.is_alive()
        (found,) = self.results
        if isinstance(found, BaseException):
            raise found
        assert isinstance(found, Fetched)
        return found


def start_fetch(address: str | list[str], into: Any = None, **options: Any) -> Running:
    def run() -> None:
        try:
            running.results.append(torchferry.fetch(address, into, **options))
        except BaseException as error:
            running.results.append(error)

    options = {"via": "tcp", "reshare": True, "timeout": 20.0, **options}
    running = Running(threading.Thread(target=run, daemon=True))
    running.thread.start()
    return running


class Leased:
    """A lease on a connection that stays open. With `port`, the source names it to those that come later."""

    def __init__(self, address: str, port: int = 0) -> None:
        self.address = parse_address(address)
        self._sock = connect(self.address)
        body = msgspec.msgpack.encode(LeaseRequest("state", "test", port=port))
        self._sock.sendall(request("POST", "/v1/leases", self.address.token, body))
        self.grant = msgspec.msgpack.decode(self._sock.recv(1 << 16).partition(b"\r\n\r\n")[2])

    def __enter__(self) -> Leased:
        return self

    def __exit__(self, *_: object) -> None:
        self._sock.close()


def connections_to(port: int) -> int:
    """Count the connections to a port of this machine that are established."""
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    found = [fields[2] for fields in map(str.split, lines) if fields[3] == "01"]
    return sum(remote.endswith(f":{port:04X}") for remote in found)


def readers(source: Source) -> int:
    """Count the fetches that are open, without the leases of the test itself."""
    found = [reader.receiver for reader in source.status().readers if reader.state == "reading"]
    return len(found) - found.count("test")


def _has_readers(source: Source, count: int) -> bool:
    return readers(source) >= count


def _has_connections(port: int) -> bool:
    return connections_to(port) > 0


def peer_ports(source: Source) -> list[int]:
    """Return the ports of the receivers that a latecomer is sent to, the last first."""
    with Leased(source.address) as leased:
        return [peer["port"] for peer in leased.grant["peers"]]


class Gate:
    """Lets a proxy relay chunks only when it is open."""

    def __init__(self) -> None:
        self.is_open = threading.Event()

    def __call__(self, exchange: Exchange) -> None:
        if exchange.step == "chunks":
            exchange.hold(self.is_open)
        exchange.relay()


@contextlib.contextmanager
def gated(source: Source) -> Iterator[tuple[Proxy, Gate]]:
    """A proxy to a source that relays no chunks until its gate is opened."""
    gate = Gate()
    with Proxy(source.address, gate) as proxy:
        yield proxy, gate


def one_after_the_other(source: Source, *fetches: Callable[[str], Running]) -> list[Running]:
    """Start fetches so that each takes chunks from the one before. The first gets its chunks at the end."""
    running: list[Running] = []
    with gated(source) as (proxy, gate):
        for number, fetch in enumerate(fetches):
            asked = [*reversed(peer_ports(source))]
            running.append(fetch(proxy.address))
            wait_until(partial(_has_readers, source, number + 1), 5.0)
            for port in asked[-1:]:
                wait_until(partial(_has_connections, port), 5.0)
        gate.is_open.set()
        for each in running:
            each.thread.join(20.0)
    return running


def from_peers(got: Fetched) -> int:
    """Return how many bytes came from other receivers."""
    return sum(report.bytes for report in [*got.report.sources.values()][1:])


def overdue(report: FetchReport) -> int:
    """Count how often a receiver was given up because it was silent: on a busy machine, one may be."""
    failures = [text for each in report.sources.values() for text in each.failures]
    return sum("too slow" in text for text in failures)


STATES: dict[str, Callable[[], Any]] = {
    "large tensors": lambda: new_state(MIB)["model"],
    "many small tensors": lambda: {f"t{n}": torch.full((n % 7 + 1,), float(n)) for n in range(500)},
    "strided": lambda: {"w": torch.arange(600_000.0).view(600, 1000)[::2, ::2].t(), "b": torch.ones(3)},
    "tied": lambda: dict(zip("abc", [(shared := torch.arange(1000.0)), shared, shared[10:20]], strict=True)),
    "empty": lambda: {"w": torch.empty(0), "n": 3},
    "no tensors": lambda: {"n": 3},
}


def zeroed(state: dict[str, Any]) -> dict[str, Any]:
    for value in state.values():
        if isinstance(value, torch.Tensor):
            value.zero_()
    return state


@pytest.mark.parametrize("how", ["fresh", "in place", "atomic"])
@pytest.mark.parametrize("kind", STATES)
def test_what_comes_from_another_receiver_is_exact(kind: str, how: str) -> None:
    state = STATES[kind]()
    options: list[dict[str, Any]] = [{}, {}]
    if how != "fresh":
        options = [{"into": zeroed(STATES[kind]()), "atomic": how == "atomic"} for _ in range(2)]
    with torchferry.serve(state, 1) as source:
        if kind in ("empty", "no tensors"):
            running = [start_fetch(source.address, **each) for each in options]
        else:
            running = one_after_the_other(source, *(partial(start_fetch, **each) for each in options))
        for run in running:
            assert_same(run.result().state, state)
        got = running[1].result()
        assert got.report.bytes_moved == got.report.bytes_total
        assert from_peers(got) == got.report.bytes_total or overdue(got.report)


@pytest.mark.parametrize("atomic", [False, True])
def test_a_receiver_whose_tensors_have_other_strides_can_not_reshare_but_fetches(atomic: bool) -> None:
    state = {"w": torch.arange(1 << 20).view(1024, 1024)}
    into = {"w": torch.zeros(1024, 1024, dtype=torch.int64).t()}
    with torchferry.serve(state, 1) as source, gated(source) as (proxy, gate):
        first = start_fetch(proxy.address, into, atomic=atomic)
        wait_until(lambda: readers(source) == 1 and bool(proxy.requests[-1].chunks), 5.0)
        began_s = time.monotonic()
        second = torchferry.fetch(source.address, via="tcp", reshare=True, timeout=10)
        # Its port is closed, so the second receiver is not kept waiting.
        assert time.monotonic() < began_s + 0.9
        gate.is_open.set()
        for got in (first.result(), second):
            assert torch.equal(got.state["w"], state["w"])
        assert from_peers(second) == 0


@pytest.mark.parametrize(
    "options", [{"extra": "drop"}, {"extra": "drop", "strict": False}, {"extra": "fresh"}]
)
def test_a_receiver_that_drops_tensors_fetches_and_others_go_elsewhere(options: dict[str, Any]) -> None:
    state = new_state(MIB)["model"]
    into = {name: torch.zeros_like(tensor) for name, tensor in state.items() if name != "layer3"}
    with torchferry.serve(state, 1) as source, gated(source) as (proxy, gate):
        first = start_fetch(proxy.address, into, **options)
        wait_until(lambda: readers(source) == 1 and bool(proxy.requests[-1].chunks), 5.0)
        second = start_fetch(source.address)
        if options["extra"] == "drop":
            assert from_peers(second.result()) == 0
        gate.is_open.set()
        assert_same(second.result().state, state)
        assert torch.equal(first.result().state["layer7"], state["layer7"])


def test_chunks_that_a_receiver_had_before_are_reshared_too() -> None:
    state = new_state(MIB)["model"]
    into = {name: tensor.clone() for name, tensor in state.items()}
    into["layer3"].zero_()
    with torchferry.serve(state, 1) as source:
        fetch = partial(start_fetch, into=into, compare=True)
        first, second = (run.result() for run in one_after_the_other(source, fetch, start_fetch))
        assert first.report.bytes_moved == MIB
        assert from_peers(second) == second.report.bytes_total or overdue(second.report)
        assert_same(second.state, state)


def test_on_one_host_a_fetch_goes_through_memory_and_asks_no_other_receiver() -> None:
    state = new_state(MIB)
    with torchferry.serve(state, 1) as source, socket.create_server(("127.0.0.1", 0)) as other:
        with Leased(source.address, other.getsockname()[1]):
            got = torchferry.fetch(source.address, reshare=True, timeout=10)
        assert [report.via for report in got.report.sources.values()] == ["memory"]
        other.settimeout(0.0)
        with pytest.raises(BlockingIOError):
            other.accept()


# Arguments.


def test_reshare_needs_verification_and_with_tls_a_source() -> None:
    address = "http://127.0.0.1:1/#0123456789abcdef"
    with pytest.raises(BadArgument, match="verify=True"):
        torchferry.fetch(address, reshare=True, verify=False)
    with pytest.raises(BadArgument, match="must be a Source"):
        torchferry.fetch(address.replace("http", "https"), reshare=True)
    for wrong in (1, "yes", None):
        with pytest.raises(BadArgument, match="reshare must be"):
            torchferry.fetch(address, reshare=wrong)  # type: ignore[arg-type]
    with pytest.raises(BadArgument, match="linger"):
        torchferry.fetch(address, reshare=True, linger=-1)


# Other receivers that are not what they should be.


def wrong_bytes(asked: Asked, status: int, body: bytes) -> bytes | None:
    return response(status, bytes(len(body))) if "/chunks/" in asked.path else None


def another_root(asked: Asked, status: int, body: bytes) -> bytes | None:
    if asked.path != "/v1/leases":
        return None
    return response(status, msgspec.msgpack.encode({**msgspec.msgpack.decode(body), "root": "0" * 32}))


def another_version(asked: Asked, status: int, body: bytes) -> bytes | None:
    if asked.path != "/v1/leases":
        return None
    return response(status, msgspec.msgpack.encode({**msgspec.msgpack.decode(body), "version": 2}))


def trickle(asked: Asked, status: int, body: bytes) -> Iterator[bytes] | None:
    return _by_the_byte(response(status, body)) if "/chunks/" in asked.path else None


def trickle_from_the_start(asked: Asked, status: int, body: bytes) -> Iterator[bytes]:
    return _by_the_byte(response(status, body))


def _by_the_byte(data: bytes) -> Iterator[bytes]:
    for byte in data:
        yield bytes([byte])
        time.sleep(0.05)


def reset(asked: Asked, status: int, body: bytes) -> bytes | None:
    raise ConnectionError


def reset_chunks(asked: Asked, status: int, body: bytes) -> bytes | None:
    if "/chunks/" in asked.path:
        raise ConnectionError
    return None


def refuse_chunks(asked: Asked, status: int, body: bytes) -> bytes | None:
    return response(401) if "/chunks/" in asked.path else None


def not_a_source(asked: Asked, status: int, body: bytes) -> bytes:
    return response(200, b"<html>It works!</html>")


HOSTILE = [
    wrong_bytes,
    another_root,
    another_version,
    trickle,
    trickle_from_the_start,
    reset,
    reset_chunks,
    refuse_chunks,
    not_a_source,
]


@pytest.mark.parametrize("change", HOSTILE, ids=lambda change: change.__name__)
@pytest.mark.parametrize("count", [1, 5])
def test_a_hostile_receiver_is_given_up_within_about_a_second(change: Any, count: int) -> None:
    state = new_state(MIB)
    with torchferry.serve(state, 1, token="t" * 40) as source, contextlib.ExitStack() as stack:
        fakes = [stack.enter_context(forwarding(source.address, change)) for _ in range(count)]
        for fake in fakes:
            stack.enter_context(Leased(source.address, fake.port))
        before, began_s = Resources.now(), time.monotonic()
        got = torchferry.fetch(source.address, via="tcp", reshare=True, timeout=20)
        # One that trickles is found after a second, and so is the one in reserve.
        assert time.monotonic() < began_s + min(count, 2) + 1.5
        assert_same(got.state, state)
        assert from_peers(got) == 0
        assert got.report.confirmed
        assert before.wait_for_return() == ""
        # The source's token goes to no other receiver.
        asked = [each for fake in fakes for each in fake.asked]
        assert asked
        for each in asked:
            assert "t" * 40 not in f"{each.headers} {each.path} {each.body!r}"
            assert len(each.headers["authorization"]) == len("Bearer ") + 64


@pytest.mark.parametrize("kind", ["closed port", "silent", "black hole"])
def test_a_receiver_that_is_not_there_costs_at_most_about_a_second(kind: str) -> None:
    state = new_state(MIB)
    with torchferry.serve(state, 1) as source, contextlib.ExitStack() as stack:
        for _ in range(6):
            if kind == "black hole":
                port = parse_address(stack.enter_context(BlackHole()).address).port
            else:
                listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
                port = listener.getsockname()[1]
                if kind == "closed port":
                    listener.close()
            stack.enter_context(Leased(source.address, port))
        began_s = time.monotonic()
        got = torchferry.fetch(source.address, via="tcp", reshare=True, timeout=20)
        assert time.monotonic() < began_s + (1.0 if kind == "closed port" else 2.5)
        assert_same(got.state, state)
        assert got.report.confirmed


def test_a_receiver_is_never_sent_to_itself() -> None:
    state = new_state(MIB)
    with torchferry.serve(state, 1) as source, Source() as own:
        port = parse_address(own.address).port
        with Leased(source.address, port):
            began_s = time.monotonic()
            got = torchferry.fetch(source.address, via="tcp", reshare=own, timeout=20)
            assert time.monotonic() < began_s + 0.7
        assert len(got.report.sources) == 1


# After the fetch.


def test_tensors_may_change_when_the_fetch_has_returned() -> None:
    state = new_state(LAYER_BYTES)["model"]
    with torchferry.serve(state, 1) as source, Proxy(source.address) as slow:
        first, second = None, None
        with gated(source) as (proxy, gate):
            first = start_fetch(proxy.address)
            wait_until(lambda: readers(source) == 1, 5.0)
            (port,) = peer_ports(source)
            # The second receiver compares for a while, and then asks for chunks that were overwritten.
            second = start_fetch(slow.address)
            wait_until(lambda: connections_to(port) > 0, 5.0)
            gate.is_open.set()
            for tensor in first.result().state.values():
                tensor.fill_(-1)
        assert_same(second.result().state, state)
        assert second.result().report.bytes_moved == second.result().report.bytes_total


def test_memory_may_be_freed_when_the_fetch_has_returned(logged: Everything) -> None:
    state = new_state(LAYER_BYTES)["model"]
    with torchferry.serve(state, 1) as source, gated(source) as (proxy, gate):
        first = start_fetch(proxy.address)
        wait_until(lambda: readers(source) == 1, 5.0)
        (port,) = peer_ports(source)
        second = start_fetch(source.address)
        wait_until(lambda: connections_to(port) > 0, 5.0)
        gate.is_open.set()
        for tensor in first.result().state.values():
            tensor.untyped_storage().resize_(0)
        assert_same(second.result().state, state)
    assert not [line for line in logged.lines if "answering" in line and "failed" in line]


def test_nothing_is_left_when_all_that_take_chunks_are_done() -> None:
    state = new_state(MIB)
    with torchferry.serve(state, 1) as source:
        before = Resources.now()
        for run in one_after_the_other(source, *([partial(start_fetch, linger=60.0)] * 3)):
            assert_same(run.result().state, state)
        assert before.wait_for_return(3.0) == ""
        # Without another receiver, there is nothing to linger for.
        torchferry.fetch(source.address, via="tcp", reshare=True, linger=60.0)
        assert before.wait_for_return() == ""


def open_lease_at(port: int, token: str) -> socket.socket:
    """Open a lease at a receiver, and read no chunks."""
    sock = socket.create_connection(("127.0.0.1", port), 5.0)
    sock.sendall(request("POST", "/v1/leases", token, msgspec.msgpack.encode(LeaseRequest("state", "test"))))
    assert status_of(sock.recv(1 << 16)) == 201
    return sock


def test_a_receiver_lingers_no_longer_than_it_was_told() -> None:
    state = new_state(MIB)
    with torchferry.serve(state, 1) as source, gated(source) as (proxy, gate):
        before = Resources.now()
        run = start_fetch(proxy.address, linger=0.3)
        wait_until(lambda: readers(source) == 1, 5.0)
        with Leased(source.address) as leased:
            (peer,) = leased.grant["peers"]
            wait_until(lambda: bool(proxy.requests) and bool(proxy.requests[-1].chunks), 5.0)
            with open_lease_at(peer["port"], leased.grant["peer_token"]):
                gate.is_open.set()
                began_s = time.monotonic()
                run.result()
                assert time.monotonic() < began_s + 0.3, "lingering does not hold up the fetch"
                wait_until(lambda: _refuses(peer["port"]), 5.0)
                assert time.monotonic() > began_s + 0.25
        proxy.close()
        assert before.wait_for_return() == ""


def _refuses(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1.0).close()
    except ConnectionRefusedError:
        return True
    return False


def test_a_fetch_that_is_refused_or_fails_closes_its_port() -> None:
    state = new_state(MIB)
    with torchferry.serve(state, 1) as source:
        before = Resources.now()
        with pytest.raises(StateMismatch):
            torchferry.fetch(source.address, {"other": torch.ones(1)}, reshare=True, via="tcp")
        assert before.wait_for_return() == ""

        def fail(event: Any) -> None:
            if event.bytes_moved:
                raise ValueError("stop")

        with pytest.raises(ValueError, match="stop"):
            torchferry.fetch(source.address, reshare=True, via="tcp", on_progress=fail)
        assert before.wait_for_return() == ""
    with pytest.raises(SourcesLost):
        torchferry.fetch(source.address, reshare=True, via="tcp")
    gc.collect()
    assert before.wait_for_return() == "" or Resources.now().descriptors < before.descriptors


# A Source that reshares.


def test_a_source_reshares_at_its_port_and_neither_token_opens_what_the_other_does() -> None:
    state = new_state(MIB)["model"]
    with torchferry.serve(state, 1) as source, torchferry.serve({"own": torch.ones(3)}, 5, name="own") as own:
        port, token = parse_address(own.address).port, parse_address(own.address).token
        with gated(source) as (proxy, gate):
            run = start_fetch(proxy.address, reshare=own)
            wait_until(lambda: readers(source) == 1, 5.0)
            with Leased(source.address) as leased:
                assert leased.grant["peers"] == [{"host": "127.0.0.1", "port": port}]
                peer_token = leased.grant["peer_token"]
            wait_until(lambda: bool(proxy.requests) and bool(proxy.requests[-1].chunks), 5.0)
            wanted = {name: LeaseRequest(name, "test") for name in ("state", "own", "other")}
            for name, with_peer, with_own in (("state", 201, 404), ("own", 404, 201), ("other", 404, 404)):
                body = msgspec.msgpack.encode(wanted[name])
                for used, expected in ((peer_token, with_peer), (token, with_own)):
                    answer = exchange(own.address, request("POST", "/v1/leases", used, body))
                    assert status_of(answer) == expected, (name, expected)
            # Without a lease there are no chunks.
            with open_lease_at(port, peer_token):
                for lease in ("0" * 32, leased.grant["lease"]):
                    data = request("GET", f"/v1/leases/{lease}/chunks/0-1", peer_token)
                    assert status_of(exchange(own.address, data)) == 410
            # Nor does the token of one source open another, or that of its receivers the source itself.
            for address, used in ((source.address, peer_token), (own.address, proxy.target.token)):
                body = msgspec.msgpack.encode(wanted["state"])
                assert status_of(exchange(address, request("POST", "/v1/leases", used, body))) == 401
            gate.is_open.set()
            assert_same(run.result().state, state)
        wait_until(lambda: _status_with(own.address, peer_token) == 401, 5.0)
        # It is as usable as before.
        assert torchferry.fetch(own.address, name="own").version == 5
        own.publish({"own": torch.zeros(3)}, 6, "own")
        assert torchferry.fetch(own.address, name="own", via="tcp").version == 6


def _status_with(address: str, token: str) -> int | None:
    body = msgspec.msgpack.encode(LeaseRequest("state", "test"))
    return status_of(exchange(address, request("POST", "/v1/leases", token, body)))


def test_two_fetches_may_reshare_by_one_source_at_the_same_time() -> None:
    states = {f"s{n}": {"w": torch.full((1 << 18,), float(n))} for n in range(4)}
    with Source() as source, Source() as own:
        for name, state in states.items():
            source.publish(state, 1, name)
        for _ in range(5):
            runs = {name: start_fetch(source.address, name=name, reshare=own) for name in states}
            for name, run in runs.items():
                assert_same(run.result().state, states[name])


def test_a_source_that_listens_elsewhere_is_not_announced(logged: Everything) -> None:
    state = new_state(MIB)
    with torchferry.serve(state, 1) as source, Source("127.0.0.2") as own, gated(source) as (proxy, gate):
        run = start_fetch(proxy.address, reshare=own)
        wait_until(lambda: readers(source) == 1, 5.0)
        assert peer_ports(source) == []
        gate.is_open.set()
        assert_same(run.result().state, state)
    assert [line for line in logged.lines if "not served to other receivers" in line]


def test_with_tls_receivers_reshare_by_sources() -> None:
    state = new_state(MIB)["model"]
    authority = trustme.CA()
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(server)
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    with (
        torchferry.serve(state, 1, tls=server) as source,
        Source(tls=server) as one,
        Source(tls=server) as two,
    ):
        # The first receiver has everything, but does not end before the second.
        ended = threading.Event()

        def wait(event: ProgressEvent) -> None:
            if event.phase == "receive tensors":
                ended.wait(10.0)

        first = start_fetch(source.address, reshare=one, tls=trusting, on_progress=wait)
        wait_until(lambda: readers(source) == 1 and source.status().readers[0].bytes_sent > 0, 5.0)
        got = torchferry.fetch(source.address, reshare=two, tls=trusting, via="tcp", timeout=10)
        ended.set()
        assert from_peers(got) == got.report.bytes_total
        for each in (first.result(), got):
            assert_same(each.state, state)


# Tokens.


@pytest.fixture
def logged() -> Iterator[Everything]:
    handler = Everything()
    logger = logging.getLogger("torchferry")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)


def test_tokens_are_in_no_log_report_or_error(logged: Everything) -> None:
    state = new_state(MIB)
    with torchferry.serve(state, 1, token="t" * 40) as source:
        with Leased(source.address) as leased:
            tokens = ["t" * 40, leased.grant["peer_token"]]
        with forwarding(source.address, wrong_bytes) as fake, Leased(source.address, fake.port):
            got = torchferry.fetch(source.address, via="tcp", reshare=True, timeout=20)
        shown = [str(got.report), repr(got.report), str(source.status()), repr(source)]
        with gated(source) as (proxy, gate), Leased(source.address, 1):
            run = start_fetch(proxy.address, timeout=0.5)
            with pytest.raises(FerryError) as caught:
                run.result()
            gate.is_open.set()
        shown += [repr(caught.value), str(caught.value)]
        grant = msgspec.msgpack.decode(msgspec.msgpack.encode(leased.grant), type=Grant)
        shown += [repr(grant), str(grant)]
    assert len(logged.lines) > 5
    for text in (*shown, *logged.lines):
        assert not [token for token in tokens if token in text], text


# Receivers in processes of their own.


class Together:
    """Lets a source answer when so many receivers have asked for a lease, so that all begin at once."""

    def __init__(self, count: int) -> None:
        self._all = threading.Barrier(count)

    def __call__(self, exchange: Exchange) -> None:
        if exchange.step == "connect":
            with contextlib.suppress(threading.BrokenBarrierError):
                self._all.wait(10.0)
        exchange.relay()


@contextlib.contextmanager
def slow_link(source: Source, receivers: int) -> Iterator[Proxy]:
    """A proxy to a source with a slow link, which lets so many receivers begin at once."""
    with Proxy(source.address, Together(receivers), RATE) as proxy:
        yield proxy


def start_all(solos: Solos, count: int, addresses: list[list[str]], **options: Any) -> list[Solo]:
    """Start fetches in processes, with one list of addresses after the other."""
    found = [solos.get(f"receiver-{number}") for number in range(count)]
    for receiver in found:
        receiver.run(Resources.now)  # it has imported everything
    options = {"reshare": True, "timeout": 20.0, "via": "tcp", **options}
    for number, receiver in enumerate(found):
        given = addresses[number % len(addresses)]
        receiver.start(partial(fetch_into, given, LAYER_BYTES, **options))
    return found


def in_order(source: Source, receivers: list[Solo]) -> list[Solo]:
    """Return receivers in the order in which they began."""
    wait_until(lambda: len(source.status().readers) >= len(receivers), 10.0)
    pids = [int(reader.receiver.rpartition(":")[2]) for reader in source.status().readers]
    return sorted(receivers, key=lambda receiver: pids.index(receiver.pid))


def check_all(receivers: list[Solo]) -> list[FetchResult]:
    """Check that all fetches succeeded, and that each moved every byte once."""
    results: list[FetchResult] = [receiver.answer() for receiver in receivers]
    for result in results:
        assert result.error is None, result.error
        assert result.contents == NEW
        assert result.report is not None
        assert result.report.bytes_moved == TOTAL_BYTES
    return results


def sent_states(source: Source) -> float:
    return sum(reader.bytes_sent for reader in source.status().readers) / TOTAL_BYTES


@pytest.fixture
def served() -> Iterator[Source]:
    with torchferry.serve(new_state(LAYER_BYTES), 7) as source:
        yield source


@pytest.mark.parametrize(
    "options", [{"fresh": True}, {}, {"atomic": True}], ids=["fresh", "in place", "atomic"]
)
def test_the_link_of_a_source_carries_the_state_of_six_receivers_about_once(
    solos: Solos, served: Source, options: dict[str, Any]
) -> None:
    with slow_link(served, 6) as proxy:
        results = check_all(start_all(solos, 6, [[proxy.address]], **options))
    given_up = sum(overdue(result.report) for result in results if result.report is not None)
    assert sent_states(served) <= 1.3 + given_up
    states = [reader.state for reader in served.status().readers]
    assert states == ["confirmed"] * 6
    served.wait(7, receivers=6, timeout=1.0)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "exits"])
@pytest.mark.parametrize("which", [0, 1])
def test_a_receiver_that_dies_costs_the_others_nothing_but_time(
    solos: Solos, served: Source, which: int, how: signal.Signals
) -> None:
    with slow_link(served, 4) as proxy:
        receivers = start_all(solos, 4, [[proxy.address]])
        victim = in_order(served, receivers)[which]
        wait_until(lambda: proxy.relayed_bytes > TOTAL_BYTES / 4, 10.0)
        victim.signal(how)
        check_all([each for each in receivers if each is not victim])
        with contextlib.suppress(SoloError):
            victim.answer()
        victim.join()
    # What was there is not sent again: only the one that the source sent to is replaced.
    assert sent_states(served) <= 1.6


@pytest.mark.parametrize("which", [0, 1])
def test_a_receiver_that_is_stopped_costs_the_others_little(solos: Solos, served: Source, which: int) -> None:
    with slow_link(served, 4) as proxy:
        receivers = start_all(solos, 4, [[proxy.address]])
        victim = in_order(served, receivers)[which]
        wait_until(lambda: proxy.relayed_bytes > TOTAL_BYTES / 4, 10.0)
        victim.signal(signal.SIGSTOP)
        try:
            wait_until_stopped(victim.pid)
            for result in check_all([each for each in receivers if each is not victim]):
                # 0.8 s at the rate of the link.
                assert result.seconds < 3.0
        finally:
            victim.signal(signal.SIGCONT)
        check_all([victim])


def test_when_the_source_is_killed_the_others_finish_from_receivers_that_have_everything(
    solos: Solos,
) -> None:
    source = solos.get("doomed-source")
    address = source.run(serve_state, LAYER_BYTES)
    # The first receiver has everything, and does not end before the second.
    ended = threading.Event()

    def wait(event: ProgressEvent) -> None:
        if event.phase == "receive tensors" and event.bytes_moved == event.bytes_total:
            ended.wait(10.0)

    first = start_fetch(address, on_progress=wait)
    wait_until(lambda: source.run(bytes_sent) == TOTAL_BYTES, 10.0)
    killed: list[float] = []

    def kill(event: ProgressEvent) -> None:
        if event.bytes_moved and not killed:
            killed.append(time.monotonic())
            source.signal(signal.SIGKILL)

    got = torchferry.fetch(address, via="tcp", reshare=True, timeout=20, on_progress=kill)
    ended.set()
    assert killed
    for each in (first.result(), got):
        assert_same(each.state, new_state(LAYER_BYTES))
    assert from_peers(got) == TOTAL_BYTES
    assert not got.report.confirmed
    source.join()
    # A latecomer gets a typed error.
    with pytest.raises(SourcesLost):
        torchferry.fetch(address, via="tcp", reshare=True, timeout=5)


def test_receivers_with_two_sources_in_any_order_do_not_wait_for_each_other(solos: Solos) -> None:
    state = new_state(LAYER_BYTES)
    with torchferry.serve(state, 7) as one, torchferry.serve(state, 7) as two:
        addresses = [[one.address, two.address], [two.address, one.address]]
        for result in check_all(start_all(solos, 4, addresses)):
            assert result.seconds < 3.0


def follow(address: str, until: int) -> list[tuple[int, bool]]:
    """Fetch one version after the other into the same tensors; return each, and whether it was exact."""
    into, found, version = old_state(MIB // 4), [], 0
    while version < until:
        got = torchferry.fetch(address, into, newer_than=version, via="tcp", reshare=True, timeout=20)
        version = got.version
        same = [
            torch.equal(a, b) for a, b in zip(into["model"].values(), _version(version).values(), strict=True)
        ]
        found.append((version, all(same)))
    return found


def _version(version: int) -> dict[str, torch.Tensor]:
    return new_state(MIB // 4, version)["model"]


def test_receivers_follow_twenty_versions(solos: Solos) -> None:
    with Source() as source:
        followers = [solos.get(f"receiver-{number}") for number in range(3)]
        baselines = [follower.run(Resources.now) for follower in followers]
        for follower in followers:
            follower.start(follow, source.address, 20)
        for version in range(1, 21):
            source.publish({"model": _version(version)}, version)
            source.wait(version, receivers=3, timeout=20)
        for follower, baseline in zip(followers, baselines, strict=True):
            assert follower.answer() == [(version, True) for version in range(1, 21)]
            assert follower.run(baseline.wait_for_return) == ""


def test_ctrl_c_closes_the_port(solos: Solos, served: Source) -> None:
    with gated(served) as (proxy, _):
        receiver = solos.get("receiver-0")
        receiver.run(Resources.now)
        options: Any = {"reshare": True, "via": "tcp", "timeout": 20.0, "interruptible": True}
        receiver.start(partial(fetch_into, [proxy.address], LAYER_BYTES, **options))
        wait_until(lambda: bool(proxy.requests) and bool(proxy.requests[-1].chunks), 10.0)
        (port,) = peer_ports(served)
        receiver.signal(signal.SIGINT)
        result: FetchResult = receiver.answer()
        assert isinstance(result.error, KeyboardInterrupt)
        assert result.left == ""
        assert _refuses(port)


def _fork_while_resharing(address: str) -> tuple[list[str], int]:
    """Fork in mid-fetch; return the sockets that the child has, and its exit code."""
    found: list[tuple[list[str], int]] = []

    def fork(event: ProgressEvent) -> None:
        if event.phase != "receive tensors" or found:
            return
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            links = [
                os.readlink(f"/proc/self/fd/{fd}")
                for fd in os.listdir("/proc/self/fd")
                if fd.isdigit() and os.path.islink(f"/proc/self/fd/{fd}")
            ]
            listening = {line.split()[9] for line in Path("/proc/net/tcp").read_text().splitlines()[1:]}
            os.write(writing, "\n".join(x for x in links if x[8:-1] in listening).encode())
            os._exit(3)
        os.close(writing)
        with os.fdopen(reading) as pipe:
            text = pipe.read()
        found.append((text.split(), os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))

    torchferry.fetch(address, via="tcp", reshare=True, timeout=20, on_progress=fork)
    return found[0]


def test_a_forked_child_keeps_no_socket(solos: Solos, served: Source) -> None:
    assert solos.get("receiver-0").run(_fork_while_resharing, served.address) == ([], 3)


EXITING = """
import sys, torchferry
got = torchferry.fetch(sys.argv[1], via="tcp", reshare=True, linger=60)
print("done", flush=True)
"""


def test_lingering_does_not_delay_the_end_of_the_interpreter(served: Source) -> None:
    with gated(served) as (proxy, gate):
        process = subprocess.Popen([sys.executable, "-c", EXITING, proxy.address], stdout=subprocess.PIPE)
        with process, contextlib.ExitStack() as stack:
            assert process.stdout is not None
            wait_until(lambda: bool(proxy.requests) and bool(proxy.requests[-1].chunks), 30.0)
            leased = stack.enter_context(Leased(served.address))
            (peer,) = leased.grant["peers"]
            stack.enter_context(open_lease_at(peer["port"], leased.grant["peer_token"]))
            gate.is_open.set()
            assert process.stdout.readline() == b"done\n"
            began_s = time.monotonic()
            assert process.wait(20.0) == 0
            assert time.monotonic() < began_s + 3.0


# On hosts of their own.

HOST = """
import sys, torch, torchferry
torch.set_num_threads(1)
if sys.argv[1] == "source":
    source = torchferry.serve({"w": torch.arange(1 << 20)}, 1, host=sys.argv[2])
    print(source.address, flush=True)
else:
    print("ready", flush=True)
    address = sys.stdin.readline().strip()
    def wait(event):
        if event.phase == "receive tensors" and event.bytes_moved == event.bytes_total:
            print("has everything", flush=True)
            sys.stdin.readline()
    on_progress = wait if sys.argv[1] == "first" else None
    got = torchferry.fetch(address, reshare=True, timeout=20, on_progress=on_progress)
    assert torch.equal(got.state["w"], torch.arange(1 << 20))
    print([(peer, each.bytes) for peer, each in got.report.sources.items()], flush=True)
sys.stdin.readline()
"""


def test_receivers_listen_where_the_source_reaches_them() -> None:
    try:
        hosts.check_rights()
    except hosts.ClusterError as error:
        pytest.skip(str(error))
    with hosts.cluster(3) as machines, contextlib.ExitStack() as stack:

        def start(number: int, role: str) -> subprocess.Popen[str]:
            command = [sys.executable, "-c", HOST, role, machines[number].address]
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                preexec_fn=machines[number].enter,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        def read(process: subprocess.Popen[str]) -> str:
            assert process.stdout is not None
            return process.stdout.readline().strip()

        def write(process: subprocess.Popen[str], text: str) -> None:
            assert process.stdin is not None
            process.stdin.write(f"{text}\n")
            process.stdin.flush()

        source, first, second = start(0, "source"), start(1, "first"), start(2, "second")
        address = read(source)
        assert read(first) == read(second) == "ready"
        write(first, address)
        assert read(first) == "has everything"
        listening = subprocess.run(
            ["ip", "netns", "exec", machines[1].namespace, "cat", "/proc/net/tcp"],
            capture_output=True,
            text=True,
        )
        places = [line.split()[1] for line in listening.stdout.splitlines()[1:] if line.split()[3] == "0A"]
        own = socket.inet_aton(machines[1].address)[::-1].hex().upper()
        assert [place.partition(":")[0] for place in places] == [own]
        write(second, address)
        reports = eval(read(second))
        assert reports[0] == (f"10.0.0.1:{parse_address(address).port}", 0)
        assert reports[1][0].startswith("10.0.0.2:")
        assert reports[1][1] == 8 << 20
        write(first, "end")
        assert "8388608" in read(first)
