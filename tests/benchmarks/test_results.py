"""Quartiles; results are written and read back unchanged; other files are refused; runs are merged."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest

from benchmarks.results import BenchmarkError, Quartiles, merge, quartiles, read_json, write_json
from benchmarks.tables import format_speed
from benchmarks.workloads import Size
from tests.benchmarks.samples import measurement, whole_run


class TestQuartiles:
    def test_do_not_depend_on_the_order(self) -> None:
        assert quartiles([3.0, 1.0, 2.0]) == quartiles([1.0, 2.0, 3.0]) == Quartiles(1.5, 2.0, 2.5)

    def test_of_one_sample_are_that_sample(self) -> None:
        assert quartiles([7.0]) == Quartiles(7.0, 7.0, 7.0)

    def test_of_nothing_are_none(self) -> None:
        assert quartiles([]) is None

    def test_are_not_moved_by_one_outlier(self) -> None:
        without, with_outlier = quartiles([1.0, 1.1, 1.2, 1.3, 1.4]), quartiles([1.0, 1.1, 1.2, 1.3, 99.0])
        assert without is not None
        assert with_outlier is not None
        assert (without.median, without.q3) == (with_outlier.median, with_outlier.q3)

    def test_are_divided_by_the_extremes(self) -> None:
        assert Quartiles(2.0, 4.0, 6.0).over(Quartiles(1.0, 2.0, 4.0)) == Quartiles(0.5, 2.0, 6.0)

    def test_can_be_divided_by_zero(self) -> None:
        assert Quartiles(1.0, 1.0, 1.0).over(Quartiles(0.0, 0.0, 0.0)).median == math.inf

    @pytest.mark.parametrize(("other", "same"), [([1.2, 1.3, 1.4], True), ([2.0, 2.1, 2.2], False)])
    def test_that_overlap_are_within_noise(self, other: list[float], same: bool) -> None:
        speed = format_speed(measurement("c", "a", [1.0, 1.2, 1.4]), measurement("c", "b", other))
        assert ("within noise" in speed) is same


class TestJson:
    def test_is_read_back_unchanged(self, tmp_path: Path) -> None:
        results = whole_run()
        write_json(results, tmp_path / "results.json")
        assert read_json(tmp_path / "results.json") == results

    def test_is_plain_data(self, tmp_path: Path) -> None:
        write_json(whole_run(), tmp_path / "results.json")
        plain = msgspec.json.decode((tmp_path / "results.json").read_bytes())
        assert plain["measurements"][0]["rounds"][0]["seconds"] > 0
        assert plain["targets"][0]["ratio"]["median"] > 0

    @pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"measurements": 1}', b"\xff"])
    def test_of_something_else_is_refused(self, content: bytes, tmp_path: Path) -> None:
        (tmp_path / "other.json").write_bytes(content)
        with pytest.raises(BenchmarkError, match=r"other\.json is not a benchmark result"):
            read_json(tmp_path / "other.json")

    def test_of_another_format_is_refused(self, tmp_path: Path) -> None:
        write_json(msgspec.structs.replace(whole_run(), format=99), tmp_path / "other.json")
        with pytest.raises(BenchmarkError, match="format 99"):
            read_json(tmp_path / "other.json")


class TestMerge:
    def test_keeps_what_each_run_has(self) -> None:
        whole = whole_run()
        parts = [
            msgspec.structs.replace(
                whole,
                workloads=tuple(one for one in whole.workloads if (one.name == "views") is views),
                measurements=tuple(one for one in whole.measurements if (one.workload == "views") is views),
                targets=tuple(one for one in whole.targets if (one.workload == "views") is views),
            )
            for views in (False, True)
        ]
        merged = merge(*parts)
        assert {one.name for one in merged.workloads} == {one.name for one in whole.workloads}
        assert sorted(one.case for one in merged.measurements) == sorted(
            one.case for one in whole.measurements
        )
        assert len(merged.targets) == len(whole.targets)
        assert merged.runs == len(parts)

    def test_keeps_the_later_of_two_measurements(self) -> None:
        earlier = whole_run()
        first, *rest = earlier.measurements
        again = msgspec.structs.replace(first, rounds=first.rounds[:1])
        merged = merge(earlier, msgspec.structs.replace(earlier, measurements=(again,)))
        assert merged.measurements == (again, *rest)

    def test_refuses_different_sizes(self) -> None:
        with pytest.raises(BenchmarkError, match="full, small"):
            merge(whole_run(), whole_run(Size.SMALL))
