"""Sources that answer late, or can't be reached any more, while another source or attempt succeeds."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest
import torch

import torchferry
from tests.support.children import unused_port
from tests.support.http_peers import lose
from tests.support.proxy import Exchange
from tests.support.proxy import Proxy as DetailedProxy
from tests.support.pull import MIB, contents_by_path, old_state, serve_state
from tests.support.solo import Solos
from torchferry.engine.pull import remote
from torchferry.engine.pull.connections import Connections
from torchferry.engine.pull.remote import RemoteSource
from torchferry.links import sockets
from torchferry.links.http_client import HttpConnection

Watch = Callable[[bytes], None]
"""Called with what a receiver sends, before it is forwarded."""


class Proxy:
    """Forwards connections to a source. `watch` may delay requests; `accepts` limits the connections."""

    def __init__(self, address: str, watch: Watch = lambda data: None, accepts: int | None = None) -> None:
        scheme, _, rest = address.partition("://")
        where, _, token = rest.partition("/#")
        host, _, port = where.rpartition(":")
        self._source = host, int(port)
        self._watch = watch
        self._accepts = accepts
        self._sockets = ExitStack()
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listener = self._keep(socket.create_server(("127.0.0.1", 0), backlog=0 if accepts else 64))
        self.where = self._listener.getsockname()
        self.address = f"{scheme}://127.0.0.1:{self.where[1]}/#{token}"
        self._start(self._accept)

    def close(self) -> None:
        """Close all sockets, and wait for all threads."""
        for sock in self._open:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._sockets.close()

    def _keep(self, sock: socket.socket) -> socket.socket:
        self._open.append(self._sockets.enter_context(sock))
        return sock

    def _start(self, work: Callable[..., None], *args: object) -> None:
        self._threads.append(threading.Thread(target=work, args=args))
        self._threads[-1].start()

    def _accept(self) -> None:
        accepted = 0
        with suppress(OSError):
            while self._accepts is None or accepted < self._accepts:
                client = self._keep(self._listener.accept()[0])
                accepted += 1
                if accepted == self._accepts:
                    self._fill_queue()
                server = self._keep(socket.create_connection(self._source))
                self._start(self._forward, client, server, self._watch)
                self._start(self._forward, server, client, lambda data: None)

    def _fill_queue(self) -> None:
        """Fill the queue of connections to accept, so that the kernel answers no more."""
        for _ in range(8):
            sock = self._keep(socket.socket())
            sock.settimeout(0.2)
            try:
                sock.connect(self.where)
            except TimeoutError:
                return
        raise AssertionError("the queue of the listener does not fill")

    def _forward(self, source: socket.socket, target: socket.socket, watch: Watch) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                watch(data)
                target.sendall(data)
        for sock in (source, target):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


@contextmanager
def proxy(address: str, watch: Watch = lambda data: None, accepts: int | None = None) -> Iterator[str]:
    """Return the address of a proxy."""
    running = Proxy(address, watch, accepts)
    try:
        yield running.address
    finally:
        running.close()


def test_late_metadata_is_asked_for_again_and_the_late_answer_is_not_taken_for_another() -> None:
    delays_s = [1.4, 0.4]  # the first patience is 1 s

    def delay(data: bytes) -> None:
        if b"/manifest" in data and delays_s:
            time.sleep(delays_s.pop(0))

    dead = f"http://127.0.0.1:{unused_port()}/#no-token-is-needed-here"
    state = {"w": torch.arange(1000)}
    with torchferry.serve(state, version=1) as source, proxy(source.address, delay) as address:
        got = torchferry.fetch([address, dead], timeout=20)
    assert not delays_s
    assert torch.equal(got.state["w"], state["w"])


@pytest.mark.slow
def test_a_source_that_can_not_be_reached_again_holds_no_chunks() -> None:
    """It granted a lease and sent the metadata. Then connecting takes until the deadline."""
    state = {"w": torch.arange(4 << 20)}
    with (
        torchferry.serve(state, version=1) as gone,
        torchferry.serve(state, version=1) as alive,
        proxy(gone.address, accepts=2) as address,
    ):
        got = torchferry.fetch([address, alive.address], timeout=12)
    assert torch.equal(got.state["w"], state["w"])
    assert got.report.phases_s["receive tensors"] < 3.0
    assert got.report.confirmed, "the connection that opened the lease still works"


def test_a_source_that_accepts_and_never_answers_is_a_stall() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}/#0123456789abcdef"
        began_s = time.monotonic()
        with pytest.raises(torchferry.LinkStalled):
            torchferry.fetch(address, timeout=20, stall_timeout=0.2)
        assert time.monotonic() - began_s < 5.0


@pytest.mark.parametrize("others", [0, 1])
def test_metadata_that_trickles_in_is_not_a_stall(others: int) -> None:
    """It takes longer than `stall_timeout` in all, but is never silent for so long."""
    state = {f"layer {number}": torch.zeros(4) for number in range(200)}
    with torchferry.serve(state, version=1) as source, DetailedProxy(source.address, trickle) as slow:
        dead = [f"http://127.0.0.1:{unused_port()}/#0123456789abcdef"] * others
        got = torchferry.fetch([slow.address, *dead], timeout=20, stall_timeout=0.5)
    assert len(got.state) == 200
    assert got.report.phases_s["receive metadata"] > 0.6


def test_metadata_that_stops_in_the_middle_is_a_stall() -> None:
    def stop(exchange: Exchange) -> None:
        if exchange.step != "manifest":
            exchange.relay()
            return
        exchange.send_request(exchange.request)
        exchange.receive_head()
        exchange.send_head(exchange.head)
        exchange.relay_body(100)
        exchange.hold()

    state = {f"layer {number}": torch.zeros(4) for number in range(200)}
    with torchferry.serve(state, version=1) as source, DetailedProxy(source.address, stop) as slow:
        began_s = time.monotonic()
        with pytest.raises(torchferry.LinkStalled, match="no metadata arrived"):
            torchferry.fetch(slow.address, timeout=20, stall_timeout=0.3)
        assert time.monotonic() - began_s < 5.0


def trickle(exchange: Exchange) -> None:
    """Relay the manifest in eight pieces, one every 0.1 s."""
    if exchange.step != "manifest":
        exchange.relay()
        return
    exchange.send_request(exchange.request)
    exchange.receive_head()
    exchange.send_head(exchange.head)
    piece = exchange.body_bytes // 8
    never = threading.Event()
    for _ in range(8):
        never.wait(0.1)
        exchange.relay_body(piece)
    exchange.relay_body()


def test_a_slow_source_does_not_hold_up_the_end() -> None:
    def trickle(exchange: Exchange) -> None:
        if exchange.step != "chunks":
            exchange.relay()
            return
        exchange.send_request(exchange.request)
        exchange.receive_head()
        exchange.send_head(exchange.head)
        for _ in range(exchange.body_bytes >> 17):
            exchange.relay_body(128 << 10)
            time.sleep(0.1)  # so a chunk takes 0.8 s

    state = {"w": torch.arange(8 << 20)}
    with (
        torchferry.serve(state, version=1) as fast,
        torchferry.serve(state, version=1) as other,
        DetailedProxy(other.address, trickle) as slow,
    ):
        began_s = time.monotonic()
        got = torchferry.fetch([fast.address, slow.address], timeout=60)
        took_s = time.monotonic() - began_s
        assert torch.equal(got.state["w"], state["w"])
        assert took_s < 5, "the slow source was asked for at least 8 chunks"


def test_a_source_far_away_is_told_that_its_state_was_refused() -> None:
    def delay(data: bytes) -> None:
        if b"/result" in data:
            time.sleep(0.5)

    with (
        torchferry.serve({"w": torch.zeros(3)}, version=1) as source,
        proxy(source.address, delay) as address,
        pytest.raises(torchferry.StateMismatch),
    ):
        torchferry.fetch(address, into={"w": torch.zeros(4)}, timeout=20)
    (reader,) = source.status().readers
    assert reader.state == "refused"
    assert "shape" in reader.reason


def test_a_failed_fetch_waits_once_for_a_source_that_does_not_take_its_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(RemoteSource, "tell", lambda *_: time.sleep(5))
    monkeypatch.setattr("torchferry.engine.pull.fetch._REFUSED_S", 1.0)
    monkeypatch.setattr("torchferry.engine.pull.sources._TELL_S", 1.0)
    with torchferry.serve({"w": torch.zeros(3)}, version=1) as source:
        began_s = time.monotonic()
        with pytest.raises(torchferry.StateMismatch):
            torchferry.fetch(source.address, into={"w": torch.zeros(4)})
        assert time.monotonic() - began_s < 1.7


def test_connections_that_the_network_lost_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A firewall that is restarted, for example, forgets all of them. The lease stays open."""
    monkeypatch.setattr(sockets, "LOST_S", 2)
    monkeypatch.setattr(sockets, "SERVER_LOST_S", 10)
    # With two lanes, the one that is silent first connects again because of the other.
    monkeypatch.setattr(remote, "MAX_LANES", 1)
    lost: list[socket.socket] = []
    opened: list[HttpConnection] = []
    add = Connections._add

    def note(self: Connections, connection: HttpConnection) -> None:
        opened.append(connection)
        add(self, connection)

    def lose_all(event: torchferry.ProgressEvent) -> None:
        if event.bytes_moved and not lost:
            lost.extend([each._sock for each in opened])
            lost.extend([each.sock for each in source._server._admitted.values()])
            for sock in lost:
                lose(sock)

    monkeypatch.setattr(Connections, "_add", note)
    state = {"w": torch.arange(64 << 20, dtype=torch.uint8)}
    local = {"w": torch.zeros_like(state["w"])}
    with torchferry.serve(state, version=1) as source:
        got = torchferry.fetch(source.address, local, via="tcp", timeout=30, on_progress=lose_all)
        assert torch.equal(local["w"], state["w"])
        (report,) = got.report.sources.values()
        assert any("acknowledged nothing for 2 s" in failure for failure in report.failures)
        assert got.report.seconds < 10
        assert got.report.confirmed
        assert [reader.state for reader in source.status().readers] == ["confirmed"]


def test_a_source_that_is_stopped_for_longer_is_not_lost(
    solos: Solos, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "LOST_S", 1)
    monkeypatch.setattr(remote, "MAX_LANES", 1)
    source = solos.get("source-0")
    address = source.run(serve_state, 8 * MIB)
    local = old_state(8 * MIB)
    stopped: list[threading.Timer] = []

    def stop(event: torchferry.ProgressEvent) -> None:
        if event.bytes_moved and not stopped:
            source.signal(signal.SIGSTOP)
            stopped.append(threading.Timer(4.0, source.signal, [signal.SIGCONT]))
            stopped[0].start()

    got = torchferry.fetch(address, local, via="tcp", timeout=30, on_progress=stop)
    assert got.report.seconds > 3.5
    assert {*contents_by_path(local, 8 * MIB).values()} == {"new"}
    (report,) = got.report.sources.values()
    assert report.failures == []
