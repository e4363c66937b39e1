"""Assigns ranges of chunks to lanes, and says which lanes are overdue.

Time is an argument, so that the simulation uses the same rules.

A lane is a thread that fetches from one source. It connects when that is needed, and requests a range of
chunks at a time, so faster sources deliver more. If a lane is overdue and another one can deliver its chunks,
its connection is shut down, and its chunks are needed again.
"""

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import inf

REQUEST_BYTES = 8 << 20
"""How many bytes a lane requests at once; more if they would arrive in less than REQUEST_S. A larger request
to a slow source could delay the end of the fetch."""

REQUEST_S = 0.05
"""How long the response to a request should take at least, so that the cost of the request is negligible."""
MIN_REQUEST_S = 0.005
"""REQUEST_S near the end of a fetch, when several lanes share what is left and request less."""

RESHARE_REQUEST_BYTES, RESHARE_REQUEST_S = 2 << 20, 0.008
"""REQUEST_BYTES and REQUEST_S of a receiver that reshares; twice `connect_s` is added to the time. They are
small, because a peer keeps sending what a stopped receiver has requested."""

OVERDUE_S = 1.0
"""How long a chunk may be late before another lane requests it."""

PEER_S = 0.03
"""How long a peer, another receiver, may send no bytes and not answer whether it is alive. Short, because the
receivers that take chunks from this one wait too. Leaving a live peer by mistake costs little."""

PEER_BACKOFF_S = 10.0
"""How long a peer that was alive but too slow is not asked, the first time. Another peer is faster."""

_SLOW = 4
"""A chunk is late if it takes this many times as long as chunks usually take."""

_MAX_FAILURES = 3
"""How many times in a row a lane may break or deliver damage before it ends."""


@dataclass
class Backoff:
    """When to ask a source again that was overdue, and which of its lanes end because they failed repeatedly.

    The delay doubles, and is reset when a chunk lands. Failures are counted by lane.

    >>> backoff = Backoff()
    >>> backoff.overdue(now_s=10.0), backoff.is_active(10.9), backoff.is_active(11.0)
    (None, True, False)
    """

    _failures: Counter[int] = field(default_factory=Counter)  # by lane, since its last chunk landed
    _delay_s: float = 0.0
    _until_s: float = 0.0

    def is_active(self, now_s: float) -> bool:
        """Return whether other sources are to be asked first."""
        return now_s < self._until_s

    def overdue(self, now_s: float, delay_s: float = OVERDUE_S) -> None:
        """Note that the source was too slow. `delay_s` is the first delay."""
        self._delay_s = 2 * self._delay_s or delay_s
        self._until_s = now_s + self._delay_s

    def failed(self, lane: int) -> bool:
        """Note that a lane broke, or delivered a damaged chunk; return whether the lane ends."""
        self._failures[lane] += 1
        return self._failures[lane] > _MAX_FAILURES

    def landed(self, lane: int) -> None:
        """Note that the source delivered a chunk."""
        self._failures[lane], self._delay_s = 0, 0.0


@dataclass
class _Asked:
    """The chunks that a lane requested and has not delivered. `began_s` is when the first of them began.

    `peer_s` is how long another receiver may be silent; None for a source. When the lane was asked last, at
    `asked_s`, it had `queued` chunks to deliver.
    """

    chunks: deque[int]
    began_s: float
    heard_s: float
    peer_s: float | None
    asked_s: float = 0.0
    queued: int = 0


class Schedule:
    """The chunks that are needed, and those that lanes have requested. Lanes have numbers.

    A lane requests `request_bytes` at once, or what arrives in `request_s`, whichever is more.

    >>> schedule = Schedule([4, 4, 4], needed=[0, 2])
    >>> schedule.take(lane=7, parts=1, now_s=0.0), schedule.take(lane=8, parts=1, now_s=0.0)
    (range(0, 1), range(2, 3))
    >>> schedule.landed(7, [0], now_s=0.5), schedule.take_back(8), schedule.take(7, parts=1, now_s=0.5)
    (None, None, range(2, 3))
    """

    def __init__(
        self,
        sizes: Sequence[int],
        needed: Iterable[int],
        request_bytes: int = REQUEST_BYTES,
        request_s: float = REQUEST_S,
    ) -> None:
        self._request_bytes = request_bytes
        self._request_s = request_s
        self._sizes = sizes
        self._needed: deque[range] = deque(_runs(needed))
        self._needed_bytes = sum(sizes[chunk] for run in self._needed for chunk in run)
        self._asked: dict[int, _Asked] = {}
        self._chunk_s: float | None = None  # how long a chunk usually takes
        self._lane_s: dict[int, float] = {}  # the same, by lane

    @property
    def is_done(self) -> bool:
        """Whether every needed chunk has landed."""
        return not self._needed and not self._asked

    @property
    def has_more(self) -> bool:
        """Whether there are needed chunks that no lane has requested."""
        return bool(self._needed)

    def is_asked(self, lane: int) -> bool:
        """Return whether a lane has requested chunks that it has not delivered."""
        return lane in self._asked

    def take(self, lane: int, parts: int, now_s: float, peer_s: float | None = None) -> range:
        """Return the chunks that a lane requests next; empty if none is left.

        They are at most one of `parts` parts of what is needed, but at least one chunk, and what arrives in
        MIN_REQUEST_S. With more parts than lanes, the lanes request less and less, and finish at about the
        same time. `peer_s` is how long the other side may be silent if it is another receiver.
        """
        if not self._needed:
            return range(0)
        run = self._needed.popleft()
        nbytes = self._sizes[run.start]
        bytes_per_s = nbytes / self._lane_s[lane] if self._lane_s.get(lane) else 0.0
        most = max(self._request_bytes, bytes_per_s * self._request_s)
        limit = max(min(most, self._needed_bytes // parts), bytes_per_s * MIN_REQUEST_S)
        end = run.start + 1
        while end < run.stop and nbytes + self._sizes[end] <= limit:
            nbytes += self._sizes[end]
            end += 1
        if end < run.stop:
            self._needed.appendleft(range(end, run.stop))
        self._needed_bytes -= nbytes
        asked = self._asked.setdefault(lane, _Asked(deque(), now_s, now_s, peer_s))
        asked.chunks.extend(range(run.start, end))
        asked.asked_s, asked.queued = now_s, len(asked.chunks)
        return range(run.start, end)

    def heard(self, lane: int, heard_s: float, alive_asked_s: float = 0.0) -> None:
        """Note when a lane last received some bytes, or another receiver showed that it is alive.

        `alive_asked_s` is when the other receiver was asked whether it is alive. It has at least PEER_S / 2
        to answer, also if it was asked late.
        """
        if lane in self._asked:
            heard_s = max(heard_s, alive_asked_s - PEER_S / 2)
            self._asked[lane].heard_s = max(self._asked[lane].heard_s, heard_s)

    def skip(self, lost_s: float, now_s: float) -> None:
        """Do not count `lost_s` seconds in which this process did not run."""
        for asked in self._asked.values():
            # Since then, a lane may have delivered a chunk or requested more.
            asked.began_s = min(asked.began_s + lost_s, now_s)
            asked.heard_s = min(asked.heard_s + lost_s, now_s)
            asked.asked_s = min(asked.asked_s + lost_s, now_s)

    def landed(self, lane: int, chunks: Sequence[int], now_s: float) -> None:
        """Note that a lane delivered its next chunks, one or several at once."""
        asked = self._asked[lane]
        took_s = (now_s - asked.began_s) / len(chunks)
        for chunk in chunks:
            assert asked.chunks[0] == chunk, "a lane delivers chunks in the order in which it requested them"
            asked.chunks.popleft()
            self._chunk_s = _average(self._chunk_s, took_s)
            self._lane_s[lane] = _average(self._lane_s.get(lane), took_s)
        asked.began_s = asked.heard_s = now_s
        if not asked.chunks:
            del self._asked[lane]

    def take_back(self, lane: int) -> None:
        """Take back what a lane has not delivered. The lane must not write any more."""
        asked = self._asked.pop(lane, None)
        if asked is not None:
            self._needed.extendleft(reversed(list(_runs(asked.chunks))))
            self._needed_bytes += sum(self._sizes[chunk] for chunk in asked.chunks)

    def overdue(self, now_s: float) -> list[int]:
        """List the lanes that are silent for too long, take too long for a chunk, or hold up the end."""
        return [
            lane
            for lane, asked in self._asked.items()
            if min(self._late_s(asked), self._last_late_s(lane, asked)) <= now_s
        ]

    def is_silent(self, lane: int, now_s: float) -> bool:
        """Return whether a lane that is overdue received nothing for too long."""
        asked = self._asked[lane]
        return asked.heard_s + _max_silence_s(asked) <= now_s

    def why_overdue(self, lane: int, now_s: float) -> str:
        """Return why a lane is overdue."""
        asked = self._asked[lane]
        if self.is_silent(lane, now_s):
            return f"no bytes for {now_s - asked.heard_s:.2g} s"
        if self._late_s(asked) <= now_s:
            return f"its next chunk took {now_s - asked.began_s:.2g} s"
        return f"the others waited for its last chunks, which took {now_s - asked.asked_s:.2g} s"

    def _late_s(self, asked: _Asked) -> float:
        """Return when a lane becomes overdue."""
        # Until the first chunk has landed, it is not known how long one takes. A source then only has to send
        # bytes; a peer has to deliver its first chunk within OVERDUE_S.
        usual_s = inf if asked.peer_s is None else 0.0
        if self._chunk_s is not None:
            usual_s = _SLOW * self._chunk_s
        return min(asked.heard_s + _max_silence_s(asked), asked.began_s + usual_s + OVERDUE_S)

    def _last_late_s(self, lane: int, asked: _Asked) -> float:
        """Return when a lane that holds up the end becomes overdue: when nothing is left to request.

        It has OVERDUE_S, and _SLOW times as long as the fastest other lane would need for its chunks. inf if
        there is something to request, if no other lane has delivered a chunk, and for a peer.
        """
        others_s = [chunk_s for other, chunk_s in self._lane_s.items() if other != lane]
        if self._needed or not others_s or asked.peer_s is not None:
            return inf
        return asked.asked_s + asked.queued * _SLOW * min(others_s) + OVERDUE_S


def _max_silence_s(asked: _Asked) -> float:
    return OVERDUE_S if asked.peer_s is None else min(asked.peer_s, OVERDUE_S)


def _average(average_s: float | None, took_s: float) -> float:
    return took_s if average_s is None else 0.8 * average_s + 0.2 * took_s


def _runs(chunks: Iterable[int]) -> Iterable[range]:
    """Group chunk numbers, which are in order, into runs of consecutive ones."""
    for _, group in groupby(enumerate(chunks), key=lambda pair: pair[1] - pair[0]):
        run = [chunk for _, chunk in group]
        yield range(run[0], run[-1] + 1)
