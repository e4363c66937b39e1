"""Medians, quartiles, and what can be told apart: pure functions of a few numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """The median of some samples and the quartiles around it."""

    low: float
    median: float
    high: float

    def over(self, other: Spread) -> Spread:
        """The ratio of two: of their medians, between the least and the most that their quartiles allow.

        >>> Spread(2.0, 3.0, 4.0).over(Spread(1.0, 2.0, 4.0))
        Spread(low=0.5, median=1.5, high=4.0)
        """
        return Spread(
            _ratio(self.low, other.high), _ratio(self.median, other.median), _ratio(self.high, other.low)
        )

    def overlaps(self, other: Spread) -> bool:
        """Whether the two can't be told apart: each reaches into the other's quartiles.

        >>> Spread(1.0, 2.0, 3.0).overlaps(Spread(2.5, 3.5, 4.5))
        True
        >>> Spread(1.0, 2.0, 3.0).overlaps(Spread(3.5, 4.0, 4.5))
        False
        """
        return self.low <= other.high and other.low <= self.high

    @property
    def noise(self) -> float:
        """The distance between the quartiles, as a part of the median.

        >>> Spread(0.9, 1.0, 1.1).noise
        0.2
        """
        return round((self.high - self.low) / self.median, 3) if self.median else 0.0


def spread_of(samples: Sequence[float]) -> Spread | None:
    """The spread of some samples, None if there are none.

    >>> spread_of([5.0, 1.0, 2.0, 3.0, 4.0])
    Spread(low=2.0, median=3.0, high=4.0)
    """
    if not samples:
        return None
    ordered = sorted(samples)
    return Spread(quantile(ordered, 0.25), quantile(ordered, 0.5), quantile(ordered, 0.75))


def quantile(ordered: Sequence[float], part: float) -> float:
    """The value below which this part of the samples lies, between two of them if need be.

    >>> quantile([1.0, 2.0], 0.5)
    1.5
    """
    place = (len(ordered) - 1) * part
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def _ratio(over: float, under: float) -> float:
    return over / under if under else float("inf")
