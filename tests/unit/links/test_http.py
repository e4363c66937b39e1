"""The HTTP link by itself, over real sockets: a server with any client, and a client with any server."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import resource
import socket
import sys
import threading
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import pytest
import torch

from tests.support.children import child, wait_until
from tests.support.http_peers import Asked, connect, exchange, read_all, request, response, serving, status_of
from torchferry.engine.source import view
from torchferry.errors import LinkBroken, LinkTimeout
from torchferry.links import http_server
from torchferry.links.address import Address, listen
from torchferry.links.http import MAX_HEAD_BYTES
from torchferry.links.http_client import HttpConnection
from torchferry.links.http_server import (
    MAX_CONNECTIONS,
    MAX_REQUEST_BYTES,
    PENDING_S,
    HttpServer,
)
from torchferry.links.server_connection import Request, Response
from torchferry.links.shared_memory import SharedBlock

TOKEN = "secret-0123456789abcdef"
MIB = 1 << 20
BIG_BYTES = 64 * MIB
OFFSET = 4099


@functools.cache
def counting() -> SharedBlock:
    """Return shared memory whose bytes differ from their neighbours."""
    block = SharedBlock(BIG_BYTES + 2 * OFFSET)
    block.tensor.copy_(torch.arange(block.nbytes, dtype=torch.int32) % 251)
    return block


@dataclass
class Echo:
    """A handler whose answer is what it was asked, except at a few paths."""

    asked: list[Request] = field(default_factory=list)
    gone: list[int] = field(default_factory=list)
    go_on: threading.Event = field(default_factory=threading.Event)

    def answer(self, request: Request) -> Response:
        self.asked.append(request)
        if request.path == "/raise":
            raise KeyError(f"not for {request.connection}")
        if request.path == "/wait":
            self.go_on.wait(10)
        if request.path == "/nothing":
            return Response(204)
        if request.path in ("/big", "/short"):
            parts = BIG_BYTES >> 20 if request.path == "/big" else 1
            return Response(200, nbytes=BIG_BYTES, buffers=self._zeros(parts))
        if request.path.startswith("/memory/"):
            sizes = [int(part) for part in request.path.split("/")[2:]]
            # The buffers hold other bytes, which show whether they are sent.
            buffers = (memoryview(bytes(size)) for size in sizes)
            return Response(200, nbytes=sum(sizes), buffers=buffers, memory=counting(), offset=OFFSET)
        return Response(200, f"{request.method} {request.path} ".encode() + request.body)

    def _zeros(self, parts: int) -> Generator[memoryview, None, None]:
        for _ in range(parts):
            yield memoryview(bytes(1 << 20))

    def disconnected(self, connection: int) -> None:
        self.gone.append(connection)


@dataclass
class Running:
    server: HttpServer
    handler: Echo
    address: Address

    def ask(self, path: str = "/x", body: bytes = b"") -> bytes:
        """Ask as an honest client does, on a new connection."""
        with contextlib.closing(HttpConnection(self.address, None, 5.0)) as connection:
            head = connection.request("GET", path, body, timeout_s=5.0)
            return connection.read(head.nbytes)


@contextlib.contextmanager
def running() -> Iterator[Running]:
    listener, handler = listen("127.0.0.1", 0), Echo()
    address = Address("127.0.0.1", listener.getsockname()[1], TOKEN)
    server = HttpServer([listener], TOKEN, handler)
    try:
        yield Running(server, handler, address)
    finally:
        handler.go_on.set()
        server.close()
        wait_until(lambda: not any(t.name.startswith("torchferry-http") for t in threading.enumerate()))


@pytest.fixture
def served() -> Iterator[Running]:
    with running() as started:
        yield started


# Requests that are valid.


def test_connections_use_cubic_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    # A connection that begins with BBR stays paced, also if it uses CUBIC later.
    used: list[bytes] = []
    connect, accept = socket.socket.connect, socket.socket.accept

    def note(sock: socket.socket) -> None:
        used.append(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0"))

    def noted_connect(sock: socket.socket, where: tuple[str, int]) -> None:
        note(sock)
        connect(sock, where)

    def noted_accept(listener: socket.socket) -> tuple[socket.socket, tuple[str, int]]:
        accepted, peer = accept(listener)
        note(accepted)
        return accepted, peer

    monkeypatch.setattr(socket.socket, "connect", noted_connect)
    monkeypatch.setattr(socket.socket, "accept", noted_accept)
    with running() as served:
        served.ask()
    assert used == [b"cubic", b"cubic"]


def test_requests_that_are_sent_ahead_are_answered_in_order() -> None:
    with running() as run, contextlib.closing(HttpConnection(run.address, None, 5.0)) as connection:
        for number in range(3):
            connection.send("GET", f"/{number}", bytes([number]) * 1000, timeout_s=5.0)
        connection.send("GET", "/big", timeout_s=5.0)
        connection.send("GET", "/last", timeout_s=5.0)
        for number in range(3):
            head = connection.read_head()
            assert connection.read(head.nbytes) == f"GET /{number} ".encode() + bytes([number]) * 1000
        assert connection.read(connection.read_head().nbytes) == bytes(BIG_BYTES)
        assert connection.read(connection.read_head().nbytes) == b"GET /last "


@pytest.mark.parametrize("sizes", [[1], [4095, 4097, 1], [BIG_BYTES], [BIG_BYTES - MIB, MIB]])
def test_bytes_that_are_in_shared_memory_are_sent_from_there(served: Running, sizes: list[int]) -> None:
    path = "/memory/" + "/".join(map(str, sizes))
    with contextlib.closing(HttpConnection(served.address, None, 5.0)) as connection:
        connection.send("GET", path, timeout_s=5.0)
        connection.send("GET", "/next", timeout_s=5.0)
        received = connection.read(connection.read_head().nbytes)
        assert received == bytes(view(counting().tensor[OFFSET : OFFSET + sum(sizes)]))
        assert connection.read(connection.read_head().nbytes) == b"GET /next "


@pytest.mark.parametrize("path", ["/big", f"/memory/{BIG_BYTES}"])
def test_a_client_that_takes_no_bytes_is_disconnected(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.setattr(http_server, "SEND_S", 0.2)
    with running() as run, contextlib.closing(HttpConnection(run.address, None, 5.0)) as connection:
        head = connection.request("GET", path, timeout_s=5.0)
        wait_until(lambda: bool(run.handler.gone))
        with pytest.raises(LinkBroken):
            connection.read(head.nbytes)
        assert run.ask() == b"GET /x "


@pytest.mark.parametrize("path", ["/big", f"/memory/{BIG_BYTES}"])
def test_a_client_that_takes_a_byte_now_and_then_is_not_disconnected(
    monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(http_server, "SEND_S", 0.4)
    with running() as run, contextlib.closing(HttpConnection(run.address, None, 5.0)) as connection:
        head = connection.request("GET", path, timeout_s=5.0)
        for _ in range(8):
            connection.read(head.nbytes // 8)
            assert not run.handler.gone
            time.sleep(0.1)
        assert connection.request("GET", "/x", timeout_s=5.0).status == 200


def test_requests_of_one_connection_have_its_number_and_are_answered_in_order(served: Running) -> None:
    with contextlib.closing(HttpConnection(served.address, None, 5.0)) as connection:
        for number in range(3):
            head = connection.request("POST", f"/{number}", b"body", timeout_s=5.0)
            assert (head.status, connection.read(head.nbytes)) == (200, f"POST /{number} body".encode())
    served.ask()
    numbers = [asked.connection for asked in served.handler.asked]
    assert numbers == [numbers[0]] * 3 + [numbers[0] + 1]
    wait_until(lambda: served.handler.gone == [numbers[0], numbers[3]])


def test_pipelined_requests_are_answered_in_order(served: Running) -> None:
    requests = [request("POST", f"/{number}", TOKEN, b"x" * number) for number in range(50)]
    answer = exchange(served.address, b"".join(requests))
    bodies = [part.rpartition(b"\r\n\r\n")[2] for part in answer.split(b"HTTP/1.1 200")[1:]]
    assert bodies == [f"POST /{number} ".encode() + b"x" * number for number in range(50)]


def test_a_chunked_body_is_read(served: Running) -> None:
    lines = ["POST /x HTTP/1.1", "Host: x", f"Authorization: Bearer {TOKEN}", "Transfer-Encoding: chunked"]
    body = b"3;name=value\r\nabc\r\n2\r\nde\r\n0\r\nTrailer: x\r\n\r\n"
    answer = exchange(served.address, "\r\n".join([*lines, "", ""]).encode() + body)
    assert answer.endswith(b"POST /x abcde")


def test_a_client_that_asks_to_close_is_answered_and_closed(served: Running) -> None:
    for data in (
        request("GET", "/x", TOKEN, b"", "Connection: close"),
        f"GET /x HTTP/1.0\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode(),
    ):
        with connect(served.address) as sock:
            sock.sendall(data)
            assert read_all(sock).endswith(b"GET /x ")


def test_a_response_without_a_body_has_no_length(served: Running) -> None:
    answer = exchange(served.address, request("POST", "/nothing", TOKEN))
    assert status_of(answer) == 204
    assert b"content-length" not in answer.lower()
    assert served.ask("/nothing") == b""


@pytest.mark.parametrize("method", ["HEAD", "OPTIONS", "TRACE", "PATCH", "NONSENSE"])
def test_any_method_is_answered_and_the_connection_lives_on(served: Running, method: str) -> None:
    answer = exchange(served.address, request(method, "/x", TOKEN) + request("GET", "/next", TOKEN))
    first, second = answer.split(b"HTTP/1.1 ")[1:]
    # A response to HEAD never has a body, so none is sent.
    assert first.endswith(b"\r\n\r\n") if method == "HEAD" else first.endswith(f"{method} /x ".encode())
    assert second.endswith(b"GET /next ")


def test_an_upgrade_is_not_made(served: Running) -> None:
    upgrade = request("GET", "/x", TOKEN, b"", "Connection: Upgrade", "Upgrade: h2c")
    assert status_of(exchange(served.address, upgrade)) == 200


# Requests that are not.

HEAD = f"POST /x HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n".encode()

MALFORMED = {
    "nothing": b"",
    "zeros": b"\0" * 100,
    "a line": b"hello\r\n\r\n",
    "a TLS hello": bytes.fromhex("16030102000100") + b"\x01" * 500,
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "HTTP/0.9": b"GET /x\r\n",
    "no host": f"GET /x HTTP/1.1\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode(),
    "two hosts": HEAD + b"Host: y\r\n\r\n",
    "a space before a colon": HEAD + b"Content-Length : 0\r\n\r\n",
    "no colon": HEAD + b"nonsense\r\n\r\n",
    "a NUL in a header": HEAD + b"X: \0\r\n\r\n",
    "a path with a space": b"GET /a b HTTP/1.1\r\nHost: x\r\n\r\n",
    "two lengths": HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nab",
    "two lengths in one": HEAD + b"Content-Length: 1, 2\r\n\r\nab",
    "a negative length": HEAD + b"Content-Length: -1\r\n\r\n",
    "a length with a sign": HEAD + b"Content-Length: +1\r\n\r\na",
    "a length that is not a number": HEAD + b"Content-Length: x\r\n\r\n",
    "a hexadecimal length": HEAD + b"Content-Length: 0x1\r\n\r\na",
    "a length of 10,000 digits": HEAD + b"Content-Length: " + b"9" * 10_000 + b"\r\n\r\n",
    "two encodings": HEAD + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: gzip\r\n\r\n",
    "an unknown encoding": HEAD + b"Transfer-Encoding: gzip\r\n\r\n",
    "a chunk without a length": HEAD + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n\r\n",
    "a negative chunk": HEAD + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n\r\n",
    "a chunk that is longer than it says": HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\nabc\r\n0\r\n\r\n",
    "a chunk of 2^64": HEAD + b"Transfer-Encoding: chunked\r\n\r\n10000000000000000\r\na",
    "a truncated head": HEAD[:-10],
    "a truncated body": HEAD + b"Content-Length: 10\r\n\r\nabc",
    "a truncated chunk": HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\nabc",
    "a head that is too long": HEAD + b"X: " + b"x" * (MAX_HEAD_BYTES + (64 << 10)) + b"\r\n\r\n",
    "too many headers": HEAD + b"X: y\r\n" * 20_000 + b"\r\n",
    "a head without an end": b"GET /" + b"x" * (1 << 20),
    "a body that is too long": HEAD + b"Content-Length: 1000000000\r\n\r\n" + b"x" * (MAX_REQUEST_BYTES + 1),
    "chunks that are too long": HEAD
    + b"Transfer-Encoding: chunked\r\n\r\n"
    + b"1000\r\n" * 1
    + (b"x" * 0x1000 + b"\r\n1000\r\n") * 17,
    "an endless chunk head": HEAD + b"Transfer-Encoding: chunked\r\n\r\n1;" + b"x" * (1 << 20),
}


@pytest.mark.parametrize("data", MALFORMED.values(), ids=list(MALFORMED))
def test_a_malformed_request_is_never_answered_with_success(served: Running, data: bytes) -> None:
    # On a new connection, and after a valid request.
    answer = exchange(served.address, data)
    assert status_of(answer) in (None, 401)
    assert served.handler.asked == []
    after = exchange(served.address, request("GET", "/first", TOKEN) + data)
    assert after.count(b"HTTP/1.1 200") == 1
    assert [asked.path for asked in served.handler.asked] == ["/first"]
    assert served.ask() == b"GET /x "


def test_the_longest_body_is_accepted_and_one_byte_more_is_not(served: Running) -> None:
    longest = b"x" * MAX_REQUEST_BYTES
    assert served.ask("/x", longest) == b"GET /x " + longest
    with pytest.raises(LinkBroken):
        served.ask("/x", longest + b"x")


def test_a_request_behind_another_needs_its_own_token(served: Running) -> None:
    # With both, the length does not count. A proxy that thinks it does would take the rest for the body.
    smuggled = request("GET", "/smuggled", None)
    body = b"0\r\n\r\n" + smuggled
    both = HEAD + f"Transfer-Encoding: chunked\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    answer = exchange(served.address, both)
    assert [status_of(b"HTTP/1.1 " + part) for part in answer.split(b"HTTP/1.1 ")[1:]] == [200, 401]
    assert [asked.path for asked in served.handler.asked] == ["/x"]


@pytest.mark.parametrize(
    "lines",
    [
        [],
        ["Authorization: Bearer"],
        ["Authorization: Bearer "],
        [f"Authorization: {TOKEN}"],
        [f"Authorization: Basic {TOKEN}"],
        [f"Authorization: Bearer {TOKEN}x"],
        [f"Authorization: Bearer {TOKEN[:-1]}"],
        [f"Authorization: Bearer {TOKEN} {TOKEN}"],
        [f"Authorization: Bearer {TOKEN}", f"Authorization: Bearer {TOKEN}"],
        [f"Authorization: Bearer {TOKEN}", "Authorization: Bearer wrong"],
        [f"X-Authorization: Bearer {TOKEN}"],
        [f"Proxy-Authorization: Bearer {TOKEN}"],
        [f"Cookie: {TOKEN}"],
    ],
)
def test_without_the_token_the_answer_is_401_and_the_end(served: Running, lines: list[str]) -> None:
    without = request("GET", "/x", None, b"", *lines)
    expected = b"HTTP/1.1 401 \r\nWWW-Authenticate: Bearer\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    assert exchange(served.address, without) == expected
    after = exchange(served.address, request("GET", "/first", TOKEN) + without + without)
    assert after.endswith(b"GET /first " + expected)
    assert [asked.path for asked in served.handler.asked] == ["/first"]


def test_no_log_has_the_token_of_a_malformed_request(
    served: Running, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    for line in (f"Authorization : Bearer {TOKEN}", f"Bearer {TOKEN}", f"Authorization: Bearer \0{TOKEN}"):
        exchange(served.address, f"GET /x HTTP/1.1\r\nHost: x\r\n{line}\r\n\r\n".encode())
        exchange(
            served.address,
            request("GET", "/x", TOKEN) + f"GET /x HTTP/1.1\r\nHost: x\r\n{line}\r\n\r\n".encode(),
        )
    wait_until(lambda: caplog.text.count("does not speak HTTP/1.1") == 6)
    assert TOKEN not in caplog.text


# Clients that are slow, silent or many.


@pytest.mark.parametrize("start", [b"GET /", HEAD + b"Content-Length: 100000\r\n\r\n"])
def test_clients_that_send_a_byte_at_a_time_do_not_hold_up_others(served: Running, start: bytes) -> None:
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(connect(served.address)) for _ in range(50)]
        for sock in slow:
            sock.sendall(start)
        for _ in range(20):
            for sock in slow:
                sock.sendall(b"x")
            began_s = time.monotonic()
            assert served.ask() == b"GET /x "
            assert time.monotonic() < began_s + 1.0


@pytest.fixture
def _many_files() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 8192
    if limits[1] != resource.RLIM_INFINITY and limits[1] < needed:
        pytest.skip(f"this process may open only {limits[1]} files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(needed, limits[0]), limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.usefixtures("_many_files")
def test_a_thousand_silent_connections_do_not_stop_others(served: Running) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(1000):
            stack.enter_context(connect(served.address))
        threads = threading.active_count()
        began_s = time.monotonic()
        assert served.ask() == b"GET /x "
        assert time.monotonic() < began_s + 1.0
        # They have no threads.
        assert threading.active_count() <= threads + 1


@pytest.mark.slow
def test_a_client_that_sends_no_request_in_time_is_closed(served: Running) -> None:
    with connect(served.address) as silent, connect(served.address) as slow:
        began_s = time.monotonic()
        silent.settimeout(2 * PENDING_S)
        slow.settimeout(0.5)
        with contextlib.suppress(ConnectionError):
            while time.monotonic() < began_s + 2 * PENDING_S:
                slow.sendall(b"x")
                with contextlib.suppress(TimeoutError):
                    assert slow.recv(1) == b""
                    break
        assert PENDING_S - 1 < time.monotonic() - began_s < PENDING_S + 2
        assert silent.recv(1) == b""
    assert served.ask() == b"GET /x "


@pytest.mark.slow
@pytest.mark.usefixtures("_many_files")
def test_connections_with_the_token_are_limited(served: Running) -> None:
    with contextlib.ExitStack() as stack:
        clients = []
        for _ in range(MAX_CONNECTIONS):
            client = stack.enter_context(connect(served.address))
            clients.append(client)
            client.sendall(request("GET", "/x", TOKEN))
            assert client.recv(1 << 16).endswith(b"GET /x ")
        assert status_of(exchange(served.address, request("GET", "/x", TOKEN))) == 503
        # Without the token, not even that is told.
        assert status_of(exchange(served.address, request("GET", "/x", "wrong"))) == 401
        clients[0].close()
        wait_until(lambda: len(served.handler.gone) == 1)
        assert served.ask() == b"GET /x "


def test_the_connections_of_each_handler_are_counted_apart(
    served: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "MAX_CONNECTIONS", 2)
    many = Echo()
    many.max_connections = 5  # type: ignore[attr-defined]
    token = "another" + TOKEN
    served.server.add_handler(token, many)
    with contextlib.ExitStack() as stack:
        for used, most in ((token, 5), (TOKEN, 2)):
            for _ in range(most):
                client = stack.enter_context(connect(served.address))
                client.sendall(request("GET", "/x", used))
                assert client.recv(1 << 16).endswith(b"GET /x ")
            assert status_of(exchange(served.address, request("GET", "/x", used))) == 503


def _serve_without_memory_for_threads(pipe: Connection) -> None:
    """Serve, but start no more threads until told to."""
    with running() as started:
        pages = int(open("/proc/self/statm").read().split()[0])  # noqa: SIM115
        threading.stack_size(256 << 20)
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (64 << 20), -1))
        pipe.send(started.address)
        pipe.recv()
        resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
        pipe.send(None)
        pipe.recv()


@pytest.mark.usefixtures("_fork_server")
def test_a_server_that_can_not_start_a_thread_goes_on() -> None:
    with child(_serve_without_memory_for_threads) as process:
        address = process.receive()
        assert exchange(address, request("GET", "/x", TOKEN)) == b""
        process.send(None)
        process.receive()
        assert exchange(address, request("GET", "/x", TOKEN)).endswith(b"GET /x ")


# Ends.


def test_a_handler_that_raises_costs_only_its_connection(
    served: Running, caplog: pytest.LogCaptureFixture
) -> None:
    assert exchange(served.address, request("GET", "/raise", TOKEN)) == b""
    wait_until(lambda: len(served.handler.gone) == 1)
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "answering 127.0.0.1" in record.getMessage()
    assert served.ask() == b"GET /x "


def test_a_response_that_ends_too_early_closes_the_connection(served: Running) -> None:
    with contextlib.closing(HttpConnection(served.address, None, 5.0)) as connection:
        head = connection.request("GET", "/short", timeout_s=5.0)
        assert head.nbytes == BIG_BYTES
        with pytest.raises(LinkBroken, match="before the end of its response"):
            connection.read(head.nbytes)


@pytest.mark.parametrize("path", ["/wait", "/big"])
@pytest.mark.parametrize("all_of_them", [False, True])
def test_a_connection_is_ended_from_another_thread(served: Running, path: str, all_of_them: bool) -> None:
    with connect(served.address) as reader, connect(served.address) as other:
        other.sendall(request("GET", "/other", TOKEN))
        assert other.recv(1 << 16).endswith(b"GET /other ")
        reader.sendall(request("GET", path, TOKEN))
        wait_until(lambda: len(served.handler.asked) == 2)
        if path == "/big":
            assert reader.recv(1)
        number = served.handler.asked[-1].connection
        if all_of_them:
            served.server.close()
        else:
            served.server.disconnect(number)
        served.server.disconnect(12345)  # unknown: nothing happens
        assert len(read_all(reader)) < BIG_BYTES
        served.handler.go_on.set()
        wait_until(lambda: number in served.handler.gone)
        if not all_of_them:
            other.sendall(request("GET", "/again", TOKEN))
            assert other.recv(1 << 16).endswith(b"GET /again ")
    if all_of_them:
        with pytest.raises(LinkBroken, match="refused"):
            served.ask()


def test_a_server_whose_start_is_interrupted_leaves_no_thread_and_no_socket(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        raise KeyboardInterrupt

    listener = listen("127.0.0.1", 0)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            HttpServer([listener], TOKEN, Echo())
    wait_until(lambda: not any(t.name.startswith("torchferry-http") for t in threading.enumerate()))
    assert listener.fileno() < 0


def test_a_server_can_be_closed_while_clients_send() -> None:
    switch_s = sys.getswitchinterval()
    # Threads take turns often, so that the server's thread may close the sockets at every possible moment.
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(400):
            listener = listen("127.0.0.1", 0)
            address = Address("127.0.0.1", listener.getsockname()[1], TOKEN)
            server = HttpServer([listener], TOKEN, Echo())
            with connect(address) as client:
                sender = threading.Thread(target=_send_until_closed, args=(client,))
                sender.start()
                server.close()
                sender.join()
    finally:
        sys.setswitchinterval(switch_s)


def _send_until_closed(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            sock.sendall(b"x")


def test_a_closed_server_can_be_closed_again(served: Running) -> None:
    served.server.stop_listening()
    served.server.close()
    served.server.close()


def test_the_child_of_a_fork_closes_its_copies_of_the_sockets(served: Running) -> None:
    with (
        connect(served.address) as guest,
        connect(served.address) as reader,
        contextlib.closing(HttpConnection(served.address, None, 5.0)) as client,
    ):
        reader.sendall(request("GET", "/x", TOKEN))
        assert reader.recv(1 << 16)
        guest.sendall(b"GET /")
        assert client.request("GET", "/x", timeout_s=5.0).status == 200
        ours = {os.fstat(sock.fileno()).st_ino for sock in (guest, reader)}
        pid = os.fork()
        if pid == 0:
            try:
                # Only those that this test opened itself are left.
                left = {os.fstat(fd).st_ino for fd in _sockets()}
                served.server.close()  # as a context manager would; it must neither wait nor raise
                os._exit(0 if ours <= left and len(left - _before) == len(ours) else 1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        # The parent's are not disturbed.
        reader.sendall(request("GET", "/y", TOKEN))
        assert reader.recv(1 << 16).endswith(b"GET /y ")
        assert client.read(7) == b"GET /x "


@pytest.fixture(autouse=True)
def _sockets_before() -> None:
    global _before
    _before = {os.fstat(fd).st_ino for fd in _sockets()}


_before: set[int] = set()


def _sockets() -> list[int]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                found.append(int(name))
    return found


# The client.

ANSWERS = {
    "nothing": b"",
    "garbage": b"\0\xff" * 100,
    "another protocol": b"SSH-2.0-OpenSSH_9.6\r\n",
    "HTTP/2": b"\0\0\x12\x04\0\0\0\0\0",
    "no status": b"HTTP/1.1 \r\n\r\n",
    "a status of 1000": b"HTTP/1.1 1000 x\r\nContent-Length: 0\r\n\r\n",
    "half a head": b"HTTP/1.1 200 OK\r\nContent-Le",
    "no length": b"HTTP/1.1 200 OK\r\n\r\nabc",
    "a negative length": b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
    "two lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
    "a length that is not a number": b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n",
    "a length of 30 digits": b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 30 + b"\r\n\r\n",
    "a chunked body": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n\r\n",
    "an unknown encoding": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\nContent-Length: 1\r\n\r\na",
    "an interim response": b"HTTP/1.1 100 Continue\r\n\r\n" + response(200),
    "an upgrade": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: h2c\r\n\r\n",
    "a head that is too long": b"HTTP/1.1 200 OK\r\nX: " + b"x" * (2 * MAX_HEAD_BYTES + (64 << 10)),
    "the token": f"HTTP/1.1 200 OK\r\nAuthorization Bearer {TOKEN}\r\n\r\n".encode(),
    "a request": request("GET", "/", TOKEN),
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=list(ANSWERS))
def test_what_is_not_a_response_with_a_length_breaks_the_link(answer: bytes) -> None:
    def respond(_: Asked) -> Iterator[bytes]:
        yield answer
        raise ConnectionError

    with serving(respond, TOKEN) as server:
        address = Address("127.0.0.1", server.port, TOKEN)
        with contextlib.closing(HttpConnection(address, None, 5.0)) as connection:
            with pytest.raises(LinkBroken) as caught:
                connection.request("GET", "/x", timeout_s=5.0)
            error: BaseException | None = caught.value
            while error is not None:
                assert TOKEN not in f"{error} {error!r}"
                error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


@pytest.mark.parametrize("status", [200, 204, 301, 302, 307, 308, 401, 404, 500, 999])
def test_every_status_is_returned_as_it_is(status: int) -> None:
    more = () if status == 204 else ("Location: http://127.0.0.1:1/",)
    with serving(lambda _: response(status, b"", *more), TOKEN) as server:
        address = Address("127.0.0.1", server.port, TOKEN)
        with contextlib.closing(HttpConnection(address, None, 5.0)) as connection:
            head = connection.request("GET", "/x", timeout_s=5.0)
            assert (head.status, head.nbytes) == (status, 0)
        assert len(server.asked) == 1


def test_a_request_has_the_token_and_the_host() -> None:
    with serving(lambda _: response(200), TOKEN) as server:
        address = Address("127.0.0.1", server.port, TOKEN)
        with contextlib.closing(HttpConnection(address, None, 5.0)) as connection:
            connection.request("POST", "/x", b"body", timeout_s=5.0)
    (asked,) = server.asked
    assert asked.headers["authorization"] == f"Bearer {TOKEN}"
    assert asked.headers["host"] == f"127.0.0.1:{server.port}"
    assert (asked.method, asked.path, asked.body) == ("POST", "/x", b"body")


@pytest.mark.parametrize(
    "answer", [b"", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nab"]
)
def test_a_server_that_stops_answering_is_a_timeout(answer: bytes) -> None:
    released = threading.Event()

    def respond(_: Asked) -> Iterator[bytes]:
        yield answer
        released.wait(10)
        raise ConnectionError

    with serving(respond, TOKEN) as server:
        address = Address("127.0.0.1", server.port, TOKEN)
        with contextlib.closing(HttpConnection(address, None, 5.0)) as connection:
            began_s = time.monotonic()
            with pytest.raises(LinkTimeout, match="the source sent nothing for"):
                connection.read(connection.request("GET", "/x", timeout_s=0.2).nbytes)
            assert 0.2 <= time.monotonic() - began_s < 1.0
        released.set()


def test_shutting_down_from_another_thread_ends_a_wait(served: Running) -> None:
    connection = HttpConnection(served.address, None, 5.0)
    timer = threading.Timer(0.1, connection.shut_down)
    timer.start()
    began_s = time.monotonic()
    with pytest.raises(LinkBroken, match="the fetch is over"):
        connection.request("GET", "/wait", timeout_s=5.0)
    assert time.monotonic() < began_s + 1.0
    timer.join()
    connection.shut_down()
    connection.close()
    connection.shut_down()


def test_a_server_that_is_not_there_breaks_the_link_at_once() -> None:
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
    for host, reason in (
        ("127.0.0.1", "refused"),
        ("no-such-host.invalid", "not known|resolution|No address"),
    ):
        with pytest.raises(LinkBroken, match=reason):
            HttpConnection(Address(host, port, TOKEN), None, 5.0)


def test_a_server_that_does_not_accept_is_a_timeout() -> None:
    # The queue of a listener that accepts nothing is full after a few connections.
    with socket.socket() as listener, contextlib.ExitStack() as stack:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        address = Address("127.0.0.1", listener.getsockname()[1], TOKEN)
        began_s = time.monotonic()

        def connect_to_many() -> None:
            while True:
                stack.enter_context(contextlib.closing(HttpConnection(address, None, 0.2)))

        with pytest.raises(LinkTimeout, match=r"could not connect within 0\.2 s"):
            connect_to_many()
        assert time.monotonic() < began_s + 2.0


def test_the_longest_timeout_is_no_problem(served: Running) -> None:
    with contextlib.closing(HttpConnection(served.address, None, 8.6e13)) as connection:
        assert connection.request("GET", "/x", timeout_s=8.6e13).status == 200


def test_a_handler_can_ask_whether_its_client_is_still_there(served: Running) -> None:
    connection = HttpConnection(served.address, None, 5.0)

    def ask() -> None:
        with pytest.raises(LinkBroken):
            connection.request("GET", "/wait", timeout_s=5)

    asking = threading.Thread(target=ask)
    asking.start()
    wait_until(lambda: served.handler.asked)
    number = served.handler.asked[0].connection
    assert served.server.is_connected(number)
    connection.shut_down()
    wait_until(lambda: not served.server.is_connected(number), 2.0)
    served.handler.go_on.set()
    asking.join()
    connection.close()
    assert not served.server.is_connected(number + 1)
