"""The leases of one source: who reads which version, and which versions may be freed.

A name has a current version, and earlier ones that still have readers: at most one, if
`VersionStore.make_room` is called before each new version. A version may be freed when it is not current, no
lease on it is open, and no thread reads it.
"""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from torchferry.core.machine import Machine
from torchferry.core.pull import LEASE_S, MAX_PEERS, LeaseRequest, LeaseState, Peer, Result, fits
from torchferry.core.text import show_name, show_text
from torchferry.errors import BadArgument, LinkBroken, NoSuchVersion, PeerGaveUp

MAX_LEASES = 1024
"""How many leases may be open."""

MAX_ENTRIES = 1000
"""How many ended leases are listed, and of how many versions the confirmations are counted."""


class Held(Protocol):
    """A version in memory.

    If it `is_abandoned`, a reader whose lease was lost or dropped may still read that memory.
    """

    is_abandoned: bool

    @property
    def version(self) -> int: ...
    @property
    def nbytes(self) -> int: ...


HeldT = TypeVar("HeldT", bound=Held)


@dataclass(frozen=True)
class Reader:
    """One fetch, as the source sees it. `state` is reading, confirmed, refused, failed, lost or dropped."""

    receiver: str
    name: str
    version: int
    state: str
    bytes_sent: int
    bytes_total: int
    seconds: float
    reason: str = ""

    def __str__(self) -> str:
        reason = f": {self.reason}" if self.reason else ""
        sent = f"{self.bytes_sent:,} of {self.bytes_total:,} bytes sent in {self.seconds:.1f} s"
        return f"{self.receiver}: {self.name} version {self.version}, {self.state} ({sent}){reason}"


@dataclass(eq=False)
class Lease(Generic[HeldT]):
    """The right to read one version. `connections` are the numbers of its reader's connections.

    If it `shares_memory`, the reader may hold a descriptor of the version's memory, or the kernel may still
    be sending its pages, until the reader reports a result. The reader serves what it has at `peer`, if that
    is given.
    """

    id: str
    receiver: str
    name: str
    held: HeldT
    began_s: float
    heard_s: float
    ended_s: float | None = None
    bytes_sent: int = 0
    shares_memory: bool = False
    peer: Peer | None = None
    reason: str = ""
    connections: set[int] = field(default_factory=set)
    machine: Machine[LeaseState] = field(default_factory=lambda: Machine(LeaseState.OPEN))

    @property
    def is_open(self) -> bool:
        """Whether the lease keeps its version in memory."""
        return self.machine.state is LeaseState.OPEN

    def show(self, now_s: float) -> Reader:
        """Return what `status` says about the lease."""
        held, state = self.held, self.machine.state.label
        seconds = (now_s if self.ended_s is None else self.ended_s) - self.began_s
        progress = self.bytes_sent, held.nbytes, seconds
        return Reader(self.receiver, self.name, held.version, state, *progress, self.reason)


class Leases(Generic[HeldT]):
    """The current version of each name, and the leases on these and earlier versions."""

    def __init__(self) -> None:
        self.current: dict[str, HeldT] = {}
        self.is_closed = False  # if set, no more leases are granted
        self._replaced: list[HeldT] = []
        self._open: dict[str, Lease[HeldT]] = {}
        self._ended: deque[tuple[float, str, Reader]] = deque(maxlen=MAX_ENTRIES)  # start, lease, entry
        self._pins: Counter[Lease[HeldT]] = Counter()
        self._confirmed: dict[tuple[str, int], int] = {}
        self._given_up: dict[str, tuple[int, str]] = {}  # version and reason, by name

    # Versions.

    def check_version(self, name: str, version: int) -> None:
        """Raise BadArgument if a version is not above the current one, or the source is closed."""
        if self.is_closed:
            raise BadArgument("the source is closed: create a new one")
        current = self.current.get(name)
        if current is not None and version <= current.version:
            raise BadArgument(
                f"version {version} of {name!r} is not above the current version {current.version}: versions "
                "must grow. After withdraw() any version can follow"
            )

    def make_current(self, name: str, held: HeldT) -> None:
        """Give out leases on this version from now on."""
        self.check_version(name, held.version)
        self.withdraw(name)
        self.current[name] = held
        self._confirmed.pop((name, held.version), None)

    def give_up(self, name: str, version: int, reason: str) -> None:
        """Refuse leases on a version that can't be published, until another one is, or the name withdrawn."""
        self._given_up[name] = version, reason

    def withdraw(self, name: str) -> None:
        """Give out no more leases on a name."""
        self._given_up.pop(name, None)
        if name in self.current:
            self._replaced.append(self.current.pop(name))

    def take_unused(self) -> list[HeldT]:
        """Return the versions that may be freed now, and forget them."""
        needed = {lease.held for lease in self.reading(lambda _: True)}
        unused = [held for held in self._replaced if held not in needed]
        self._replaced = [held for held in self._replaced if held in needed]
        return unused

    # Leases.

    def grant(
        self, request: LeaseRequest, lease_id: str, connection: int, now_s: float, host: str = ""
    ) -> Lease[HeldT] | None:
        """Open a lease; None if there is nothing newer than the requested version yet.

        `host` is where the receiver connects from.

        Raises NoSuchVersion if the name or the version is not there, PeerGaveUp if it will not be there, and
        LinkBroken if the source is closed or has too many readers.
        """
        if self.is_closed:
            raise LinkBroken("the source is closed")
        current = self.current.get(request.name)
        if current is None or not fits(request, current.version):
            version, reason = self._given_up.get(request.name, (None, ""))
            if version is not None and version == request.version:
                raise PeerGaveUp(reason)
            if request.newer_than is None:
                raise NoSuchVersion(self._explain(request, current))
            return None
        if len(self._open) >= MAX_LEASES:
            raise LinkBroken(f"the source has {MAX_LEASES} readers and accepts no more")
        receiver = show_name(request.receiver)
        lease = Lease(lease_id, receiver, request.name, current, now_s, now_s, connections={connection})
        if host and request.port:
            lease.peer = Peer(host, request.port)
        self._open[lease_id] = lease
        return lease

    def _explain(self, request: LeaseRequest, current: HeldT | None) -> str:
        if current is None:
            names = ", ".join(map(repr, self.current)) or "nothing"
            return f"the source has no {request.name!r}; it serves {names}"
        return f"the source has version {current.version} of {request.name!r}, not version {request.version}"

    def find(self, lease_id: str, connection: int, now_s: float) -> Lease[HeldT] | None:
        """Return an open lease, and note that its reader is alive; None if there is no such open lease."""
        lease = self._open.get(lease_id)
        if lease is not None:
            lease.heard_s = now_s
            lease.connections.add(connection)
        return lease

    def pin(self, lease: Lease[HeldT]) -> bool:
        """Note that a thread starts to read a lease's version; False if the lease has ended."""
        if lease.is_open:
            self._pins[lease] += 1
        return lease.is_open

    def sent(self, lease: Lease[HeldT], nbytes: int, now_s: float) -> bool:
        """Note that bytes were sent; return whether the lease is still open."""
        lease.bytes_sent += nbytes
        lease.heard_s = now_s
        return lease.is_open

    def unpin(self, lease: Lease[HeldT]) -> None:
        """Note that a thread does not read a lease's version any more."""
        self._pins[lease] -= 1
        self._pins += Counter()  # removes zeros

    def finish(self, lease: Lease[HeldT], result: Result, now_s: float) -> None:
        """End a lease with the result that its reader reports."""
        if not lease.is_open:
            return
        self._end(lease, LeaseState[result.outcome.upper()], show_text(result.reason), now_s)
        if result.outcome == "confirmed":
            key = lease.name, lease.held.version
            self._confirmed[key] = self._confirmed.pop(key, 0) + 1
            while len(self._confirmed) > MAX_ENTRIES:
                del self._confirmed[next(iter(self._confirmed))]

    def disconnected(self, connection: int, now_s: float) -> None:
        """End the leases whose last connection this was."""
        for lease in list(self._open.values()):
            lease.connections.discard(connection)
            if not lease.connections:
                self._end(lease, LeaseState.LOST, "the receiver's last connection was closed", now_s)

    def expire(self, now_s: float) -> list[Lease[HeldT]]:
        """End the leases of readers that were silent for too long, and return them."""
        silent = [lease for lease in self._open.values() if now_s > lease.heard_s + LEASE_S]
        for lease in silent:
            self._end(lease, LeaseState.LOST, f"the receiver was silent for {LEASE_S:g} s", now_s)
        return silent

    def drop(self, lease: Lease[HeldT], reason: str, now_s: float) -> None:
        """End a lease whose version must go."""
        if lease.is_open:
            self._end(lease, LeaseState.DROPPED, reason, now_s)

    def _end(self, lease: Lease[HeldT], state: LeaseState, reason: str, now_s: float) -> None:
        lease.machine.advance(state)
        lease.reason, lease.ended_s = reason, now_s
        if lease.shares_memory and state in (LeaseState.LOST, LeaseState.DROPPED):
            lease.held.is_abandoned = True
        del self._open[lease.id]
        # Without the lease itself, which would keep the manifest and the plan of its version in memory.
        self._ended.append((lease.began_s, lease.id, lease.show(now_s)))

    # Queries.

    def peers(self, lease: Lease[HeldT]) -> tuple[Peer, ...]:
        """Return the peers to name in the grant of a lease: receivers of its version that reshare it.

        Only those that were granted a lease before, the newest first. So receivers of one source never wait
        for each other in a circle.
        """
        found: list[Peer] = []
        for other in self._open.values():
            if other is lease:
                break
            if other.held is lease.held and other.peer is not None:
                found.append(other.peer)
        return tuple(found[: -MAX_PEERS - 1 : -1])

    def reading(self, concerns: Callable[[Lease[HeldT]], bool]) -> list[Lease[HeldT]]:
        """List the leases that keep a version: those that are open, and those whose bytes a thread sends."""
        return [lease for lease in dict.fromkeys((*self._open.values(), *self._pins)) if concerns(lease)]

    def is_replaced(self, lease: Lease[HeldT], name: str) -> bool:
        """Return whether a lease is on a version of this name that is not current any more."""
        return lease.name == name and lease.held is not self.current.get(name)

    def confirmed(self, name: str, version: int) -> int:
        """Return how many fetches of a version were confirmed."""
        return self._confirmed.get((name, version), 0)

    def why_ended(self, lease_id: str) -> str:
        """Return why a lease has ended."""
        found = next((reader for _, ended, reader in self._ended if ended == lease_id), None)
        if found is None:
            return "unknown lease"
        return f"the lease has ended: {found.reason or 'the receiver reported a result'}"

    def readers(self, now_s: float) -> list[Reader]:
        """List the open leases and the last that ended, oldest first."""
        reading = [(lease.began_s, lease.id, lease.show(now_s)) for lease in self._open.values()]
        return [reader for *_, reader in sorted([*self._ended, *reading], key=lambda entry: entry[0])]

    def missing(self, name: str, version: int, now_s: float) -> list[Reader]:
        """List the last fetch of every receiver of a name that has not confirmed a version.

        A receiver that reads it more than once at the same time is listed for every open fetch.
        """
        last = {reader.receiver: reader for reader in self.readers(now_s) if reader.name == name}
        for reader in self.readers(now_s):
            if (reader.name, reader.version, reader.state) == (name, version, LeaseState.CONFIRMED.label):
                last.pop(reader.receiver, None)
        reading = [lease.show(now_s) for lease in self._open.values() if lease.name == name]
        found = [*last.values(), *(reader for reader in reading if reader.version == version)]
        return list(dict.fromkeys(found))
