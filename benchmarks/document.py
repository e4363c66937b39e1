"""Results as Markdown with SVG files (`--markdown`), and as one HTML page made from it (`--report`)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from markdown_it import MarkdownIt

from benchmarks.plots import Plot
from benchmarks.results import Results
from benchmarks.tables import Table, target_table, workload_table

_METHOD = """\
The first rank sends (in `sources-4`, the first four), the others receive. Each rank is a process. All ranks
start together after a barrier. A round ends when the last rank is done; if a receiver sleeps, is stopped or
is killed, when the others are done. Systems are interleaved, in a new order in every round, so that a
disturbance of the machine affects all systems alike. The first round is a warm-up and does not count. A
system that needs more than eight seconds for its warm-up is not repeated; its warm-up is then its one round.

A version that is fetched was published before the round, so the time is that of `fetch`, from call to return.
`publish` has rows of its own; its receiver fetches every version, and only the time of `publish` counts. A
fetch in place has `compare=False`: the receiver's tensors were overwritten before the round, so a comparison
would only take time. Only where the receiver has the state already, they are not overwritten, and fetch has
`compare=True`.

After each round, outside the timed part, every received tensor is compared with the sent tensor by 128-bit
digests of its bits. Memory that is received into is overwritten with a pattern before each round.

Times are medians. IQR is the interquartile range divided by the median. Two systems are within noise of each
other if their interquartile ranges overlap. A target is within noise if it lies between the ratios at the
quartiles. The rate is the state's bytes, to all receivers whose time counts, divided by the median time.

Bytes on the wire are what the kernel counts on the TCP sockets of the busiest receiver. Peak memory is the
largest growth of a process's resident memory, in the round or in the warm-up; memory for a state that is
received fresh is included, and so is, on both sides, the ring of a live state."""
_STYLE = """
body { max-width: 62rem; margin: 2rem auto; padding: 0 1rem; font: 16px/1.5 system-ui, sans-serif; }
table { border-collapse: collapse; font-size: 0.875rem; }
th, td { text-align: left; padding: 0.3rem 0.9rem 0.3rem 0; border-bottom: 1px solid #dde2e8; }
svg { max-width: 100%; height: auto; }
"""


def to_html(results: Results, plots: Sequence[Plot]) -> str:
    """Render one page with everything inline: it loads nothing."""
    body = MarkdownIt("commonmark").enable("table").render(_to_markdown(results, plots, "plots"))
    pictures = {plot.name: plot.svg for plot in plots}
    body = re.sub(r'<img src="plots/([\w-]+)\.svg"[^>]*>', lambda found: pictures[found[1]], body)
    head = f'<meta charset="utf-8">\n<title>torchferry benchmarks</title>\n<style>{_STYLE}</style>'
    return f'<!doctype html>\n<html lang="en">\n<head>\n{head}\n</head>\n<body>\n{body}</body>\n</html>\n'


def write_markdown(results: Results, plots: Sequence[Plot], file: Path) -> list[Path]:
    """Write a Markdown file, and its plots into a folder of the same name; return what was written.

    Raises:
        OSError: a file can't be written.
    """
    folder = file.with_suffix("")
    folder.mkdir(exist_ok=True)
    for stale in folder.glob("*.svg"):
        stale.unlink()
    pictures = {folder / f"{plot.name}.svg": plot.svg for plot in plots}
    for picture, svg in pictures.items():
        picture.write_text(svg, encoding="utf-8")
    file.write_text(_to_markdown(results, plots, folder.name), encoding="utf-8")
    return [file, *pictures]


def _to_markdown(results: Results, plots: Iterable[Plot], folder: str) -> str:
    return "\n\n".join(_blocks(results, plots, folder)) + "\n"


def _blocks(results: Results, plots: Iterable[Plot], folder: str) -> Iterator[str]:
    yield "# Benchmarks"
    runs = f"{results.runs} runs, merged." if results.runs > 1 else f"One run, {results.repeats} rounds."
    yield f"{runs} Size {results.size}. Absolute figures depend on the machine; compare ratios within a run."
    yield f"```\n{results.command}\n```"
    facts = {"date": results.date, **results.machine}
    yield _rows(Table(("machine", ""), [[name, fact] for name, fact in facts.items()]))
    if results.targets:
        yield "## Targets"
        if results.size != "full":
            yield f"Targets apply to size full. This run has size {results.size}."
        yield _rows(target_table(results.targets))
    yield "## Plots"
    for plot in plots:
        title = _escaped(plot.title)
        yield f"**{title}.** {_escaped(plot.caption)}\n\n![{title}]({folder}/{plot.name}.svg)"
    yield "## All measurements"
    for workload in results.workloads:
        if measurements := results.of(workload.name):
            yield f"### {_escaped(workload.title[:1].upper() + workload.title[1:])}"
            yield _rows(workload_table(results, measurements))
    yield "## Method"
    yield _METHOD
    yield from (f"Skipped: {_escaped(reason)}." for reason in results.skipped)


def _rows(table: Table) -> str:
    lines = [table.headers, ["---"] * len(table.headers), *table.rows]
    return "\n".join(f"| {' | '.join(_escaped(cell) for cell in cells)} |" for cells in lines)


def _escaped(text: str) -> str:
    """Escape text for Markdown.

    >>> _escaped("a | b\\n*c*")
    'a \\\\| b \\\\*c\\\\*'
    """
    return re.sub(r"([\\|*_<`])", r"\\\1", text.replace("\n", " "))
