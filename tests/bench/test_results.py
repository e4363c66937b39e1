"""Results are written and read back the same, and anything else is refused by name."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests.bench.samples import a_whole_run
from torchferry.bench.results import read_json, write_json
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
