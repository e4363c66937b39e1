"""The HTML report loads nothing, is well formed, and names everything that was measured."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from html import escape
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from benchmarks.document import to_html, write_markdown
from benchmarks.plots import Plot, make_plots
from benchmarks.results import Results
from benchmarks.workloads import MAX_HOSTS, Size
from tests.benchmarks.samples import whole_run

RESULTS = whole_run()
EMPTY = Results("python -m benchmarks", "today", "small", 1, {})
TITLES = [*(one.title for one in RESULTS.workloads), *(one.title for one in RESULTS.targets)]
_VOID = {"meta", "br"}


class Outline(HTMLParser):
    """Checks that each tag is closed, and records what a browser would load."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag not in _VOID:
            self.open.append(tag)
        if tag in ("script", "link", "iframe", "img", "image", "object", "embed", "base"):
            self.loads.append(tag)
        for name, value in attributes:
            if name in ("src", "href", "xlink:href", "srcset") and not (value or "").startswith("#"):
                self.loads.append(f"{tag} {name}={value}")

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag, f"</{tag}> closes another tag"


@pytest.fixture(scope="module")
def plots() -> list[Plot]:
    return make_plots(RESULTS)


@pytest.fixture(scope="module")
def html(plots: list[Plot]) -> str:
    return to_html(RESULTS, plots)


class TestThePage:
    def test_is_well_formed_and_loads_nothing(self, html: str) -> None:
        outline = Outline(html)
        assert outline.open == []
        assert outline.loads == []
        assert not re.search(r"https?://|@import|url\((?!#)", re.sub(r'xmlns(:\w+)?="[^"]*"', "", html))

    def test_names_every_workload_system_and_target(self, html: str) -> None:
        used = {one.system for one in RESULTS.measurements}
        titles = TITLES + [one.title for one in RESULTS.systems if one.name in used]
        assert [title for title in titles if escape(title, quote=False) not in html] == []

    def test_has_the_machine_the_command_and_what_was_skipped(self, html: str) -> None:
        for text in (*RESULTS.machine.values(), RESULTS.command, RESULTS.date, *RESULTS.skipped):
            assert escape(text) in html

    def test_shows_what_failed(self) -> None:
        first, *rest = RESULTS.measurements
        broken = msgspec.structs.replace(first, rounds=(), problem="rank 1: <it> broke", failed=True)
        page = to_html(msgspec.structs.replace(RESULTS, measurements=(broken, *rest)), [])
        assert "rank 1: &lt;it&gt; broke" in page

    def test_without_measurements_is_well_formed(self) -> None:
        assert Outline(to_html(EMPTY, make_plots(EMPTY))).open == []

    def test_says_that_targets_apply_to_another_size(self) -> None:
        assert "Targets apply to size full. This run has size small." in to_html(whole_run(Size.SMALL), [])


class TestThePlots:
    def test_are_of_every_kind(self, plots: list[Plot]) -> None:
        names = {plot.name for plot in plots}
        assert {"rate-big-fresh", "phases-big-fresh", "time-metadata", "peak-memory-memory"} <= names
        assert {"bytes-on-the-wire-views", "time-tensors", "time-receivers", "rate-tensor-size"} <= names
        assert len(names) == len(plots)

    def test_are_of_every_workload_of_a_cluster(self) -> None:
        results = whole_run(hosts=MAX_HOSTS)
        assert [plot.title for plot in make_plots(results) if plot.name.startswith(("time", "rate"))] == [
            one.title for one in results.workloads
        ]

    def test_are_well_formed_with_title_labels_and_units(self, plots: list[Plot]) -> None:
        for plot in plots:
            root = ElementTree.fromstring(plot.svg)
            texts = {"".join(element.itertext()).strip() for element in root.iter() if "text" in element.tag}
            assert texts & {"rate", "time", "bytes on the wire", "peak memory"}, plot.name
            assert any(re.fullmatch(r"[\d.,]+ (µs|ms|s|B|kB|MB|GB)(/s)?", text) for text in texts), plot.name
            assert any("torchferry" in text for text in texts), plot.name
            assert plot.title.removesuffix(": phases") in texts

    def test_are_reproducible(self, plots: list[Plot]) -> None:
        first = msgspec.structs.replace(RESULTS, workloads=RESULTS.workloads[:2])
        again = make_plots(first)
        assert again == plots[: len(again)]


class TestTheMarkdown:
    def test_links_its_plots(self, plots: list[Plot], tmp_path: Path) -> None:
        written = write_markdown(RESULTS, plots, tmp_path / "benchmarks.md")
        text = (tmp_path / "benchmarks.md").read_text()
        linked = re.findall(r"\]\((benchmarks/[^)]+\.svg)\)", text)
        assert {tmp_path / link for link in linked} == set(written[1:])
        assert all(file.exists() for file in written)

    def test_names_every_workload_and_target(self, tmp_path: Path) -> None:
        write_markdown(RESULTS, [], tmp_path / "benchmarks.md")
        text = (tmp_path / "benchmarks.md").read_text().replace("\\", "").lower()
        assert [title for title in TITLES if title.lower() not in text] == []

    def test_removes_the_plots_of_an_earlier_run(self, plots: list[Plot], tmp_path: Path) -> None:
        write_markdown(RESULTS, plots, tmp_path / "benchmarks.md")
        write_markdown(EMPTY, [], tmp_path / "benchmarks.md")
        assert list((tmp_path / "benchmarks").iterdir()) == []
