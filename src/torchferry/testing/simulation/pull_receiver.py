"""A simulated receiver: fetches by the rules of `core.pull` and `core.schedule`, as `engine.fetch` does."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torchferry.core import pull
from torchferry.core.machine import Machine
from torchferry.core.pull import FetchState, Grant, LeaseRequest, LeaseState, Result
from torchferry.core.schedule import OVERDUE_S, Backoff, Schedule
from torchferry.errors import NoSuchVersion
from torchferry.testing.simulation.pull_network import (
    END_S,
    NAME,
    TICK_S,
    Broken,
    Connection,
    Damaged,
    Ended,
    Host,
    Lost,
    PullWorld,
    Steps,
    check,
)
from torchferry.testing.simulation.pull_source import Source

WAIT_S = 20.0
"""How long a receiver waits for a version."""
CONFIRM_S = 5.0
SLACK_S = 1.0
_MAX_FAILURES = 4
"""In a row, of one lane."""
_HARMLESS = {"damage", "pause"}
"""Faults of a source that a fetch survives."""


@dataclass(eq=False)
class Peer:
    """A source as its receiver sees it."""

    source: Source
    grant: Grant | None = None
    error: Exception | None = None
    has_answered: bool = False
    control: Connection | None = None
    backoff: Backoff = field(default_factory=Backoff)

    @property
    def serves(self) -> bool:
        """Whether chunks can be requested."""
        return self.grant is not None and self.error is None


@dataclass(eq=False)
class Lane:
    """A thread that asks one source for chunks."""

    number: int
    peer: Peer
    connection: Connection | None = None
    is_overdue: bool = False
    asked_s: float = 0.0
    failures: int = 0  # in a row


class Receiver(Host):
    """A process that fetches once."""

    def __init__(
        self,
        world: PullWorld,
        name: str,
        sources: list[Source],
        needed: list[int],
        chunks: int,
        **options: Any,
    ) -> None:
        super().__init__(name)
        self.world = world
        self.peers = [Peer(source) for source in sources]
        self.needed = needed
        self.chunks = chunks
        self.newer_than: int | None = options["newer_than"]
        self.timeout_s: float = options["timeout_s"]
        self.verifies: bool = options["verifies"]
        self.refuses: bool = options["refuses"]
        self.compare_s: float = options["compare_s"]
        self.machine = Machine(FetchState.CONNECTING)
        self.began_s = self.ended_s = 0.0
        self.failure: str | None = None
        self.chosen: Grant | None = None
        self.lanes: dict[int, Lane] = {}
        self.owed: dict[int, Lane] = {}  # which lane a chunk was asked of
        self.landed: Counter[int] = Counter()
        self.received: dict[int, str] = {}
        self.is_over = False

    @property
    def ending(self) -> str:
        """How the fetch ended."""
        if not self.is_alive:
            return "killed"
        if self.failure is not None:
            return f"failed: {self.failure}"
        return self.machine.state.label

    # Requests.

    def _ask(self, connection: Connection, ask: Callable[[], Steps], until_s: float) -> Steps:
        self.world.request(connection, ask)
        return (yield from self._next_answer(connection, until_s))

    def _next_answer(self, connection: Connection, until_s: float = END_S) -> Steps:
        self.world.at(until_s, lambda: self.world.wake(connection))
        while not connection.answers:
            if not connection.is_open or self.world.now_s >= until_s:
                raise Broken("closed" if not connection.is_open else "no answer in time")
            yield connection
        answer = connection.answers.popleft()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _connect(self, peer: Peer, until_s: float) -> Steps:
        yield self.world.delay_s()
        if not peer.source.is_alive:
            raise Lost("refused")
        while self.world.now_s < peer.source.stopped_until_s:
            if self.world.now_s >= until_s:
                raise Broken("not reachable in time")
            yield TICK_S
        if not peer.source.is_alive:
            raise Lost("refused")
        return self.world.connect(self, peer.source)

    def _open(self, peer: Peer, version: int | None, newer_than: int | None, until_s: float) -> Steps:
        wait_s = 0.0 if newer_than is None else WAIT_S
        request = LeaseRequest(NAME, self.name, version, newer_than, wait_s, port=1)
        try:
            peer.control = control = yield from self._connect(peer, until_s)
            return (yield from self._ask(control, lambda: peer.source.grant(control, request), until_s))
        except (Broken, NoSuchVersion) as error:
            raise Lost(str(error)) from None

    def _tell(self, peer: Peer, result: Result, until_s: float, told: list[Peer]) -> Steps:
        grant = peer.grant
        assert grant is not None
        try:
            connection = yield from self._connect(peer, until_s)
            ask = peer.source.finish
            yield from self._ask(connection, lambda: ask(connection, grant.lease, result), until_s)
            told.append(peer)
        except (Broken, Lost):
            pass

    def _tell_all(self, result: Result, timeout_s: float) -> Steps:
        """Tell all sources a result at the same time; return whether all know."""
        told: list[Peer] = []
        peers = [peer for peer in self.peers if peer.serves]
        until_s = self.world.now_s + timeout_s
        for peer in peers:
            self.world.start(self, self._tell(peer, result, until_s, told))
        while self.world.now_s < until_s and len(told) < len(peers):
            yield TICK_S
        return len(told) == len(peers)

    # The fetch.

    def run(self) -> Steps:
        """Fetch, and check what is promised."""
        self.began_s = self.world.now_s
        self.deadline_s = self.began_s + WAIT_S
        try:
            yield from self._fetch()
        except Lost as error:
            self.failure = str(error)
            self._check_failure()
            yield from self._tell_all(Result("failed", str(error)), 0.5)
        self.is_over = True
        self.ended_s = self.world.now_s
        self.world.close_all(self)

    def _fetch(self) -> Steps:
        for peer in self.peers:
            self.world.start(self, self._start_peer(peer))
        yield from self._choose()
        self.machine.advance(FetchState.MANIFEST)
        digests = yield from self._read_metadata()
        self.machine.advance(FetchState.COMPARING)
        yield self.compare_s
        if self.refuses:
            self.machine.advance(FetchState.REFUSED)
            yield from self._tell_all(Result("refused"), 0.5)
            return
        self.machine.advance(FetchState.RECEIVING)
        yield from self._receive(digests)
        self.machine.advance(FetchState.ASSEMBLING)
        self.is_over = True
        self._check_received()
        self.machine.advance(FetchState.CONFIRMING)
        yield from self._tell_all(Result("confirmed", verified=self.verifies), CONFIRM_S)
        self.machine.advance(FetchState.DONE)

    def _start_peer(self, peer: Peer) -> Steps:
        try:
            peer.grant = yield from self._open(peer, None, self.newer_than, self.deadline_s)
        except Lost as error:
            peer.error = error
        peer.has_answered = True

    def _choose(self) -> Steps:
        first_s: float | None = None
        while self.world.now_s < self.deadline_s:
            grants = [peer.grant for peer in self.peers]
            if any(grants):
                first_s = self.world.now_s if first_s is None else first_s
            pending = [number for number, peer in enumerate(self.peers) if not peer.has_answered]
            waited_s = 0.0 if first_s is None else self.world.now_s - first_s
            wanted = LeaseRequest(NAME, self.name, None, self.newer_than)
            if pull.is_settled(grants, pending, wanted, waited_s):
                break
            yield 0.05
        grants = [peer.grant for peer in self.peers]
        self.chosen = pull.choose(grants)
        if self.chosen is None:
            raise Lost("no source")
        known = [grant for grant in grants if grant is not None]
        newest = max(grant.version for grant in known)
        first = next(grant for grant in known if grant.version == newest)
        check(self.chosen is first, "the chosen version is not the first of the newest")
        is_newer = self.newer_than is None or self.chosen.version > self.newer_than
        check(is_newer, f"version {self.chosen.version} is not newer than {self.newer_than}")
        self.deadline_s = self.world.now_s + self.timeout_s

    def _members(self) -> list[Peer]:
        assert self.chosen is not None
        for peer in self.peers:
            if (
                peer.serves
                and peer.grant is not None
                and (reason := pull.why_not_mixed(peer.grant, self.chosen))
            ):
                peer.error = Lost(reason)
        return [peer for peer in self.peers if peer.serves]

    def _read_metadata(self) -> Steps:
        for attempt in itertools.count():
            for peer in self._members():
                until_s = min(self.world.now_s + OVERDUE_S * 2**attempt, self.deadline_s)
                try:
                    return (yield from self._read_metadata_of(peer, until_s))
                except Broken as error:
                    if self.world.now_s < until_s:
                        peer.error = error
                except Lost as error:
                    peer.error = error
            if self.world.now_s >= self.deadline_s:
                raise Lost("late")
            if not self._members() and all(peer.has_answered for peer in self.peers):
                raise Lost("no source left")
            yield TICK_S

    def _read_metadata_of(self, peer: Peer, until_s: float) -> Steps:
        grant = peer.grant
        assert grant is not None
        connection = yield from self._connect(peer, until_s)
        try:
            ask = peer.source.metadata
            return (yield from self._ask(connection, lambda: ask(connection, grant.lease), until_s))
        finally:
            self.world.close(connection)

    def _receive(self, digests: tuple[str, ...]) -> Steps:
        self.digests = digests
        self.schedule = schedule = Schedule([1 << 20] * self.chunks, self.needed)
        while True:
            members = self._members()
            busy = {id(lane.peer) for lane in self.lanes.values()}
            wanted = [peer for peer in members if id(peer) not in busy]
            for peer in wanted * (2 if len(members) == 1 else 1):
                lane = self.lanes[len(self.lanes)] = Lane(len(self.lanes), peer)
                self.world.start(self, self._deliver(lane))
            yield TICK_S
            if schedule.is_done:
                return
            self._close_overdue()
            if not self._members() and all(peer.has_answered for peer in self.peers):
                raise Lost("no source left")
            if self.world.now_s >= self.deadline_s:
                raise Lost("late")

    def _close_overdue(self) -> None:
        members, now_s = self._members(), self.world.now_s
        busy = [lane for lane in self.lanes.values() if lane.connection is not None]
        for lane in busy:
            self.schedule.heard(lane.number, lane.connection.heard_s)  # type: ignore[union-attr]
        overdue = self.schedule.overdue(now_s)
        for lane in busy:
            assert lane.connection is not None
            owes = lane in self.owed.values() and lane.asked_s + OVERDUE_S + SLACK_S < now_s
            is_silent = lane.connection.heard_s + OVERDUE_S + SLACK_S < now_s
            check(not (owes and is_silent) or lane.number in overdue, "a silent lane is not overdue")
            others = [peer for peer in members if peer is not lane.peer and not peer.backoff.is_active(now_s)]
            if lane.number in overdue and others:
                lane.is_overdue = True
                self.world.close(lane.connection)

    def _deliver(self, lane: Lane) -> Steps:
        peer = lane.peer
        try:
            while (chunks := (yield from self._next_range(lane))) is not None:
                grant = peer.grant
                try:
                    yield from self._receive_range(lane, chunks)
                except Broken as error:
                    yield from self._recover(lane, grant, error)
        except (Lost, Broken) as error:
            peer.error = peer.error or error
        self._give_up(lane)

    def _next_range(self, lane: Lane) -> Steps:
        peer, schedule = lane.peer, self.schedule
        while not self.is_over and self.failure is None and peer.serves and not schedule.is_done:
            now_s, others = self.world.now_s, [each for each in self._members() if each is not peer]
            has_others = any(not each.backoff.is_active(now_s) for each in others)
            if not schedule.has_more or (has_others and peer.backoff.is_active(now_s)):
                yield TICK_S
            elif lane.connection is None:
                lane.connection = yield from self._connect(peer, self.deadline_s)
            else:
                chunks = schedule.take(lane.number, 4 * len(self.lanes), self.world.now_s)
                lane.asked_s = self.world.now_s
                for chunk in chunks:
                    check(chunk not in self.owed, f"chunk {chunk} was asked of two lanes")
                    self.owed[chunk] = lane
                return chunks
        return None

    def _receive_range(self, lane: Lane, chunks: range) -> Steps:
        grant, source, connection = lane.peer.grant, lane.peer.source, lane.connection
        assert grant is not None
        assert connection is not None
        self.world.request(connection, lambda: source.send(connection, grant.lease, chunks))
        for chunk in chunks:
            data = yield from self._next_answer(connection)
            if self.is_over or self.failure is not None:
                raise Broken("the fetch is over")
            if self.verifies and data != self.digests[chunk]:
                raise Damaged(chunk)
            check(self.owed.pop(chunk, None) is lane, f"chunk {chunk} landed, but is owed by another lane")
            self.landed[chunk] += 1
            self.received[chunk] = data
            self.schedule.landed(lane.number, [chunk], self.world.now_s)
            lane.asked_s = self.world.now_s
            lane.peer.backoff.landed(lane.number)
            lane.failures = 0

    def _give_up(self, lane: Lane) -> None:
        if lane.connection is not None:
            self.world.close(lane.connection)
            lane.connection = None
        self.owed = {chunk: each for chunk, each in self.owed.items() if each is not lane}
        self.schedule.take_back(lane.number)

    def _recover(self, lane: Lane, grant: Grant | None, error: Broken) -> Steps:
        peer, is_overdue = lane.peer, lane.is_overdue
        self._give_up(lane)
        lane.is_overdue = False
        if is_overdue:
            peer.backoff.overdue(self.world.now_s)
            return
        lane.failures += 1
        check(lane.failures <= _MAX_FAILURES, f"a lane failed {lane.failures} times in a row")
        if peer.backoff.failed(lane.number):
            raise Lost(str(error))
        if isinstance(error, Ended) and grant is not None and peer.grant is grant:
            renewed = yield from self._open(peer, grant.version, None, self.deadline_s)
            if reason := pull.why_not_mixed(renewed, grant):
                raise Lost(reason)
            peer.grant = renewed

    # Checks.

    def _check_received(self) -> None:
        """The bytes are those of the chosen version, every needed chunk landed once, and no other."""
        assert self.chosen is not None
        check(self.landed == Counter(self.needed), f"{self.name} received other chunks than it needs")
        expected = {n: f"{self.chosen.root}:{n}" for n in self.needed}
        check(self.received == expected, f"{self.name} received other bytes than those of its version")

    def _check_failure(self) -> None:
        """A fetch fails only if no source without a fault serves its version until then."""
        if self.faults:
            return
        for peer in self.peers:
            source, grant = peer.source, peer.grant
            if source.faults - _HARMLESS:
                continue
            if self.chosen is None:
                check(not self._could_be_granted(source), f"{self.name} found no version at {source.name}")
            elif grant is not None and _are_equal(grant, self.chosen):
                lease = next(each for each in source.granted if each.id == grant.lease)
                ended = lease.machine.state is LeaseState.DROPPED
                check(ended, f"{self.name} failed ({self.failure}) although {source.name} serves its version")

    def _could_be_granted(self, source: Source) -> bool:
        served = source.leases.current.get(NAME)
        dropped = [lease for lease in source.granted if lease.machine.state is LeaseState.DROPPED]
        if served is None or any(lease.receiver == self.name for lease in dropped):
            return False
        if self.newer_than is None:
            return source.serves_since_s < self.began_s
        return (
            served.version > self.newer_than and source.published_s[served.version] < self.world.now_s - 1.0
        )


def _are_equal(one: Grant, two: Grant) -> bool:
    return (one.version, one.root) == (two.version, two.root)
