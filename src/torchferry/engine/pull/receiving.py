"""Receiving the chunks of a fetch: lanes request ranges from the sources, and verify each chunk.

A chunk is received in place where that is possible, so memory is written before the chunk is verified. The
chunk counts as received only if its digest is right.
"""

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from xxhash import xxh3_64_intdigest

from torchferry.core.outcome import paths_of
from torchferry.core.plan import Chunk, Plan
from torchferry.core.pull import Grant
from torchferry.core.schedule import (
    OVERDUE_S,
    PEER_BACKOFF_S,
    PEER_S,
    REQUEST_BYTES,
    REQUEST_S,
    RESHARE_REQUEST_BYTES,
    RESHARE_REQUEST_S,
    Schedule,
)
from torchferry.engine.deadlines import left_s
from torchferry.engine.pull.landing import Landing
from torchferry.engine.pull.remote import TOO_SLOW, LeaseEnded, RemoteSource
from torchferry.engine.pull.sources import Sources
from torchferry.errors import Corrupted, LinkError, LinkStalled, LinkTimeout, PeerError, StateError
from torchferry.links.http_client import HttpConnection, MemoryUnusable, Unreachable

EVENT_BYTES = 8 << 20
EVENT_S = 0.1
"""The calling thread is woken for this many bytes, and at least this often."""

_TWO_LANES_BYTES = 8 << 20
"""If more is needed, a single source may get several lanes. For less, another connection costs too much."""

_GROUP_BYTES, _GROUP_CHUNKS = 4 << 20, 64
"""How much of a source on this machine lands at once. Landing takes locks, and so does each copy out of
shared memory, so larger groups mean less contention."""


@dataclass(eq=False)
class _Lane:
    """A thread that requests chunks from one source, in ranges. `connection` is None unless it is connected.

    If the connection is ended because the source is too slow, `backoff_s` is the first delay of its backoff.
    `has_failed` says that the lane ended because of an error.
    """

    number: int
    source: RemoteSource
    outstanding: deque[range] = field(default_factory=deque)  # ranges that were requested, but not read yet
    thread: threading.Thread | None = None
    connection: HttpConnection | None = None
    is_connecting: bool = False
    backoff_s: float | None = None
    has_failed: bool = False

    @property
    def used_connection(self) -> HttpConnection:
        """The connection of a lane that is connected."""
        assert self.connection is not None, "a lane connects before it takes chunks"
        return self.connection


class Receiving:
    """Receives the chunks that a fetch needs. `digests` is empty if nothing is verified.

    Each preferred source gets one lane; a single one up to its `max_lanes`, if more than _TWO_LANES_BYTES
    are needed. `in_order` is for resharing: a single source gets one lane too, and requests are small, so
    chunks arrive in order, and soon for the receivers that take them from this one.

    The calling thread calls `check` every `check_every_s`, and whenever this `needs_check`, until `is_done`.
    """

    def __init__(
        self,
        sources: Sources,
        plan: Plan,
        needed: Sequence[int],
        digests: Sequence[int],
        landing: Landing,
        deadline_s: float,
        *,
        in_order: bool,
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
        self._in_order = in_order
        self.check_every_s, request_bytes, request_s = EVENT_S, REQUEST_BYTES, REQUEST_S
        if in_order:
            # A silent peer must be replaced soon: other receivers wait for this one.
            self.check_every_s, request_bytes = PEER_S / 4, RESHARE_REQUEST_BYTES
            request_s = RESHARE_REQUEST_S + 2 * max(source.connect_s for source in sources.all)
        sizes = [chunk.nbytes for chunk in plan.chunks]
        self._schedule = Schedule(sizes, needed, request_bytes, request_s)
        self._lanes: list[_Lane] = []
        self._preferred: list[RemoteSource] = []  # the lanes of other sources pause
        self.failure: BaseException | None = None
        self._heard_s = time.monotonic()
        self._changes = 0

    @property
    def is_done(self) -> bool:
        """Whether every needed chunk has landed, or an error in a lane ends the fetch."""
        return self._schedule.is_done or self.failure is not None

    @property
    def needs_check(self) -> bool:
        """Whether `check` should be called: this `is_done`, or other sources may be preferred by now."""
        return self.is_done or self._sources.changes != self._changes

    # The calling thread.

    def skip(self, lost_s: float) -> None:
        """Do not count `lost_s` seconds in which this process did not run: the sources may have sent."""
        now_s = time.monotonic()
        with self._changed:
            self._schedule.skip(lost_s, now_s)
            self._heard_s = min(self._heard_s + lost_s, now_s)

    def check(self, stall_s: float | None) -> None:
        """Start lanes, end the connections of overdue ones; raises an error that ends the fetch."""
        if self.failure is not None:
            raise self.failure
        if self._schedule.is_done:
            return
        self._changes = self._sources.changes
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
        preferred = self._sources.preferred()
        with self._changed:
            if preferred != self._preferred:
                self._preferred = preferred
                self._changed.notify_all()  # lanes that pause
        is_one = len(preferred) == 1 and self.total_bytes > _TWO_LANES_BYTES and not self._in_order
        wanted: list[RemoteSource] = []
        for source in preferred:
            lanes = source.max_lanes if is_one else 1
            wanted += [source] * (lanes - sum(lane.source is source for lane in self._lanes))
        new = [_Lane(number, source) for number, source in enumerate(wanted, len(self._lanes))]
        # All are in the list before one starts: the size of a request depends on their number.
        self._lanes += new
        for lane in new:
            try:
                self._sources.start(self._deliver, lane)
            except StateError:  # no thread can be started
                lane.has_failed = True
                if not self._siblings(lane):
                    raise

    def _siblings(self, lane: _Lane) -> list[_Lane]:
        """List the other lanes of the same source, without those that failed."""
        return [
            each
            for each in self._lanes
            if each is not lane and each.source is lane.source and not each.has_failed
        ]

    def _end_overdue(self) -> None:
        """Shut down overdue connections, if another source can deliver their chunks, or another lane.

        A source that is in backoff, connecting, or has an overdue lane can't.
        """
        now_s, serving = time.monotonic(), self._sources.serving()
        with self._changed:
            # A lane's own thread sets its connection to None at any time.
            connections = [lane.connection for lane in self._lanes]
            self._note_activity(connections, now_s)
            overdue = self._schedule.overdue(now_s)
            busy = {lane.source for lane in self._lanes if lane.is_connecting or lane.number in overdue}
            others = [each for each in serving if each not in busy and not each.backoff.is_active(now_s)]
            for number in overdue:
                lane, connection = self._lanes[number], connections[number]
                siblings = [each for each in self._siblings(lane) if each.number not in overdue]
                if connection is None or not (others or any(connections[each.number] for each in siblings)):
                    continue
                if others:
                    slow_peer = lane.source.is_peer and not self._schedule.is_silent(number, now_s)
                    lane.backoff_s = PEER_BACKOFF_S if slow_peer else OVERDUE_S
                connection.shut_down(f"{TOO_SLOW}: {self._schedule.why_overdue(number, now_s)}")

    def _note_activity(self, connections: Sequence[HttpConnection | None], now_s: float) -> None:
        """Note when each lane last received bytes. Ask peers that are silent whether they are alive."""
        for lane, connection in zip(self._lanes, connections, strict=True):
            if connection is not None:
                heard_s, source = connection.heard_s, lane.source
                if heard_s > connection.opened_s:
                    self._heard_s = max(self._heard_s, heard_s)
                if source.is_peer:
                    # A peer may be waiting for its own source. One that is stopped does not answer.
                    heard_s = max(heard_s, source.answered_s)
                    if now_s > heard_s + PEER_S / 2 and self._schedule.is_asked(lane.number):
                        source.ask_if_alive()
                self._schedule.heard(lane.number, heard_s, source.alive_asked_s)

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
        """Request and receive ranges of chunks, until none is needed.

        If this fails, the lane ends. Its source is given up if that was its last lane, or if its answers
        can't be used.
        """
        # Set here: Ctrl-C may interrupt the thread that starts this one. Then either `stop` sees it, or this
        # thread sees that the fetch is over.
        lane.thread = threading.current_thread()
        source = lane.source
        try:
            while (chunks := self._next_range(lane)) is not None or lane.outstanding:
                grant = source.grant
                try:
                    if chunks is None:
                        self._receive_range(lane, lane.outstanding.popleft())
                    else:
                        # Requested ahead, so that the source always has something to send.
                        lane.outstanding.append(chunks)
                        source.request_chunks(lane.used_connection, chunks, left_s(self._deadline_s))
                except LinkError as error:
                    self._recover(lane, grant, error)
        except (LinkError, PeerError) as error:
            with self._changed:
                lane.has_failed = True
                if isinstance(error, (PeerError, Corrupted)) or not self._siblings(lane):
                    self._sources.lose(source, error)
        except BaseException as error:
            self.failure = error
        finally:
            self._reset(lane)

    def _next_range(self, lane: _Lane) -> range | None:
        """Connect if necessary, and return the next chunks to request; None if there are none now.

        If this is None and no range is outstanding, the lane ends. It connects before it takes chunks,
        because connecting may take until the deadline.
        Raises LinkError if the source can't be reached.
        """
        while self._may_ask(lane) and self._wait_until_needed(lane):
            if lane.connection is None:
                lane.connection = self._connect(lane)
                self._raise_if_over()
            with self._changed:
                if self._schedule.has_more:
                    now_s, peer_s = time.monotonic(), lane.source.peer_s
                    return self._schedule.take(lane.number, self._parts(), now_s, peer_s)
        return None

    def _connect(self, lane: _Lane) -> HttpConnection:
        """Connect to a lane's source. If there are others, do not wait long, and do not use a peer again."""
        source, limit_s = lane.source, left_s(self._deadline_s)
        has_others = any(each is not source for each in self._sources.serving())
        lane.is_connecting = True
        try:
            return source.connect_for_chunks(min(limit_s, OVERDUE_S) if has_others else limit_s)
        except LinkTimeout as error:
            if has_others and source.is_peer:
                raise Unreachable(error.what) from None
            lane.backoff_s = OVERDUE_S if has_others else None
            raise
        finally:
            lane.is_connecting = False

    def _parts(self) -> int:
        """Return into how many requests the chunks that are needed are split.

        Two for each lane of one source: they are equally fast, and finish together. Four if sources differ,
        so that a slow one holds up less at the end.
        """
        lanes = [lane for lane in self._lanes if not lane.has_failed]
        if len(lanes) == 1:
            return 1
        return (2 if len({lane.source for lane in lanes}) == 1 else 4) * len(lanes)

    def _may_ask(self, lane: _Lane) -> bool:
        return len(lane.outstanding) < lane.source.max_ahead

    def _wait_until_needed(self, lane: _Lane) -> bool:
        """Wait until there are chunks that a lane may request; return False if there will be none.

        A lane that has ranges to read does not wait: it returns False if there are none now.
        """
        schedule, source = self._schedule, lane.source
        with self._changed:
            while not self._sources.is_over and source.serves and not schedule.is_done:
                now_s = time.monotonic()
                is_paused = source not in self._preferred or source.backoff.is_active(now_s)
                # If all other sources are in backoff too, or not connected, waiting gains nothing.
                absent = [source, *(each.source for each in self._lanes if each.is_connecting)]
                others = [each for each in self._sources.serving() if each not in absent]
                has_others = any(not each.backoff.is_active(now_s) for each in others)
                if schedule.has_more and not (is_paused and has_others):
                    return True
                if lane.outstanding:
                    return False
                # Chunks are needed again if another lane fails.
                self._changed.wait(EVENT_S)
        return False

    def _receive_range(self, lane: _Lane, chunks: range) -> None:
        """Receive a range of chunks that was requested: one after the other over TCP, and else in groups."""
        connection = lane.used_connection
        found = self._plan.chunks[chunks.start : chunks.stop]
        lane.source.read_chunks_head(connection, sum(chunk.nbytes for chunk in found))
        group: list[Chunk] = []
        group_bytes = 0
        for chunk in found:
            group.append(chunk)
            group_bytes += chunk.nbytes
            is_enough = group_bytes >= _GROUP_BYTES or len(group) >= _GROUP_CHUNKS
            if is_enough or not connection.is_local or chunk is found[-1]:
                self._receive_group(lane, connection, group)
                group, group_bytes = [], 0

    def _receive_group(self, lane: _Lane, connection: HttpConnection, group: Sequence[Chunk]) -> None:
        """Receive some chunks, and verify each. Those before a damaged one count as received."""
        self._raise_if_over()
        views = [self._landing.open(chunk) for chunk in group]
        if connection.reads_memory:
            connection.read_into(*views)
        whole: list[Chunk] = []
        for chunk, view in zip(group, views, strict=True):
            if not connection.reads_memory:
                connection.read_into(view)
            if self._digests and xxh3_64_intdigest(view) != self._digests[chunk.number]:
                break
            whole.append(chunk)
        self._raise_if_over()
        if whole:
            self._landing.write(whole)
            with self._changed:
                self._schedule.landed(lane.number, [chunk.number for chunk in whole], time.monotonic())
                self._count(lane, whole)
        if len(whole) < len(group):
            damaged = group[len(whole)].number
            raise _Damaged(damaged, paths_of(self._landing.sink.manifest, self._plan, {damaged}))

    def _count(self, lane: _Lane, chunks: Sequence[Chunk]) -> None:
        source, nbytes = lane.source, sum(chunk.nbytes for chunk in chunks)
        before = self.moved_bytes // EVENT_BYTES
        self.moved_bytes += nbytes
        self.last_peer = source.peer
        source.backoff.landed(lane.number)
        source.report.bytes += nbytes
        source.report.chunks += len(chunks)
        if self._schedule.is_done or self.moved_bytes // EVENT_BYTES > before:
            self._changed.notify_all()

    def _recover(self, lane: _Lane, grant: Grant | None, error: LinkError) -> None:
        """Let other lanes take what this one did not deliver; raises an error that ends the lane."""
        source = lane.source
        self._reset(lane)
        backoff_s, lane.backoff_s = lane.backoff_s, None
        self._raise_if_over()
        if isinstance(error, MemoryUnusable):
            source.fall_back_to_tcp(error)
            return
        source.hold_lease()
        with self._changed:
            source.report.failures.append(error.what)
            if backoff_s is not None:
                self._sources.set_back(source, backoff_s)
                return
            is_last = source.backoff.failed(lane.number) or isinstance(error, Unreachable)
        if is_last:
            raise Corrupted(error.paths) if isinstance(error, _Damaged) else error
        if isinstance(error, LeaseEnded) and grant is not None:
            source.renew(self._sources.wanted, grant, self._deadline_s)
        if isinstance(error, _Damaged):
            source.report_damage(error.chunk, left_s(self._deadline_s))

    def _reset(self, lane: _Lane) -> None:
        """Close the connection of a lane, so that late bytes are not written, and take its chunks back."""
        if lane.connection is not None:
            lane.source.close(lane.connection)
            lane.connection = None
        lane.outstanding.clear()
        with self._changed:
            self._schedule.take_back(lane.number)
            self._changed.notify_all()

    def _raise_if_over(self) -> None:
        if self._sources.is_over:
            raise LinkTimeout("the fetch is over")


class _Damaged(Corrupted):
    """The digest of a chunk is not the one that the source announced."""

    def __init__(self, chunk: int, paths: Sequence[str]) -> None:
        super().__init__(paths)
        self.chunk = chunk
