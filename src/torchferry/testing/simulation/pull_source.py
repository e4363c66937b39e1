"""A simulated source: publishes versions, and answers requests by the rules of `core.leases`."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchferry.core.leases import Lease, Leases
from torchferry.core.pull import LEASE_S, MAX_PEERS, Grant, LeaseRequest, LeaseState, Result
from torchferry.errors import NoSuchVersion
from torchferry.testing.simulation.pull_network import (
    NAME,
    TICK_S,
    Connection,
    Ended,
    Host,
    Lost,
    PullWorld,
    Steps,
    check,
)

_PARTS = 4
"""How many parts a chunk is sent in."""


@dataclass(eq=False)
class Version:
    """A version in memory. `memory` has what a thread that reads it now would send."""

    version: int
    root: str
    digests: tuple[str, ...]
    memory: list[str]
    is_copy: bool
    nbytes: int = 1
    is_abandoned: bool = False


class Source(Host):
    """A process that publishes versions and answers requests."""

    def __init__(self, world: PullWorld, name: str, chunks: int, chunk_s: float) -> None:
        super().__init__(name)
        self.world = world
        self.leases: Leases[Version] = Leases()
        self.granted: list[Lease[Version]] = []
        self.heard_s: dict[Lease[Version], float] = {}
        self.used: dict[Lease[Version], set[int]] = {}  # by which connections that were not found closed
        self.sends: list[Lease[Version]] = []
        self.held: list[Version] = []  # not freed yet
        self.kept: list[list[str]] = []  # the memory of freed snapshots
        self.confirmed: Counter[int] = Counter()
        self.damages: set[int] = set()
        self.serves_since_s = 0.0
        self.published_s: dict[int, float] = {}
        self._chunks = chunks
        self.chunk_s = chunk_s
        self._sent_chunks = 0
        self._lease_ids = itertools.count()

    # What its user does.

    def publish(self, version: int, *, is_copy: bool, readers: str, timeout_s: float) -> Steps:
        """Publish a version as `Source.publish` does."""
        leases = self.leases
        if version <= getattr(leases.current.get(NAME), "version", -1):
            return
        if not (yield from self.release(lambda lease: leases.is_replaced(lease, NAME), timeout_s, readers)):
            return
        copies = [held for held in self.held if held.is_copy]
        check(len(copies) <= 1, f"{self.name} holds {len(copies)} versions after it made room")
        root = f"{'other ' if 'other root' in self.faults else ''}root {version}"
        contents = tuple(f"{root}:{chunk}" for chunk in range(self._chunks))
        memory = self.kept.pop() if self.kept and is_copy else [""] * self._chunks
        memory[:] = contents
        yield 0.01
        earlier = leases.current.get(NAME)
        held = Version(version, root, contents, memory, is_copy)
        self.held.append(held)
        leases.make_current(NAME, held)
        self.published_s[version] = self.world.now_s
        if earlier is None:
            self.serves_since_s = self.world.now_s
        self.free_unused()
        if earlier is not None and not earlier.is_copy:
            concerned = earlier
            if (yield from self.release(lambda lease: lease.held is concerned, timeout_s, readers)):
                self._change(concerned)

    def withdraw(self, readers: str, timeout_s: float) -> Steps:
        """Withdraw the state as `Source.withdraw` does."""
        current = self.leases.current.get(NAME)
        self.leases.withdraw(NAME)
        self.free_unused()
        released = yield from self.release(lambda lease: lease.name == NAME, timeout_s, readers)
        if released and current is not None and not current.is_copy:
            self._change(current)

    def release(self, concerns: Callable[[Lease[Version]], bool], timeout_s: float, readers: str) -> Steps:
        """Wait for readers or drop them, as `VersionStore` does; return whether none is left."""
        deadline_s = self.world.now_s + timeout_s
        while True:
            self.expire()
            if readers == "drop":
                for lease in self.leases.reading(concerns):
                    self.leases.drop(lease, "dropped", self.world.now_s)
                    self._disconnect(lease)
            if not self.leases.reading(concerns):
                self.free_unused()
                return True
            if self.world.now_s >= deadline_s:
                return False
            yield TICK_S

    def watch(self) -> Steps:
        """Ask for the status every second, which ends the leases of silent readers."""
        while True:
            self.expire()
            self.free_unused()
            yield 1.0

    def expire(self) -> None:
        """End the leases of silent readers."""
        for lease in self.leases.expire(self.world.now_s):
            silent_s = self.world.now_s - self.heard_s[lease]
            check(silent_s > LEASE_S, f"a lease expired after {silent_s:.1f} s of silence")
            self._disconnect(lease)
        late = [lease for lease, heard_s in self.heard_s.items() if self.world.now_s > heard_s + LEASE_S]
        check(not any(lease.is_open for lease in late), "a silent lease did not expire")

    def free_unused(self) -> None:
        """Free what nobody needs."""
        for held in self.leases.take_unused():
            self._check_unread(held, "freed")
            self.held.remove(held)
            if held.is_copy:
                self.kept = [held.memory]

    def _change(self, held: Version) -> None:
        """The user changes tensors that were served where they are."""
        self._check_unread(held, "changed")
        held.memory[:] = ["changed"] * len(held.memory)

    def _check_unread(self, held: Version, what: str) -> None:
        leased = any(lease.is_open and lease.held is held for lease in self.granted)
        check(not leased, f"memory of version {held.version} is {what} while it is leased")
        sent = any(lease.held is held for lease in self.sends)
        check(not sent, f"memory of version {held.version} is {what} while a thread sends it")

    def _disconnect(self, lease: Lease[Version]) -> None:
        for connection in self.connections:
            if connection.number in lease.connections:
                self.world.close(connection)

    # Requests.

    def notice(self, connection: Connection, delay_s: float) -> Steps:
        """Find after a while that a connection is closed."""
        yield delay_s
        was_open = [lease for lease in self.granted if lease.is_open]
        self.leases.disconnected(connection.number, self.world.now_s)
        self.free_unused()
        for lease in was_open:
            self.used[lease].discard(connection.number)
            check(lease.is_open <= bool(self.used[lease]), "a lease outlived its last connection")
            check(
                lease.is_open >= bool(self.used[lease]), "a lease ended before its last connection was closed"
            )

    def _reply(self, connection: Connection, answer: Any) -> None:
        world = self.world
        connection.arrives_s = max(connection.arrives_s, world.now_s + world.delay_s())

        def arrive() -> None:
            if connection.is_open:
                connection.heard_s = world.now_s
                if answer is not None:
                    connection.answers.append(answer)
                    world.wake(connection)

        world.at(connection.arrives_s, arrive)

    def grant(self, connection: Connection, request: LeaseRequest) -> Steps:
        """Answer a request for a lease."""
        deadline_s = self.world.now_s + request.wait_s
        while True:
            lease_id = f"{next(self._lease_ids):032x}"
            try:
                lease = self.leases.grant(
                    request, lease_id, connection.number, self.world.now_s, connection.receiver.name
                )
            except NoSuchVersion as error:
                self._reply(connection, error)
                return
            if lease is not None or self.world.now_s >= deadline_s:
                break
            yield TICK_S
        if lease is None:
            self._reply(connection, Lost("nothing newer"))
            return
        held = lease.held
        self._check_peers(lease)
        self.granted.append(lease)
        self.heard_s[lease] = self.world.now_s
        self.used[lease] = {connection.number}
        grant = Grant(lease.id, held.version, held.root, "", 0, 16, 0, len(held.digests))
        self._reply(connection, grant)
        if not connection.is_open:  # the reader is gone, and this thread finds that now
            yield from self.notice(connection, 0.0)

    def _check_peers(self, lease: Lease[Version]) -> None:
        """Check to whom a receiver is sent: they began before it, and read the same version now."""
        readers = [each.peer for each in self.granted if each.is_open and each.held is lease.held]
        known = [peer for peer in readers if peer is not None][: -MAX_PEERS - 1 : -1]
        check([*self.leases.peers(lease)] == known, f"{lease.receiver} is not sent to {known}")

    def _find(self, connection: Connection, lease_id: str) -> Lease[Version] | None:
        lease = self.leases.find(lease_id, connection.number, self.world.now_s)
        if lease is None:
            self._reply(connection, Ended(self.leases.why_ended(lease_id)))
        else:
            self.heard_s[lease] = self.world.now_s
            self.used[lease].add(connection.number)
        return lease

    def metadata(self, connection: Connection, lease_id: str) -> Steps:
        """Answer a request for the digests."""
        lease = self._find(connection, lease_id)
        if lease is not None:
            self._reply(connection, lease.held.digests)
        yield 0.0

    def send(self, connection: Connection, lease_id: str, chunks: range) -> Steps:
        """Send chunks, each in a few parts, and read the memory when its last part is sent."""
        lease = self._find(connection, lease_id)
        if lease is None or not self.leases.pin(lease):
            return
        self.sends.append(lease)
        for chunk in chunks:
            for _ in range(_PARTS):
                yield self.chunk_s / _PARTS
                while connection.is_open and self.world.now_s < connection.receiver.stopped_until_s:
                    yield TICK_S  # the buffers are full
                self._reply(connection, None)
            if not connection.is_open:
                break
            self._sent_chunks += 1
            is_damaged = self._sent_chunks in self.damages
            self._reply(connection, "damaged" if is_damaged else lease.held.memory[chunk])
            self.heard_s[lease] = self.world.now_s
            if not self.leases.sent(lease, 1, self.world.now_s):
                self.world.close(connection)
                break
        self.sends.remove(lease)
        self.leases.unpin(lease)
        self.free_unused()

    def finish(self, connection: Connection, lease_id: str, result: Result) -> Steps:
        """Note the result of a reader."""
        lease = self._find(connection, lease_id)
        if lease is not None:
            self.leases.finish(lease, result, self.world.now_s)
            self.free_unused()
            check(lease.machine.state is LeaseState[result.outcome.upper()], "a result was not noted")
            self.confirmed[lease.held.version] += result.outcome == "confirmed"
            noted = self.leases.confirmed(NAME, lease.held.version)
            check(noted == self.confirmed[lease.held.version], "a confirmation was not counted")
            self._reply(connection, True)
        yield 0.0
