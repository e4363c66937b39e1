"""The measuring on a cluster, the same on every rank: all cases of a work in turn, again and again.

A ratio between two cases is worth something only if they were measured side by side. So not only systems are
interleaved here but cases too: every round has one take of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch.distributed as dist

from benchmarks.assembly import Assembly, share
from benchmarks.portrait import Portrait, portray
from benchmarks.recipes import State
from benchmarks.results import Series, Take
from benchmarks.run import Began, Event, Measured, Tell, Took
from benchmarks.systems import SYSTEMS, Session, Site
from benchmarks.systems.base import SENDER
from benchmarks.taking import Part, combine, problem_of, take
from benchmarks.works import Case, Work

TAKE_TIMEOUT_S = 60.0


@dataclass
class _Entrant:
    """A system in a case, and what has come of it so far.

    Each has groups of its own, so that one that fails breaks nobody else's. They have all ranks as members,
    also those that the case has no use for: torch names a group of some by how many groups each of them has
    had, which then is not the same for all.
    """

    work: Work
    case: Case
    system: str
    assembly: Assembly
    session: Session | None = None
    expected: Portrait = field(default_factory=dict)
    takes: list[Take] = field(default_factory=list)
    problem: str | None = None


def measure(works: Sequence[Work], repeats: int, tell: Tell) -> None:
    """Take this rank's part in all works, in the default process group; the sender tells what happens.

    Raises:
        RuntimeError: another rank is gone.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank != SENDER:
        tell = _say_nothing
    for work in works:
        # One state serves all: the sender's is only read, and a receiver's is spoiled before every take.
        states = {case.recipe: case.recipe.build() for case in work.cases}
        entrants = [
            _enter(work, case, system, rank, size, states[case.recipe])
            for case in work.cases
            for system in case.systems
        ]
        # Number 0 warms up.
        for number in range(repeats + 1):
            for entrant in entrants:
                if entrant.problem is None:
                    tell(Began(work.name, entrant.case.name))
                    _take(entrant, rank, number, tell)
        for entrant in entrants:
            if entrant.session is not None:
                entrant.session.close()
            tell(Measured(_series(entrant)))


def _enter(work: Work, case: Case, name: str, rank: int, size: int, state: State) -> _Entrant:
    """Open a session, on all ranks that the case has use for."""
    assembly = Assembly(size, TAKE_TIMEOUT_S)
    entrant = _Entrant(work, case, name, assembly, problem=SYSTEMS[name].missing())
    if entrant.problem is not None:
        return entrant
    sends = rank == SENDER
    site = Site(
        case=case,
        group=assembly.data,
        rank=rank,
        timeout_s=TAKE_TIMEOUT_S,
        share=lambda own: share(own, assembly.data, size),
        # Nothing here goes through files: hosts share none.
        folder=Path(),
        source=state if sends else None,
        target=None if sends else state,
    )
    if rank <= case.receivers:
        entrant.session = SYSTEMS[name].open(site)
    own = portray(state) if sends else {}
    expected = assembly.share(msgspec.json.encode(own))[SENDER]
    entrant.expected = msgspec.json.decode(expected, type=Portrait)
    return entrant


def _take(entrant: _Entrant, rank: int, number: int, tell: Tell) -> None:
    case, assembly = entrant.case, entrant.assembly
    if entrant.session is not None:
        parts = take(assembly, rank, case, entrant.session, entrant.expected)
    else:
        parts = _look_on(assembly)
    entrant.problem = problem_of(parts)
    if entrant.problem is not None:
        entrant.takes.clear()
        return
    if entrant.session is not None:
        entrant.session.settle()
    done = combine(case, parts, wired=SYSTEMS[entrant.system].wired)
    tell(Took(entrant.system, number, done.seconds))
    if number > 0:
        entrant.takes.append(done)


def _look_on(assembly: Assembly) -> list[Part]:
    """Be there when others transfer, which takes nothing from them, and hear how it went."""
    assembly.wait()
    return [msgspec.json.decode(one, type=Part) for one in assembly.share(msgspec.json.encode(Part()))]


def _series(entrant: _Entrant) -> Series:
    case = entrant.case
    return Series(
        work=entrant.work.name,
        case=case.name,
        system=entrant.system,
        takes=tuple(entrant.takes),
        problem=entrant.problem,
        failed=entrant.problem is not None and entrant.session is not None,
        state_bytes=case.recipe.needed_bytes,
        tensors=case.recipe.tensors,
        receivers=case.receivers,
        in_place=case.in_place,
        x=case.x,
    )


def _say_nothing(event: Event) -> None:
    pass
