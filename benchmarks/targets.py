"""Performance targets, and the comparison of measurements with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from msgspec.structs import replace

from benchmarks.results import Measurement, Quartiles, Round, TargetResult, find, quartiles


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


def faster(title: str, case: str, system: str, than: str, by: float) -> Target:
    """Return the target that `system` is at least `by` times as fast as `than`.

    >>> faster("small", "small", "torchferry", "torch-pg", 15.0).limit
    15.0
    """
    return Target(title, Figure(case, than), Figure(case, system), limit=by, at_least=True)


def evaluate(workload: str, target: Target, measurements: Sequence[Measurement]) -> TargetResult:
    """Compare the measurements with a target."""
    result = TargetResult(workload, target.title, target.limit, target.at_least, target.unit)
    sides: list[Quartiles] = []
    rounds: list[int] = []
    for side in (target.numerator, target.denominator):
        if not isinstance(side, Figure):
            sides.append(Quartiles(side, side, side))
            continue
        samples = _samples(side, find(measurements, side.case, side.system))
        if isinstance(samples, str):
            return replace(result, problem=f"{side.system} {samples}")
        found = quartiles(samples)
        assert found is not None, "_samples returns a problem instead of no samples"
        sides.append(found)
        rounds.append(len(samples))
    return replace(result, ratio=sides[0].over(sides[1]), rounds=min(rounds))


def _samples(figure: Figure, found: Measurement | None) -> list[float] | str:
    """Return the samples of a figure, or why there are none."""
    if found is None:
        return "was not run"
    if found.problem is not None:
        return f"failed: {found.problem}"
    values = [_value(one, found, figure.metric) for one in found.rounds]
    samples = [value for value in values if value is not None]
    return samples or f"has no {figure.metric.value}: the kernel does not report it"


def _value(one: Round, found: Measurement, metric: Metric) -> float | None:
    match metric:
        case Metric.SECONDS:
            return one.seconds
        case Metric.SECONDS_PER_TENSOR:
            return one.seconds / max(found.tensors, 1)
        case Metric.WIRE_BYTES:
            return one.wire_bytes
        case Metric.PEAK_BYTES:
            return one.peak_bytes
