"""The simulated world: processes that take turns, and events in order of simulated time.

Each process is a thread, because the engine is ordinary blocking code. Only one thread runs at a time, until
it waits or ends; then the world chooses the next one.
"""

from __future__ import annotations

import heapq
import itertools
import random
import threading
from collections.abc import Callable
from typing import Any


class Killed(BaseException):
    """Unwinds a killed process. It is a BaseException, so that the engine does not handle it as an error."""


def _held_lock() -> threading.Lock:
    """Return a lock that is held. A thread waits for its turn by acquiring it."""
    lock = threading.Lock()
    lock.acquire()
    return lock


class Process:
    """One process. When `ended_s` is set, it has a value or an error, or neither if it was killed."""

    def __init__(self, world: World, rank: int, body: Callable[[], Any]) -> None:
        self.rank = rank
        self.value: Any = None
        self.error: Exception | None = None
        self.ended_s: float | None = None
        self.killed_s: float | None = None
        self.stopped_until_s = 0.0
        self.awake_s: float | None = None  # when the process may run next; None while it runs
        self._world = world
        self._body = body
        self._turn = _held_lock()
        self._thread = threading.Thread(target=self._run, name=f"simulated-{rank}", daemon=True)

    def _run(self) -> None:
        self._turn.acquire()
        try:
            if self.killed_s is None:
                self.value = self._body()
        except Killed:
            pass
        except Exception as error:
            self.error = error
        self.ended_s = self._world.now_s
        self._world._idle.release()

    def wait(self, until_s: float) -> None:
        """Let other processes run; return at the given time, or when woken.

        Raises:
            Killed: the process was killed meanwhile.
        """
        self.awake_s = max(until_s, self._world.now_s)
        self._world.at(self.awake_s, lambda: None)
        self._world._idle.release()
        self._turn.acquire()
        if self.killed_s is not None:
            raise Killed

    def wake(self) -> None:
        """Let the process continue at the current time."""
        if self.ended_s is None:
            self.awake_s = self._world.now_s


class World:
    """A clock, a queue of events, and processes."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.now_s = 0.0
        self.processes: dict[int, Process] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._idle = _held_lock()

    def at(self, time_s: float, event: Callable[[], None]) -> None:
        """Call `event` at a time."""
        heapq.heappush(self._events, (max(time_s, self.now_s), next(self._numbers), event))

    def start(self, rank: int, body: Callable[[], Any]) -> None:
        """Add a process that starts when the world runs."""
        process = Process(self, rank, body)
        self.processes[rank] = process
        process.awake_s = 0.0
        process._thread.start()

    def kill(self, rank: int) -> None:
        """Kill a process at its current wait."""
        process = self.processes[rank]
        if process.ended_s is None and process.killed_s is None:
            process.killed_s = self.now_s
            process.stopped_until_s = 0.0
            process.wake()

    def stop(self, rank: int, until_s: float) -> None:
        """Stop a process until the given time."""
        self.processes[rank].stopped_until_s = until_s
        self.at(until_s, lambda: None)

    def is_gone(self, rank: int) -> bool:
        """Return whether a process was killed."""
        return self.processes[rank].killed_s is not None

    def run(self, until_s: float) -> None:
        """Run until every process has ended or `until_s` is reached; then kill the others."""
        while any(process.ended_s is None for process in self.processes.values()):
            ready = [process for process in self.processes.values() if self._is_ready(process)]
            if ready:
                self._give_turn(self.chance.choice(ready))
            elif self._events and self._events[0][0] <= until_s:
                time_s, _, event = heapq.heappop(self._events)
                self.now_s = max(self.now_s, time_s)
                event()
            else:
                break
        self._end_all()

    def _is_ready(self, process: Process) -> bool:
        return (
            process.ended_s is None
            and process.awake_s is not None
            and process.awake_s <= self.now_s
            and process.stopped_until_s <= self.now_s
        )

    def _give_turn(self, process: Process) -> None:
        process.awake_s = None
        process._turn.release()
        self._idle.acquire()

    def _end_all(self) -> None:
        for process in self.processes.values():
            if process.ended_s is None:
                ended_s = process.killed_s
                process.killed_s = self.now_s if ended_s is None else ended_s
                self._give_turn(process)
                # A process that is still running here hung: `ended_s` stays None.
                process.ended_s = None if ended_s is None else process.ended_s
            process._thread.join()
