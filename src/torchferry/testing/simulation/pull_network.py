"""The network of simulated fetches: hosts that are stopped and killed, connections, and the clock.

A process or thread is a generator that yields how long it sleeps, or the connection that it waits for.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from random import Random
from typing import Any

from torchferry.testing.simulation.scenario import CheckFailed

END_S = 200.0
"""When a simulation ends: long after all fetches and leases."""
TICK_S = 0.1
NAME = "state"

Steps = Generator["float | Connection", None, Any]
"""A process or thread. It is resumed after the time that it yields, or when its connection has news."""


def check(holds: bool, what: str) -> None:
    if not holds:
        raise CheckFailed(what)


class Broken(Exception):
    """A connection was closed, or did not answer in time."""


class Ended(Broken):
    """The source ended the lease."""


class Damaged(Broken):
    """A chunk has another digest than announced."""


class Lost(Exception):
    """A source can't be used any more."""


@dataclass(eq=False, repr=False)
class Host:
    """A machine with one process, which can be killed or stopped."""

    name: str
    is_alive: bool = True
    stopped_until_s: float = 0.0
    faults: set[str] = field(default_factory=set)
    connections: list[Connection] = field(default_factory=list)

    def notice(self, connection: Connection, delay_s: float) -> Steps:
        """Find after a while that a connection is closed. Only sources do."""
        raise NotImplementedError


@dataclass(eq=False)
class Connection:
    """A connection between a receiver and a source. `answers` are those that arrived."""

    number: int
    receiver: Host
    source: Host
    is_open: bool = True
    heard_s: float = 0.0
    arrives_s: float = 0.0  # when the last answer arrives
    answers: deque[Any] = field(default_factory=deque)
    waiting: list[tuple[Host, Steps]] = field(default_factory=list)


class PullWorld:
    """The clock, the events and the network."""

    def __init__(self, chance: Random, max_delay_s: float) -> None:
        self.chance = chance
        self.now_s = 0.0
        self.max_delay_s = max_delay_s
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count(1)

    def at(self, time_s: float, event: Callable[[], None]) -> None:
        """Call `event` at a time."""
        if time_s < END_S:
            heapq.heappush(self._events, (max(time_s, self.now_s), next(self._numbers), event))

    def run(self) -> None:
        """Run all events."""
        while self._events:
            self.now_s, _, event = heapq.heappop(self._events)
            event()

    def delay_s(self) -> float:
        """Return how long the next message takes."""
        return self.chance.random() * self.max_delay_s

    def start(self, host: Host, steps: Steps) -> None:
        """Start a process or thread on a host."""
        self.at(self.now_s, lambda: self._resume(host, steps))

    def _resume(self, host: Host, steps: Steps) -> None:
        if not host.is_alive:
            return
        if self.now_s < host.stopped_until_s:
            self.at(host.stopped_until_s, lambda: self._resume(host, steps))
            return
        waited = next(steps, None)
        if isinstance(waited, Connection):
            waited.waiting.append((host, steps))
        elif waited is not None:
            self.at(self.now_s + waited, lambda: self._resume(host, steps))

    def wake(self, connection: Connection) -> None:
        """Resume all that wait for a connection."""
        waiting, connection.waiting = connection.waiting, []
        for host, steps in waiting:
            self.start(host, steps)

    def connect(self, receiver: Host, source: Host) -> Connection:
        """Connect to a source that is alive."""
        connection = Connection(next(self._numbers), receiver, source, heard_s=self.now_s)
        receiver.connections.append(connection)
        source.connections.append(connection)
        return connection

    def request(self, connection: Connection, answer: Callable[[], Steps]) -> None:
        """Let the source answer a request, unless the connection is closed before it arrives."""

        def steps() -> Steps:
            yield self.delay_s()
            if connection.is_open:
                yield from answer()

        self.start(connection.source, steps())

    def close(self, connection: Connection) -> None:
        """Close a connection. Its source notices that later."""
        if connection.is_open:
            connection.is_open = False
            self.wake(connection)
            self.start(connection.source, connection.source.notice(connection, self.delay_s()))

    def kill(self, host: Host) -> None:
        """Kill a process. Its connections are closed."""
        host.is_alive = False
        self.close_all(host)

    def stop(self, host: Host, until_s: float) -> None:
        """Stop a process until the given time."""
        host.stopped_until_s = max(host.stopped_until_s, until_s)

    def close_all(self, host: Host) -> None:
        """Close all connections of a host."""
        for connection in host.connections:
            self.close(connection)
