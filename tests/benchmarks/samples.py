"""Results for tests to look at, as a run would have made them, without the run."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.marks import judge
from benchmarks.results import Results, Series, SystemTitle, Take, WorkTitle
from benchmarks.systems import SYSTEMS
from benchmarks.works import Case, Size, Work, works

MACHINE = {"processor": "a <small> one", "cores": "2", "memory": "8 GiB", "torch": "2.13.0", "python": "3.11"}


def series(case: str, system: str, seconds: Sequence[float], **given: object) -> Series:
    """The series of a system that took these times."""
    takes = tuple(Take(one, wire_bytes=1000, peak_bytes=2**20) for one in seconds)
    fields: dict[str, object] = {"work": case, "state_bytes": 10**6, "tensors": 100, "takes": takes, **given}
    return Series(case=case, system=system, **fields)  # type: ignore[arg-type]


def a_whole_run(size: Size = Size.FULL) -> Results:
    """Every case of every work by every system that it names; the later in the list, the slower."""
    everything = [
        _measured(work, case, system, number)
        for work in works(size)
        for case in work.cases
        for number, system in enumerate(case.systems)
    ]
    return Results(
        command="torchferry bench --size full",
        date="2024-05-01 12:00 UTC",
        size=size,
        repeats=3,
        machine=MACHINE,
        works=tuple(WorkTitle(work.name, work.title, work.axis, work.shows) for work in works(size)),
        systems=tuple(SystemTitle(one.name, one.title, one.kind) for one in SYSTEMS.values()),
        series=tuple(everything),
        judgements=tuple(judge(work.name, mark, everything) for work in works(size) for mark in work.marks),
        left_out=("something & <something> else",),
    )


def _measured(work: Work, case: Case, system: str, number: int) -> Series:
    middle = case.recipe.needed_bytes / 1e9 * (number + 1) * case.receivers
    phases = {
        "send": {"describe": middle / 4, "send tensors": middle / 2},
        "receive": {"assemble": middle / 2},
    }
    return Series(
        work=work.name,
        case=case.name,
        system=system,
        takes=tuple(
            Take(middle * part, case.recipe.needed_bytes, 2**20, phases if number < 2 else {})
            for part in (0.9, 1.0, 1.1)
        ),
        state_bytes=case.recipe.needed_bytes,
        tensors=case.recipe.tensors,
        receivers=case.receivers,
        in_place=case.in_place,
        x=case.x,
    )
