"""The run itself, the same on every rank: case by case, the systems in turn, again and again.

Systems are interleaved, in every round in another order, so that what else happens on the machine happens to
all of them alike.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch.distributed as dist

from benchmarks.assembly import Assembly, host, share
from benchmarks.portrait import Portrait, portray
from benchmarks.recipes import State
from benchmarks.results import Series, Take
from benchmarks.systems import SYSTEMS, Session, Site, System
from benchmarks.systems.base import SENDER
from benchmarks.taking import attempt, combine, problem_of, take
from benchmarks.works import Case, Size, Work, works

# The deadline of one transfer. The slowest, 40 GB for 40 MB by torch's PGTransport, takes half a minute, and
# several times that on a machine that has other things to do.
TAKE_TIMEOUT_S = 300.0
# What takes longer than this in its warm-up is not repeated: the warm-up is its one take.
_SLOW_S = 8.0
# What those who measure tell those who stand by.
_RENEW, _DONE = b"renew", b"done"


class Plan(msgspec.Struct, frozen=True):
    """What to run: the names of works and systems, at which size, how often."""

    size: Size
    works: tuple[str, ...]
    systems: tuple[str, ...]
    repeats: int

    def chosen(self) -> list[Work]:
        """The works themselves."""
        return [work for work in works(self.size) if work.name in self.works]

    @property
    def ranks(self) -> int:
        """How many processes its largest case takes."""
        return 1 + max(case.receivers for work in self.chosen() for case in work.cases)


class Began(msgspec.Struct, frozen=True, tag=True):
    """A case is about to be measured."""

    work: str
    case: str


class Took(msgspec.Struct, frozen=True, tag=True):
    """A system has done a take of the case."""

    system: str
    number: int
    seconds: float


class Measured(msgspec.Struct, frozen=True, tag=True):
    """A system is done with a case."""

    series: Series


class LeftOut(msgspec.Struct, frozen=True, tag=True):
    """Something will not be run, and why."""

    reason: str


Event = Began | Took | Measured | LeftOut
Tell = Callable[[Event], None]


def perform(plan: Plan, folder: Path, tell: Tell) -> None:
    """Run the plan on this rank of the default process group; the sender tells what happens.

    Raises:
        RuntimeError: another rank is gone.
    """
    stage = _Stage(plan, folder, tell)
    for work in plan.chosen():
        for case in work.cases:
            if case.receivers >= stage.size:
                stage.tell(
                    LeftOut(f"{case.name} needs {case.receivers + 1} ranks, and there are {stage.size}")
                )
            elif stage.rank <= case.receivers:
                stage.play(work, case)
            else:
                stage.stand_by(case)


@dataclass
class _Entrant:
    """A system in a case: its session, what must arrive, and what has come of it so far."""

    system: System
    session: Session | None = None
    expected: Portrait = field(default_factory=dict)
    takes: list[Take] = field(default_factory=list)
    warm_up: Take | None = None
    problem: str | None = None
    failed: bool = False

    def wants(self, number: int) -> bool:
        slow = self.warm_up is not None and self.warm_up.seconds > _SLOW_S
        return self.problem is None and not (slow and number > 0)

    def add(self, done: Take) -> None:
        """Keep a take. The warm-up is no measure of time, unless there will be no other.

        But what a system acquires in it, and keeps, is memory that it takes.
        """
        if self.warm_up is None:
            self.warm_up = done
            return
        peaks = [peak for peak in (done.peak_bytes, self.warm_up.peak_bytes) if peak is not None]
        self.takes.append(msgspec.structs.replace(done, peak_bytes=max(peaks, default=None)))

    def fail(self, problem: str) -> None:
        self.problem, self.failed = problem, True
        self.takes.clear()

    def series(self, work: Work, case: Case) -> Series:
        only = [self.warm_up] if self.warm_up is not None and self.problem is None else []
        return Series(
            work=work.name,
            case=case.name,
            system=self.system.name,
            takes=tuple(self.takes or only),
            problem=self.problem,
            failed=self.failed,
            state_bytes=case.recipe.needed_bytes if self.system.moves else 0,
            tensors=case.recipe.tensors,
            receivers=case.receivers,
            in_place=case.in_place,
            x=case.x,
        )


class _Stage:
    """This rank's view of a run."""

    def __init__(self, plan: Plan, folder: Path, tell: Tell) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        needed = {case.receivers + 1 for work in plan.chosen() for case in work.cases}
        self._assemblies = {
            ranks: Assembly(ranks, TAKE_TIMEOUT_S)
            for ranks in sorted({*needed, self.size})
            if ranks <= self.size
        }
        self._everyone = self._assemblies[self.size]
        self._plan = plan
        self._folder = folder
        self.tell = tell if self.rank == SENDER else lambda event: None
        self._one_host = len(set(self._everyone.share(host()))) == 1
        self._missing = self._find_missing()
        for name, reason in self._missing.items():
            self.tell(LeftOut(f"{SYSTEMS[name].title} {reason}"))

    def play(self, work: Work, case: Case) -> None:
        """Measure one case by all systems."""
        self.tell(Began(work.name, case.name))
        assembly = self._assemblies[case.receivers + 1]
        state = case.recipe.build() if self.rank == SENDER or case.in_place else None
        entrants = [self._enter(case, SYSTEMS[name]) for name in self._systems_for(case)]
        self._open_all(entrants, case, assembly, state)
        # Number 0 warms up.
        for number in range(self._plan.repeats + 1):
            for entrant in _shuffled(entrants, number):
                if entrant.wants(number):
                    self._take(assembly, case, entrant, number)
                    if entrant.failed:
                        # Its group may be broken, and it is everyone's.
                        self._everyone.share(_RENEW)
                        assembly.renew()
                        self._open_all(entrants, case, assembly, state)
        for entrant in entrants:
            _close(entrant)
            self.tell(Measured(entrant.series(work, case)))
        entrants.clear()
        gc.collect()
        self._everyone.share(_DONE)

    def stand_by(self, case: Case) -> None:
        """Wait while others measure a case; a new group is everyone's business."""
        while self._everyone.share(b"")[SENDER] == _RENEW:
            self._assemblies[case.receivers + 1].renew()

    def _systems_for(self, case: Case) -> list[str]:
        wanted = [name for name in case.systems if name in self._plan.systems]
        return [name for name in wanted if name not in self._missing]

    def _enter(self, case: Case, system: System) -> _Entrant:
        return _Entrant(system, problem=system.refuses(case, self._one_host))

    def _open_all(
        self, entrants: Sequence[_Entrant], case: Case, assembly: Assembly, state: State | None
    ) -> None:
        for entrant in entrants:
            _close(entrant)
            if entrant.problem is None:
                self._open(entrant, case, assembly, state)

    def _open(self, entrant: _Entrant, case: Case, assembly: Assembly, state: State | None) -> None:
        """Open a session, on all ranks at once. If one of them can't, nobody does."""
        sends = self.rank == SENDER
        site = Site(
            case=case,
            group=assembly.data,
            rank=self.rank,
            timeout_s=TAKE_TIMEOUT_S,
            share=lambda own: share(own, assembly.data, assembly.ranks),
            folder=self._folder,
            source=state if sends else None,
            target=None if sends else state,
        )
        session, trouble = attempt(lambda: entrant.system.open(site))
        if problem := self._agree(assembly, trouble):
            entrant.fail(problem)
            return
        assert session is not None, "what did not fail has made a session"
        own = portray(session.source) if sends else {}
        # It may be a copy as large as the state, made only to be portrayed.
        session.source = None
        entrant.session = session
        entrant.expected = msgspec.json.decode(
            assembly.share(msgspec.json.encode(own))[SENDER], type=Portrait
        )

    def _take(self, assembly: Assembly, case: Case, entrant: _Entrant, number: int) -> None:
        assert entrant.session is not None, "one without a session has a problem, and takes no part"
        parts = take(assembly, self.rank, case, entrant.session, entrant.expected)
        if problem := problem_of(parts):
            entrant.fail(problem)
            return
        _, trouble = attempt(entrant.session.settle)
        if problem := self._agree(assembly, trouble):
            entrant.fail(problem)
            return
        done = combine(case, parts, wired=entrant.system.wired)
        self.tell(Took(entrant.system.name, number, done.seconds))
        entrant.add(done)

    def _agree(self, assembly: Assembly, trouble: str | None) -> str | None:
        """The first trouble that any rank has, None if none has any."""
        everyones = assembly.share((trouble or "").encode())
        return next((f"rank {rank}: {one.decode()}" for rank, one in enumerate(everyones) if one), None)

    def _find_missing(self) -> dict[str, str]:
        """What one rank lacks, nobody can use."""
        own = {name: reason for name in self._plan.systems if (reason := SYSTEMS[name].missing())}
        everyones = self._everyone.share(msgspec.json.encode(own))
        return {
            name: reason
            for theirs in everyones
            for name, reason in msgspec.json.decode(theirs, type=dict[str, str]).items()
        }


def _shuffled(entrants: list[_Entrant], number: int) -> list[_Entrant]:
    """Give every round an order of its own, the same on all ranks: who comes after whom makes a difference.

    Memory that one has just given back is there at once for the next; what nobody has used for a while the
    system, or the host behind it, has to find first.
    """
    return random.Random(number).sample(entrants, len(entrants))


def _close(entrant: _Entrant) -> None:
    session, entrant.session = entrant.session, None
    if session is not None:
        attempt(session.close)
