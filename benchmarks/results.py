"""The result of a run: plain values, written by `--json` and read by `--from`; and targets for them."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TypeVar

import msgspec

FORMAT = 2


class BenchmarkError(Exception):
    """The benchmark can't run. `exit_code` is 2 for wrong arguments, 1 for a failed run."""

    def __init__(self, message: str, exit_code: int = 2) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Quartiles(msgspec.Struct, frozen=True):
    """The median and the quartiles of some samples."""

    q1: float
    median: float
    q3: float

    def over(self, other: Quartiles) -> Quartiles:
        """Divide two: the ratio of the medians, and the extreme ratios between the quartiles.

        >>> Quartiles(2.0, 3.0, 4.0).over(Quartiles(1.0, 2.0, 4.0))
        Quartiles(q1=0.5, median=1.5, q3=4.0)
        """
        pairs = (self.q1, other.q3), (self.median, other.median), (self.q3, other.q1)
        return Quartiles(*(top / bottom if bottom else float("inf") for top, bottom in pairs))

    def overlaps(self, other: Quartiles) -> bool:
        """Whether the interquartile ranges overlap, so that the difference is within noise."""
        return self.q1 <= other.q3 and other.q1 <= self.q3


def quartiles(samples: Sequence[float]) -> Quartiles | None:
    """Compute the quartiles of some samples; None without samples.

    >>> quartiles([5.0, 1.0, 2.0, 3.0, 4.0])
    Quartiles(q1=2.0, median=3.0, q3=4.0)
    """
    if not samples:
        return None
    # statistics.quantiles needs two samples.
    padded = [*samples, *samples] if len(samples) == 1 else samples
    return Quartiles(*statistics.quantiles(padded, n=4, method="inclusive"))


class Round(msgspec.Struct, frozen=True):
    """One transfer, timed from the common start until the last timed rank is done.

    `wire_bytes` is what the busiest receiver received over TCP. `peak_bytes` is the largest growth of a
    process's resident memory. Either is None where the kernel does not report it. `phases_s` has seconds by
    phase, for each side ("send", "receive") of a system that reports them.
    """

    seconds: float
    wire_bytes: int | None = None
    peak_bytes: int | None = None
    phases_s: dict[str, dict[str, float]] = {}


class Measurement(msgspec.Struct, frozen=True):
    """All rounds of one case by one system. Without rounds, `problem` says why.

    `failed` is False if the system does not support the case. `state_bytes` is what each receiver gets, 0 if
    the system moves nothing. `receivers` is how many receivers' time counts. `x` is the case's position on
    the workload's axis.
    """

    workload: str
    case: str
    system: str
    rounds: tuple[Round, ...] = ()
    problem: str | None = None
    failed: bool = False
    state_bytes: int = 0
    tensors: int = 0
    receivers: int = 1
    x: float | None = None

    @property
    def seconds(self) -> Quartiles | None:
        return quartiles([one.seconds for one in self.rounds])

    @property
    def wire_bytes(self) -> Quartiles | None:
        return quartiles([one.wire_bytes for one in self.rounds if one.wire_bytes is not None])

    @property
    def peak_bytes(self) -> Quartiles | None:
        return quartiles([one.peak_bytes for one in self.rounds if one.peak_bytes is not None])

    @property
    def bytes_per_s(self) -> Quartiles | None:
        """The state's bytes, to all timed receivers, per second; None if the system moves nothing."""
        total, seconds = self.state_bytes * self.receivers, self.seconds
        if not total or seconds is None:
            return None
        return Quartiles(total / seconds.q3, total / seconds.median, total / seconds.q1)


class TargetResult(msgspec.Struct, frozen=True):
    """A target and the measured ratio, from `rounds` rounds. Without a ratio, `problem` says why."""

    workload: str
    title: str
    limit: float
    at_least: bool
    unit: str = "×"
    ratio: Quartiles | None = None
    problem: str | None = None
    rounds: int = 0

    @property
    def met(self) -> bool:
        if self.ratio is None:
            return False
        return self.ratio.median >= self.limit if self.at_least else self.ratio.median <= self.limit

    @property
    def within_noise(self) -> bool:
        return self.ratio is not None and self.ratio.q1 <= self.limit <= self.ratio.q3

    @property
    def verdict(self) -> str:
        if self.ratio is None:
            return f"not measured: {self.problem}"
        note = " (one round)" if self.rounds == 1 else " (within noise)" if self.within_noise else ""
        return f"{'met' if self.met else 'missed'}{note}"


class WorkloadInfo(msgspec.Struct, frozen=True):
    """A workload's name, title, and what its plot shows: see `workloads.Workload`."""

    name: str
    title: str
    axis: str | None = None
    shows: str = "rate"


class SystemInfo(msgspec.Struct, frozen=True):
    """A system's name, title and kind: "torchferry", "transport", "files" or "limit"."""

    name: str
    title: str
    kind: str


Item = TypeVar("Item", WorkloadInfo, SystemInfo, Measurement, TargetResult)


class Results(msgspec.Struct, frozen=True):
    """One run, or several merged ones. `skipped` lists what was not run, and why."""

    command: str
    date: str
    size: str
    repeats: int
    machine: dict[str, str]
    workloads: tuple[WorkloadInfo, ...] = ()
    systems: tuple[SystemInfo, ...] = ()
    measurements: tuple[Measurement, ...] = ()
    targets: tuple[TargetResult, ...] = ()
    skipped: tuple[str, ...] = ()
    runs: int = 1
    format: int = FORMAT

    def of(self, workload: str) -> list[Measurement]:
        """List the measurements of one workload."""
        return [one for one in self.measurements if one.workload == workload]

    def system(self, name: str) -> SystemInfo:
        """Return a system's title and kind."""
        return next(one for one in self.systems if one.name == name)


def find(measurements: Iterable[Measurement], case: str, system: str) -> Measurement | None:
    """Find the measurement of a case by a system; None if there is none."""
    return next((one for one in measurements if (one.case, one.system) == (case, system)), None)


def merge(*runs: Results) -> Results:
    """Merge several runs, such as one on this machine and one on a cluster.

    Date and machine are those of the first run. A later run replaces what an earlier run measured too.

    Raises:
        BenchmarkError: the runs have different sizes.
    """
    if len(sizes := {run.size for run in runs}) > 1:
        raise BenchmarkError(f"can't merge runs of different sizes: {', '.join(sorted(sizes))}")
    return msgspec.structs.replace(
        runs[0],
        command=" && ".join(run.command for run in runs),
        workloads=_latest([one for run in runs for one in run.workloads], "name"),
        systems=_latest([one for run in runs for one in run.systems], "name"),
        measurements=_latest([one for run in runs for one in run.measurements], "case", "system"),
        targets=_latest([one for run in runs for one in run.targets], "title"),
        runs=sum(run.runs for run in runs),
        skipped=tuple(dict.fromkeys(reason for run in runs for reason in run.skipped)),
    )


def _latest(items: Sequence[Item], *key: str) -> tuple[Item, ...]:
    """Keep the last of the items with the same key."""
    return tuple({tuple(getattr(item, name) for name in key): item for item in items}.values())


class Metric(Enum):
    """What is compared."""

    SECONDS = "seconds"
    SECONDS_PER_TENSOR = "seconds per tensor"
    WIRE_BYTES = "bytes on the wire"
    PEAK_BYTES = "memory beyond the state"


@dataclass(frozen=True)
class Figure:
    """One metric of one case by one system."""

    case: str
    system: str
    metric: Metric = Metric.SECONDS


@dataclass(frozen=True)
class Target:
    """`numerator` over `denominator` must be at least, or at most, `limit`.

    The denominator may be a constant, such as the bytes of the state or of a MiB.
    """

    title: str
    numerator: Figure
    denominator: Figure | float
    limit: float
    at_least: bool = False
    unit: str = "×"


def evaluate(workload: str, target: Target, measurements: Sequence[Measurement]) -> TargetResult:
    """Compare the measurements with a target."""
    result = TargetResult(workload, target.title, target.limit, target.at_least, target.unit)
    sides, rounds = [], []
    for side in (target.numerator, target.denominator):
        if not isinstance(side, Figure):
            sides.append(Quartiles(side, side, side))
            continue
        found = find(measurements, side.case, side.system)
        samples = _samples(found, side.metric) if found is not None else []
        middle = quartiles(samples)
        if middle is None:
            return msgspec.structs.replace(result, problem=f"{side.system} {_why_missing(found, side)}")
        sides.append(middle)
        rounds.append(len(samples))
    return msgspec.structs.replace(result, ratio=sides[0].over(sides[1]), rounds=min(rounds))


def _samples(found: Measurement, metric: Metric) -> list[float]:
    match metric:
        case Metric.SECONDS:
            return [one.seconds for one in found.rounds]
        case Metric.SECONDS_PER_TENSOR:
            return [one.seconds / max(found.tensors, 1) for one in found.rounds]
        case Metric.WIRE_BYTES:
            return [one.wire_bytes for one in found.rounds if one.wire_bytes is not None]
        case Metric.PEAK_BYTES:
            return [one.peak_bytes for one in found.rounds if one.peak_bytes is not None]


def _why_missing(found: Measurement | None, figure: Figure) -> str:
    if found is None:
        return "was not run"
    if found.problem is not None:
        return f"{'failed' if found.failed else 'does not support this case'}: {found.problem}"
    return f"has no measurement of {figure.metric.value}: it can't be counted for this system or kernel"


def write_json(results: Results, file: Path) -> None:
    """Write the results as indented JSON.

    Raises:
        OSError: the file can't be written.
    """
    file.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")


def read_json(file: Path) -> Results:
    """Read a file that `write_json` wrote.

    Raises:
        BenchmarkError: the file can't be read, is something else, or has another format version.
    """
    try:
        results = msgspec.json.decode(file.read_bytes(), type=Results)
    except OSError as error:
        raise BenchmarkError(f"can't read {file}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise BenchmarkError(f"{file} is not a benchmark result: {error}") from None
    if results.format != FORMAT:
        raise BenchmarkError(f"{file} has format {results.format}; this version reads format {FORMAT}")
    return results
