"""The measuring loop, the same on every rank: systems are interleaved, in a new order in every round.

So a disturbance of the machine affects all systems alike. Where targets compare cases, as on a cluster, cases
are interleaved too.
"""

from __future__ import annotations

import contextlib
import gc
import math
import random
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch.distributed as dist

from benchmarks.hosts import Host
from benchmarks.results import Measurement, Round
from benchmarks.rounds import RankGroup, RankReport, attempt, combine, run_round, share
from benchmarks.states import LeafDigests, State, StateSpec, digest_leaves
from benchmarks.systems import SYSTEMS
from benchmarks.systems.session import SENDER, Session, Setup, System
from benchmarks.workloads import Case, Size, Workload, cluster_workloads, workloads

# torch's PGTransport needs half a minute for 40 GB, and several times that on a busy machine.
_LOCAL_TIMEOUT_S = 300.0
_CLUSTER_TIMEOUT_S = 60.0
_LOOPBACK = "127.0.0.1"
# A system that needs longer for its warm-up is not repeated; the warm-up is then its one round.
_SLOW_S = 8.0


@dataclass(frozen=True)
class Plan:
    """What to measure: the names of workloads and systems. `hosts` is 0 for a run on one machine."""

    size: Size
    workloads: tuple[str, ...]
    systems: tuple[str, ...]
    repeats: int
    hosts: int = 0

    def chosen(self) -> list[Workload]:
        """List the workloads."""
        known = cluster_workloads(self.size, self.hosts) if self.hosts else workloads(self.size)
        return [workload for workload in known if workload.name in self.workloads]

    @property
    def ranks(self) -> int:
        """The number of processes: one for each host, or as many as the largest case needs."""
        return self.hosts or max(workload.ranks for workload in self.chosen())

    @property
    def round_timeout_s(self) -> float:
        return _CLUSTER_TIMEOUT_S if self.hosts else _LOCAL_TIMEOUT_S

    @property
    def slow_s(self) -> float:
        return math.inf if self.hosts else _SLOW_S


class Started(NamedTuple):
    """The measuring of a case, or on a cluster of a workload, has started."""

    name: str


class RoundDone(NamedTuple):
    """A system has finished a round. Round 0 is the warm-up."""

    case: str
    system: str
    number: int
    seconds: float


class Measured(NamedTuple):
    """All rounds of a case by a system are done."""

    measurement: Measurement


class Skipped(NamedTuple):
    """A case or a system is not run."""

    reason: str


Event = Started | RoundDone | Measured | Skipped
Emit = Callable[[Event], None]


def run(plan: Plan, folder: Path, emit: Emit, host: Host | None = None) -> None:
    """Run the plan on this rank of the default process group, and on a cluster on this host.

    Only the sender emits events.

    Raises:
        ClusterError: the rate of a link can't be limited.
        RuntimeError: another rank has died.
    """
    runner = _Runner(plan, folder, emit, host)
    for workload in plan.chosen():
        cases = [case for case in workload.cases if runner.has_ranks_for(case)]
        # On a cluster, the cases of a workload are always compared with each other.
        together = plan.hosts > 0 or workload.interleaved
        with runner.links_limited(workload):
            for batch in [cases] if together else [[case] for case in cases]:
                runner.run_batch(workload, batch, workload.name if together else batch[0].name)


@dataclass
class _Entry:
    """One system in one case, and its results so far.

    All fields except `session` and `expected` are equal on all ranks.
    """

    workload: Workload
    case: Case
    system: System
    session: Session | None = None
    expected: LeafDigests = field(default_factory=dict)
    rounds: list[Round] = field(default_factory=list)
    warm_up: Round | None = None
    problem: str | None = None
    failed: bool = False

    @property
    def ranks(self) -> int:
        return self.case.ranks

    def add(self, done: Round) -> None:
        """Add a round. Memory that the system allocated in the warm-up, and kept, counts for all rounds."""
        if self.warm_up is None:
            self.warm_up = done
            return
        peaks = [peak for peak in (done.peak_bytes, self.warm_up.peak_bytes) if peak is not None]
        self.rounds.append(msgspec.structs.replace(done, peak_bytes=max(peaks, default=None)))

    def fail(self, problem: str) -> None:
        self.problem, self.failed = problem, True

    def close(self) -> None:
        session, self.session = self.session, None
        if session is not None:
            attempt(session.close)

    def measurement(self) -> Measurement:
        only = [self.warm_up] if self.warm_up is not None else []
        return Measurement(
            workload=self.workload.name,
            case=self.case.name,
            system=self.system.name,
            rounds=tuple(self.rounds or only) if self.problem is None else (),
            problem=self.problem,
            failed=self.failed,
            state_bytes=self.case.state.state_bytes if self.system.moves else 0,
            tensors=self.case.state.tensors,
            receivers=self.case.timed_receivers,
            x=self.case.x,
        )


class _Runner:
    """This rank's part of a run."""

    def __init__(self, plan: Plan, folder: Path, emit: Emit, host: Host | None) -> None:
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._plan, self._folder, self._host = plan, folder, host
        self._emit = emit if self._rank == SENDER else lambda event: None
        needed = {case.ranks for workload in plan.chosen() for case in workload.cases}
        self._groups = {
            ranks: RankGroup(ranks, plan.round_timeout_s)
            for ranks in sorted({*needed, self._ranks})
            if ranks <= self._ranks
        }
        self._everyone = self._groups[self._ranks]
        # The hosts of a cluster are namespaces of one machine, and have its name.
        self._one_host = not plan.hosts and len(set(self._everyone.share(socket.gethostname()))) == 1
        # A system is skipped if one rank does not have it.
        own = {name: reason for name in plan.systems if (reason := SYSTEMS[name].missing())}
        missing = {name: reason for each in self._everyone.share(own) for name, reason in each.items()}
        for name, reason in missing.items():
            self._emit(Skipped(f"{SYSTEMS[name].title} {reason}"))
        self._systems = set(plan.systems) - missing.keys()

    def has_ranks_for(self, case: Case) -> bool:
        enough = case.ranks <= self._ranks
        if not enough:
            self._emit(Skipped(f"{case.name} needs {case.ranks} ranks; there are {self._ranks}"))
        return enough

    def links_limited(self, workload: Workload) -> contextlib.AbstractContextManager[None]:
        """Limit the link of this host while the workload runs, if this rank is a source in it."""
        is_source = any(case.sends(self._rank) for case in workload.cases)
        if self._host is None or workload.source_mbit is None or not is_source:
            return contextlib.nullcontext()
        return self._host.limited(workload.source_mbit)

    def run_batch(self, workload: Workload, cases: Sequence[Case], name: str) -> None:
        """Measure the cases by all systems, interleaved."""
        self._emit(Started(name))
        # Entries share states: the sender only reads, and a target is overwritten before each round.
        states = {case.state: case.state.build() for case in cases if self._needs_state(case)}
        entries = [
            _Entry(workload, case, SYSTEMS[name], problem=SYSTEMS[name].refuses(case, self._one_host))
            for case in cases
            for name in case.systems
            if name in self._systems
        ]
        self._open_all(entries, states)
        # The garbage collections between rounds skip what exists now: modules, states and sessions.
        gc.freeze()
        for number in range(self._plan.repeats + 1):
            # A new order, the same on all ranks: memory that one system frees speeds up the next.
            for entry in random.Random(number).sample(entries, len(entries)):
                slow = entry.warm_up is not None and entry.warm_up.seconds > self._plan.slow_s
                if entry.problem is not None or slow:
                    continue
                self._run_round(entry, number)
                if entry.failed:
                    # The data group may be broken, and other systems use it too.
                    self._groups[entry.ranks].renew()
                    self._open_all([one for one in entries if one.ranks == entry.ranks], states)
        for entry in entries:
            entry.close()
            self._emit(Measured(entry.measurement()))
        entries.clear()
        gc.unfreeze()
        gc.collect()
        self._everyone.wait()

    def _needs_state(self, case: Case) -> bool:
        return case.sends(self._rank) or (case.in_place and self._rank < case.ranks)

    def _open_all(self, entries: Sequence[_Entry], states: dict[StateSpec, State]) -> None:
        for entry in entries:
            entry.close()
            if entry.problem is None:
                self._open(entry, states.get(entry.case.state))

    def _open(self, entry: _Entry, state: State | None) -> None:
        """Open a session on all ranks of the case. If one rank fails, the entry fails on all ranks."""
        session, problem = None, None
        group, sends = self._groups[entry.ranks], entry.case.sends(self._rank)
        takes_part = self._rank < entry.ranks
        if takes_part:
            setup = Setup(
                case=entry.case,
                group=group.data,
                rank=self._rank,
                timeout_s=self._plan.round_timeout_s,
                share=lambda own: share(own, group.data, group.ranks),
                folder=self._folder,
                host=_LOOPBACK if self._host is None else self._host.address,
                source=state if sends else None,
                target=state if entry.case.in_place and not sends else None,
            )
            session, problem = attempt(lambda: entry.system.open(setup))
        if problem := _first(self._everyone.share(problem)):
            entry.fail(problem)
        elif takes_part:
            assert session is not None, "open returns a session or raises"
            own = digest_leaves(session.source) if sends else {}
            # The session may hold a copy as large as the state, which only the digest needs.
            session.source = None
            entry.session = session
            entry.expected = group.share(own)[SENDER]

    def _run_round(self, entry: _Entry, number: int) -> None:
        report = RankReport()
        if entry.session is not None:
            group = self._groups[entry.ranks]
            report = run_round(group, self._rank, entry.case, entry.session, entry.expected)
        reports = self._everyone.share(report)
        problem = _first([one.problem for one in reports])
        if problem is None:
            trouble = attempt(entry.session.settle)[1] if entry.session is not None else None
            problem = _first(self._everyone.share(trouble))
        if problem is not None:
            entry.fail(problem)
            return
        done = combine(entry.case, reports[: entry.ranks], wired=entry.system.wired)
        self._emit(RoundDone(entry.case.name, entry.system.name, number, done.seconds))
        entry.add(done)


def _first(problems: Sequence[str | None]) -> str | None:
    """Return the problem of the lowest rank that has one."""
    return next((f"rank {rank}: {problem}" for rank, problem in enumerate(problems) if problem), None)
