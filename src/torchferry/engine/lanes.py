"""Lanes: the work of a transfer with one peer, run in a thread and watched by the caller until it ends.

A backend waits in native code, where Ctrl-C does not reach it and a dead peer may never end it. So lanes run
in threads, and the caller sleeps where it can be woken. It checks every lane by the rules of `core.watch`,
and cancels a lane whose peer is dead, stalled or late. The simulation runs the same lanes with a scheduler.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import inf
from queue import Empty, SimpleQueue
from typing import Any, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

from torchferry.core.watch import Action, Limits, next_action
from torchferry.engine.progress import Cancellation, Progress
from torchferry.errors import FerryError, LinkBroken, LinkError, LinkStalled, LinkTimeout
from torchferry.links.base import Link, Pending

T = TypeVar("T")

Steps: TypeAlias = Generator[Pending, None, T]
"""Work that yields every message it waits for, and is resumed when that message completed or failed."""


class _Entry(NamedTuple, Generic[T]):
    pending: Pending
    nbytes: int
    in_place: bool
    item: T


@dataclass(eq=False)
class Window(Generic[T]):
    """A queue of messages in flight, each with an item that says what to do when it completes.

    Messages that are sent from or received into the tensors themselves take no extra memory, so up to
    `max_in_place_bytes` may be in flight, and of all others `max_bytes`.
    """

    max_bytes: int
    max_in_place_bytes: int = 0
    _entries: deque[_Entry[T]] = field(default_factory=deque)
    _staged_bytes: int = 0
    _in_place_bytes: int = 0

    def __len__(self) -> int:
        return len(self._entries)

    def has_room(self, nbytes: int, *, in_place: bool = False) -> bool:
        """Return whether so many more bytes may be in flight. An empty window takes any message."""
        if not self._entries:
            return True
        if in_place:
            return self._in_place_bytes + self._staged_bytes + nbytes <= self.max_in_place_bytes
        return self._staged_bytes + nbytes <= self.max_bytes

    def add(self, pending: Pending, nbytes: int, item: T, *, in_place: bool = False) -> None:
        """Add a message that was just started."""
        self._entries.append(_Entry(pending, nbytes, in_place, item))
        if in_place:
            self._in_place_bytes += nbytes
        else:
            self._staged_bytes += nbytes

    def pop(self) -> Steps[T]:
        """Wait for the oldest message and return its item.

        Raises:
            LinkError: the message failed.
        """
        entry = self._entries[0]
        yield entry.pending
        self._entries.popleft()
        if entry.in_place:
            self._in_place_bytes -= entry.nbytes
        else:
            self._staged_bytes -= entry.nbytes
        return entry.item


_STOP_S = 0.25
"""How long the caller waits for a cancelled lane to finish the few chunks that it is writing."""


@dataclass(eq=False)
class Lane(Generic[T]):
    """Work with one peer. When it is `over`, it has either an `error` or a `value`.

    `on_failure` is called with the error. `ends_s` is an earlier deadline for this lane alone. `lost` is the
    link's error about a dead peer, found at `lost_s`. The runner holds `at_work` unless the lane waits.
    """

    progress: Progress
    cancellation: Cancellation
    steps: Steps[T]
    on_failure: Callable[[BaseException], None] = lambda error: None
    over: bool = False
    error: BaseException | None = None
    value: T | None = None
    probed_s: float = 0.0
    lost: LinkError | None = None
    lost_s: float | None = None
    ends_s: float = inf
    at_work: threading.Lock = field(default_factory=threading.Lock)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def settle(self, value: T | None, error: BaseException | None) -> None:
        """End the lane. Only the first call counts."""
        with self._lock:
            if self.over:
                return
            self.value, self.error, self.over = value, error, True
        if error is not None:
            self.on_failure(error)

    def result(self) -> T:
        """Return the value of a lane that is over.

        Raises:
            BaseException: the lane's error.
        """
        if self.error is not None:
            raise self.error
        return self.value  # type: ignore[return-value]


class Runner(Protocol):
    """Runs lanes: `threads.ThreadRunner` with the real clock, the simulation with a clock of its own."""

    def now_s(self) -> float:
        """Return the time."""

    def start(self, lane: Lane[Any], limits: Limits) -> None:
        """Start to run a lane; settle it when it ends."""

    def sleep(self, lanes: Sequence[Lane[Any]], until_s: float) -> None:
        """Return when one of the lanes is over, or at the given time."""

    def end(self, lanes: Sequence[Lane[Any]]) -> None:
        """Wait a moment for cancelled lanes to end."""


def run_lanes(link: Link, lanes: Sequence[Lane[Any]], limits: Limits, runner: Runner) -> None:
    """Run lanes side by side until each is over. Errors stay in the lanes.

    Raises:
        BaseException: an exception that interrupts the caller, such as KeyboardInterrupt. The link is closed
            first, so that peers notice and waits end.
    """
    try:
        for lane in lanes:
            runner.start(lane, limits)
        while running := [lane for lane in lanes if not lane.over]:
            next_s = min(_watch(lane, link, limits, runner.now_s()) for lane in running)
            _await_stop([lane for lane in running if lane.cancellation.is_set])
            if not any(lane.over for lane in running):
                runner.sleep(running, next_s)
    except BaseException as interrupt:
        for lane in lanes:
            lane.settle(None, interrupt)
        # The link closes first. A cancelled lane sends an abort, and some peers would get one and others not.
        for lane in lanes:
            link.close(lane.progress.peer)
        for lane in lanes:
            lane.cancellation.set()
        _await_stop(lanes)
        runner.end(lanes)
        raise


def _await_stop(lanes: Sequence[Lane[Any]]) -> None:
    """Wait until cancelled lanes stop working, so that nothing is written after the error is raised."""
    ends_s = time.monotonic() + _STOP_S
    for lane in lanes:
        if lane.at_work.acquire(timeout=max(ends_s - time.monotonic(), 0.0)):
            lane.at_work.release()


def _watch(lane: Lane[Any], link: Link, limits: Limits, now_s: float) -> float:
    """Do what the rules ask for now, and return when to check again."""
    progress = lane.progress
    # An idle lane waits for another lane, so its peer has not stalled.
    stall_s = None if progress.idle else limits.stall_s
    action, again_s = next_action(
        Limits(min(limits.deadline_s, lane.ends_s), stall_s),
        now_s,
        waiting_since_s=progress.waiting_since_s,
        probed_s=lane.probed_s,
        lost_s=lane.lost_s,
    )
    error: LinkError | None = None
    if action is Action.PROBE:
        lane.probed_s = now_s
        try:
            link.check_peer(progress.peer)
        except LinkError as gone:
            lane.lost, lane.lost_s = gone, now_s
    elif action is Action.GIVE_UP_DEAD:
        error = lane.lost
    elif action is Action.GIVE_UP_STALLED:
        error = LinkStalled(f"no message completed for {limits.stall_s:g} s", peer=progress.peer)
    elif action is Action.GIVE_UP_LATE:
        error = deadline_passed(progress.peer)
    if error is not None:
        lane.cancellation.set()
        lane.settle(None, error)
    return again_s


def deadline_passed(peer: int) -> LinkTimeout:
    """Return the error for a deadline that passed."""
    return LinkTimeout("the transfer did not finish within its timeout", peer=peer)


_JOIN_S = 0.5
"""How long an interrupted caller waits for threads: Ctrl-C is to end a transfer within a second."""


class ThreadRunner:
    """Runs the lanes of one transfer, each in a thread."""

    def __init__(self) -> None:
        self._ended: SimpleQueue[None] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def now_s(self) -> float:
        """Return the time."""
        return time.monotonic()

    def start(self, lane: Lane[Any], limits: Limits) -> None:
        """Run a lane in a new thread."""
        thread = threading.Thread(
            target=self._run,
            args=(lane, limits.deadline_s),
            name=f"torchferry-lane-{lane.progress.peer}",
            daemon=True,
        )
        self._threads.append(thread)
        thread.start()

    def sleep(self, lanes: Sequence[Lane[Any]], until_s: float) -> None:
        """Sleep until a lane is over, or until the given time."""
        if any(lane.over for lane in lanes):
            return
        left_s = max(until_s - time.monotonic(), 0.0)
        with suppress(Empty):
            self._ended.get(timeout=min(left_s, threading.TIMEOUT_MAX))

    def end(self, lanes: Sequence[Lane[Any]]) -> None:
        """Wait for the threads, but not for one that is stuck."""
        ends_s = time.monotonic() + _JOIN_S
        for thread in self._threads:
            thread.join(max(ends_s - time.monotonic(), 0.0))

    def _run(self, lane: Lane[Any], deadline_s: float) -> None:
        value: object = None
        error: BaseException | None = None
        try:
            value = _run_steps(lane, deadline_s)
        except BaseException as raised:
            error = raised
        lane.settle(value, error)
        self._ended.put(None)


def _run_steps(lane: Lane[T], deadline_s: float) -> T:
    """Run a lane, and wait for each message that it yields until the deadline.

    Raises:
        FerryError: as the lane does.
    """
    step: Callable[[], Pending] = partial(next, lane.steps)
    while True:
        with lane.at_work:
            try:
                pending = step()
            except StopIteration as stop:
                return stop.value  # type: ignore[no-any-return]
        try:
            lane.progress.waiting_since_s = time.monotonic()
            _wait(pending, deadline_s, lane.progress.peer)
            step = partial(next, lane.steps)
        except FerryError as error:
            step = partial(lane.steps.throw, error)
        finally:
            lane.progress.waiting_since_s = None


def _wait(pending: Pending, deadline_s: float, peer: int) -> None:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise deadline_passed(peer)
    try:
        pending.wait(left_s)
    except LinkBroken as error:
        # When the wait of one lane times out, gloo closes the connections of all lanes.
        if time.monotonic() >= deadline_s:
            raise deadline_passed(peer) from error
        raise
