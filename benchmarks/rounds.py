"""One round of one case: all its ranks start together, each measures itself and checks what it received."""

from __future__ import annotations

import gc
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from benchmarks import machine
from benchmarks.results import Round
from benchmarks.states import LeafDigests, differing_paths, digest_leaves, poison
from benchmarks.systems.session import SENDER, Session
from benchmarks.workloads import Case

T = TypeVar("T")

# Ranks that a case does not use wait this long. gloo reports a dead process at once.
IDLE_TIMEOUT = timedelta(hours=2)
_SHOWN_PATHS = 3
# A receiver is stopped when it has begun to receive.
_STOP_AFTER_S = 0.05
_STOP = 'sleep "$1"; kill -STOP "$3"; sleep "$2"; kill -CONT "$3"'
_SHOWN_CHARACTERS = 200


class RankGroup:
    """The first `ranks` ranks, with a data group for the measured system and a control group for the
    benchmark.

    A system that breaks its group does not break the benchmark. All ranks create a RankGroup at the same
    time, members or not: torch names groups by a counter, which must be equal on all ranks.
    """

    def __init__(self, ranks: int, timeout_s: float) -> None:
        self.ranks = ranks
        self._timeout = timedelta(seconds=timeout_s)
        self._control = self._new_group(IDLE_TIMEOUT)
        self.renew()

    def renew(self) -> None:
        """Replace the data group after a failure, on all ranks of the run at the same time.

        The old group is not destroyed: that would block until its pending operations end.
        """
        self.data = self._new_group(self._timeout)

    def wait(self) -> None:
        """Wait for all members.

        Raises:
            RuntimeError: a member has died.
        """
        dist.barrier(group=self._control)

    def share(self, own: T) -> list[T]:
        """Send a value to all members; return the values of all members, by rank.

        Raises:
            RuntimeError: a member has died.
        """
        return share(own, self._control, self.ranks)

    def _new_group(self, timeout: timedelta) -> dist.ProcessGroup:
        group: dist.ProcessGroup = dist.new_group(list(range(self.ranks)), timeout=timeout, backend="gloo")
        return group


def share(own: T, group: dist.ProcessGroup, ranks: int) -> list[T]:
    """Gather a value from all ranks of a group on all of them."""
    values: list[T] = [own] * ranks
    dist.all_gather_object(values, own, group=group)
    return values


@dataclass(frozen=True)
class RankReport:
    """What one rank measured in a round, or what went wrong on it."""

    seconds: float = 0.0
    wire_bytes: int | None = None
    peak_bytes: int | None = None
    phases_s: dict[str, float] = field(default_factory=dict)
    problem: str | None = None


def run_round(group: RankGroup, rank: int, case: Case, session: Session, expected: LeafDigests) -> RankReport:
    """Transfer once, and report this rank's part. An exception of the system becomes the report's problem.

    Raises:
        RuntimeError: another rank has died.
    """
    if session.target is not None and not case.unchanged:
        poison(session.target)
    gc.collect()
    group.wait()
    start_bytes = machine.reset_peak()
    received_before = machine.received_bytes()
    if case.asleep_s and rank == case.last:
        time.sleep(case.asleep_s)
    stopper = _stop_soon(case.stopped_s) if case.stopped_s and rank == case.last else None
    start_s = time.perf_counter()
    received, problem = attempt(session.send if case.sends(rank) else session.receive)
    seconds = time.perf_counter() - start_s
    if stopper is not None:
        stopper.wait()
    if problem is not None:
        return RankReport(problem=problem)
    wire_bytes = machine.received_between(received_before, machine.received_bytes())
    peak_bytes = machine.peak_since(start_bytes)
    if not case.sends(rank) and not (case.killed and rank == case.last):
        problem = _compare(expected, received)
    return RankReport(seconds, wire_bytes, peak_bytes, session.phases(), problem)


def combine(case: Case, reports: Sequence[RankReport], *, wired: bool) -> Round:
    """Combine the reports of a case's ranks. The round ends when the last timed rank is done."""
    received = reports[case.sources :]
    wires = [report.wire_bytes for report in received if report.wire_bytes is not None]
    phases = {"send": reports[SENDER].phases_s, "receive": received[0].phases_s}
    return Round(
        seconds=max(reports[rank].seconds for rank in case.timed or range(len(reports))),
        wire_bytes=max(wires, default=None) if wired else None,
        peak_bytes=max((one.peak_bytes for one in reports if one.peak_bytes is not None), default=None),
        phases_s={side: seconds for side, seconds in phases.items() if seconds},
    )


def attempt(call: Callable[[], T]) -> tuple[T | None, str | None]:
    """Call a measured system; return its result, or else the first line of its exception.

    >>> attempt(lambda: 1 // 0)
    (None, 'ZeroDivisionError: integer division or modulo by zero')
    """
    try:
        return call(), None
    except Exception as error:
        line = str(error).strip().partition("\n")[0]
        shown = line if len(line) <= _SHOWN_CHARACTERS else f"{line[:_SHOWN_CHARACTERS]}…"
        return None, f"{type(error).__name__}: {shown}"


def _stop_soon(stopped_s: float) -> subprocess.Popen[bytes]:
    """Start a process that stops this one by SIGSTOP, and continues it after `stopped_s`."""
    return subprocess.Popen(["sh", "-c", _STOP, "sh", str(_STOP_AFTER_S), str(stopped_s), str(os.getpid())])


def _compare(expected: LeafDigests, received: object) -> str | None:
    wrong = differing_paths(expected, digest_leaves(received))
    if not wrong:
        return None
    more = f" and {len(wrong) - _SHOWN_PATHS:,} more" if len(wrong) > _SHOWN_PATHS else ""
    return f"the received state differs from the sent state at {', '.join(wrong[:_SHOWN_PATHS])}{more}"
