"""One connection to an HTTP/1.1 server: it reads requests and sends the handler's responses.

Bodies are sent from the handler's memory without a copy. Over a Unix socket, a response may have the
descriptor of shared memory instead.
"""

import errno
import os
import select
import socket
import ssl
from collections.abc import Generator, Iterable
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Protocol

import h11

from torchferry.links.http import MAX_HEAD_BYTES, READ_BYTES, RING_HEADER
from torchferry.links.ring import SLOTS, Ring, address_of
from torchferry.links.shared_memory import SharedBlock

_NO_SENDFILE = frozenset({errno.ENOSYS, errno.EPERM, errno.EINVAL, errno.EOPNOTSUPP})
"""What `sendfile` fails with where a sandbox forbids it, or its kernel has none."""


@dataclass(frozen=True)
class Request:
    """A request with the right token. `connection` is the same number for all requests of a connection.

    If it is `local`, it came over the Unix socket. Otherwise it came from the address `host`.
    """

    method: str
    path: str
    body: bytes
    connection: int
    local: bool = False
    host: str = ""


@dataclass(frozen=True)
class Response:
    """An answer. Its body is `body`, or the `nbytes` bytes that `buffers` yields, each sent before the next.

    If `buffers` yields fewer than `nbytes`, the connection is closed. With `buffers` and `memory`, the same
    bytes are in `memory` from `offset` on. How the body is sent (–: the handler does not do that):

    | given               | TCP          | TLS     | Unix socket                       |
    | `body`              | bytes        | bytes   | bytes                             |
    | `body`, `memory`    | –            | –       | bytes, with the descriptor        |
    | `buffers`           | bytes        | bytes   | through a ring, if one is free    |
    | `buffers`, `memory` | sendfile     | bytes   | –                                 |
    """

    status: int
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()
    nbytes: int = 0
    buffers: Generator[memoryview, None, None] | None = None
    memory: SharedBlock | None = None
    offset: int = 0


class Handler(Protocol):
    """What a server serves. Several threads call it at the same time.

    It may have attributes `max_request_bytes`, `idle_s` and `max_connections`, which replace
    MAX_REQUEST_BYTES, IDLE_S and MAX_CONNECTIONS.
    """

    def answer(self, request: Request) -> Response:
        """Answer a request."""

    def disconnected(self, connection: int) -> None:
        """Note that a connection with the token was closed."""


@dataclass(eq=False)
class ServerConnection:
    """A connection to the server, with the parser of its requests. One thread at a time uses it."""

    number: int
    sock: socket.socket
    host: str
    port: int
    since_s: float
    handshaking: bool
    handler: Handler | None = None
    is_answering: bool = True
    is_over: bool = False
    ring: Ring | None = None
    parser: h11.Connection = field(
        default_factory=lambda: h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
    )

    @property
    def peer(self) -> str:
        """The client, for logs."""
        return f"{self.host} port {self.port}" if self.host else "a local process"

    def next_event(self) -> Any:
        """Read until the parser has an event; a closed connection is an event too."""
        while (event := self.parser.next_event()) is h11.NEED_DATA:
            self.parser.receive_data(self.sock.recv(READ_BYTES))
        return event

    def read_body(self, max_bytes: int) -> bytes:
        body = bytearray()
        while isinstance(event := self.next_event(), h11.Data):
            body += event.data
            if len(body) > max_bytes:
                raise h11.RemoteProtocolError("the body of a request is too long")
        return bytes(body)

    def _send(self, data: memoryview) -> None:
        # The timeout is for one call, so it does not pass while the client takes bytes, however slowly.
        while data:
            data = data[self.sock.send(data) :]

    def _send_file(self, descriptor: int, offset: int, data: memoryview) -> None:
        """Send `data`, which a file in memory has at `offset`. The kernel sends its pages, without a copy."""
        poll = select.poll()
        poll.register(self.sock, select.POLLOUT)
        timeout_s = self.sock.gettimeout()
        sent = 0
        while sent < len(data):
            try:
                sent += os.sendfile(self.sock.fileno(), descriptor, offset + sent, len(data) - sent)
            except BlockingIOError:
                if not poll.poll(None if timeout_s is None else timeout_s * 1e3):
                    raise TimeoutError(f"the client took no bytes for {timeout_s:g} s") from None
            except OSError as error:
                if error.errno not in _NO_SENDFILE:
                    raise
                self._send(data[sent:])
                return

    def respond(self, response: Response, *, last: bool = False) -> None:
        ring = None if response.buffers is None else self.ring
        self._send_head(response, ring, last=last)
        if response.body:
            self.parser.send_with_data_passthrough(h11.Data(data=response.body))
        if response.buffers is not None:
            with closing(response.buffers) as buffers:
                self._send_buffers(buffers, response, ring)
        self.parser.send(h11.EndOfMessage())
        if ring is not None:
            # Read all signals of the client. What it sends next is a request.
            ring.flush()

    def _send_head(self, response: Response, ring: Ring | None, *, last: bool) -> None:
        """Send the head, with `body` and a descriptor if there are any."""
        headers = [*response.headers]
        headers += [(RING_HEADER, str(SLOTS))] if ring is not None else []
        if response.status != 204:  # HTTP forbids it there
            headers.append(("Content-Length", str(response.nbytes or len(response.body))))
        headers += [("Connection", "close")] if last else []
        head = self.parser.send(h11.Response(status_code=response.status, headers=headers))
        data = (head or b"") + response.body
        passed = response.memory if response.buffers is None else ring
        if passed is not None:
            # A few hundred bytes are always sent in one call.
            socket.send_fds(self.sock, [data], [passed.descriptor])
        else:
            self._send(memoryview(data))

    def _send_buffers(self, buffers: Iterable[memoryview], response: Response, ring: Ring | None) -> None:
        """Send the buffers: through a ring, or from the pages of a file where that is possible."""
        file = None if isinstance(self.sock, ssl.SSLSocket) else response.memory
        offset = response.offset
        for buffer in buffers:
            if ring is not None:
                ring.fill(address_of(buffer), len(buffer))
            elif file is not None:
                self._send_file(file.descriptor, offset, buffer)
                offset += len(buffer)
            else:
                self._send(buffer)
            self.parser.send_with_data_passthrough(h11.Data(data=buffer))  # type: ignore[arg-type]

    def wait_for_signals(self, most: int) -> int:
        signals = self.sock.recv(most)
        if not signals:
            raise ConnectionError("the client closed the connection")
        return len(signals)
