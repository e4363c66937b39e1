"""An HTTP/1.1 server over TCP, and over a Unix socket for processes of the same user on this machine.

One thread watches pending connections: those that have not sent a valid token yet. A pending connection is
closed if it does not send a request in time. A connection with the token gets a thread of its own.
"""

import hmac
import logging
import os
import select
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from typing import Any

import h11

from torchferry.errors import FerryError
from torchferry.links import sockets
from torchferry.links.http import reason_of
from torchferry.links.lifecycle import close_after_fork, end_at_exit
from torchferry.links.ring import MAX_SLOT_BYTES, SLOTS, create_ring
from torchferry.links.server_connection import Handler, Request, Response, ServerConnection

logger = logging.getLogger(__name__)

MAX_REQUEST_BYTES = 64 << 10
"""The longest body of a request. Receivers send a few hundred bytes."""

PENDING_S = 10.0
"""How long a connection may take to send its first request."""
MAX_PENDING = 512
"""The most connections without a token. A new one replaces the oldest."""

IDLE_S = 600.0
"""How long a connection with the token may wait before its next request."""
_LOOK_S = 2.0
"""How often the server looks for connections that are lost."""
SEND_S = 60.0
"""How long a connection with the token may wait to send more of an answer, or to read more of a request."""
MAX_CONNECTIONS = 1024
"""The most connections for each handler."""
_MAX_RINGS = 8
"""The most connections of local clients that have a ring, of 4 MiB each. Others get bytes over the socket."""
LAST_ANSWERS_S = 0.5
"""How long a server that is closed may take to finish the answers that it began."""


class HttpServer:
    """Serves a handler until it is closed. Its threads are daemons.

    It accepts connections from `listeners`. Those of the Unix family are local: they use no TLS, and accept
    only connections of the same user. `wake` is called when the server is shut down: it must end answers that
    wait.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        token: str,
        handler: Handler,
        tls: ssl.SSLContext | None = None,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self._wake = wake
        self._listeners = listeners
        self._handlers = {f"Bearer {token}".encode(): handler}
        self._tls = tls
        self._numbers = count(1)
        self._lock = threading.Condition()
        self._pending: dict[int, ServerConnection] = {}  # oldest first; only the watching thread uses it
        self._admitted: dict[int, ServerConnection] = {}
        self._is_closed = False
        self._looked_s = 0.0
        self._free_rings = threading.Semaphore(_MAX_RINGS)
        self._selector = selectors.DefaultSelector()
        self._waker, self._woken = socket.socketpair()
        for listener in listeners:
            listener.setblocking(False)
            sockets.prepare(listener, sockets.SERVER_LOST_S)
            self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        close_after_fork(self)
        end_at_exit(self)
        self._watcher = threading.Thread(target=self._watch, name="torchferry-http", daemon=True)
        try:
            self._watcher.start()
        except BaseException:
            # Ctrl-C may arrive when the thread runs already. Then it closes the sockets.
            self._is_closed = True
            self._waker.send(b"\0")
            raise

    def stop_listening(self) -> None:
        """Accept no more connections."""
        with self._lock:
            if not self._is_closed:
                # In this order: the thread closes the sockets as soon as it sees the flag.
                with suppress(OSError):
                    self._waker.send(b"\0")
                self._is_closed = True
        self._watcher.join()

    def add_handler(self, token: str, handler: Handler) -> None:
        """Serve a handler to clients with this token, unless the token has a handler already."""
        with self._lock:
            self._handlers = {f"Bearer {token}".encode(): handler, **self._handlers}

    def remove_handler(self, handler: Handler) -> None:
        """Stop serving a handler."""
        with self._lock:
            self._handlers = {token: each for token, each in self._handlers.items() if each is not handler}

    def disconnect(self, connection: int) -> None:
        """Shut one connection down. Its thread notices, and closes it."""
        with self._lock:
            found = self._admitted.get(connection)
            if found is not None:
                sockets.shut_down(found.sock)

    def is_connected(self, connection: int) -> bool:
        """Return whether a client that waits for an answer is still there."""
        with self._lock:
            found = self._admitted.get(connection)
            if found is None or found.is_over:
                return False
            poll = select.poll()
            poll.register(found.sock, select.POLLRDHUP)
            return not poll.poll(0)

    def close(self, finish_s: float = LAST_ANSWERS_S) -> None:
        """Accept no more connections, finish the answers that were begun, and shut down all connections."""
        self.stop_listening()
        with self._lock:
            connections = self._admitted.values()
            # A receiver that confirmed gets its answer, even if the source is closed at once.
            self._lock.wait_for(lambda: not any(each.is_answering for each in connections), finish_s)
        self.shut_down()
        # When all threads have ended, nothing of the handler's memory is read any more.
        self.join(time.monotonic() + LAST_ANSWERS_S)

    def shut_down(self) -> None:
        """Accept no more connections, and shut down all."""
        self._wake()
        self.stop_listening()
        with self._lock:
            for connection in self._admitted.values():
                connection.is_over = True
                sockets.shut_down(connection.sock)

    def join(self, until_s: float) -> None:
        """Wait for the threads to end."""
        with self._lock:
            self._lock.wait_for(lambda: not self._admitted, max(until_s - time.monotonic(), 0.0))

    def close_inherited(self) -> None:
        """Close the sockets in a forked child, which has no threads. Take no lock: its holder may be gone."""
        for connection in (*self._pending.values(), *self._admitted.values()):
            sockets.close_descriptor(connection.sock)
        for sock in (*self._listeners, self._waker, self._woken):
            sockets.close_descriptor(sock)
        with suppress(OSError):
            self._selector.close()
        # So that the child may close its copy of the server.
        self._is_closed, self._lock, self._admitted = True, threading.Condition(), {}

    # Pending connections: the watching thread.

    def _watch(self) -> None:
        """Accept connections, and admit those whose first request has the token."""
        try:
            while not self._is_closed:
                for key, _ in self._selector.select(self._expire()):
                    try:
                        if key.data is not None:
                            self._advance(key.data)
                        elif key.fileobj is not self._woken:
                            self._accept(key.fileobj)  # type: ignore[arg-type]
                    except Exception as error:
                        # There is no memory for a thread or a buffer, for example. Later there may be.
                        client = "a new client" if key.data is None else key.data.peer
                        logger.warning("the connection of %s can't be served: %s", client, error)
                        if key.data is not None:
                            self._reject(key.data)
        finally:
            for connection in list(self._pending.values()):
                self._reject(connection)
            for sock in (*self._listeners, self._waker, self._woken):
                sock.close()
            self._selector.close()

    def _expire(self) -> float | None:
        """Close pending connections that took too long, and shut down lost ones.

        Return in how many seconds to look again.
        """
        now_s = time.monotonic()
        found = list(self._pending.values())
        late = [each for each in found if now_s >= each.since_s + PENDING_S]
        for connection in late:
            self._reject(connection)
        if now_s >= self._looked_s + _LOOK_S:
            self._looked_s = now_s
            with self._lock:
                for connection in self._admitted.values():
                    if sockets.is_lost(connection.sock):
                        sockets.shut_down(connection.sock)
        pending_s = found[len(late)].since_s + PENDING_S - now_s if len(found) > len(late) else None
        look_s = _LOOK_S if self._admitted else None
        return min((each for each in (pending_s, look_s) if each is not None), default=None)

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, peer = listener.accept()
        except OSError:
            # The peer has disconnected already, or the process has no file descriptor left.
            if self._pending:
                self._reject(next(iter(self._pending.values())))
            else:
                time.sleep(0.01)
            return
        if len(self._pending) >= MAX_PENDING:
            self._reject(next(iter(self._pending.values())))
        sock.setblocking(False)
        local = sock.family == socket.AF_UNIX
        if local and sockets.user_of(sock) != os.geteuid():
            sock.close()
            return
        if self._tls is not None and not local:
            try:
                sock = self._tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
            except OSError:
                sock.close()
                return
        host, port = ("", 0) if local else peer[:2]
        handshaking = isinstance(sock, ssl.SSLSocket)
        connection = ServerConnection(next(self._numbers), sock, host, port, time.monotonic(), handshaking)
        self._pending[connection.number] = connection
        self._selector.register(sock, selectors.EVENT_READ, connection)

    def _advance(self, connection: ServerConnection) -> None:
        """Read what a pending connection has sent. Admit or close it when its first request is known."""
        try:
            if connection.handshaking:
                connection.sock.do_handshake()  # type: ignore[attr-defined]
                connection.handshaking = False
            event = connection.next_event()
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return
        except (OSError, h11.RemoteProtocolError) as error:
            logger.debug("%s sent no valid request: %s", connection.peer, reason_of(error))
            event = None
        if not isinstance(event, h11.Request):
            self._reject(connection)
            return
        handler = connection.handler = self._handler_for(event)
        with self._lock:
            served = sum(each.handler is handler for each in self._admitted.values())
        if handler is None or served >= getattr(handler, "max_connections", MAX_CONNECTIONS):
            with suppress(OSError, h11.LocalProtocolError):
                connection.respond(Response(503) if handler else _UNAUTHORIZED, last=True)
            self._reject(connection)
            return
        self._selector.unregister(connection.sock)
        del self._pending[connection.number]
        with self._lock:
            self._admitted[connection.number] = connection
        name = f"torchferry-http-{connection.number}"
        threading.Thread(
            target=self._serve, args=(connection, event, handler), name=name, daemon=True
        ).start()

    def _reject(self, connection: ServerConnection) -> None:
        """Close a pending connection, or one that was admitted but got no thread."""
        with self._lock:
            self._admitted.pop(connection.number, None)
        with suppress(KeyError, ValueError, OSError):
            self._selector.unregister(connection.sock)
        self._pending.pop(connection.number, None)
        connection.sock.close()

    def _handler_for(self, request: h11.Request) -> Handler | None:
        """Return the handler that a request's token is for; None if the token is wrong or missing."""
        given = [value for name, value in request.headers if name == b"authorization"]
        found = [
            each for token, each in self._handlers.items() if hmac.compare_digest(b"".join(given), token)
        ]
        return found[0] if len(given) == 1 and found else None

    # Connections with the token: a thread each.

    def _serve(self, connection: ServerConnection, request: Any, handler: Handler) -> None:
        """Answer the requests of one connection, all with the same token, until it is closed."""
        try:
            self._answer_all(connection, request, handler)
        except (OSError, h11.ProtocolError) as error:
            # The client is gone, too slow, or does not speak HTTP.
            logger.debug("the connection of %s ended: %s", connection.peer, reason_of(error))
        except FerryError as error:
            logger.warning("answering %s failed: %s", connection.peer, error)
        except Exception:
            logger.warning("answering %s failed", connection.peer, exc_info=True)
        finally:
            handler.disconnected(connection.number)
            if connection.ring is not None:
                connection.ring.close()
                connection.ring = None
                self._free_rings.release()
            with self._lock:
                self._admitted.pop(connection.number, None)
                self._lock.notify_all()
                connection.sock.close()

    def _open_ring(self, connection: ServerConnection) -> None:
        """Give a local connection a ring, if one is free and there is memory for it."""
        if self._free_rings.acquire(blocking=False):
            try:
                wait = connection.wait_for_signals
                connection.ring = create_ring(connection.sock, SLOTS * MAX_SLOT_BYTES, wait)
            except OSError as error:
                self._free_rings.release()
                logger.debug("no ring for %s: %s", connection.peer, error)

    def _answer_all(self, connection: ServerConnection, request: Any, handler: Handler) -> None:
        max_bytes = getattr(handler, "max_request_bytes", MAX_REQUEST_BYTES)
        while isinstance(request, h11.Request) and not connection.is_over:
            connection.sock.settimeout(SEND_S)
            if self._handler_for(request) is not handler:
                connection.respond(_UNAUTHORIZED, last=True)
                return
            body = connection.read_body(max_bytes)
            method = request.method.decode("ascii", "replace")
            path = request.target.decode("ascii", "replace")
            asked = Request(method, path, body, connection.number, not connection.host, connection.host)
            # A response to HEAD has no body, so it can't have a reason.
            response = Response(400) if method == "HEAD" else handler.answer(asked)
            if asked.local and response.buffers is not None and connection.ring is None:
                self._open_ring(connection)
            connection.respond(response)
            connection.parser.start_next_cycle()
            connection.sock.settimeout(getattr(handler, "idle_s", IDLE_S))
            with self._lock:
                connection.is_answering = False
                self._lock.notify_all()
            request = connection.next_event()
            connection.is_answering = True


_UNAUTHORIZED = Response(401, headers=(("WWW-Authenticate", "Bearer"),))
