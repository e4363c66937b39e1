"""What must be reached, as data, and the judgement whether it was: no clock, no processes, no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from msgspec.structs import replace

from benchmarks.results import Judgement, Series, Take, find
from benchmarks.spread import Spread, spread_of

MIB = 2**20


class Quantity(Enum):
    """What of a take is looked at."""

    SECONDS = "seconds"
    SECONDS_PER_TENSOR = "seconds per tensor"
    WIRE_BYTES = "bytes on the wire"
    PEAK_BYTES = "memory beyond the state"


@dataclass(frozen=True)
class Figure:
    """A quantity of one case by one system."""

    case: str
    system: str
    quantity: Quantity = Quantity.SECONDS


@dataclass(frozen=True)
class Mark:
    """`over` divided by `under` must be at least, or at most, `wanted`.

    `under` may be a number: the bytes that a state has, or those in a MiB.
    """

    title: str
    over: Figure
    under: Figure | float
    wanted: float
    at_least: bool = True
    unit: str = "×"


def faster(title: str, case: str, system: str, than: str, by: float) -> Mark:
    """The mark that `system` must be so many times as fast as `than`, in the same case.

    >>> faster("small", "small", "torchferry", "torch-pg", 15.0).wanted
    15.0
    """
    return Mark(title, over=Figure(case, than), under=Figure(case, system), wanted=by)


def judge(work: str, mark: Mark, series: Iterable[Series]) -> Judgement:
    """Compare what was measured with a mark. What was not measured is said, and is not reached."""
    known = list(series)
    blank = Judgement(work, mark.title, mark.wanted, mark.at_least, mark.unit)
    figures = [one for one in (mark.over, mark.under) if isinstance(one, Figure)]
    samples = [_samples(figure, known) for figure in figures]
    for figure, measured in zip(figures, samples, strict=True):
        if not measured:
            return replace(blank, problem=_why_lacking(figure, known))
    over, *rest = [spread for measured in samples if (spread := spread_of(measured))]
    under = rest[0] if rest else _exactly(mark.under)
    ratio = over.over(under)
    takes = min(len(measured) for measured in samples)
    return replace(blank, ratio=ratio.median, low=ratio.low, high=ratio.high, takes=takes)


def _samples(figure: Figure, series: list[Series]) -> list[float]:
    found = find(series, figure.case, figure.system)
    if found is None:
        return []
    samples = [_sample(take, found, figure.quantity) for take in found.takes]
    return [sample for sample in samples if sample is not None]


def _exactly(number: object) -> Spread:
    assert isinstance(number, (int, float)), "what is not a figure is a number"
    return Spread(number, number, number)


def _sample(take: Take, series: Series, quantity: Quantity) -> float | None:
    match quantity:
        case Quantity.SECONDS:
            return take.seconds
        case Quantity.SECONDS_PER_TENSOR:
            return take.seconds / max(series.tensors, 1)
        case Quantity.WIRE_BYTES:
            return take.wire_bytes
        case Quantity.PEAK_BYTES:
            return take.peak_bytes


def _why_lacking(figure: Figure, series: list[Series]) -> str:
    found = find(series, figure.case, figure.system)
    if found is None:
        return f"{figure.system} was not run"
    return f"{figure.system}: {found.problem or f'{figure.quantity.value} can not be measured here'}"
