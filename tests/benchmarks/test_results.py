"""Results are written and read back the same, and anything else is refused by name."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from benchmarks.markdown import render
from benchmarks.results import merge, read_json, write_json
from benchmarks.works import Size
from tests.benchmarks.samples import a_whole_run
from torchferry.errors import BadArgument


class TestTheJson:
    def test_comes_back_as_it_was(self, tmp_path: Path) -> None:
        results = a_whole_run()
        write_json(results, tmp_path / "results.json")
        assert read_json(tmp_path / "results.json") == results

    def test_is_plain_data_for_others(self, tmp_path: Path) -> None:
        write_json(a_whole_run(), tmp_path / "results.json")
        plain = msgspec.json.decode((tmp_path / "results.json").read_bytes())
        assert plain["series"][0]["takes"][0]["seconds"] > 0
        assert plain["judgements"][0]["ratio"] > 0

    @pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"series": 1}', b"\xff"])
    def test_of_something_else_is_refused_with_the_file(self, content: bytes, tmp_path: Path) -> None:
        (tmp_path / "other.json").write_bytes(content)
        with pytest.raises(BadArgument, match=r"other\.json"):
            read_json(tmp_path / "other.json")

    def test_of_another_version_is_refused(self, tmp_path: Path) -> None:
        other = msgspec.structs.replace(a_whole_run(), format=99)
        write_json(other, tmp_path / "other.json")
        with pytest.raises(BadArgument, match="format 99"):
            read_json(tmp_path / "other.json")


class TestSeveralRuns:
    def test_become_one_with_what_each_has(self) -> None:
        whole = a_whole_run()
        parts = [
            msgspec.structs.replace(
                whole,
                works=tuple(one for one in whole.works if (one.name == "views") is views),
                series=tuple(one for one in whole.series if (one.work == "views") is views),
                judgements=tuple(one for one in whole.judgements if (one.work == "views") is views),
            )
            for views in (False, True)
        ]
        merged = merge(*parts)
        assert {one.name for one in merged.works} == {one.name for one in whole.works}
        assert sorted(one.case for one in merged.series) == sorted(one.case for one in whole.series)
        assert len(merged.judgements) == len(whole.judgements)
        assert merged.runs == len(parts)
        assert f"{len(parts)} runs, as they came out" in render(merged, "plots")

    def test_of_the_same_thing_leave_the_later(self) -> None:
        earlier = a_whole_run()
        again = msgspec.structs.replace(earlier.series[0], takes=earlier.series[0].takes[:1])
        merged = merge(earlier, msgspec.structs.replace(earlier, series=(again,)))
        assert merged.series == (again, *earlier.series[1:])

    def test_of_different_sizes_are_refused(self) -> None:
        with pytest.raises(BadArgument, match="full, small"):
            merge(a_whole_run(), a_whole_run(Size.SMALL))
