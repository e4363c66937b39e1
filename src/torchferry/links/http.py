"""HTTP/1.1 over TCP: a server, and the connection of a client.

h11 reads and writes every head. Bodies go from and into the caller's memory without a copy.

One thread watches all guests: connections that have not sent a valid token yet. A guest is closed if it does
not send a request in time. A connection with the token gets a thread of its own.
"""

import atexit
import hmac
import logging
import os
import selectors
import socket
import ssl
import struct
import threading
import time
import weakref
from collections.abc import Callable, Generator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Protocol

import h11

from torchferry.errors import FerryError, LinkBroken, LinkTimeout
from torchferry.links.address import Address

logger = logging.getLogger(__name__)

MAX_HEAD_BYTES = 16 << 10
MAX_REQUEST_BYTES = 64 << 10
"""The longest body of a request. Receivers send a few hundred bytes."""

GUEST_S = 10.0
"""How long a connection may take to send its first request."""
MAX_GUESTS = 512
"""The most connections without a token. The oldest is closed for the next."""

IDLE_S = 600.0
"""How long a connection with the token may wait before its next request."""
SEND_S = 60.0
"""How long a connection with the token may take no bytes, or take to send the rest of a request."""
MAX_CONNECTIONS = 1024
"""The most connections with the token."""
LAST_ANSWERS_S = 0.5
"""How long a server that is closed may take to finish the answers that it began."""

_READ_BYTES = 64 << 10
_MAX_WAIT_S = 1e9
"""The longest timeout that every platform's sockets accept, about 30 years."""


@dataclass(frozen=True)
class Request:
    """A request with the right token. `connection` is the same number for all requests of a connection."""

    method: str
    path: str
    body: bytes
    connection: int


@dataclass(frozen=True)
class Response:
    """An answer. Its body is `body`, or the `nbytes` bytes that `buffers` yields, each sent before the next.

    If `buffers` yields less, the connection is closed.
    """

    status: int
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()
    nbytes: int = 0
    buffers: Generator[memoryview, None, None] | None = None


class Handler(Protocol):
    """What a server serves. Several threads call it at the same time."""

    def answer(self, request: Request) -> Response:
        """Answer a request."""

    def disconnected(self, connection: int) -> None:
        """Note that a connection with the token was closed."""


@dataclass(eq=False)
class _Connection:
    """A connection to the server, with the parser of its requests. One thread at a time uses it."""

    number: int
    sock: socket.socket
    peer: str
    since_s: float
    handshaking: bool
    is_answering: bool = True
    is_sending: bool = False  # parts of a body, which the handler reads meanwhile
    parser: h11.Connection = field(
        default_factory=lambda: h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
    )

    def next_event(self) -> Any:
        """Read until the parser has an event; a closed connection is an event too."""
        while (event := self.parser.next_event()) is h11.NEED_DATA:
            self.parser.receive_data(self.sock.recv(_READ_BYTES))
        return event

    def read_body(self) -> bytes:
        body = bytearray()
        while isinstance(event := self.next_event(), h11.Data):
            body += event.data
            if len(body) > MAX_REQUEST_BYTES:
                raise h11.RemoteProtocolError("the body of a request is too long")
        return bytes(body)

    def respond(self, response: Response, *, last: bool = False) -> None:
        nbytes = response.nbytes or len(response.body)
        # HTTP forbids the length of a response that never has a body.
        headers = [*response.headers]
        headers += [("Content-Length", str(nbytes))] if response.status != 204 else []
        headers += [("Connection", "close")] if last else []
        head = self.parser.send(h11.Response(status_code=response.status, headers=headers))
        self.sock.sendall((head or b"") + response.body)
        if response.body:
            self.parser.send_with_data_passthrough(h11.Data(data=response.body))
        if response.buffers is not None:
            self.is_sending = True
            with closing(response.buffers) as buffers:
                for buffer in buffers:
                    self.sock.sendall(buffer)
                    self.parser.send_with_data_passthrough(h11.Data(data=buffer))  # type: ignore[arg-type]
            self.is_sending = False
        self.parser.send(h11.EndOfMessage())


class HttpServer:
    """Serves a handler until it is closed. Its threads are daemons, so they never delay the end of Python."""

    def __init__(
        self, listener: socket.socket, token: str, handler: Handler, tls: ssl.SSLContext | None = None
    ) -> None:
        self._listener = listener
        self._token = f"Bearer {token}".encode()
        self._handler = handler
        self._tls = tls
        self._numbers = count(1)
        self._lock = threading.Condition()
        self._guests: dict[int, _Connection] = {}  # oldest first; only the watching thread uses it
        self._admitted: dict[int, _Connection] = {}
        self._is_closed = False
        listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._waker, self._woken = socket.socketpair()
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        close_after_fork(self)
        _servers.add(self)
        self._watcher = threading.Thread(target=self._watch, name="torchferry-http", daemon=True)
        self._watcher.start()

    def stop_listening(self) -> None:
        """Accept no more connections."""
        with self._lock:
            if not self._is_closed:
                # In this order: the thread closes the sockets as soon as it sees the flag.
                self._waker.send(b"\0")
                self._is_closed = True
        self._watcher.join()

    def disconnect(self, connection: int) -> None:
        """Shut one connection down. Its thread notices, and closes it."""
        with self._lock:
            found = self._admitted.get(connection)
            if found is not None:
                _shut_down(found.sock)

    def close(self, finish_s: float = LAST_ANSWERS_S) -> None:
        """Accept no more connections, finish the answers that were begun, and shut down all."""
        self.stop_listening()
        with self._lock:
            connections = self._admitted.values()
            # A receiver that confirmed gets its answer, even if the source is closed at once.
            self._lock.wait_for(lambda: not any(each.is_answering for each in connections), finish_s)
            for connection in connections:
                _shut_down(connection.sock)
            # Nothing of the state is read any more.
            self._lock.wait_for(lambda: not any(each.is_sending for each in connections), LAST_ANSWERS_S)

    def close_inherited(self) -> None:
        """Close the sockets in a forked child, which has none of the threads. Locks may never be released."""
        for connection in (*self._guests.values(), *self._admitted.values()):
            _close_descriptor(connection.sock)
        for sock in (self._listener, self._waker, self._woken):
            _close_descriptor(sock)
        with suppress(OSError):
            self._selector.close()
        # So that the child may close its copy of the server.
        self._is_closed, self._lock, self._admitted = True, threading.Condition(), {}

    # Guests: the watching thread.

    def _watch(self) -> None:
        """Accept connections, and admit those whose first request has the token."""
        try:
            while not self._is_closed:
                for key, _ in self._selector.select(self._expire()):
                    try:
                        if key.fileobj is self._listener:
                            self._accept()
                        elif key.data is not None:
                            self._advance(key.data)
                    except (RuntimeError, MemoryError) as error:
                        # There is no memory for a thread or a buffer. Later there may be.
                        logger.warning("a connection is closed, because it can't be served: %s", error)
                        if key.data is not None:
                            self._dismiss(key.data)
        finally:
            for guest in list(self._guests.values()):
                self._dismiss(guest)
            for sock in (self._listener, self._waker, self._woken):
                sock.close()
            self._selector.close()

    def _expire(self) -> float | None:
        """Close guests that took too long; return when to look again."""
        now_s = time.monotonic()
        for guest in list(self._guests.values()):
            if now_s < guest.since_s + GUEST_S:
                return guest.since_s + GUEST_S - now_s
            self._dismiss(guest)
        return None

    def _accept(self) -> None:
        try:
            sock, peer = self._listener.accept()
        except OSError:
            # The peer has disconnected already, or the process has no file descriptor left.
            if self._guests:
                self._dismiss(next(iter(self._guests.values())))
            else:
                time.sleep(0.01)
            return
        if len(self._guests) >= MAX_GUESTS:
            self._dismiss(next(iter(self._guests.values())))
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if self._tls is not None:
            try:
                sock = self._tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
            except OSError:
                sock.close()
                return
        where = f"[{peer[0]}]:{peer[1]}" if ":" in peer[0] else f"{peer[0]}:{peer[1]}"
        guest = _Connection(next(self._numbers), sock, where, time.monotonic(), self._tls is not None)
        self._guests[guest.number] = guest
        self._selector.register(sock, selectors.EVENT_READ, guest)

    def _advance(self, guest: _Connection) -> None:
        """Read what a guest has sent. Admit or dismiss it when its first request is known."""
        try:
            if guest.handshaking:
                guest.sock.do_handshake()  # type: ignore[attr-defined]
                guest.handshaking = False
            event = guest.next_event()
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return
        except (OSError, h11.RemoteProtocolError) as error:
            logger.debug("%s sent no valid request: %s", guest.peer, _reason(error))
            event = None
        if not isinstance(event, h11.Request):
            self._dismiss(guest)
            return
        is_authorized = self._is_authorized(event)
        if not is_authorized or len(self._admitted) >= MAX_CONNECTIONS:
            with suppress(OSError, h11.LocalProtocolError):
                guest.respond(Response(503) if is_authorized else _UNAUTHORIZED, last=True)
            self._dismiss(guest)
            return
        self._selector.unregister(guest.sock)
        del self._guests[guest.number]
        with self._lock:
            self._admitted[guest.number] = guest
        name = f"torchferry-http-{guest.number}"
        threading.Thread(target=self._serve, args=(guest, event), name=name, daemon=True).start()

    def _dismiss(self, guest: _Connection) -> None:
        """Close the connection of a guest, or of one that was admitted and could not get a thread."""
        with self._lock:
            self._admitted.pop(guest.number, None)
        with suppress(KeyError, ValueError, OSError):
            self._selector.unregister(guest.sock)
        self._guests.pop(guest.number, None)
        guest.sock.close()

    def _is_authorized(self, request: h11.Request) -> bool:
        given = [value for name, value in request.headers if name == b"authorization"]
        return len(given) == 1 and hmac.compare_digest(given[0], self._token)

    # Connections with the token: a thread each.

    def _serve(self, connection: _Connection, request: Any) -> None:
        """Answer the requests of one connection until it is closed."""
        try:
            while isinstance(request, h11.Request):
                connection.sock.settimeout(SEND_S)
                if not self._is_authorized(request):
                    connection.respond(_UNAUTHORIZED, last=True)
                    return
                body = connection.read_body()
                method = request.method.decode("ascii", "replace")
                asked = Request(method, request.target.decode("ascii", "replace"), body, connection.number)
                # A response to HEAD has no body, so it can't have a reason.
                connection.respond(Response(400) if method == "HEAD" else self._handler.answer(asked))
                connection.parser.start_next_cycle()
                connection.sock.settimeout(IDLE_S)
                with self._lock:
                    connection.is_answering = False
                    self._lock.notify_all()
                request = connection.next_event()
                connection.is_answering = True
        except (OSError, h11.ProtocolError) as error:
            # The client is gone, too slow, or does not speak HTTP.
            logger.debug("the connection of %s ended: %s", connection.peer, _reason(error))
        except FerryError as error:
            logger.warning("answering %s failed: %s", connection.peer, error)
        except Exception:
            logger.warning("answering %s failed", connection.peer, exc_info=True)
        finally:
            with self._lock:
                self._admitted.pop(connection.number, None)
                self._lock.notify_all()
                connection.sock.close()
            self._handler.disconnected(connection.number)


_UNAUTHORIZED = Response(401, headers=(("WWW-Authenticate", "Bearer"),))


class ResponseHead:
    """The status and the length of a response."""

    def __init__(self, event: h11.Response) -> None:
        self.status = event.status_code
        lengths = [bytes(value) for name, value in event.headers if name == b"content-length"]
        length = b"0" if event.status_code == 204 else b"".join(lengths)
        if not length.isdigit() or len(length) > 18:
            raise ConnectionError("the source sent a response without a valid length")
        self.nbytes = int(length)


class HttpConnection:
    """A connection to a server. One thread uses it and closes it; any thread may shut it down.

    `heard_s` is when it last received something. `connecting` is called with it before it connects, so that
    another thread can shut it down while it connects. Every method raises LinkBroken if the connection fails,
    and LinkTimeout if no bytes arrive in time.
    """

    def __init__(
        self,
        address: Address,
        tls: ssl.SSLContext | None,
        timeout_s: float,
        connecting: Callable[["HttpConnection"], object] = lambda _: None,
    ) -> None:
        self.address = address
        self.heard_s = time.monotonic()
        self._rest: bytes | bytearray = b""  # what was received behind a head
        self._is_shut_down = False
        self._lock = threading.Lock()
        self._sock: socket.socket
        try:
            self._connect(min(timeout_s, _MAX_WAIT_S), connecting)
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if address.secure:
                context = tls or ssl.create_default_context()
                # The handshake comes afterwards, so that it can be ended.
                self._sock = context.wrap_socket(
                    self._sock, server_hostname=address.host, do_handshake_on_connect=False
                )
                self._sock.do_handshake()
        except (OSError, UnicodeError) as error:
            with suppress(AttributeError):  # there is no socket if the host has no address
                self._sock.close()
            raise self._translated(error) from error

    def _connect(self, timeout_s: float, connecting: Callable[["HttpConnection"], object]) -> None:
        """Connect to the first address of the host that answers, as socket.create_connection does."""
        found = socket.getaddrinfo(self.address.host, self.address.port, type=socket.SOCK_STREAM)
        for number, (family, kind, protocol, _, where) in enumerate(found, 1):
            self._sock = socket.socket(family, kind, protocol)
            try:
                close_after_fork(self)
                connecting(self)
                self._sock.settimeout(timeout_s)
                if self._is_shut_down:
                    raise ConnectionError("the fetch is over")
                self._sock.connect(where)
                return
            except OSError:
                self._sock.close()
                if number == len(found):
                    raise

    def request(self, method: str, path: str, body: bytes = b"", *, timeout_s: float) -> ResponseHead:
        """Send a request and read the head of its response. `read_into` or `read` then reads the body.

        `timeout_s` limits every wait for the next bytes, also those of the body.
        """
        parser = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD_BYTES)
        headers = [
            ("Host", str(self.address)),
            ("Authorization", f"Bearer {self.address.token}"),
            ("Content-Length", str(len(body))),
        ]
        try:
            self._sock.settimeout(min(timeout_s, _MAX_WAIT_S))
            head = parser.send(h11.Request(method=method, target=path, headers=headers)) or b""
            self._sock.sendall(head + body)
            while (event := parser.next_event()) is h11.NEED_DATA:
                if not (data := self._sock.recv(_READ_BYTES)):
                    raise ConnectionError("the source closed the connection")
                parser.receive_data(data)
                self.heard_s = time.monotonic()
            if not isinstance(event, h11.Response):
                raise ConnectionError("the source sent an interim response")
            self._rest, _ = parser.trailing_data
            return ResponseHead(event)
        except OSError as error:
            raise self._translated(error) from error
        except h11.ProtocolError as error:
            raise LinkBroken(_reason(error), peer=str(self.address)) from None

    def read_into(self, view: memoryview) -> None:
        """Fill a buffer with the next bytes of a body."""
        ready = min(len(view), len(self._rest))
        view[:ready] = self._rest[:ready]
        self._rest = self._rest[ready:]
        try:
            while ready < len(view):
                received = self._sock.recv_into(view[ready:])
                if not received:
                    raise ConnectionError("the source closed the connection before the end of its response")
                self.heard_s = time.monotonic()
                ready += received
        except OSError as error:
            raise self._translated(error) from error

    def read(self, nbytes: int) -> bytes:
        """Return the next bytes of a body. The caller limits how many."""
        body = bytearray(nbytes)
        self.read_into(memoryview(body))
        return bytes(body)

    def shut_down(self) -> None:
        """End the connection. The thread that waits for it gets an error."""
        with self._lock:
            self._is_shut_down = True
            # close() then resets it. Otherwise a server that waits to send may not notice for a minute.
            with suppress(OSError):
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            _shut_down(self._sock)

    def close(self) -> None:
        """Close the socket. Only the thread that uses the connection does that."""
        with self._lock:
            self._sock.close()

    def close_inherited(self) -> None:
        """Close the socket in a forked child. The server does not notice."""
        _close_descriptor(self._sock)

    def _translated(self, error: Exception) -> LinkBroken | LinkTimeout:
        peer = str(self.address)
        if isinstance(error, TimeoutError):
            return LinkTimeout("the source did not answer in time", peer=peer)
        if self._is_shut_down:
            return LinkBroken("the source was too slow, so the connection was closed", peer=peer)
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        return LinkBroken(reason or type(error).__name__, peer=peer)


def _reason(error: Exception) -> str:
    """Return the reason of an error for users and logs. h11 quotes headers, which may have a token."""
    return "the peer does not speak HTTP/1.1" if isinstance(error, h11.ProtocolError) else str(error)


def _shut_down(sock: socket.socket) -> None:
    """End a connection that another thread uses. That thread closes it, so its descriptor is not reused."""
    with suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


_open: weakref.WeakSet[Any] = weakref.WeakSet()
"""What a forked child must close. A DataLoader's worker would keep sockets open after this process has died,
and peers would not notice."""


def close_after_fork(inherited: Any) -> None:
    """Call `inherited.close_inherited()` in every child that this process forks from now on."""
    _open.add(inherited)


def _close_inherited() -> None:
    for inherited in list(_open):
        inherited.close_inherited()


os.register_at_fork(after_in_child=_close_inherited)

_servers: weakref.WeakSet[HttpServer] = weakref.WeakSet()


@atexit.register
def _close_servers() -> None:
    """End threads that read a state: torch aborts the process if it ends while a thread uses torch."""
    for server in list(_servers):
        server.close(finish_s=0.0)


def _close_descriptor(sock: socket.socket) -> None:
    with suppress(OSError):
        os.close(sock.detach())
