"""Peers that speak HTTP as a test says, over real sockets: a client that sends bytes, a server that does."""

from __future__ import annotations

import contextlib
import ctypes
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import h11

from torchferry.errors import LinkError
from torchferry.links.address import Address, parse_address
from torchferry.links.http_client import HttpConnection

TIMEOUT_S = 10.0


_DROP_ALL = struct.pack("HBBI", 6, 0, 0, 0)  # a BPF program: return 0
_SO_ATTACH_FILTER = 26


def lose(sock: socket.socket) -> None:
    """Let the kernel drop whatever arrives at a socket, as if the network had lost this connection."""
    program = ctypes.create_string_buffer(_DROP_ALL)
    sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(program)))


def connect(address: Address | str) -> socket.socket:
    """Connect to a server."""
    to = parse_address(address) if isinstance(address, str) else address
    return socket.create_connection((to.host, to.port), TIMEOUT_S)


def request(method: str, path: str, token: str | None, body: bytes = b"", *more: str) -> bytes:
    """Return the bytes of a request. `more` are lines of the head."""
    lines = [f"{method} {path} HTTP/1.1", "Host: x", f"Content-Length: {len(body)}", *more]
    if token is not None:
        lines.append(f"Authorization: Bearer {token}")
    return "\r\n".join([*lines, "", ""]).encode() + body


def read_all(sock: socket.socket) -> bytes:
    """Read until the server closes the connection. A reset counts as closed."""
    received = b""
    with contextlib.suppress(ConnectionError):
        while data := sock.recv(1 << 16):
            received += data
    return received


def exchange(address: Address | str, data: bytes) -> bytes:
    """Send bytes and nothing more, and return all that the server answers until it closes the connection."""
    with connect(address) as sock:
        # The server may close the connection before it has read everything.
        with contextlib.suppress(OSError):
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
        return read_all(sock)


def status_of(answer: bytes) -> int | None:
    """Return the status of the first response, or None if there is none."""
    return int(answer.split()[1]) if answer.startswith(b"HTTP/1.1 ") else None


@dataclass
class Asked:
    """A request that a server received. `connection` is the number of the connection."""

    connection: int
    method: str
    path: str
    body: bytes
    headers: dict[str, str]


Answer = Callable[[Asked], bytes | Iterator[bytes]]


@dataclass
class Server:
    """A server whose every answer is a function of the request. `asked` are the requests so far.

    The function returns bytes, which are sent as they are, or a generator of bytes. After an answer, the
    connection is used for the next request, unless the function raises ConnectionError.
    """

    token: str
    port: int
    answer: Answer
    ended: Callable[[int], None]
    asked: list[Asked] = field(default_factory=list)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}/#{self.token}"

    def serve(self, sock: socket.socket, number: int) -> None:
        with contextlib.suppress(OSError, h11.ProtocolError):
            while True:
                asked = _read_request(sock, number)
                self.asked.append(asked)
                answer = self.answer(asked)
                for data in [answer] if isinstance(answer, bytes) else answer:
                    sock.sendall(data)
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
        sock.close()
        self.ended(number)


_LENGTH = re.compile(rb"\r\ncontent-length: *([0-9]+)\r\n", re.IGNORECASE)


def read_message(sock: socket.socket) -> bytes | None:
    """Read one request with its body, and nothing of the next one; None if the connection was closed."""
    data = b""
    while b"\r\n\r\n" not in data:
        received = sock.recv(1 << 16, socket.MSG_PEEK)
        if not received:
            return None
        # All of it, or what it has of the head.
        end = (data + received).find(b"\r\n\r\n")
        data += sock.recv(len(received) if end < 0 else end + 4 - len(data))
    length = _LENGTH.search(data)
    end = data.index(b"\r\n\r\n") + 4 + (int(length[1]) if length else 0)
    while len(data) < end:
        received = sock.recv(end - len(data))
        if not received:
            return None
        data += received
    return data


def _read_request(sock: socket.socket, number: int) -> Asked:
    parser = h11.Connection(h11.SERVER)
    message = read_message(sock)
    if message is None:
        raise ConnectionError("the client closed the connection")
    parser.receive_data(message)
    head, body = None, b""
    while True:
        event = parser.next_event()
        if isinstance(event, h11.Request):
            head = event
        elif isinstance(event, h11.Data):
            body += event.data
        else:
            assert head is not None
            headers = {name.decode(): value.decode() for name, value in head.headers}
            return Asked(number, head.method.decode(), head.target.decode(), body, headers)


def response(status: int, body: bytes = b"", *more: str) -> bytes:
    """Return the bytes of a response. `more` are lines of the head."""
    return (
        "\r\n".join([f"HTTP/1.1 {status} x", f"Content-Length: {len(body)}", *more, "", ""]).encode() + body
    )


@contextlib.contextmanager
def serving(
    answer: Answer, token: str = "t" * 32, ended: Callable[[int], None] = lambda _: None
) -> Iterator[Server]:
    """Run a server. At the end, all its connections are closed and its threads have ended.

    `ended` is called with the number of each connection that ended.
    """
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    server = Server(token, listener.getsockname()[1], answer, ended)
    sockets: list[socket.socket] = []
    threads: list[threading.Thread] = []

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = listener.accept()
                sockets.append(sock)
                threads.append(threading.Thread(target=server.serve, args=(sock, len(sockets)), daemon=True))
                threads[-1].start()

    accepting = threading.Thread(target=accept, daemon=True)
    accepting.start()
    try:
        yield server
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        accepting.join()
        listener.close()
        for sock in sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join(TIMEOUT_S)
            assert not thread.is_alive(), "a thread of the server still runs"


Change = Callable[[Asked, int, bytes], "bytes | Iterator[bytes] | None"]


@contextlib.contextmanager
def forwarding(address: str, change: Change) -> Iterator[Server]:
    """Run a server that forwards every request to a source, and sends what `change` makes of its response.

    `change` is called with the request, the status and the body. If it returns None, the response is sent as
    it is. Every connection to the server has one to the source.
    """
    to = parse_address(address)
    connections: dict[int, HttpConnection] = {}

    def answer(asked: Asked) -> bytes | Iterator[bytes]:
        if asked.connection not in connections:
            connections[asked.connection] = HttpConnection(to, None, TIMEOUT_S)
        connection = connections[asked.connection]
        try:
            head = connection.request(asked.method, asked.path, asked.body, timeout_s=TIMEOUT_S)
            body = connection.read(head.nbytes)
        except LinkError as error:
            raise ConnectionError from error
        changed = change(asked, head.status, body)
        return response(head.status, body) if changed is None else changed

    def ended(number: int) -> None:
        if number in connections:
            connections.pop(number).close()

    with serving(answer, to.token, ended) as server:
        yield server
