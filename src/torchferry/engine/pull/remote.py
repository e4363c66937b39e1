"""One source of a fetch: its lease, the requests to it, and what it delivered."""

import os
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Literal

from msgspec import msgpack, structs

from torchferry.core import pull
from torchferry.core.codec import decode_value
from torchferry.core.pull import Grant, LeaseRequest, Result
from torchferry.core.report import SourceReport
from torchferry.core.schedule import PEER_S, Backoff
from torchferry.core.text import show_text
from torchferry.engine.deadlines import left_s
from torchferry.engine.pull.connections import Connections
from torchferry.errors import (
    BadManifest,
    Corrupted,
    FerryError,
    LinkBroken,
    LinkError,
    LinkTimeout,
    NoSuchVersion,
    NotAuthorized,
    PeerError,
    PeerGaveUp,
)
from torchferry.links.address import Address
from torchferry.links.http_client import HttpConnection, MemoryUnusable

_MAX_ANSWER_BYTES = 64 << 10
"""The longest answer that is neither metadata nor chunks."""

_LEAVE_S = 1.0
"""How long a receiver tries to tell a source that it is not used."""

MAX_LANES = 2
"""How many connections read chunks from a single source at most."""

TOO_SLOW = "the connection was too slow, so it was closed"


class LeaseEnded(LinkBroken):
    """The source ended the lease. The receiver may ask for another."""


Via = Literal["tcp", "memory"]
"""How chunks travel: over TCP, or through memory of this machine."""


_ERRORS: dict[int, type[FerryError]] = {
    pull.UNKNOWN: NoSuchVersion,
    pull.CHANGED: PeerGaveUp,
    pull.LEASE_ENDED: LeaseEnded,
}
"""The error for each status that a source sends with a reason."""


class RemoteSource:
    """One source. It has a grant once it gave a lease, and an error once it is given up.

    `is_peer` says that the source is another receiver. `peer_s` is then how long it may be silent,
    `alive_asked_s` when it was asked whether it is alive, and `answered_s` when it last answered that.
    `connect_s` is how long connecting took. `listen_at(host)` listens for peers that fetch from this process,
    and returns the port; `host` is this process's own address, as seen from the source. `open` keeps host and
    port in `own_address`. `heard_s` is when bytes of metadata last arrived.

    Requests for metadata (of a single source), `damaged` and `result` may go over the connection that opened
    the lease. `alive` has a connection of its own, `_alive`, which stays open too.

    Requests raise LinkError if the connection fails, is too slow or its token is wrong, LeaseEnded if `renew`
    may help, and PeerError if the answer can't be used or is an error.
    """

    def __init__(
        self,
        address: Address,
        tls: ssl.SSLContext | None,
        max_metadata_bytes: int,
        via: Via | None = None,
        *,
        listen_at: Callable[[str], int] | None = None,
        is_peer: bool = False,
    ) -> None:
        self.is_peer = is_peer
        self.peer_s = PEER_S if is_peer else None
        self.alive_asked_s = self.answered_s = 0.0
        self.connect_s = 0.0
        self._listen_at = listen_at
        self.own_address: tuple[str, int] | None = None
        self.address = address
        self.peer = str(address)
        self.report = SourceReport()
        self.grant: Grant | None = None
        self.error: FerryError | None = None
        self.heard_s = 0.0
        self.backoff = Backoff()
        self._connections = Connections(address, tls)
        self._max_metadata_bytes = max_metadata_bytes
        self._via = via
        self._alive: HttpConnection | None = None
        self._renewing = threading.Lock()
        self._wake = threading.Event()  # wakes `keep_alive`

    @property
    def serves(self) -> bool:
        """Whether chunks can be requested: it granted a lease and was not given up."""
        return self.grant is not None and self.error is None

    def connect(self, timeout_s: float) -> HttpConnection:
        """Connect; raises LinkBroken or LinkTimeout."""
        return self._connections.open(timeout_s)

    def connect_for_chunks(self, timeout_s: float) -> HttpConnection:
        """Connect to the source's Unix socket if it is on this machine, and else over TCP.

        Raises LinkBroken, LinkTimeout, or PeerError if chunks must come through memory and can't.
        """
        if self._via != "tcp" and not self.report.why_tcp:
            try:
                found = self._connect_locally(timeout_s)
                self.report.via = "memory"
                return found
            except LinkBroken as error:
                self.fall_back_to_tcp(error)
        self.report.via = "tcp"
        return self.connect(timeout_s)

    def is_local(self) -> bool:
        """Return whether chunks can come through memory."""
        if self._via != "tcp":
            with suppress(LinkError):
                self.close(self._connect_locally(0.0))
                return True
        return False

    def _connect_locally(self, timeout_s: float) -> HttpConnection:
        assert self.grant is not None, "the source granted a lease"
        if self.grant.memory is None:
            raise MemoryUnusable("the source does not offer its memory")
        if self._via is None and self.grant.port != self.address.port:
            raise MemoryUnusable(
                f"a proxy is in between: the address has port {self.address.port}, the source listens on "
                f"{self.grant.port}"
            )
        return self._connections.open(timeout_s, local=self.grant.memory)

    def fall_back_to_tcp(self, error: LinkBroken) -> None:
        """Use TCP from now on; raises PeerError if chunks must come through memory."""
        if self._via == "memory":
            raise PeerError(f"memory can't be used: {error.what}", peer=self.peer) from None
        self.report.why_tcp = error.what

    def close(self, connection: HttpConnection) -> None:
        """Close a connection. Only the thread that uses it does that."""
        self._connections.close(connection)

    def shut_down_readers(self, reason: str = "the fetch is over") -> None:
        """End all connections but those that keep the lease: the one that opened it, and that for `alive`."""
        self._connections.shut_down_readers(reason, spared=self._alive)

    def shut_down(self) -> None:
        """End all connections, and every one that is opened later."""
        self._connections.shut_down()
        self._wake.set()

    # Requests.

    def open(self, wanted: LeaseRequest, deadline_s: float) -> Grant | None:
        """Connect and ask for a lease; None if there was nothing newer until the deadline."""
        began_s = time.monotonic()
        control = self.connect(deadline_s - began_s)
        self.connect_s = time.monotonic() - began_s
        unneeded: HttpConnection | None = control
        try:
            if self._listen_at is not None:
                self.own_address = control.own_host, self._listen_at(control.own_host)
                wanted = structs.replace(wanted, port=self.own_address[1])
            while most_s := left_s(deadline_s):
                wait_s = 0.0 if wanted.newer_than is None else min(most_s, pull.MAX_WAIT_S)
                body = msgpack.encode(structs.replace(wanted, wait_s=wait_s))
                # The source may take wait_s to answer.
                status, answer = self._ask(control, "POST", "/v1/leases", most_s + wait_s, body)
                if status == pull.GRANTED:
                    grant = decode_value(answer, pull.grant_decoder)
                    if not pull.fits(wanted, grant.version):
                        raise PeerError(f"the source granted version {grant.version}, not {wanted}")
                    unneeded = self._connections.hold(control)
                    if self.is_peer:
                        # On a long link, an answer takes longer.
                        self.peer_s = PEER_S + 2 * self.connect_s
                    return grant
                if status != pull.NOTHING or wanted.newer_than is None:
                    raise PeerError(f"the source answered with status {status} instead of a lease")
            return None
        finally:
            if unneeded is not None:
                self.close(unneeded)

    def renew(self, wanted: LeaseRequest, ended: Grant, deadline_s: float) -> None:
        """Ask for another lease on the same version, unless another thread did so already."""
        with self._renewing:
            if self.grant is not ended:
                return
            grant = self.open(structs.replace(wanted, version=ended.version, newer_than=None), deadline_s)
            if grant is None:
                raise LinkTimeout("the source did not renew the lease in time")
            if reason := pull.why_not_mixed(grant, ended):
                raise PeerError(reason)
            self.grant = grant

    def metadata(self, silent_s: float, reuse: bool) -> tuple[bytes, tuple[int, ...]]:
        """Read the manifest and the digests of all chunks; raises LinkTimeout after `silent_s` of silence.

        Without `reuse`, they are read on a connection of their own, so that `shut_down_readers` ends that.
        """
        grant = self.grant
        assert grant is not None, "the source granted a lease"
        limits = {"manifest": self._max_metadata_bytes, "digests": 8 * grant.chunks}

        def read(connection: HttpConnection) -> tuple[bytes, bytes]:
            try:
                for what in limits:
                    connection.send("GET", self._path(what), timeout_s=silent_s)
                manifest, digests = (
                    self._answer(connection, what, max_bytes)[1] for what, max_bytes in limits.items()
                )
                return manifest, digests
            finally:
                self.heard_s = connection.heard_s

        manifest, digests = self._connections.ask(read, silent_s, reuse=reuse)
        found = pull.metadata_digest(manifest, digests, grant.version, grant.root)
        if found != grant.metadata:
            raise Corrupted((), "the metadata arrived damaged: its digest is not the one that was announced")
        return manifest, pull.decode_digests(digests)

    @property
    def uses_ring(self) -> bool:
        """Whether chunks come through a ring, as far as is known: memory is used, and the state is live."""
        is_live = self.grant is not None and not self.grant.snapshot
        return is_live and "tcp" not in (self._via, self.report.via)

    @property
    def max_lanes(self) -> int:
        """How many connections to open for chunks.

        One for a ring. MAX_LANES for a snapshot, through memory or over TCP without TLS. For a live state
        over TCP, and with TLS, the source needs as much of a core as this process, and may be on this
        machine: MAX_LANES if this process may use more cores than MAX_LANES, or else one.
        """
        if self.uses_ring:
            return 1
        # Until a lane is connected, it is not known whether memory can be used.
        is_tls = self.address.secure and self.report.via != "memory"
        is_cheap = self.grant is not None and self.grant.snapshot and not is_tls
        return MAX_LANES if is_cheap or len(os.sched_getaffinity(0)) > MAX_LANES else 1

    @property
    def max_ahead(self) -> int:
        """How many requests for chunks may be in flight on one connection."""
        # While bytes come through a ring, this end sends only signals for slots, and no requests.
        return 1 if self.uses_ring else pull.MAX_AHEAD

    def request_chunks(self, connection: HttpConnection, chunks: range, timeout_s: float) -> None:
        """Ask for a range of chunks."""
        connection.send("GET", self._path(f"chunks/{chunks.start}-{chunks.stop}"), timeout_s=timeout_s)

    def read_chunks_head(self, connection: HttpConnection, nbytes: int) -> None:
        """Read the head of the next answer to a request for chunks. The caller then reads `nbytes` bytes."""
        head = connection.read_head()
        if head.status == pull.IN_MEMORY and connection.is_local:
            answer = connection.read(min(head.nbytes, _MAX_ANSWER_BYTES))
            try:
                offset = decode_value(answer, pull.in_memory_decoder).offset
            except BadManifest as failure:
                raise MemoryUnusable(failure.what) from None
            connection.use_memory(offset, nbytes)
            return
        if head.status != pull.OK:
            error = _error_of(head.status, connection.read(min(head.nbytes, _MAX_ANSWER_BYTES)))
            raise error or PeerError(f"the source answered with status {head.status}, without chunks")
        if head.nbytes != nbytes:
            raise LinkBroken(f"the source sends {head.nbytes} bytes instead of {nbytes}")

    def report_damage(self, chunk: int, timeout_s: float) -> None:
        """Report a chunk with a wrong digest to the source; raises PeerGaveUp if its state changed."""
        self._post(f"damaged/{chunk}-{chunk + 1}", timeout_s)

    def ask_if_alive(self) -> None:
        """Let the thread in `keep_alive` send a request now. If the source answers, `answered_s` is set.

        `alive_asked_s` is when this was called first since the last answer.
        """
        if self.alive_asked_s <= self.answered_s:
            self.alive_asked_s = time.monotonic()
        self.hold_lease()

    def hold_lease(self) -> None:
        """Let the thread in `keep_alive` send a request now, on a connection that is not lost.

        If one connection was lost, others may be lost too. The lease ends with its last connection.
        """
        self._wake.set()

    def keep_alive(self) -> None:
        """Tell the source regularly that this receiver is alive, until `shut_down`."""
        while True:
            self._wake.wait(pull.ALIVE_S)
            self._wake.clear()
            if self._connections.is_over:
                break
            self._show_alive()
        self._close_alive()

    def _show_alive(self) -> None:
        """Send `alive` on the connection of the last time. If there is none, or it fails, open a new one."""
        is_new = self._alive is None
        try:
            self._alive = connection = self._alive or self.connect(pull.ALIVE_S)
            self._ask(connection, "POST", self._path("alive"), pull.ALIVE_S)
            self.answered_s = time.monotonic()
        except FerryError:
            # If the source is gone, the next request for chunks finds that out.
            self._close_alive()
            if not (is_new or self._connections.is_over):
                self._show_alive()

    def _close_alive(self) -> None:
        connection, self._alive = self._alive, None
        if connection is not None:
            self.close(connection)

    def leave(self, reason: str) -> None:
        """End the lease and all connections, because this source is not used."""
        with suppress(FerryError):
            self.tell(Result("failed", reason), _LEAVE_S)
        self.shut_down()

    def tell(self, result: Result, timeout_s: float) -> bool:
        """Tell the source the result, which ends the lease; return whether the source acknowledged it.

        Raises PeerGaveUp if the source does not accept it, because its state changed.
        """
        with suppress(LinkError):
            self._post("result", timeout_s, msgpack.encode(result))
            return True
        return False

    def _post(self, what: str, timeout_s: float, body: bytes = b"") -> None:
        self._connections.ask(
            lambda connection: self._ask(connection, "POST", self._path(what), timeout_s, body), timeout_s
        )

    def _path(self, what: str) -> str:
        assert self.grant is not None, "only a source that granted a lease is asked"
        return f"/v1/leases/{self.grant.lease}/{what}"

    def _ask(
        self,
        connection: HttpConnection,
        method: str,
        path: str,
        timeout_s: float,
        body: bytes = b"",
    ) -> tuple[int, bytes]:
        """Send a request, and return the status and the body of its response."""
        connection.send(method, path, body, timeout_s=timeout_s)
        return self._answer(connection, path.rpartition("/")[2])

    def _answer(
        self, connection: HttpConnection, what: str, max_bytes: int = _MAX_ANSWER_BYTES
    ) -> tuple[int, bytes]:
        """Return the status and the body of the next response."""
        head = connection.read_head()
        max_bytes = max_bytes if head.status < 400 else _MAX_ANSWER_BYTES
        if head.nbytes > max_bytes:
            option = " (max_metadata_bytes)" if what == "manifest" else ""
            raise BadManifest(
                f"the source announces {head.nbytes} bytes for {what}; the limit is {max_bytes}{option}"
            )
        answer = connection.read(head.nbytes)
        if error := _error_of(head.status, answer):
            raise error.with_context(peer=self.peer)
        return head.status, answer


def _error_of(status: int, answer: bytes) -> FerryError | None:
    """Return the error that a source reports; None if it reports none."""
    if status in (pull.OK, pull.GRANTED, pull.NOTHING):
        return None
    if status == pull.UNAUTHORIZED:
        return NotAuthorized("the source does not accept the token: pass `source.address` as it is")
    if status == pull.TOO_MANY:
        return LinkBroken(
            "the source has as many connections as it allows (503): fetch with fewer receivers at once"
        )
    try:
        reason = show_text(decode_value(answer, pull.failure_decoder).reason)
    except PeerError:
        return PeerError(f"this is not a torchferry source: it answers with HTTP status {status}")
    if status in _ERRORS:
        return _ERRORS[status](reason)
    return PeerError(f"the source rejected a request with status {status}: {reason}")
