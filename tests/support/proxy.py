"""A proxy between a receiver and a source that knows HTTP well enough to damage a chosen exchange.

Every request of the receiver becomes an `Exchange`, which a test may relay in parts, change, or break. By
default it is relayed as it is. If one side ends its connection, the proxy ends the other.

With `memory`, the proxy also stands between them on the Unix socket: it changes grants, so that the receiver
takes the proxy for a source on the same machine, and relays the descriptors of memory.
"""

from __future__ import annotations

import mmap
import os
import re
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from types import TracebackType
from typing import Self

import msgspec
import torch

from tests.support.http_peers import read_message
from torchferry.links import sockets
from torchferry.links.address import Address, parse_address
from torchferry.links.http import RING_HEADER
from torchferry.links.ring import MAX_SLOT_BYTES
from torchferry.links.shared_memory import SharedBlock, close_all

_PIECE_BYTES = 64 << 10
_CHUNKS = re.compile(r"/chunks/(\d+)-(\d+)$")
_LENGTH = re.compile(rb"(?i)(content-length: *)(\d+)")


class Ended(Exception):
    """The connection of an exchange is to be closed, or was closed by a peer."""


class Exchange:
    """One request, which was read, and its response, which is read by the methods."""

    def __init__(self, proxy: Proxy, client: socket.socket, server: socket.socket, request: bytes) -> None:
        self._proxy, self._client, self._server = proxy, client, server
        self.request = request
        self.method, self.path = request.split(b"\r\n", 1)[0].decode("ascii").split()[:2]
        self.head = b""
        """The head of the response, once it was received."""
        self.is_local = client.family == socket.AF_UNIX
        self._descriptors: list[int] = []
        self._left_bytes = 0

    @property
    def step(self) -> str:
        """The step of the protocol: connect, manifest, digests, chunks, damaged or confirm."""
        if self.path == "/v1/leases":
            return "connect"
        name = self.path.split("/")[4]
        return "confirm" if name == "result" else name

    @property
    def connection(self) -> socket.socket:
        """The connection of the receiver."""
        return self._client

    @property
    def chunks(self) -> range:
        """The chunks that are asked for."""
        found = _CHUNKS.search(self.path)
        return range(int(found[1]), int(found[2])) if found else range(0)

    def relay(self) -> None:
        """Relay the request and the response."""
        self.send_request(self.request)
        self.receive_head()
        if self.step == "connect" and self._proxy.local_name is not None:
            self._relay_grant(self._proxy.local_name)
            return
        self.send_head(self.head)
        self.relay_body()

    def _relay_grant(self, local_name: str) -> None:
        """Relay a grant that names the proxy instead of the source."""
        body = self._receive_body()
        if self.head.startswith(b"HTTP/1.1 201"):
            grant = msgspec.msgpack.decode(body)
            self._proxy.source_name = grant["memory"]
            port = parse_address(self._proxy.address).port
            body = msgspec.msgpack.encode({**grant, "memory": local_name, "port": port})
        self._send(_LENGTH.sub(lambda found: found[1] + str(len(body)).encode(), self.head) + body)

    def relay_damaged_memory(self, place: int) -> None:
        """Relay a response with other memory, in which the byte `place` bytes behind the start differs."""
        body = self._receive_body()
        place += msgspec.msgpack.decode(body)["offset"]
        with mmap.mmap(self._descriptors[0], 0, access=mmap.ACCESS_READ) as memory:
            damaged = SharedBlock(len(memory))
            damaged.tensor.copy_(torch.frombuffer(bytearray(memory[:]), dtype=torch.uint8))
        damaged.tensor[place] ^= 0xFF
        self.respond(self.head + body, [damaged.descriptor])

    def respond(self, response: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send a response of the test with copies of descriptors, instead of that of the source."""
        self._forget_descriptors()
        self._descriptors = [os.dup(descriptor) for descriptor in descriptors]
        self._send(response)

    def _receive_body(self) -> bytes:
        body = b""
        while len(body) < self._left_bytes:
            self._wait()
            body += self._receive(self._left_bytes - len(body))
        self._left_bytes = 0
        return body

    def send_request(self, request: bytes) -> None:
        """Send a request to the source."""
        self._server.sendall(request)

    def receive_head(self) -> None:
        """Receive the head of the response. Its body stays in the socket."""
        head = bytearray()
        while not head.endswith(b"\r\n\r\n"):
            self._wait()
            head += self._receive(1)
        self.head = bytes(head)
        length = _LENGTH.search(self.head)
        self._left_bytes = int(length[2]) if length else 0

    @property
    def body_bytes(self) -> int:
        """How much of the body was not relayed yet."""
        return self._left_bytes

    def send_head(self, head: bytes) -> None:
        """Send the head of a response to the receiver."""
        self._send(head)

    def relay_body(self, nbytes: int | None = None) -> None:
        """Relay so many bytes of the body, or all that are left, at the rate of the proxy."""
        if RING_HEADER.lower().encode() in self.head.lower():
            self._relay_signals(-(-self._left_bytes // MAX_SLOT_BYTES))
            return
        left = self._left_bytes if nbytes is None else nbytes
        while left:
            rate = self._proxy.rate
            size = _PIECE_BYTES if rate is None else max(1, min(_PIECE_BYTES, int(rate / 50)))
            self._wait()
            data = self._receive(min(size, left))
            self._send(data)
            left -= len(data)
            self._left_bytes -= len(data)
            self._proxy.relayed_bytes += len(data)
            if rate is not None:
                self._proxy.closed.wait(len(data) / rate)

    def _relay_signals(self, slots: int) -> None:
        """Relay the signals of both ends of a ring until all slots were filled and copied."""
        due = {self._client: slots, self._server: slots}
        while any(due.values()):
            self._raise_if_ended()
            for sock in select.select([sock for sock in due if due[sock]], [], [], 0.02)[0]:
                signals = sock.recv(due[sock])
                if not signals:
                    raise Ended
                due[sock] -= len(signals)
                (self._client if sock is self._server else self._server).sendall(signals)

    def relay_changed_byte(self) -> None:
        """Relay the next byte of the body with its bits inverted."""
        self._wait()
        (byte,) = self._receive(1)
        self._send(bytes([byte ^ 0xFF]))
        self._left_bytes -= 1

    def hold(self, until: threading.Event | None = None) -> None:
        """Relay nothing until an event, or until the receiver closes the connection."""
        while until is None or not until.is_set():
            self._raise_if_ended()
            self._proxy.closed.wait(0.02)

    def reset(self) -> None:
        """Reset both connections."""
        for sock in (self._client, self._server):
            _reset_when_closed(sock)
        raise Ended

    def end(self) -> None:
        """Close both connections in order."""
        raise Ended

    def drop_client(self) -> None:
        """Close the connection of the receiver, and keep that to the source."""
        self._client.close()
        self._proxy.closed.wait()
        raise Ended

    def end_request(self) -> None:
        """Send no more to the source, and relay what it still sends."""
        self._server.shutdown(socket.SHUT_WR)
        while True:
            self._wait()
            self._send(self._receive(_PIECE_BYTES))

    def _send(self, data: bytes) -> None:
        """Send to the receiver; raises Ended if it closes the connection, even if it takes no bytes."""
        rest = memoryview(data)
        while rest:
            _, writable, _ = select.select([], [self._client], [], 0.02)
            self._raise_if_ended()
            if writable and self._descriptors:
                rest = rest[socket.send_fds(self._client, [rest], self._descriptors) :]
                self._forget_descriptors()
            elif writable:
                rest = rest[self._client.send(rest) :]

    def close(self) -> None:
        """Close the descriptors that were not relayed."""
        self._forget_descriptors()

    def _forget_descriptors(self) -> None:
        close_all(self._descriptors)
        self._descriptors = []

    def _receive(self, nbytes: int) -> bytes:
        if self.is_local:
            data, descriptors, _, _ = socket.recv_fds(self._server, nbytes, 1, socket.MSG_CMSG_CLOEXEC)
            self._descriptors += descriptors
        else:
            data = self._server.recv(nbytes)
        if not data:
            raise Ended
        return data

    def _wait(self) -> None:
        """Wait until the source sends; raises Ended if the receiver closes the connection."""
        while not select.select([self._server], [], [], 0.02)[0]:
            self._raise_if_ended()
        self._raise_if_ended()

    def _raise_if_ended(self) -> None:
        """Raise Ended if the receiver closed its connection. It may have sent its next request before."""
        poll = select.poll()
        poll.register(self._client, select.POLLRDHUP)
        if poll.poll(0) or self._proxy.closed.is_set():
            raise Ended


class Proxy:
    """Relays connections to the source at an address. `address` names the proxy, with the same token.

    `on_exchange` is called instead of `Exchange.relay`, in the thread of the connection. `rate` is the most
    bytes of bodies per second that a connection relays; None for no limit. `requests` lists the steps. With
    `memory`, chunks come through memory.
    """

    def __init__(
        self,
        address: str,
        on_exchange: Callable[[Exchange], None] = Exchange.relay,
        rate: float | None = None,
        memory: bool = False,
    ) -> None:
        self.target = parse_address(address)
        self.on_exchange = on_exchange
        self.rate = rate
        self.relayed_bytes = 0
        self.requests: list[Exchange] = []
        self.errors: list[BaseException] = []
        self.closed = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self._listeners = [self._listener]
        self.source_name: str | None = None
        """The name of the source's Unix socket, once a grant was relayed."""
        self.local_name: str | None = None
        """The name of the proxy's Unix socket."""
        if memory:
            self.local_name = secrets.token_hex(16)
            self._listeners.append(sockets.listen_locally(self.local_name))
        port = self._listener.getsockname()[1]
        self.address = Address("127.0.0.1", port, self.target.token).url
        self.peer = f"127.0.0.1:{port}"
        self._accepts = True
        self._waiting: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def refuse(self) -> None:
        """Refuse connections from now on."""
        self._stop_accepting()
        for listener in self._listeners:
            listener.close()

    def vanish(self) -> None:
        """Answer no more connections, as if packets to this address were lost."""
        self._stop_accepting()
        self._waiting = fill_queue(self._listener)

    def _stop_accepting(self) -> None:
        self._accepts = False
        self._threads[0].join()

    def close(self) -> None:
        """Close everything. Raises what an exchange raised."""
        self.closed.set()
        self.refuse()
        for sock in self._waiting:
            sock.close()
        for thread in self._threads:
            thread.join(5.0)
            assert not thread.is_alive(), "a thread of the proxy has not ended"
        if self.errors:
            raise self.errors[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _accept(self) -> None:
        while self._accepts:
            for listener in select.select(self._listeners, [], [], 0.01)[0]:
                client, _ = listener.accept()
                thread = threading.Thread(target=self._serve, args=(client,), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _serve(self, client: socket.socket) -> None:
        try:
            server = self._connect(client.family == socket.AF_UNIX)
        except OSError:
            # There is no source any more.
            self.refuse()
            _reset_when_closed(client)
            client.close()
            return
        with client, server:
            server.settimeout(30.0)
            client.settimeout(30.0)
            try:
                while (request := self._read_request(client, server)) is not None:
                    exchange = Exchange(self, client, server, request)
                    self.requests.append(exchange)
                    with closing(exchange):
                        self.on_exchange(exchange)
            except (Ended, OSError):
                pass
            except BaseException as error:
                self.errors.append(error)

    def _connect(self, is_local: bool) -> socket.socket:
        """Connect to the source; raises OSError."""
        if not is_local:
            return socket.create_connection((self.target.host, self.target.port), 5.0)
        assert self.source_name is not None, "a grant was relayed"
        server = socket.socket(socket.AF_UNIX)
        try:
            sockets.connect_locally(server, self.source_name)
        except OSError:
            server.close()
            raise
        return server

    def _read_request(self, client: socket.socket, server: socket.socket) -> bytes | None:
        """Return the next request; None if one side closed its connection or the proxy was closed."""
        while not self.closed.is_set():
            readable, _, _ = select.select([client, server], [], [], 0.05)
            if server in readable:
                return None
            if client in readable:
                return read_message(client)
        return None


def with_longer_length(message: bytes) -> bytes:
    """Return a message whose head announces one byte more."""
    return _LENGTH.sub(lambda found: found[1] + str(int(found[2]) + 1).encode(), message, count=1)


def _reset_when_closed(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def fill_queue(listener: socket.socket) -> list[socket.socket]:
    """Fill the queue of a listener. The kernel then ignores further connections."""
    listener.listen(0)
    waiting: list[socket.socket] = []
    limit_s = time.monotonic() + 5.0
    while not waiting or select.select([], [waiting[-1]], [], 0.05)[1]:
        assert time.monotonic() < limit_s, "the queue of the listener does not fill"
        waiting.append(socket.socket())
        waiting[-1].setblocking(False)
        waiting[-1].connect_ex(listener.getsockname())
    return waiting


class BlackHole:
    """An address that answers no connection, as if packets to it were lost."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._waiting = fill_queue(self._listener)
        self.address = f"http://127.0.0.1:{self._listener.getsockname()[1]}/#0123456789abcdef"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for sock in (*self._waiting, self._listener):
            sock.close()
