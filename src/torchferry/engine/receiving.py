"""Receiving the chunks of a fetch: lanes ask the sources for ranges, verify each chunk and write it."""

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from xxhash import xxh3_64

from torchferry.core.outcome import paths_of
from torchferry.core.plan import Plan
from torchferry.core.pull import Grant
from torchferry.core.schedule import PEER_S, Schedule
from torchferry.engine.deadlines import left_s
from torchferry.engine.landing import Landing
from torchferry.engine.remote import TOO_SLOW, LeaseEnded, RemoteSource
from torchferry.engine.sources import Sources
from torchferry.errors import Corrupted, LinkError, LinkStalled, LinkTimeout, PeerError
from torchferry.links.http_client import HttpConnection, MemoryUnusable

EVENT_BYTES = 8 << 20
EVENT_S = 0.1
"""The calling thread is woken for this many bytes, and at least this often."""

_HASH_BYTES = 1 << 20
"""Bytes are received and hashed in pieces of this size, while they are in the cache."""


@dataclass(eq=False)
class _Lane:
    """A thread that requests chunks from one source, in ranges. `connection` is None unless it is connected.

    `is_overdue` is set when the connection was ended because the source was too slow.
    """

    number: int
    source: RemoteSource
    asked: deque[range] = field(default_factory=deque)  # ranges that were requested, but not read yet
    thread: threading.Thread | None = None
    connection: HttpConnection | None = None
    is_connecting: bool = False
    is_overdue: bool = False

    @property
    def used_connection(self) -> HttpConnection:
        """The connection of a lane that is connected."""
        assert self.connection is not None, "a lane connects before it takes chunks"
        return self.connection


class Receiving:
    """Receives the chunks that a fetch needs. `digests` is empty if nothing is verified.

    A single source gets `lanes` lanes. If there are several sources, each gets one lane.
    The calling thread calls `check` again and again until `is_done`.
    """

    def __init__(
        self,
        sources: Sources,
        plan: Plan,
        needed: Sequence[int],
        digests: Sequence[int],
        landing: Landing,
        deadline_s: float,
        lanes: int,
    ) -> None:
        self.total_bytes = sum(plan.chunks[number].nbytes for number in needed)
        self.moved_bytes = 0
        self.last_peer: str | None = None
        self._sources = sources
        self._changed = sources.changed
        self._plan = plan
        self._digests = digests
        self._landing = landing
        self._deadline_s = deadline_s
        self._max_lanes = lanes
        self._schedule = Schedule([chunk.nbytes for chunk in plan.chunks], needed)
        self._lanes: list[_Lane] = []
        self._preferred: list[RemoteSource] = []  # the lanes of other sources pause
        self.failure: BaseException | None = None
        self._heard_s = time.monotonic()

    @property
    def is_done(self) -> bool:
        """Whether every needed chunk has landed, or an error in a lane ends the fetch."""
        return self._schedule.is_done or self.failure is not None

    # The calling thread.

    def check(self, stall_s: float | None) -> None:
        """Start lanes for sources that have none, end overdue lanes; raises an error that ends the fetch."""
        if self.failure is not None:
            raise self.failure
        if self._schedule.is_done:
            return
        self._start_lanes()
        self._end_overdue()
        done = f"{self.moved_bytes:,} of {self.total_bytes:,} bytes done"
        if not left_s(self._deadline_s):
            raise LinkTimeout(f"the fetch took longer than its timeout; {done}")
        if self._sources.are_lost():
            raise self._sources.why_none(is_late=False).with_context(more=f"; {done}")
        if stall_s is not None and time.monotonic() > self._heard_s + stall_s:
            raise LinkStalled(f"no bytes arrived for {stall_s:g} s; {done}")

    def _start_lanes(self) -> None:
        preferred = self._preferred = self._sources.preferred()
        is_one = len(preferred) == 1 and self.total_bytes > EVENT_BYTES
        wanted: list[RemoteSource] = []
        for source in preferred:
            lanes = min(self._max_lanes, source.max_lanes) if is_one else 1
            wanted += [source] * (lanes - sum(lane.source is source for lane in self._lanes))
        new = [_Lane(number, source) for number, source in enumerate(wanted, len(self._lanes))]
        # How much a lane asks for depends on how many there are.
        self._lanes += new
        for lane in new:
            lane.thread = self._sources.start(self._deliver, lane)

    def _end_overdue(self) -> None:
        """End connections whose next chunk is overdue, if another source can deliver it.

        A source can't during its backoff, or if it is overdue itself, or is still being connected to.
        """
        now_s, serving = time.monotonic(), self._sources.serving()
        with self._changed:
            # A lane's own thread sets its connection to None at any time.
            connections = [lane.connection for lane in self._lanes]
            for lane, connection in zip(self._lanes, connections, strict=True):
                if connection is not None:
                    heard_s, source = connection.heard_s, lane.source
                    self._heard_s = max(self._heard_s, heard_s)
                    if source.is_peer:
                        # It may be waiting for its own source. If it is stopped, it does not answer.
                        heard_s = max(heard_s, source.answered_s)
                        if now_s > heard_s + PEER_S / 4 and self._schedule.is_asked(lane.number):
                            source.ask_if_alive()
                    self._schedule.heard(lane.number, heard_s)
            overdue = self._schedule.overdue(now_s)
            busy = {lane.source for lane in self._lanes if lane.is_connecting or lane.number in overdue}
            able = [each for each in serving if each not in busy and not each.backoff.is_active(now_s)]
            for number in overdue:
                connection = connections[number]
                if connection is not None and able:
                    self._lanes[number].is_overdue = True
                    connection.shut_down(TOO_SLOW)

    def stop(self) -> None:
        """End all lanes, so that nothing is written any more."""
        with self._changed:
            self._sources.is_over = True
            self._changed.notify_all()
        for source in self._sources.all:
            source.shut_down_readers()
        for lane in self._lanes:
            # A thread that still connects does not write, and may take until the deadline.
            if lane.connection is not None and lane.thread is not None:
                lane.thread.join()

    # A lane.

    def _deliver(self, lane: _Lane) -> None:
        """Request and receive ranges of chunks, until none is needed or the source is given up."""
        source = lane.source
        try:
            while (chunks := self._next_range(lane)) is not None or lane.asked:
                grant = source.grant
                try:
                    if chunks is None:
                        self._receive_range(lane, lane.asked.popleft())
                    else:
                        # Requested ahead, so that the source always has something to send.
                        lane.asked.append(chunks)
                        source.request_chunks(lane.used_connection, chunks, left_s(self._deadline_s))
                except LinkError as error:
                    self._recover(lane, grant, error)
        except (LinkError, PeerError) as error:
            self._sources.lose(source, error)
        except BaseException as error:
            self.failure = error
        finally:
            self._give_up(lane)

    def _next_range(self, lane: _Lane) -> range | None:
        """Connect if necessary, and return the next chunks to request; None if there are none now.

        If the lane then has no range to read either, it is not needed any more. It connects before it takes
        chunks, because connecting may take until the deadline.
        Raises LinkError if the source can't be reached.
        """
        while self._may_ask(lane) and self._wait_until_needed(lane):
            if lane.connection is None:
                lane.is_connecting = True
                try:
                    lane.connection = lane.source.connect_for_chunks(left_s(self._deadline_s))
                finally:
                    lane.is_connecting = False
                self._raise_if_over()
            with self._changed:
                if self._schedule.has_more:
                    now_s, peer_s = time.monotonic(), lane.source.peer_s
                    return self._schedule.take(lane.number, len(self._lanes), now_s, peer_s)
        return None

    def _may_ask(self, lane: _Lane) -> bool:
        return len(lane.asked) < lane.source.max_ahead

    def _wait_until_needed(self, lane: _Lane) -> bool:
        """Wait until there are chunks that a lane may request; return False if there will be none.

        A lane that has ranges to read does not wait: it returns False if there are none now.
        """
        schedule, source = self._schedule, lane.source
        with self._changed:
            while not self._sources.is_over and source.serves and not schedule.is_done:
                is_last = len(self._sources.serving()) <= 1
                is_paused = source not in self._preferred or source.backoff.is_active(time.monotonic())
                if schedule.has_more and (is_last or not is_paused):
                    return True
                if lane.asked:
                    return False
                # Chunks are needed again if another lane fails.
                self._changed.wait(EVENT_S)
        return False

    def _receive_range(self, lane: _Lane, chunks: range) -> None:
        """Read a range of chunks that was requested, verify each, and write it."""
        connection = lane.used_connection
        found = self._plan.chunks[chunks.start : chunks.stop]
        lane.source.begin_chunks(connection, sum(chunk.nbytes for chunk in found))
        for chunk in found:
            self._raise_if_over()
            data, hasher = self._landing.open(chunk), xxh3_64()
            for start in range(0, len(data), _HASH_BYTES):
                part = data[start : start + _HASH_BYTES]
                connection.read_into(part)
                if self._digests:
                    hasher.update(part)
            if self._digests and hasher.intdigest() != self._digests[chunk.number]:
                paths = paths_of(self._landing.sink.manifest, self._plan, {chunk.number})
                raise _Damaged(chunk.number, paths)
            self._raise_if_over()
            self._landing.write(chunk)
            with self._changed:
                self._schedule.landed(lane.number, chunk.number, time.monotonic())
                self._count(lane, chunk.nbytes)

    def _count(self, lane: _Lane, nbytes: int) -> None:
        source = lane.source
        before = self.moved_bytes // EVENT_BYTES
        self.moved_bytes += nbytes
        self.last_peer = source.peer
        source.backoff.landed(lane.number)
        source.report.bytes += nbytes
        source.report.chunks += 1
        if self._schedule.is_done or self.moved_bytes // EVENT_BYTES > before:
            self._changed.notify_all()

    def _recover(self, lane: _Lane, grant: Grant | None, error: LinkError) -> None:
        """Let other lanes take what this one did not deliver; raises an error if its source is given up."""
        source = lane.source
        self._give_up(lane)
        is_overdue, lane.is_overdue = lane.is_overdue, False
        self._raise_if_over()
        if isinstance(error, MemoryUnusable):
            source.give_memory_up(error)
            return
        with self._changed:
            source.report.failures.append(error.what)
            if is_overdue:
                source.backoff.overdue(time.monotonic())
                return
            is_lost = source.backoff.failed(lane.number)
        if is_lost:
            raise Corrupted(error.paths) if isinstance(error, _Damaged) else error
        if isinstance(error, LeaseEnded) and grant is not None:
            source.renew(self._sources.wanted, grant, self._deadline_s)
        if isinstance(error, _Damaged):
            source.report_damage(error.chunk, left_s(self._deadline_s))

    def _give_up(self, lane: _Lane) -> None:
        """Close the connection of a lane, so that late bytes are not written, and take its chunks back."""
        if lane.connection is not None:
            lane.source.close(lane.connection)
            lane.connection = None
        lane.asked.clear()
        with self._changed:
            self._schedule.give_up(lane.number)
            self._changed.notify_all()

    def _raise_if_over(self) -> None:
        if self._sources.is_over:
            raise LinkTimeout("the fetch is over")


class _Damaged(Corrupted):
    """The digest of a chunk is not the one that the source announced."""

    def __init__(self, chunk: int, paths: Sequence[str]) -> None:
        super().__init__(paths)
        self.chunk = chunk
