"""The sources of one fetch: which of them serve the state, and the error if none does."""

import logging
import ssl
import threading
import time
from collections.abc import Callable, Sequence

from msgspec import structs

from torchferry.core.pull import Grant, LeaseRequest, Result, choose, is_settled, why_not_mixed
from torchferry.core.schedule import OVERDUE_S, PEER_S
from torchferry.engine import threads
from torchferry.engine.deadlines import left_s, wait_until
from torchferry.engine.pull.remote import RemoteSource, Via
from torchferry.errors import (
    BadManifest,
    Corrupted,
    FerryError,
    LinkBroken,
    LinkTimeout,
    NoSuchVersion,
    NotAuthorized,
    PeerError,
    PeerGaveUp,
    SourcesLost,
    StateError,
    what_of,
)
from torchferry.links.address import Address, is_numeric
from torchferry.links.lifecycle import end_at_exit

logger = logging.getLogger(__name__)

_TELL_S = 0.25
"""How long `tell` waits for an answer at least, and at most for one that the fetch does not wait for."""

_PEERS = 2
"""How many peers to get leases from: the one that chunks come from, and one in reserve."""

_PEER_ANSWERS_S = 10.0
"""How long a peer, another receiver, may take to grant a lease: it compares its local state first."""


class Sources:
    """The sources of a fetch: those that were given, and peers, which are other receivers that reshare.

    Threads of the fetch share it. `changed` guards its lists, its counters and the errors of its sources.

    `chosen` is the grant of the version to fetch, once it is known. `is_final` is set when the metadata of
    that version was verified. Once `is_over` is set, lanes stop, and no source is given up any more;
    `shut_down` ends all threads. `changes` is incremented whenever `preferred` may return other sources.
    """

    def __init__(
        self,
        name: str,
        addresses: Sequence[Address],
        wanted: LeaseRequest,
        tls: ssl.SSLContext | None,
        max_metadata_bytes: int,
        via: Via | None,
        listen_at: Callable[[str], int] | None = None,
    ) -> None:
        self._name = name
        self.changed = threading.Condition()
        self.all = [
            RemoteSource(address, tls, max_metadata_bytes, via, listen_at=listen_at) for address in addresses
        ]
        self._peers: list[RemoteSource] = []  # those that were not asked yet, the best first
        self._lease_asked_s: dict[RemoteSource, float] = {}  # when peers were asked
        self.unanswered = set(self.all)
        self.wanted = wanted
        self.chosen: Grant | None = None
        self.is_final = False
        self.is_over = False
        self.changes = 0
        self._granted_s: float | None = None
        self._threads: list[threading.Thread] = []
        end_at_exit(self)

    def start(self, work: Callable[..., object], *args: object) -> threading.Thread:
        """Run `work` in a thread of this fetch; raises StateError if no thread can be started."""
        name = f"torchferry {self._name}: {len(self._threads) + 1}"
        thread = threading.Thread(target=work, args=args, name=name, daemon=True)
        threads.start(thread)
        self._threads.append(thread)
        return thread

    def shut_down(self) -> None:
        """End all threads and connections."""
        with self.changed:
            self.is_over = True
            self.changed.notify_all()
        for source in self.all:
            source.shut_down()

    def join(self, until_s: float) -> None:
        """Wait for the threads to end."""
        for thread in list(self._threads):
            thread.join(left_s(until_s))

    def open_all(self, timeout_s: float) -> None:
        """Ask all sources for a lease, each in a thread."""
        for source in self.all:
            self.start(self._open, source, self.wanted, timeout_s)

    def _open(self, source: RemoteSource, wanted: LeaseRequest, timeout_s: float) -> None:
        grant: Grant | None = None
        error: FerryError = LinkTimeout(f"the source did not have {wanted} within {timeout_s:g} s")
        try:
            grant = source.open(wanted, time.monotonic() + timeout_s)
        except Exception as failure:
            error = failure if isinstance(failure, FerryError) else StateError(what_of(failure))
        with self.changed:
            source.grant = grant
            self.unanswered.discard(source)
            if grant is None:
                self.lose(source, error)
            elif self._granted_s is None:
                self._granted_s = time.monotonic()
            self._note_change()
        if grant is not None:
            source.keep_alive()

    def is_settled(self) -> bool:
        """Return whether the version can be chosen."""
        grants, now_s = [source.grant for source in self.all], time.monotonic()
        pending = [number for number, source in enumerate(self.all) if source in self.unanswered]
        return is_settled(grants, pending, self.wanted, now_s - (self._granted_s or now_s))

    def choose(self) -> Grant | None:
        """Choose the version to fetch; None if no source serves any."""
        with self.changed:
            found = choose([source.grant if source.serves else None for source in self.all])
            self.chosen = found or self.chosen
            return found

    def serving(self) -> list[RemoteSource]:
        """Return the sources that serve the chosen state. If that `is_final`, give up the others."""
        found = []
        with self.changed:
            for source in self.all:
                if source.serves and source.grant is not None and self.chosen is not None:
                    reason = why_not_mixed(source.grant, self.chosen)
                    if not reason:
                        found.append(source)
                    elif self.is_final and not self.is_over:
                        self.lose(source, PeerError(f"not used: {reason}"))
                        # Otherwise it would keep that version in memory until the end of the fetch.
                        self.start(source.leave, f"not used: {reason}")
        return found

    def add_peers(self, grant: Grant, tls: ssl.SSLContext | None) -> None:
        """Let `preferred` ask the receivers that a grant names before the sources that were given.

        If the source is on this machine, they are ignored: nothing is faster than its memory.
        """
        given = next(source for source in self.all if source.grant is grant)
        # Only numeric addresses, so that a source can't make this process resolve names. Not this receiver.
        named = [
            peer
            for peer in grant.peers
            if peer.port and is_numeric(peer.host) and (peer.host, peer.port) != given.own_address
        ]
        if named and grant.peer_token and not given.is_local():
            self._peers = [
                RemoteSource(
                    Address(peer.host, peer.port, grant.peer_token, given.address.secure),
                    tls,
                    max_metadata_bytes=0,
                    via="tcp",
                    is_peer=True,
                )
                for peer in named
            ]

    def preferred(self) -> list[RemoteSource]:
        """Return the sources to ask for chunks now: the best peer that serves, or else all that were given.

        Also asks the next peers for leases, so that there are always _PEERS. Chunks come from one peer at a
        time, so each peer sends about as much as it receives.

        The list is empty while it is worth waiting for a better peer's lease: PEER_S and four times
        `connect_s` from when the first peer was asked. If a peer was too slow, and none has delivered a chunk
        OVERDUE_S after the first was asked, the given sources are asked too.
        """
        now_s, serving = time.monotonic(), self.serving()
        with self.changed:
            peers = [each for each in serving if each.is_peer and not each.backoff.is_active(now_s)]
            asked = [each for each, since_s in self._lease_asked_s.items() if now_s < since_s + OVERDUE_S]
            due = [each for each in asked if each in self.unanswered]
            while self.chosen is not None and self._peers and len(peers) + len(due) < _PEERS:
                peer = self._peers.pop(0)
                self.all.append(peer)
                self.unanswered.add(peer)
                self._lease_asked_s[peer] = now_s
                due.append(peer)
                wanted = structs.replace(self.wanted, version=self.chosen.version, newer_than=None)
                self.start(self._open, peer, wanted, _PEER_ANSWERS_S)
            asked_for_s = now_s - next(iter(self._lease_asked_s.values()), now_s)
            given = [each for each in serving if not each.is_peer]
            # On a long link, an answer takes several round trips.
            answers_s = PEER_S + 4 * max((each.connect_s for each in given), default=0.0)
            best = next((each for each in self.all if each in peers or each in due), None)
            if best in due and asked_for_s < answers_s:
                return []
            granted = [each for each in serving if each.is_peer]
            is_slow = len(granted) > len(peers) and not any(each.report.chunks for each in granted)
            if is_slow and asked_for_s >= OVERDUE_S:
                return peers[:1] + given
            return peers[:1] or given or serving

    def lose(self, source: RemoteSource, error: FerryError) -> None:
        """Give a source up, because of an error."""
        if source.is_peer and isinstance(error, NotAuthorized):
            error = LinkBroken("the receiver does not reshare this version any more")
        with self.changed:
            if source.error is None and not self.is_over:
                source.error = error.with_context(peer=source.peer)
                source.report.failures.append(error.what)
                logger.debug("%s: %s is given up: %s", self._name, source.peer, error.what)
            self._note_change()

    def set_back(self, source: RemoteSource, delay_s: float = OVERDUE_S) -> None:
        """Ask other sources first for a while, because this one was too slow."""
        with self.changed:
            source.backoff.overdue(time.monotonic(), delay_s)
            self._note_change()

    def _note_change(self) -> None:
        self.changes += 1
        self.changed.notify_all()

    def live(self) -> list[RemoteSource]:
        """Return the sources that delivered chunks of a live state, which may have changed."""
        return [each for each in self.all if each.report.chunks and each.grant and not each.grant.snapshot]

    def forget_errors(self) -> None:
        """Forget why sources were given up."""
        for source in self.all:
            source.error = None

    def are_lost(self) -> bool:
        """Return whether no source serves the chosen state, and none is left that may answer."""
        return not self.unanswered and not self.serving()

    def why_none(self, *, is_late: bool) -> FerryError:
        """Return the error for a fetch that no source can serve. `is_late` says that its deadline passed."""
        given = [source for source in self.all if not source.is_peer]
        errors = [source.error for source in given if source.error is not None]
        # A source answers a request for a newer version only when it has one, or after a long time.
        silent = "no answer in time" + (", or nothing newer" if self.wanted.newer_than is not None else "")
        reasons = {each.peer: each.error.what if each.error else silent for each in self.all}
        listed = "; ".join(f"{peer}: {reason}" for peer, reason in reasons.items())
        # A version that was granted and is gone is a lost source, not a wrong argument.
        kinds = [NotAuthorized, NoSuchVersion] if self.chosen is None else []
        answers = [error for error in errors if not isinstance(error, LinkBroken)]
        for kind in (*kinds, LinkTimeout, PeerGaveUp, BadManifest, Corrupted):
            # A source that can't be reached does not tell whether the token or the version is wrong.
            found = answers if kind in kinds else errors
            if len(errors) == len(given) and found and all(isinstance(error, kind) for error in found):
                is_listed = len(errors) > 1 and kind is not Corrupted
                return kind(listed) if is_listed else errors[0]
        if is_late:
            return LinkTimeout(f"no source sent {self.wanted} in time: {listed}")
        return SourcesLost(reasons)

    def tell(
        self,
        sources: Sequence[RemoteSource],
        result: Result,
        until_s: float,
        wait_for: Sequence[RemoteSource] | None = None,
    ) -> list[RemoteSource]:
        """Tell sources a result, all at the same time, and return those that did not acknowledge it.

        Each has until `until_s`, and at least _TELL_S. With `wait_for`, this waits for these sources, and
        only a moment longer for the others. Raises PeerGaveUp if a source does not accept the result.
        """
        told: dict[RemoteSource, bool | Exception] = {}

        def tell(source: RemoteSource) -> None:
            try:
                told[source] = source.tell(result, left_s(_extended(until_s)))
            except Exception as error:
                told[source] = error
            with self.changed:
                self.changed.notify_all()

        for source in sources:
            try:
                self.start(tell, source)
            except StateError as error:
                told[source] = error
        with self.changed:
            due = sources if wait_for is None else wait_for
            wait_until(self.changed, lambda: all(source in told for source in due), _extended(until_s))
            if wait_for is not None:
                others_s = min(until_s, time.monotonic() + _TELL_S)
                wait_until(self.changed, lambda: len(told) == len(sources), others_s)
        for answer in list(told.values()):
            if isinstance(answer, PeerGaveUp):
                raise answer
        return [source for source in sources if told.get(source) is not True]


def _extended(until_s: float) -> float:
    return max(until_s, time.monotonic() + _TELL_S)
