"""Lanes: the work of a transfer with one peer, run in a thread and watched by the caller until it ends.

A backend waits in native code, where Ctrl-C does not reach it and a dead peer may never end it. So lanes run
in threads, and the caller sleeps where it can be woken. It checks every lane by the rules of `core.watch`,
and cancels a lane whose peer is dead, stalled or late. The simulation runs the same lanes with a scheduler.
"""

import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeAlias, TypeVar

from torchferry.core.watch import Action, Limits, next_action
from torchferry.engine.deadlines import left_s
from torchferry.errors import LinkBroken, LinkError, LinkStalled, LinkTimeout
from torchferry.links.base import Link, Pending

T = TypeVar("T")

Steps: TypeAlias = Generator[Pending, None, T]
"""Work that yields every message it waits for, and is resumed when that message completed or failed."""


@dataclass
class Progress:
    """Progress with one peer. The lane that moves bytes writes it, the caller that watches the lane reads it.

    `contacted` is False until a message to or from the peer has completed. `waiting_since_s` is None while
    the lane works by itself. `idle` means that the lane waits for another lane, not for the peer.
    """

    peer: int
    bytes_due: int = 0
    bytes_done: int = 0
    chunks_done: int = 0
    contacted: bool = True
    idle: bool = False
    waiting_since_s: float | None = None

    def add(self, nbytes: int) -> None:
        """Count one completed chunk."""
        self.bytes_done += nbytes
        self.chunks_done += 1


@dataclass
class Cancellation:
    """Cancels a lane. The caller sets it; a cancelled lane writes nothing more.

    `end_waits` ends the lane's waits, if closing the link does not.
    """

    is_set: bool = False
    end_waits: Callable[[], None] = lambda: None

    def set(self) -> None:
        """Cancel the lane."""
        self.is_set = True
        self.end_waits()

    def raise_if_cancelled(self) -> None:
        """Stop a cancelled lane. Its caller has an error already and never sees this one."""
        if self.is_set:
            raise LinkTimeout("the transfer was cancelled")


_STOP_S = 0.25
"""How long the caller waits for a cancelled lane to finish the few chunks that it is writing."""


@dataclass(eq=False)
class Lane(Generic[T]):
    """Work with one peer. When it is `over`, it has either an `error` or a `value`.

    `on_failure` is called with the error. `ends_s` is an earlier deadline for this lane alone. `lost` is the
    link's error about a dead peer, found at `lost_s`. `at_work` is held unless the lane waits.
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

    def step(self, failure: BaseException | None = None) -> Pending | None:
        """Work until the next wait and return what is waited for; at the end, settle and return None."""
        try:
            with self.at_work:
                return next(self.steps) if failure is None else self.steps.throw(failure)
        except StopIteration as stop:
            self.settle(stop.value, None)
        except BaseException as error:
            self.settle(None, error)
        return None

    def settle(self, value: T | None, error: BaseException | None) -> None:
        """End the lane. Only the first call counts."""
        with self._lock:
            if self.over:
                return
            self.value, self.error, self.over = value, error, True
        if error is not None:
            self.on_failure(error)

    def result(self) -> T:
        """Return the value of a lane that is over, or raise its error."""
        if self.error is not None:
            raise self.error
        return self.value  # type: ignore[return-value]


_JOIN_S = 0.5
"""How long an interrupted caller waits for threads: Ctrl-C is to end a transfer within a second."""


class Runner:
    """Runs the lanes of one transfer, each in a thread. The simulation has one with a clock of its own."""

    def __init__(self) -> None:
        self._ended: SimpleQueue[None] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def now_s(self) -> float:
        """Return the time."""
        return time.monotonic()

    def start(self, lane: Lane[Any], deadline_s: float) -> None:
        """Start to run a lane; it is settled when it ends."""
        name = f"torchferry-lane-{lane.progress.peer}"
        thread = threading.Thread(target=self._run, args=(lane, deadline_s), name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def sleep(self, lanes: Sequence[Lane[Any]], until_s: float) -> None:
        """Return when one of the lanes is over, or at the given time."""
        if any(lane.over for lane in lanes):
            return
        with suppress(Empty):
            self._ended.get(timeout=min(left_s(until_s), threading.TIMEOUT_MAX))

    def end(self) -> None:
        """Wait a moment for cancelled lanes to end, but not for one that is stuck."""
        ends_s = time.monotonic() + _JOIN_S
        for thread in self._threads:
            thread.join(left_s(ends_s))

    def _run(self, lane: Lane[Any], deadline_s: float) -> None:
        pending = lane.step()
        while pending is not None:
            lane.progress.waiting_since_s = time.monotonic()
            failure = _wait(pending, deadline_s, lane.progress.peer)
            lane.progress.waiting_since_s = None
            pending = lane.step(failure)
        self._ended.put(None)


def _wait(pending: Pending, deadline_s: float, peer: int) -> BaseException | None:
    """Wait for a message until the deadline, and return why it failed.

    A wait that begins late times out in the backend too: gloo closes the connection, and the peer notices.
    """
    try:
        pending.wait(left_s(deadline_s))
    except BaseException as error:
        # When the wait of one lane times out, gloo closes the connections of all lanes.
        is_late = isinstance(error, LinkBroken) and time.monotonic() >= deadline_s
        return deadline_passed(peer) if is_late else error
    return None


def run_lanes(link: Link, lanes: Sequence[Lane[Any]], limits: Limits, runner: Runner) -> None:
    """Run lanes side by side until each is over. Errors stay in the lanes.

    Only an exception that interrupts the caller, such as KeyboardInterrupt, is raised. The link is closed
    first, so that peers notice and waits end.
    """
    try:
        for lane in lanes:
            runner.start(lane, limits.deadline_s)
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
        runner.end()
        raise


def _await_stop(lanes: Sequence[Lane[Any]]) -> None:
    """Wait until cancelled lanes stop working, so that nothing is written after the error is raised."""
    ends_s = time.monotonic() + _STOP_S
    for lane in lanes:
        if lane.at_work.acquire(timeout=left_s(ends_s)):
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
        # In this order, or the lane might end with the error of a wait that was ended.
        lane.settle(None, error)
        lane.cancellation.set()
    return again_s


def deadline_passed(peer: int) -> LinkTimeout:
    """Return the error for a deadline that passed."""
    return LinkTimeout("the transfer did not finish within its timeout", peer=peer)
