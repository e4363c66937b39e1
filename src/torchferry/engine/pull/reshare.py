"""Resharing: a receiver serves the chunks that it has verified, while it still fetches the rest.

The source lists such receivers in its grants to later receivers, which then fetch from them. So the source's
link carries the state about once.
"""

import logging
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress

from xxhash import xxh3_64_intdigest

from torchferry.core.codec import EncodedManifest
from torchferry.core.outcome import paths_of
from torchferry.core.plan import Plan
from torchferry.core.pull import Grant
from torchferry.engine.pull.handler import PullHandler
from torchferry.engine.pull.landing import Landing
from torchferry.engine.pull.published import Published, SnapshotMemory
from torchferry.engine.pull.version_store import VersionStore
from torchferry.errors import BadArgument, StateError
from torchferry.links.address import listen
from torchferry.links.http_server import HttpServer
from torchferry.links.lifecycle import close_after_fork
from torchferry.links.sockets import close_descriptor

logger = logging.getLogger(__name__)


class _Arriving(Published):
    """A version that this process fetches. A chunk can be read when it has landed.

    The user may change the tensors when the fetch is over, so a chunk that is served may be stale. Receivers
    verify every chunk by the digests of the source.
    """

    def __init__(
        self, grant: Grant, encoded: EncodedManifest, plan: Plan, digests: Sequence[int], landing: Landing
    ) -> None:
        super().__init__(grant.version, encoded, plan, digests, grant.root, None, None, SnapshotMemory())
        self._landing = landing

    def read(self, first: int, end: int) -> Iterator[memoryview]:
        # The user may free the memory when the fetch is over.
        with suppress(StateError):
            for chunk in self.plan.chunks[first:end]:
                if (data := self._landing.read(chunk)) is None:
                    return
                yield memoryview(data)

    def changed_paths(self, chunk: int | None = None) -> list[str]:
        if chunk is None:
            return []
        data = self._landing.read(self.plan.chunks[chunk])
        if data is not None and xxh3_64_intdigest(data) == self.digests[chunk]:
            return []
        return paths_of(self.encoded.manifest, self.plan, {chunk})


class Resharing:
    """What one fetch serves to other receivers of the same version: at `server`, or at a server of its own.

    `host` and `port` are where the server listens.
    """

    def __init__(self, server: HttpServer | None = None, host: str | None = None, port: int = 0) -> None:
        self._server = server
        self._is_own = server is None
        self._port = port
        self._host = host
        self._is_stopped = False
        self._listener: socket.socket | None = None
        self._handler: PullHandler | None = None
        self._landing: Landing | None = None
        self._lock = threading.Lock()
        self._versions = VersionStore(self._disconnect)
        close_after_fork(self)

    def listen_at(self, host: str) -> int:
        """Listen at this process's address `host`, and return the port at which peers reach it.

        0 if they can't: it listens at another address already, can't listen there, or was stopped.
        """
        everywhere = "::" if ":" in host else "0.0.0.0"
        with self._lock:
            if self._is_stopped:
                return 0
            if self._host is None:
                self._host = host
                try:
                    self._listener = listen(host, 0)
                    self._port = self._listener.getsockname()[1]
                except BadArgument as error:
                    logger.warning("chunks are not served to other receivers: %s", error.what)
            elif not self._is_own and self._host not in (host, everywhere):
                logger.warning(
                    "chunks are not served to other receivers: the source given as reshare= listens on %s, "
                    "and they may reach this process at %s",
                    self._host,
                    host,
                )
            return self._port if self._host in (host, everywhere) else 0

    def start(
        self,
        name: str,
        grant: Grant,
        encoded: EncodedManifest,
        plan: Plan,
        digests: Sequence[int],
        landing: Landing,
    ) -> None:
        """Serve what is there already or lands, to receivers that know the token of the version."""
        if not self._port or not grant.peer_token or not landing.can_read_all():
            # Close the listener, so that peers that know its address are refused, and do not wait.
            self.stop()
            return
        self._landing = landing
        self._versions.put(name, _Arriving(grant, encoded, plan, digests, landing), 1.0, "drop")
        self._handler = PullHandler(self._versions, grant.peer_token, self._port)
        if self._server is not None:
            self._server.add_handler(grant.peer_token, self._handler)
        elif self._listener is not None:
            self._server = HttpServer(
                [self._listener], grant.peer_token, self._handler, wake=landing.stop_reading
            )

    def finish(self, linger_s: float) -> None:
        """Return at once, and serve those that take chunks now for up to `linger_s` in the background."""
        if self._handler is not None:
            name = "torchferry-reshare"
            # If no thread can be started, the fetch is complete all the same: stop at once.
            with suppress(RuntimeError):
                threading.Thread(target=self.stop, args=(linger_s,), name=name, daemon=True).start()
                return
        self.stop()

    def stop(self, linger_s: float = 0.0) -> None:
        """Stop when nobody takes chunks any more, or after `linger_s`."""
        if self._landing is not None and not linger_s:
            self._landing.stop_reading()
        self._versions.close(linger_s)
        if self._landing is not None:
            self._landing.stop_reading()
        with self._lock:
            self._is_stopped = True
        if self._server is not None and self._handler is not None:
            self._server.remove_handler(self._handler)
            if self._is_own:
                self._server.close(finish_s=0.0)
        elif self._listener is not None:
            self._listener.close()

    def close_inherited(self) -> None:
        """Forget everything in a forked child."""
        self._versions.forget()
        self._landing, self._lock = None, threading.Lock()
        if self._listener is not None:
            close_descriptor(self._listener)

    def _disconnect(self, connection: int) -> None:
        if self._server is not None:
            self._server.disconnect(connection)
