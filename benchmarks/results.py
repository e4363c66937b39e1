"""What a run of the benchmark comes to: plain values, in the form in which `--json` writes them.

Whoever measures elsewhere, on a cluster for example, makes the same values and has all the views of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

import msgspec

from benchmarks.spread import Spread, spread_of
from torchferry.errors import BadArgument

FORMAT = 1


class Take(msgspec.Struct, frozen=True):
    """One transfer: from the common start to when the last side that counts was done.

    `wire_bytes` is what the busiest receiver took in by TCP, `peak_bytes` by how much the memory of the side
    that grew most grew at its peak; None where it can't be measured. `phases_s` has the seconds by phase of a
    system that reports them, first by side ("send", "receive").
    """

    seconds: float
    wire_bytes: int | None = None
    peak_bytes: int | None = None
    phases_s: dict[str, dict[str, float]] = msgspec.field(default_factory=dict)


class Series(msgspec.Struct, frozen=True):
    """All takes of one case by one system. Without takes, `problem` says why there are none."""

    work: str
    case: str
    system: str
    takes: tuple[Take, ...] = ()
    problem: str | None = None
    # Whether the system was at fault, or is simply not made for this.
    failed: bool = False
    # What every receiver gets; none if nothing is moved.
    state_bytes: int = 0
    tensors: int = 0
    receivers: int = 1
    in_place: bool = False
    # Where the case stands on the work's axis, if it has one.
    x: float | None = None

    def spread(self) -> Spread | None:
        """The spread of the seconds, None without takes."""
        return spread_of([take.seconds for take in self.takes])

    @property
    def bytes_per_second(self) -> float | None:
        """The state's bytes, to every receiver, over the median time."""
        spread = self.spread()
        return None if spread is None else self.state_bytes * self.receivers / spread.median


class Judgement(msgspec.Struct, frozen=True):
    """One row of what must be reached: the ratio that was measured, and what is to be said of it.

    `low` and `high` are the ratio at the quartiles. It is `within_noise` if the mark lies between the two.
    Without a ratio, `problem` says what is missing.
    """

    work: str
    title: str
    wanted: float
    at_least: bool
    unit: str = "×"
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    problem: str | None = None
    # How many takes are behind it, at least.
    takes: int = 0

    @property
    def reached(self) -> bool:
        if self.ratio is None:
            return False
        return self.ratio >= self.wanted if self.at_least else self.ratio <= self.wanted

    @property
    def within_noise(self) -> bool:
        return self.low is not None and self.high is not None and self.low <= self.wanted <= self.high

    @property
    def doubtful(self) -> bool:
        return self.ratio is None or self.within_noise

    @property
    def verdict(self) -> str:
        """`reached`, `not reached`, either of them with what there is to doubt, or `not measured`."""
        if self.ratio is None:
            return "not measured"
        verdict = "reached" if self.reached else "not reached"
        if self.takes == 1:
            return f"{verdict} (one take)"
        return f"{verdict} (within noise)" if self.within_noise else verdict


class WorkTitle(msgspec.Struct, frozen=True):
    """What a work is called, for those who read the results, and what there is to see of it.

    `axis` is what its cases differ in, if they are points of a curve. `shows` is what its bars are, if they
    are not: "rate", "time", "wire" or "memory".
    """

    name: str
    title: str
    axis: str | None = None
    shows: str = "rate"


class SystemTitle(msgspec.Struct, frozen=True):
    """What a system is called; `kind` is "ferry", "peer", "disk" or "limit"."""

    name: str
    title: str
    kind: str


Known = TypeVar("Known", WorkTitle, SystemTitle, Series, Judgement)


class Results(msgspec.Struct, frozen=True):
    """A whole run, or several that were put into one.

    `machine` is what it ran on, in words; `left_out` what was not run, and why.
    """

    command: str
    date: str
    size: str
    repeats: int
    machine: dict[str, str]
    works: tuple[WorkTitle, ...] = ()
    systems: tuple[SystemTitle, ...] = ()
    series: tuple[Series, ...] = ()
    judgements: tuple[Judgement, ...] = ()
    left_out: tuple[str, ...] = ()
    runs: int = 1
    format: int = FORMAT

    def of(self, work: str) -> list[Series]:
        """The series of one work, in the order in which they were measured."""
        return [series for series in self.series if series.work == work]

    def system_title(self, name: str) -> SystemTitle:
        """What a system is called; its name, if the results do not say."""
        return next((one for one in self.systems if one.name == name), SystemTitle(name, name, "peer"))


def find(series: Iterable[Series], case: str, system: str) -> Series | None:
    """Find the series of a case by a system, None if it was not run."""
    return next((one for one in series if one.case == case and one.system == system), None)


def merge(first: Results, *others: Results) -> Results:
    """Put several runs into one, such as one on this machine and one on a cluster.

    The first says when it was and on what. What a later run has measured again takes the place of what was
    there.

    Raises:
        BadArgument: they are of different sizes.
    """
    if len(sizes := {one.size for one in (first, *others)}) > 1:
        raise BadArgument(f"runs of different sizes do not make one: {', '.join(sorted(sizes))}")
    return msgspec.structs.replace(
        first,
        command=" && ".join(one.command for one in (first, *others)),
        works=_latest(one.works for one in (first, *others)),
        systems=_latest(one.systems for one in (first, *others)),
        series=_latest(one.series for one in (first, *others)),
        judgements=_latest(one.judgements for one in (first, *others)),
        runs=sum(one.runs for one in (first, *others)),
        left_out=tuple(dict.fromkeys(reason for one in (first, *others) for reason in one.left_out)),
    )


def _latest(groups: Iterable[tuple[Known, ...]]) -> tuple[Known, ...]:
    """All of several groups, each once, the last of those that are of the same thing."""
    return tuple({_identity(one): one for group in groups for one in group}.values())


def _identity(one: WorkTitle | SystemTitle | Series | Judgement) -> tuple[str, ...]:
    match one:
        case Series(work, case, system):
            return work, case, system
        case Judgement(work, title):
            return work, title
        case WorkTitle(name) | SystemTitle(name):
            return (name,)


def write_json(results: Results, file: Path) -> None:
    """Write the results as JSON that a person can read too.

    Raises:
        OSError: it can't be written there.
    """
    file.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")


def read_json(file: Path) -> Results:
    """Read what `write_json` has written.

    Raises:
        OSError: it can't be read.
        BadArgument: it is not the results of a benchmark, or those of another version.
    """
    try:
        results = msgspec.json.decode(file.read_bytes(), type=Results)
    except msgspec.DecodeError as error:
        raise BadArgument(f"{file} does not hold the results of a benchmark: {error}") from None
    if results.format != FORMAT:
        raise BadArgument(f"{file} is of format {results.format}, and this version reads {FORMAT}")
    return results
