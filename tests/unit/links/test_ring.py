"""A ring between two threads, and as the body of an HTTP response over a Unix socket."""

from __future__ import annotations

import os
import secrets
import socket
import threading
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager

import pytest

from torchferry.errors import LinkBroken
from torchferry.links.address import Address
from torchferry.links.http_client import HttpConnection, MemoryUnusable
from torchferry.links.http_server import HttpServer
from torchferry.links.ring import SLOTS, Ring, address_of
from torchferry.links.server_connection import Request, Response
from torchferry.links.shared_memory import SharedBlock, map_received
from torchferry.links.sockets import listen_locally

TOKEN = "secret-0123456789abcdef"
SLOT_BYTES = 4096


def test_a_slot_is_not_filled_again_before_it_was_copied() -> None:
    block = SharedBlock(SLOTS * SLOT_BYTES)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        waits: list[int] = []

        def wait(most: int) -> int:
            waits.append(most)
            raise TimeoutError

        ring = Ring(ours, block, wait)
        data = bytearray(SLOT_BYTES)
        for number in range(SLOTS):
            data[:] = bytes([number]) * SLOT_BYTES
            ring.fill(address_of(memoryview(data)), SLOT_BYTES)
        assert not waits
        with pytest.raises(TimeoutError):
            ring.fill(address_of(memoryview(data)), SLOT_BYTES)
        assert waits == [SLOTS], "it may read one signal for each slot, and nothing behind them"
        assert theirs.recv(100) == b"\1" * SLOTS
        assert block.tensor.view(SLOTS, -1)[:, 0].tolist() == [*range(SLOTS)]


def test_a_flush_reads_as_many_signals_as_are_due_and_no_more() -> None:
    block = SharedBlock(SLOTS * SLOT_BYTES)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ring, data = Ring(ours, block, lambda most: len(ours.recv(most))), bytearray(3)
        for _ in range(2):
            ring.fill(address_of(memoryview(data)), 3)
        theirs.sendall(b"\1\1GET")
        ring.flush()
        assert ours.recv(10) == b"GET"


def test_a_ring_that_was_stopped_copies_nothing() -> None:
    block = SharedBlock(SLOTS * SLOT_BYTES)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        descriptor = os.dup(block.descriptor)
        ring, data = Ring(ours, map_received(descriptor), lambda most: 1), bytearray(b"old")
        os.close(descriptor)
        block.tensor.fill_(7)
        ring.is_stopped = True
        with pytest.raises(ConnectionError, match="closed"):
            ring.empty(address_of(memoryview(data)), 3)
        assert data == b"old"


class Live:
    """A handler whose answer has a body of these buffers."""

    def __init__(self, buffers: list[bytes]) -> None:
        self.buffers = [bytearray(each) for each in buffers]
        self.nbytes = sum(map(len, buffers))

    def answer(self, request: Request) -> Response:
        if request.path == "/short":
            return Response(200, nbytes=self.nbytes + 1, buffers=self._all())
        return Response(200, nbytes=self.nbytes, buffers=self._all())

    def _all(self) -> Generator[memoryview, None, None]:
        for buffer in self.buffers:
            yield memoryview(buffer)

    def disconnected(self, connection: int) -> None:
        pass


@contextmanager
def connected(handler: Live) -> Iterator[HttpConnection]:
    name = secrets.token_hex(8)
    server = HttpServer([listen_locally(name)], TOKEN, handler)
    try:
        with closing(HttpConnection(Address("127.0.0.1", 1, TOKEN), None, 5.0, local=name)) as connection:
            yield connection
    finally:
        server.close()


def test_a_body_comes_through_the_ring_again_and_again() -> None:
    # More than all slots hold, less than one slot, and not a multiple of a slot.
    handler = Live([os.urandom(9 << 20), b"x", os.urandom((1 << 20) + 5)])
    with connected(handler) as connection:
        files = set()
        for _ in range(3):
            head = connection.request("GET", "/x", timeout_s=5.0)
            assert (head.status, head.nbytes, head.in_ring) == (200, handler.nbytes, True)
            files.add(os.fstat(connection._descriptors[0]).st_ino)
            assert [connection.read(len(each)) for each in handler.buffers] == [*map(bytes, handler.buffers)]
        assert len(files) == 1


def test_a_body_that_ends_early_closes_the_connection() -> None:
    handler = Live([b"x" * 100])
    with connected(handler) as connection:
        connection.request("GET", "/short", timeout_s=5.0)
        assert connection.read(100) == b"x" * 100
        with pytest.raises(LinkBroken, match="before the end"):
            connection.read(1)


def test_a_client_that_is_shut_down_stops_reading_the_ring() -> None:
    handler = Live([b"x" * (16 << 20)])
    with connected(handler) as connection:
        connection.request("GET", "/x", timeout_s=5.0)
        connection.read(1 << 20)
        # The ring is full, and nothing of it is copied after the connection was shut down.
        connection.shut_down("enough")
        with pytest.raises(LinkBroken, match="enough"):
            connection.read(16 << 20)


@pytest.mark.parametrize("answer", ["no descriptor", "not sealed", "too small"])
def test_a_ring_that_can_not_be_used_is_an_error_of_its_own(answer: str) -> None:
    name = secrets.token_hex(8)
    head = b"HTTP/1.1 200 \r\ncontent-length: 5\r\ntorchferry-ring: 8\r\n\r\n"
    listener = listen_locally(name)
    block = SharedBlock(7)
    file = os.memfd_create("open")
    os.ftruncate(file, 1 << 20)

    def serve() -> None:
        sock, _ = listener.accept()
        with sock:
            sock.recv(1 << 16)
            descriptors = {"no descriptor": [], "not sealed": [file], "too small": [block.descriptor]}[answer]
            socket.send_fds(sock, [head], descriptors)
            sock.recv(1)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        connection = HttpConnection(Address("127.0.0.1", 1, TOKEN), None, 5.0, local=name)
        with closing(connection), pytest.raises(MemoryUnusable):
            connection.request("GET", "/x", timeout_s=5.0)
    finally:
        thread.join(5.0)
        listener.close()
        os.close(file)
