"""The connections of a fetch to one source."""

import ssl
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from torchferry.core import pull
from torchferry.errors import LinkBroken
from torchferry.links.address import Address
from torchferry.links.http_client import HttpConnection

T = TypeVar("T")


@dataclass
class _Control:
    """The connection that opened a lease. If a request failed, it `is_spoilt`: an answer may be late."""

    connection: HttpConnection
    is_used: bool = False
    is_spoilt: bool = False

    @property
    def is_free(self) -> bool:
        """Whether it can take a request. After a long silence, a firewall may have forgotten it."""
        is_recent = time.monotonic() < self.connection.heard_s + pull.ALIVE_S
        return is_recent and not self.is_used and not self.is_spoilt


class Connections:
    """All connections to one source. One thread at a time uses a connection; any thread may shut down all.

    The connection that opened the lease stays open beside those that read chunks, so the lease outlasts a
    connection that breaks. It also takes other requests, if no other thread uses it.
    """

    def __init__(self, address: Address, tls: ssl.SSLContext | None) -> None:
        self.is_over = False
        self._address = address
        # One context for all connections: loading the system's certificates takes longer than a request.
        self._tls = tls or (ssl.create_default_context() if address.secure else None)
        self._lock = threading.Lock()
        self._all: weakref.WeakSet[HttpConnection] = weakref.WeakSet()
        self._control: _Control | None = None

    def open(self, timeout_s: float, local: str | None = None) -> HttpConnection:
        """Connect; with `local`, to the Unix socket of that name. Raises LinkBroken or LinkTimeout."""
        return HttpConnection(self._address, None if local else self._tls, timeout_s, self._add, local=local)

    def _add(self, connection: HttpConnection) -> None:
        with self._lock:
            self._all.add(connection)
            if self.is_over:
                connection.shut_down()

    def close(self, connection: HttpConnection) -> None:
        """Close a connection. Only the thread that uses it does that."""
        connection.close()
        with self._lock:
            self._all.discard(connection)

    def hold(self, connection: HttpConnection) -> HttpConnection | None:
        """Keep a connection open because it opened a lease; return the one to close instead, if any."""
        with self._lock:
            if self.is_over:
                return connection
            earlier, self._control = self._control, _Control(connection)
            return None if earlier is None or earlier.is_used else earlier.connection

    def shut_down_readers(self, reason: str, spared: HttpConnection | None) -> None:
        """End all connections but one, and the one that opened the lease."""
        with self._lock:
            control = None if self._control is None else self._control.connection
            for connection in self._all:
                if connection not in (control, spared):
                    connection.shut_down(reason)

    def shut_down(self) -> None:
        """End all connections, and every one that is opened later."""
        with self._lock:
            self.is_over = True
            for connection in self._all:
                connection.shut_down()
            if self._control is not None and not self._control.is_used:
                self._control.connection.close()

    def ask(self, ask: Callable[[HttpConnection], T], timeout_s: float, *, reuse: bool = True) -> T:
        """Call `ask` with a connection: with `reuse`, that of the lease if it is free; or else a new one.

        If a connection that was used before breaks without an answer, call it once more with a new one. The
        source may have handled the first request.
        """
        began_s, used = time.monotonic(), None
        try:
            with self.borrowed(timeout_s, reuse=reuse) as used:
                return ask(used)
        except LinkBroken:
            is_unanswered = used is not None and used.heard_s < began_s
            if not is_unanswered:
                raise
        with self.borrowed(timeout_s, reuse=False) as fresh:
            return ask(fresh)

    @contextmanager
    def borrowed(self, timeout_s: float, *, reuse: bool = True) -> Iterator[HttpConnection]:
        """Yield a connection for requests, as `ask` describes."""
        with self._lock:
            control = self._control if reuse and self._control is not None and self._control.is_free else None
            if control is not None:
                control.is_used = True
        used = control or _Control(self.open(timeout_s), is_used=True)
        try:
            yield used.connection
        except BaseException:
            used.is_spoilt = True
            raise
        finally:
            with self._lock:
                used.is_used = False
                is_unneeded = used is not self._control or self.is_over
            if is_unneeded:
                self.close(used.connection)
