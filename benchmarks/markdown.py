"""The results as a document for docs/: tables in Markdown, and its plots as SVG files beside it."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.plots import plots
from benchmarks.results import Results, Series, find
from benchmarks.style import PLOT
from benchmarks.wording import COLUMNS, METHOD, say_ratio, say_series, say_wanted
from benchmarks.works import TORCH


def write(results: Results, file: Path) -> list[Path]:
    """Write the document, and its plots into a folder with its name; returns what was written.

    Raises:
        OSError: it can't be written there.
    """
    folder = file.with_suffix("")
    folder.mkdir(exist_ok=True)
    # What an earlier run drew and this one does not would lie there for ever.
    for stale in folder.glob("*.svg"):
        stale.unlink()
    written = [file]
    for plot in plots(results):
        picture = folder / f"{plot.name}.svg"
        picture.write_text(plot.drawing.standalone(PLOT) + "\n", encoding="utf-8")
        written.append(picture)
    file.write_text(render(results, folder.name), encoding="utf-8")
    return written


def render(results: Results, folder: str) -> str:
    """The document; `folder` is where its plots are, seen from it."""
    parts = [
        "# Benchmarks",
        _opening(results),
        f"```\n{results.command}\n```",
        _facts(results),
        *([_marks(results)] if results.judgements else []),
        "## Plots",
        *(
            f"**{_safe(plot.title)}.** {_safe(plot.says)}\n\n![{_safe(plot.title)}]({folder}/{plot.name}.svg)"
            for plot in plots(results)
        ),
        "## All figures",
        *(_table(results, work.name, work.title) for work in results.works if results.of(work.name)),
        "## How it was measured",
        *METHOD,
        *(f"Left out: {_safe(reason)}." for reason in results.left_out),
    ]
    return "\n\n".join(parts) + "\n"


def _opening(results: Results) -> str:
    alone = results.runs == 1
    if results.size != "full":
        which = "One run" if alone else f"{results.runs} runs, put together,"
        return f"{which} at size {results.size}. The marks are for size full."
    which = (
        "One full run, as it came out" if alone else f"{results.runs} runs, as they came out, put together"
    )
    return f"{which}. The figures are of that machine; ratios are within a run."


def _facts(results: Results) -> str:
    facts = {"date": results.date, **results.machine}
    if results.runs == 1:
        # Of several, each has its own.
        facts["repeats"] = str(results.repeats)
    return _rows(["", ""], [[name, fact] for name, fact in facts.items()])


def _marks(results: Results) -> str:
    rows = [
        [
            one.title,
            say_wanted(one),
            say_ratio(one),
            f"{one.verdict}: {one.problem}" if one.problem else one.verdict,
        ]
        for one in results.judgements
    ]
    return "## The marks\n\n" + _rows(["work", "must reach", "measured (at the quartiles)", "verdict"], rows)


def _table(results: Results, name: str, title: str) -> str:
    series = results.of(name)
    headers = ["case", "system", *COLUMNS, "to torch's"]
    rows = [_row(results, one, find(series, one.case, TORCH)) for one in series]
    return f"### {_safe(title[0].upper() + title[1:])}\n\n{_rows(headers, rows)}"


def _row(results: Results, one: Series, baseline: Series | None) -> list[str]:
    cells = say_series(one, baseline) or ["–", "", "", "", "", one.problem or "not measured"]
    return [one.case, results.system_title(one.system).title, *cells]


def _rows(headers: list[str], rows: list[list[str]]) -> str:
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join(f"| {' | '.join(_safe(cell) for cell in cells)} |" for cells in lines)


def _safe(words: str) -> str:
    """Words that stay what they are in Markdown.

    >>> _safe("a | b\\n*c*")
    'a \\\\| b \\\\*c\\\\*'
    """
    return re.sub(r"([\\|*_<`])", r"\\\1", words.replace("\n", " "))
