"""The page stands alone, is well formed, and names everything that was measured."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from html import escape
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from benchmarks import markdown, page
from benchmarks.plots import Plot, plots
from benchmarks.results import Results
from tests.benchmarks.samples import a_whole_run

RESULTS = a_whole_run()
_VOID = {"meta", "br"}


class Outline(HTMLParser):
    """Checks that what is opened is closed, and keeps what could load something."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag not in _VOID:
            self.open.append(tag)
        if tag in ("script", "link", "iframe", "img", "object", "embed", "base"):
            self.loads.append(tag)
        for name, value in attributes:
            if name in ("src", "href", "xlink:href", "srcset") and not (value or "").startswith("#"):
                self.loads.append(f"{tag} {name}={value}")

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag, f"</{tag}> closes something else"


@pytest.fixture(scope="module")
def html() -> str:
    return page.render(RESULTS)


class TestThePage:
    def test_is_well_formed(self, html: str) -> None:
        outline = Outline()
        outline.feed(html)
        outline.close()
        assert outline.open == []

    def test_loads_nothing(self, html: str) -> None:
        outline = Outline()
        outline.feed(html)
        assert outline.loads == []
        assert not re.search(r"https?://|//cdn|@import|url\(", html)

    def test_names_every_work_system_and_mark(self, html: str) -> None:
        titles = [work.title for work in RESULTS.works] + [one.title for one in RESULTS.judgements]
        used = {one.system for one in RESULTS.series}
        titles += [one.title for one in RESULTS.systems if one.name in used]
        assert [title for title in titles if escape(title) not in html] == []

    def test_says_the_machine_the_command_and_what_is_missing(self, html: str) -> None:
        for said in (*RESULTS.machine.values(), RESULTS.command, RESULTS.date, *RESULTS.left_out):
            assert escape(said) in html

    def test_is_made_for_light_and_dark(self, html: str) -> None:
        assert "prefers-color-scheme: dark" in html

    def test_has_every_sort_of_plot(self) -> None:
        names = {plot.name for plot in plots(RESULTS)}
        assert {"rate-big-fresh", "timeline-big-fresh", "growth-tensors"} <= names
        assert {"growth-receivers", "growth-tensor-size"} <= names

    def test_shows_what_failed(self) -> None:
        broken = msgspec.structs.replace(
            RESULTS.series[0], takes=(), problem="rank 1: <it> broke", failed=True
        )
        shown = page.render(msgspec.structs.replace(RESULTS, series=(broken, *RESULTS.series[1:])))
        assert "rank 1: &lt;it&gt; broke" in shown

    def test_of_a_run_without_anything_is_still_a_page(self) -> None:
        empty = Results("torchferry bench", "today", "small", 1, {})
        outline = Outline()
        outline.feed(page.render(empty))
        assert outline.open == []


class TestThePlots:
    @pytest.mark.parametrize("plot", plots(RESULTS), ids=lambda plot: plot.name)
    def test_are_well_formed_and_within_their_frame(self, plot: Plot) -> None:
        root = ElementTree.fromstring(plot.drawing.standalone("svg {}"))
        width, height = plot.drawing.width, plot.drawing.height
        for shape in root.iter():
            for name, limit in (("x", width), ("cx", width), ("x2", width), ("y", height), ("cy", height)):
                if name in shape.attrib:
                    assert -0.1 <= float(shape.attrib[name]) <= limit + 0.1, ElementTree.tostring(shape)


class TestTheDocument:
    def test_has_its_plots_beside_it(self, tmp_path: Path) -> None:
        written = markdown.write(RESULTS, tmp_path / "benchmarks.md")
        text = (tmp_path / "benchmarks.md").read_text()
        linked = re.findall(r"\]\((benchmarks/[^)]+\.svg)\)", text)
        assert {tmp_path / link for link in linked} == set(written[1:])
        assert all(file.exists() for file in written)

    def test_names_every_work_and_mark(self, tmp_path: Path) -> None:
        text = markdown.render(RESULTS, "benchmarks").replace("\\", "")
        titles = [work.title for work in RESULTS.works] + [one.title for one in RESULTS.judgements]
        assert [title for title in titles if title.lower() not in text.lower()] == []

    def test_leaves_no_plot_of_an_earlier_run(self, tmp_path: Path) -> None:
        markdown.write(RESULTS, tmp_path / "benchmarks.md")
        empty = msgspec.structs.replace(RESULTS, works=(), series=(), judgements=())
        markdown.write(empty, tmp_path / "benchmarks.md")
        assert list((tmp_path / "benchmarks").iterdir()) == []
