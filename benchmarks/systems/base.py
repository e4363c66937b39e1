"""What a system under comparison is: something that can open a session, which then sends and receives.

A session is opened on every rank that takes part, outside the timed part, and used for all takes of a case.
Rank 0 of the group is the sender, the others receive.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from benchmarks.recipes import State
from benchmarks.works import Case

SENDER = 0

Phases = dict[str, float]


@dataclass(frozen=True)
class Site:
    """Where a session takes place.

    `source` is the state to send, on the sender; `target` what to receive into, on a receiver of an in-place
    case. `share` gives everyone's bytes to everyone, in the order of ranks, and is not for timed parts.
    `folder` is on tmpfs, and the same for all ranks of a host.
    """

    case: Case
    group: dist.ProcessGroup
    rank: int
    timeout_s: float
    share: Callable[[bytes], list[bytes]]
    folder: Path
    source: State | None = None
    target: State | None = None

    @property
    def sends(self) -> bool:
        return self.rank == SENDER

    @property
    def receivers(self) -> list[int]:
        return list(range(1, self.case.receivers + 1))


@dataclass
class Session:
    """A system that is set up. `send` is called on the sender, `receive` on the others, in the timed part.

    `source` is what a receiver must end up with, on the sender; `target` the memory in which it will, if it
    is known beforehand. `phases` tells the seconds by phase of the last transfer. `settle` is called after
    every take, untimed, once all ranks are done, and `close` at the end.
    """

    send: Callable[[], None]
    receive: Callable[[], object]
    source: object = None
    target: object = None
    phases: Callable[[], Phases] = dict
    settle: Callable[[], None] = lambda: None
    close: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class System:
    """One of those that are compared. Every rank of a case opens it at the same time.

    `kind` is "ferry", "peer", "disk" or "limit". `wired` says whether its bytes go by TCP sockets that stay
    open, so that they can be counted; `moves`, whether it moves the state, and so has a rate. `missing` says
    what has to be installed first, `refuses` why it can't do a case, given whether all ranks are on one
    host; None if there is nothing to say.
    """

    name: str
    title: str
    kind: str
    open: Callable[[Site], Session]
    wired: bool = True
    moves: bool = True
    missing: Callable[[], str | None] = lambda: None
    refuses: Callable[[Case, bool], str | None] = lambda case, one_host: None
