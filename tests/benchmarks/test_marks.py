"""A mark is reached, or not, or within noise; and nothing is reached that was not measured."""

from __future__ import annotations

import pytest

from benchmarks.marks import Figure, Mark, Quantity, faster, judge
from benchmarks.results import Judgement
from tests.benchmarks.samples import series

TWICE = faster("twice as fast", "c", "ours", than="theirs", by=2.0)


def judged(ours: list[float], theirs: list[float]) -> Judgement:
    return judge("w", TWICE, [series("c", "ours", ours), series("c", "theirs", theirs)])


class TestAMark:
    @pytest.mark.parametrize(
        ("ours", "theirs", "verdict"),
        [
            ([1.0, 1.0, 1.0], [3.0, 3.0, 3.0], "reached"),
            ([1.0, 1.0, 1.0], [1.5, 1.5, 1.5], "not reached"),
            ([1.0, 1.0, 1.0], [1.0, 2.1, 4.0], "reached (within noise)"),
            ([0.5, 1.0, 2.0], [1.9, 1.9, 1.9], "not reached (within noise)"),
            ([1.0, 1.0, 1.0], [2.0, 2.0, 2.0], "reached (within noise)"),
            ([1.0, 1.0, 1.0], [9.0], "reached (one take)"),
        ],
    )
    def test_is_judged_by_medians_and_doubted_by_quartiles(
        self, ours: list[float], theirs: list[float], verdict: str
    ) -> None:
        assert judged(ours, theirs).verdict == verdict

    def test_says_the_ratio_of_the_medians(self) -> None:
        found = judged([1.0, 2.0, 9.0], [5.0, 6.0, 7.0])
        assert found.ratio == 3.0
        assert found.low is not None
        assert found.high is not None
        assert found.low < 3.0 < found.high

    def test_may_be_a_most(self) -> None:
        mark = Mark("no more", Figure("c", "ours", Quantity.WIRE_BYTES), 1000.0, 1.02, at_least=False)
        assert judge("w", mark, [series("c", "ours", [1.0, 1.0])]).verdict == "reached"
        mark = Mark("no more", Figure("c", "ours", Quantity.WIRE_BYTES), 900.0, 1.02, at_least=False)
        assert judge("w", mark, [series("c", "ours", [1.0, 1.0])]).verdict == "not reached"

    def test_may_be_of_the_time_per_tensor(self) -> None:
        few, many = (Figure(case, "ours", Quantity.SECONDS_PER_TENSOR) for case in ("few", "many"))
        found = judge(
            "w",
            Mark("per tensor", many, few, 1.3, at_least=False),
            [series("few", "ours", [1.0], tensors=10), series("many", "ours", [12.0], tensors=100)],
        )
        assert found.ratio == pytest.approx(1.2)
        assert found.reached

    def test_may_be_of_memory(self) -> None:
        peak = Figure("c", "ours", Quantity.PEAK_BYTES)
        mark = Mark("memory", peak, float(2**20), 64.0, at_least=False, unit=" MiB")
        assert judge("w", mark, [series("c", "ours", [1.0])]).ratio == 1.0


class TestWhatWasNotMeasured:
    def test_is_not_reached_and_says_who_was_not_run(self) -> None:
        found = judge("w", TWICE, [series("c", "ours", [1.0])])
        assert (found.verdict, found.problem) == ("not measured", "theirs was not run")
        assert not found.reached

    def test_says_what_went_wrong(self) -> None:
        broken = series("c", "ours", [], problem="rank 1: it broke", failed=True)
        found = judge("w", TWICE, [broken, series("c", "theirs", [1.0])])
        assert found.problem == "ours: rank 1: it broke"

    def test_says_what_this_machine_can_not_tell(self) -> None:
        unknown = series("c", "ours", [])
        mark = Mark("bytes", Figure("c", "ours", Quantity.WIRE_BYTES), 1000.0, 1.0, at_least=False)
        assert judge("w", mark, [unknown]).problem == "ours: bytes on the wire can not be measured here"
