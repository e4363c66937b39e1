"""Unix sockets between processes of one user, and the server that listens there."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest

from tests.support.children import wait_until
from tests.support.http_peers import connect, lose, request
from tests.support.proxy import BlackHole
from torchferry.errors import LinkBroken, LinkTimeout
from torchferry.links import sockets
from torchferry.links.address import Address, listen, parse_address
from torchferry.links.http_client import HttpConnection, Unreachable
from torchferry.links.http_server import HttpServer
from torchferry.links.server_connection import Request, Response
from torchferry.links.shared_memory import SharedBlock

TOKEN = "secret-0123456789abcdef"


@pytest.fixture
def name() -> str:
    return secrets.token_hex(16)


def test_a_listener_is_found_by_its_name_and_leaves_no_file(name: str) -> None:
    with sockets.listen_locally(name) as listener, socket.socket(socket.AF_UNIX) as client:
        sockets.connect_locally(client, name)
        accepted, _ = listener.accept()
        with accepted:
            assert sockets.user_of(accepted) == sockets.user_of(client) == os.geteuid()
        assert listener.getsockname() == f"\0torchferry-{name}".encode()
    with socket.socket(socket.AF_UNIX) as late, pytest.raises(ConnectionError, match="on another host"):
        sockets.connect_locally(late, name)


def test_a_name_can_be_taken_once(name: str) -> None:
    with sockets.listen_locally(name), pytest.raises(OSError, match="in use"):
        sockets.listen_locally(name)
    sockets.listen_locally(name).close()


def test_a_listener_of_another_user_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "user_of", lambda _: 12345)
    with (
        sockets.listen_locally(name),
        socket.socket(socket.AF_UNIX) as client,
        pytest.raises(ConnectionError, match="runs as user 12345, this process as"),
    ):
        sockets.connect_locally(client, name)


@dataclass
class Sharing:
    """A handler that answers with memory, and takes as long as the test says."""

    go_on: threading.Event = field(default_factory=threading.Event)
    asked: list[Request] = field(default_factory=list)
    answered: list[float] = field(default_factory=list)
    block: SharedBlock = field(default_factory=lambda: SharedBlock(1 << 20))

    def answer(self, request: Request) -> Response:
        self.asked.append(request)
        if request.path == "/slow":
            self.go_on.wait(10)
        self.answered.append(time.monotonic())
        return Response(202, b"body", memory=self.block) if request.local else Response(200, b"plain")

    def disconnected(self, connection: int) -> None:
        pass


@dataclass
class Running:
    server: HttpServer
    handler: Sharing
    address: Address
    name: str

    def connect(self) -> contextlib.closing[HttpConnection]:
        return contextlib.closing(HttpConnection(self.address, None, 5.0, local=self.name))


@pytest.fixture
def served(name: str) -> Iterator[Running]:
    listener, handler = listen("127.0.0.1", 0), Sharing()
    address = Address("127.0.0.1", listener.getsockname()[1], TOKEN)
    server = HttpServer([listener, sockets.listen_locally(name)], TOKEN, handler)
    try:
        yield Running(server, handler, address, name)
    finally:
        handler.go_on.set()
        server.close()


def test_a_local_response_has_the_memory(served: Running) -> None:
    served.handler.block.tensor.fill_(4)
    with served.connect() as connection:
        for offset in (0, 100):
            head = connection.request("GET", "/x", timeout_s=5.0)
            assert (head.status, connection.read(head.nbytes)) == (202, b"body")
            connection.use_memory(offset, 1000)
            assert connection.read(1000) == bytes([4]) * 1000
    assert all(asked.local for asked in served.handler.asked)


def test_a_request_over_tcp_is_not_local(served: Running) -> None:
    with contextlib.closing(HttpConnection(served.address, None, 5.0)) as connection:
        head = connection.request("GET", "/x", timeout_s=5.0)
        assert connection.read(head.nbytes) == b"plain"
        with pytest.raises(OSError, match="sent no descriptor"):
            connection.use_memory(0, 1)
    assert [asked.local for asked in served.handler.asked] == [False]


def test_a_descriptor_that_is_not_used_is_closed_with_the_next_request_and_with_the_connection(
    served: Running,
) -> None:
    with served.connect() as connection:
        head = connection.request("GET", "/x", timeout_s=5.0)
        connection.read(head.nbytes)
        with_one = len(os.listdir("/proc/self/fd"))
        for _ in range(5):
            head = connection.request("GET", "/x", timeout_s=5.0)
            connection.read(head.nbytes)
            assert len(os.listdir("/proc/self/fd")) == with_one
        (descriptor,) = connection._descriptors
        is_memory = "memfd:torchferry" in os.readlink(f"/proc/self/fd/{descriptor}")
        connection.close()
        assert is_memory
        assert connection._descriptors == []


def test_memory_that_is_too_small_is_refused(served: Running) -> None:
    with served.connect() as connection:
        for offset, nbytes in ((0, (1 << 20) + 1), (1 << 20, 1), (2**62, 1)):
            head = connection.request("GET", "/x", timeout_s=5.0)
            connection.read(head.nbytes)
            with pytest.raises(OSError, match="memory has 1048576"):
                connection.use_memory(offset, nbytes)


def test_a_connection_of_another_user_is_closed_unheard(
    served: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        monkeypatch.setattr(sockets, "user_of", lambda _: 12345)
        client.connect(f"\0torchferry-{served.name}")
        client.settimeout(5.0)
        assert client.recv(1) == b""
    assert served.handler.asked == []


def test_a_server_that_is_closed_waits_for_an_answer_to_a_local_client(served: Running) -> None:
    """It may be a copy of a part of the state, which must not be read any more afterwards."""
    with served.connect() as connection:

        def ask() -> None:
            with contextlib.suppress(LinkBroken):
                connection.request("GET", "/slow", timeout_s=5.0)

        asking = threading.Thread(target=ask)
        asking.start()
        wait_until(lambda: served.handler.asked)
        timer = threading.Timer(0.1, served.handler.go_on.set)
        timer.start()
        served.server.close(finish_s=0.0)
        assert served.handler.answered
        asking.join()
        timer.join()


@pytest.fixture
def quickly_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "LOST_S", 2)
    monkeypatch.setattr(sockets, "SERVER_LOST_S", 2)


@pytest.mark.usefixtures("quickly_lost")
@pytest.mark.parametrize("end", ["client", "server"])
def test_a_client_gives_up_a_connection_whose_packets_are_not_acknowledged(end: str) -> None:
    """Probes of the silent connection are not, or the request itself is not."""
    with listen("127.0.0.1", 0) as listener:
        address = Address("127.0.0.1", listener.getsockname()[1], TOKEN)
        with contextlib.closing(HttpConnection(address, None, 30.0)) as connection:
            accepted, _ = listener.accept()
            with accepted:
                lose(connection._sock if end == "client" else accepted)
                connection.send("GET", "/x", timeout_s=30.0)
                began_s = time.monotonic()
                with pytest.raises(LinkBroken, match="has acknowledged nothing for 2 s"):
                    connection.read_head()
                assert time.monotonic() - began_s < 6.0


@pytest.mark.usefixtures("quickly_lost")
def test_a_client_gives_up_an_address_at_which_no_machine_answers() -> None:
    with BlackHole() as hole:
        began_s = time.monotonic()
        with pytest.raises(Unreachable, match="its machine has not answered for 2 s"):
            HttpConnection(parse_address(hole.address), None, 30.0)
        assert 2.0 <= time.monotonic() - began_s < 4.0
        with pytest.raises(LinkTimeout, match=r"could not connect within 0\.5 s"):
            HttpConnection(parse_address(hole.address), None, 0.5)


@pytest.mark.usefixtures("quickly_lost")
def test_a_client_waits_for_a_server_that_is_stopped_and_whose_buffers_are_full() -> None:
    body = bytes(8 << 20)

    def read_late(listener: socket.socket) -> None:
        accepted, _ = listener.accept()
        with accepted:
            time.sleep(5.0)
            left = len(body)
            while left > 0:
                left -= len(accepted.recv(1 << 20))
            accepted.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
            accepted.recv(1)

    with listen("127.0.0.1", 0) as listener, ThreadPoolExecutor(1) as pool:
        address = Address("127.0.0.1", listener.getsockname()[1], TOKEN)
        reading = pool.submit(read_late, listener)
        with contextlib.closing(HttpConnection(address, None, 30.0)) as connection:
            assert connection.request("POST", "/x", body, timeout_s=30.0).status == 200
        reading.result()


@dataclass
class Ending(Sharing):
    """A handler that knows when a connection has ended."""

    ended: threading.Event = field(default_factory=threading.Event)

    def disconnected(self, connection: int) -> None:
        self.ended.set()


@pytest.mark.usefixtures("quickly_lost")
@pytest.mark.parametrize("path", ["/x", "/slow"], ids=["while it is silent", "while it is answered"])
def test_a_server_closes_the_connection_of_a_client_that_is_lost(path: str) -> None:
    listener, handler = listen("127.0.0.1", 0), Ending()
    address = Address("127.0.0.1", listener.getsockname()[1], TOKEN)
    # This client does not probe the connection itself.
    with contextlib.closing(HttpServer([listener], TOKEN, handler)), connect(address) as client:
        client.sendall(request("GET", path, TOKEN))
        wait_until(lambda: handler.asked, 5.0)
        if path == "/x":
            assert client.recv(1000).endswith(b"plain")
        assert not handler.ended.wait(1.0)
        lose(client)
        handler.go_on.set()
        assert handler.ended.wait(12.0)


@pytest.mark.usefixtures("quickly_lost")
def test_a_server_waits_for_a_client_that_is_stopped() -> None:
    class Long(Ending):
        def answer(self, request: Request) -> Response:
            return Response(200, bytes(32 << 20))

    listener, handler = listen("127.0.0.1", 0), Long()
    address = Address("127.0.0.1", listener.getsockname()[1], TOKEN)
    with contextlib.closing(HttpServer([listener], TOKEN, handler)), connect(address) as client:
        client.sendall(request("GET", "/x", TOKEN))
        assert not handler.ended.wait(7.0)
        received = 0
        while received < 32 << 20:
            received += len(client.recv(1 << 20))
