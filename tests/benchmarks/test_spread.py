"""Medians, quartiles, and what they can tell apart."""

from __future__ import annotations

import math

import pytest

from benchmarks.spread import Spread, spread_of
from benchmarks.wording import say_comparison
from tests.benchmarks.samples import series


class TestASpread:
    def test_does_not_depend_on_the_order(self) -> None:
        assert spread_of([3.0, 1.0, 2.0]) == spread_of([1.0, 2.0, 3.0]) == Spread(1.5, 2.0, 2.5)

    def test_of_one_sample_is_that_sample(self) -> None:
        assert spread_of([7.0]) == Spread(7.0, 7.0, 7.0)

    def test_of_nothing_is_nothing(self) -> None:
        assert spread_of([]) is None

    def test_is_not_moved_by_one_outlier(self) -> None:
        calm, upset = spread_of([1.0, 1.1, 1.2, 1.3, 1.4]), spread_of([1.0, 1.1, 1.2, 1.3, 99.0])
        assert calm is not None
        assert upset is not None
        assert calm.median == upset.median
        assert calm.high == upset.high

    def test_is_divided_by_the_worst_and_the_best(self) -> None:
        assert Spread(2.0, 4.0, 6.0).over(Spread(1.0, 2.0, 4.0)) == Spread(0.5, 2.0, 6.0)

    def test_can_be_divided_by_nothing(self) -> None:
        assert Spread(1.0, 1.0, 1.0).over(Spread(0.0, 0.0, 0.0)).median == math.inf

    @pytest.mark.parametrize(("other", "same"), [([1.2, 1.3, 1.4], True), ([2.0, 2.1, 2.2], False)])
    def test_is_within_noise_of_another_if_they_overlap(self, other: list[float], same: bool) -> None:
        said = say_comparison(series("c", "a", [1.0, 1.2, 1.4]), series("c", "b", other))
        assert ("within noise" in said) is same
