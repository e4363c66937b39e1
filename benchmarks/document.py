"""Results as one HTML page (`--report`), and as a Markdown file with plots as SVG files (`--markdown`)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from benchmarks.plots import Plot
from benchmarks.results import Results
from benchmarks.tables import RIGHT_ALIGNED, Table, target_table, workload_table

_METHOD = """
Rank 0 sends, the other ranks receive. Each rank is a process. All ranks start together after a barrier. A
round ends when the last rank is done. Systems are interleaved, in a new order in every round, so that a
disturbance of the machine affects all systems alike. The first round is a warm-up and does not count. A
system that needs more than eight seconds for its warm-up is not repeated; its warm-up is then its one round.

After each round, outside the timed part, every received tensor is compared with the sent tensor by 128-bit
digests of its bits. Memory that is received into is overwritten with a pattern before each round.

Times are medians. IQR is the interquartile range divided by the median. Two systems are within noise of each
other if their interquartile ranges overlap. A target is within noise if it lies between the ratios at the
quartiles. The rate is the state's bytes, to all receivers together, divided by the median time.

Bytes on the wire are what the kernel counts on the TCP sockets of the busiest receiver. Peak memory is the
largest growth of a process's resident memory, in the round or in the warm-up; memory for a state that is
received fresh is included.
"""
_STYLE = """
body { max-width: 62rem; margin: 2rem auto; padding: 0 1rem; font: 16px/1.5 system-ui, sans-serif; }
h2 { margin-top: 2.5rem; border-top: 1px solid #dde2e8; padding-top: 1rem; }
table { border-collapse: collapse; font-size: 0.875rem; }
th, td { text-align: left; vertical-align: top; padding: 0.3rem 0.9rem 0.3rem 0; }
th, td { border-bottom: 1px solid #dde2e8; }
.number { text-align: right; white-space: nowrap; }
.good { color: #12803c; } .bad { color: #c62f2f; } .unsure { color: #9a6700; }
svg { max-width: 100%; height: auto; }
"""


@dataclass(frozen=True)
class Heading:
    """A heading of level 1 to 3."""

    level: int
    text: str


@dataclass(frozen=True)
class Code:
    """A block of code."""

    text: str


# A string is a paragraph.
Block = Heading | Code | Table | Plot | str


def to_html(results: Results, plots: Sequence[Plot]) -> str:
    """Render one page with everything inline: it loads nothing."""
    body = "\n".join(_html(block) for block in _blocks(results, plots))
    title = f"torchferry benchmarks, {escape(results.date)}"
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{title}</title>\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


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
    blocks = [_markdown(block, folder.name) for block in _blocks(results, plots)]
    file.write_text("\n\n".join(blocks) + "\n", encoding="utf-8")
    return [file, *pictures]


def _blocks(results: Results, plots: Sequence[Plot]) -> Iterator[Block]:
    yield Heading(1, "Benchmarks")
    runs = f"{results.runs} runs, merged." if results.runs > 1 else f"One run, {results.repeats} rounds."
    yield f"{runs} Size {results.size}. Absolute figures depend on the machine; compare ratios within a run."
    yield Code(results.command)
    facts = {"date": results.date, **results.machine}
    yield Table(("machine", ""), [[name, fact] for name, fact in facts.items()])
    if results.targets:
        yield Heading(2, "Targets")
        if results.size != "full":
            yield f"Targets apply to size full. This run has size {results.size}."
        yield target_table(results.targets)
    yield Heading(2, "Plots")
    yield from plots
    yield Heading(2, "All measurements")
    for workload in results.workloads:
        if measurements := results.of(workload.name):
            yield Heading(3, workload.title[:1].upper() + workload.title[1:])
            yield workload_table(results, measurements)
    yield Heading(2, "Method")
    yield from (" ".join(paragraph.split()) for paragraph in _METHOD.split("\n\n"))
    yield from (f"Skipped: {reason}." for reason in results.skipped)


def _html(block: Block) -> str:
    match block:
        case Heading(level, text):
            return f"<h{level}>{escape(text)}</h{level}>"
        case Code(text):
            return f"<pre><code>{escape(text)}</code></pre>"
        case Plot(_, title, caption, svg):
            return f"<h3>{escape(title)}</h3>\n<p>{escape(caption)}</p>\n{svg}"
        case Table(headers, rows, tones):
            classes = ["number" if header in RIGHT_ALIGNED else "" for header in headers[:-1]]
            lines = [_html_row("th", headers, [*classes, ""])]
            for number, row in enumerate(rows):
                lines.append(_html_row("td", row, [*classes, tones[number] if tones else ""]))
            return "<table>\n" + "\n".join(lines) + "\n</table>"
        case text:
            return f"<p>{escape(text)}</p>"


def _html_row(tag: str, cells: Sequence[str], classes: Sequence[str]) -> str:
    filled = [
        f"<{tag}{f' class={name}' if name else ''}>{escape(cell)}</{tag}>"
        for cell, name in zip(cells, classes, strict=True)
    ]
    return f"<tr>{''.join(filled)}</tr>"


def _markdown(block: Block, folder: str) -> str:
    match block:
        case Heading(level, text):
            return f"{'#' * level} {_escaped(text)}"
        case Code(text):
            return f"```\n{text}\n```"
        case Plot(name, title, caption):
            return f"**{_escaped(title)}.** {_escaped(caption)}\n\n![{_escaped(title)}]({folder}/{name}.svg)"
        case Table(headers, rows):
            lines = [headers, ["---"] * len(headers), *rows]
            return "\n".join(f"| {' | '.join(_escaped(cell) for cell in cells)} |" for cells in lines)
        case text:
            return _escaped(text)


def _escaped(text: str) -> str:
    """Escape text for Markdown.

    >>> _escaped("a | b\\n*c*")
    'a \\\\| b \\\\*c\\\\*'
    """
    return re.sub(r"([\\|*_<`])", r"\\\1", text.replace("\n", " "))
