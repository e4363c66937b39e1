"""The versions that a source holds in memory, for the threads that read, replace and wait for them."""

import secrets
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from typing import Literal

from torchferry.core.leases import Lease, Leases, Reader
from torchferry.core.pull import LeaseRequest, Peer, Result
from torchferry.engine.pull.published import Published
from torchferry.errors import LinkBroken, ReadersRemain
from torchferry.links.shared_memory import SharedBlock

Readers = Literal["wait", "drop"]
"""What to do with readers of a version that must go."""

_DROPPED_S = 1.0
"""How long a source that is closed waits for the threads that read for dropped readers. They end at once,
unless the kernel holds them up."""

_CHECK_S = 1.0
"""How often a thread that waits for readers looks for leases that have expired."""


class VersionStore:
    """The versions of one source, by name. Threads may use it at the same time.

    `disconnect` closes a connection, given its number.
    """

    def __init__(self, disconnect: Callable[[int], None]) -> None:
        self._disconnect = disconnect
        self._changed = threading.Condition()
        self._leases: Leases[Published] = Leases()

    @contextmanager
    def _locked(self) -> Iterator[Leases[Published]]:
        """Hold the lock. Afterwards, free what nobody needs, and wake all threads that wait."""
        with self._changed:
            try:
                yield self._leases
            finally:
                self._free_unused()

    def _free_unused(self) -> None:
        for published in self._leases.take_unused():
            published.free()
        self._changed.notify_all()

    # For the user of the source.

    def make_room(self, name: str, version: int, timeout_s: float, readers: Readers) -> None:
        """Wait for, or drop, the readers of versions that were replaced, so that only the current is held.

        Raises BadArgument if the new version is not above the current one, or the source is closed.
        """
        with self._locked() as leases:
            leases.check_version(name, version)
            self._release(lambda lease: leases.is_replaced(lease, name), timeout_s, readers)

    def put(self, name: str, published: Published, timeout_s: float, readers: Readers) -> None:
        """Make a version the current one. If the earlier one is live, wait for its readers, or drop them."""
        with self._locked() as leases:
            earlier = leases.current.get(name)
            leases.make_current(name, published)
            self._free_unused()
            if earlier is not None and not earlier.is_copy:
                self._release(lambda lease: lease.held is earlier, timeout_s, readers)

    def withdraw(self, name: str, timeout_s: float, readers: Readers) -> None:
        """Give out no more leases on a name, and return when it has no readers."""
        with self._locked() as leases:
            leases.withdraw(name)
            self._free_unused()
            # Not those of a version that another thread publishes meanwhile.
            self._release(lambda lease: leases.is_replaced(lease, name), timeout_s, readers)

    def give_up(self, name: str, version: int, reason: str) -> None:
        """Refuse leases on a version that can't be published, also to those who wait for it."""
        with self._locked() as leases:
            leases.give_up(name, version, reason)

    def stop_granting(self) -> None:
        """Give out no more leases, and end requests that wait for a version."""
        with self._changed:
            self._leases.is_closed = True
            self._changed.notify_all()

    def close(self, timeout_s: float) -> None:
        """Withdraw everything. Readers have `timeout_s` to finish, and are dropped then."""
        self.stop_granting()
        with self._locked() as leases:
            try:
                self._release(lambda _: True, timeout_s, "wait")
            except ReadersRemain:
                with suppress(ReadersRemain):
                    self._release(lambda _: True, _DROPPED_S, "drop")
            for name in list(leases.current):
                leases.withdraw(name)

    def _release(
        self, concerns: Callable[[Lease[Published]], bool], timeout_s: float, readers: Readers
    ) -> None:
        """Wait until no lease that this concerns is in use, or drop them; raises ReadersRemain."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            self._expire()
            now_s = time.monotonic()
            if readers == "drop":
                for lease in self._leases.reading(concerns):
                    self._leases.drop(lease, "the source withdrew this version or needed its memory", now_s)
                    # A thread that sends finds its connection closed.
                    self._disconnect_all(lease)
            found = self._leases.reading(concerns)
            if not found:
                return
            if now_s >= deadline_s:
                raise ReadersRemain([str(lease.show(now_s)) for lease in found])
            self._changed.wait(min(deadline_s - now_s, _CHECK_S))

    def wait(self, name: str, version: int, receivers: int, timeout_s: float) -> None:
        """Wait until so many receivers have confirmed a version; raises ReadersRemain if fewer do in time."""
        with self._changed:
            leases = self._leases
            self._changed.wait_for(
                lambda: leases.confirmed(name, version) >= receivers or leases.is_closed,
                min(timeout_s, threading.TIMEOUT_MAX),
            )
            confirmed = leases.confirmed(name, version)
            if confirmed < receivers:
                when = "before the source was closed" if leases.is_closed else "in time"
                what = f"{confirmed} of {receivers} receivers confirmed version {version} of {name!r} {when}"
                missing = leases.missing(name, version, time.monotonic())
                raise ReadersRemain([str(reader) for reader in missing], what)

    def status(self) -> tuple[dict[str, int], list[Reader]]:
        """Return the current version of each name, and all readers that are known, oldest first."""
        with self._locked() as leases:
            self._expire()
            versions = {name: published.version for name, published in leases.current.items()}
            return versions, leases.readers(time.monotonic())

    def forget(self) -> None:
        """Drop all references to memory in a forked child. Locks may be held for ever there."""
        self._leases = Leases()
        self._leases.is_closed = True
        self._changed = threading.Condition()

    def _expire(self) -> None:
        if silent := self._leases.expire(time.monotonic()):
            for lease in silent:
                self._disconnect_all(lease)
            self._free_unused()

    def _disconnect_all(self, lease: Lease[Published]) -> None:
        for connection in lease.connections:
            self._disconnect(connection)

    # For the threads that answer readers.

    def lease(
        self, request: LeaseRequest, wait_s: float, connection: int, host: str
    ) -> tuple[Lease[Published], tuple[Peer, ...]] | None:
        """Open a lease, and return it with the peers that have the version or are getting it.

        None if nothing newer than the requested version came within `wait_s`.

        Raises what `Leases.grant` raises.
        """
        deadline_s = time.monotonic() + wait_s
        with self._changed:
            self._expire()
            while True:
                now_s = time.monotonic()
                lease = self._leases.grant(request, secrets.token_hex(16), connection, now_s, host)
                if lease is not None:
                    return lease, self._leases.peers(lease)
                if now_s >= deadline_s:
                    return None
                self._changed.wait(deadline_s - now_s)

    def find(self, lease_id: str, connection: int) -> Lease[Published]:
        """Return an open lease, and note that its reader is alive; raises LinkBroken if it has ended."""
        with self._changed:
            lease = self._leases.find(lease_id, connection, time.monotonic())
            if lease is None:
                raise LinkBroken(self._leases.why_ended(lease_id))
            return lease

    def read(self, lease: Lease[Published], first: int, end: int) -> Generator[memoryview, None, None]:
        """Yield the bytes of the chunks from `first` to `end`, until the lease ends."""
        with suppress(LinkBroken), self._pinned(lease):
            for data in lease.held.read(first, end):
                yield data
                with self._changed:
                    if not self._leases.sent(lease, len(data), time.monotonic()):
                        return

    def changed_paths(self, lease: Lease[Published], chunk: int | None = None) -> list[str]:
        """Return which paths of a lease's version changed; raises LinkBroken if the lease has ended."""
        with self._pinned(lease):
            return lease.held.changed_paths(chunk)

    @contextmanager
    def _pinned(self, lease: Lease[Published]) -> Iterator[None]:
        """Keep a lease's version while a thread reads it; raises LinkBroken if the lease has ended."""
        with self._changed:
            if not self._leases.pin(lease):
                raise LinkBroken(self._leases.why_ended(lease.id))
        try:
            yield
        finally:
            with self._locked() as leases:
                leases.unpin(lease)

    def share(self, lease: Lease[Published]) -> SharedBlock | None:
        """Return the shared memory of a lease's snapshot; None if it has none.

        Notes that until it reports a result, the reader may hold its descriptor, or the kernel may be sending
        its pages.

        Raises LinkBroken if the lease has ended.
        """
        with self._changed:
            block = lease.held.block
            if not lease.is_open:
                raise LinkBroken(self._leases.why_ended(lease.id))
            if block is None or block.shared is None:
                return None
            lease.shares_memory = True
            return block.shared

    def note_read(self, lease: Lease[Published], nbytes: int) -> None:
        """Note that a reader gets bytes out of shared memory."""
        with self._changed:
            self._leases.sent(lease, nbytes, time.monotonic())

    def finish(self, lease: Lease[Published], result: Result) -> None:
        """End a lease with the result that its reader reports."""
        with self._locked() as leases:
            leases.finish(lease, result, time.monotonic())

    def disconnected(self, connection: int) -> None:
        """End the leases whose last connection this was."""
        with self._locked() as leases:
            leases.disconnected(connection, time.monotonic())
