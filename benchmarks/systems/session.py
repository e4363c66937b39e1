"""The interface of a measured system: it opens a session on every rank of a case; the session sends and
receives.

A session is opened outside the timed part, and used for all rounds of a case. Rank 0 sends, or the
first ranks if a case has several sources. The others receive.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.states import State, leaves
from benchmarks.workloads import Case

SENDER = 0


@dataclass(frozen=True)
class Setup:
    """What a system gets to open a session.

    `source` is the state to send, on the sender. `target` is the state to receive into, on a receiver of an
    in-place case. `share` gathers a string from all ranks, outside the timed part. `folder` is on tmpfs, and
    the same for all ranks of a host. `host` is the address to listen on.
    """

    case: Case
    group: dist.ProcessGroup
    rank: int
    timeout_s: float
    share: Callable[[str], list[str]]
    folder: Path
    host: str
    source: State | None = None
    target: State | None = None

    @property
    def sends(self) -> bool:
        return self.case.sends(self.rank)

    @property
    def receivers(self) -> list[int]:
        return list(range(self.case.sources, self.case.ranks))


@dataclass
class Session:
    """An open system. `send` on the sender and `receive` on the others are timed.

    `source`, on the sender, is the state that a receiver must get. `target` is the memory that it is received
    into, if that is known beforehand. `phases` returns the seconds by phase of the last transfer. `settle` is
    called after each round, untimed, when all ranks are done; `close` at the end.
    """

    send: Callable[[], None]
    receive: Callable[[], object]
    source: object = None
    target: object = None
    phases: Callable[[], dict[str, float]] = dict
    settle: Callable[[], None] = lambda: None
    close: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class System:
    """A measured system. `kind` is "torchferry", "transport", "files" or "limit".

    `wired`: its bytes go through TCP sockets that stay open, so that they can be counted. `moves`: it moves
    the state, so that it has a rate. `missing` returns what is not installed. `refuses` returns why it does
    not support a case, given whether all ranks are on one host.
    """

    name: str
    title: str
    kind: str
    open: Callable[[Setup], Session]
    wired: bool = True
    moves: bool = True
    missing: Callable[[], str | None] = lambda: None
    refuses: Callable[[Case, bool], str | None] = lambda case, one_host: None


def copy_into(target: State | None, received: object) -> object:
    """Copy a received state into the target's tensors, as `load_state_dict` does, if there is a target."""
    if target is None:
        return received
    values = dict(leaves(received))
    for path, leaf in leaves(target):
        if isinstance(leaf, torch.Tensor):
            value = values[path]
            assert isinstance(value, torch.Tensor), f"{path} was received as {type(value)}"
            leaf.copy_(value)
    return target
