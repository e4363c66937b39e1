"""Results as tables, and the terminal output: progress during a run, tables at the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.status import Status
from rich.table import Table as RichTable

from benchmarks.results import Measurement, Quartiles, Results, TargetResult, find
from benchmarks.run import Event, RoundDone, Skipped, Started
from benchmarks.systems import SYSTEMS
from benchmarks.units import format_bytes, format_rate, format_ratio, format_seconds
from benchmarks.workloads import TORCH, Size, workloads

COLUMNS = ("median", "IQR", "rate", "on the wire", "peak memory", "speed vs torch")
RIGHT_ALIGNED = COLUMNS[:-1]
_LEGEND = (
    "median: time from the common start until the last rank is done. IQR: interquartile range / median. "
    "rate: to all receivers together. speed vs torch: torch's PGTransport = 1."
)
_STYLES = {"good": "green", "bad": "red", "unsure": "yellow"}


@dataclass(frozen=True)
class Table:
    """A table. `tones` has "good", "bad", "unsure" or "" for the last cell of each row."""

    headers: Sequence[str]
    rows: list[list[str]]
    tones: Sequence[str] = ()


def target_table(targets: Sequence[TargetResult]) -> Table:
    """Tabulate the targets and the measured ratios."""
    rows = [
        [
            one.title,
            f"{'≥' if one.at_least else '≤'} {one.limit:g}{one.unit}",
            _format_range(one.ratio, one.unit),
            one.verdict,
        ]
        for one in targets
    ]
    doubts = [one.ratio is None or one.within_noise for one in targets]
    tones = [
        "unsure" if doubt else "good" if one.met else "bad"
        for one, doubt in zip(targets, doubts, strict=True)
    ]
    return Table(("what", "target", "measured (at the quartiles)", "verdict"), rows, tones)


def workload_table(results: Results, measurements: Sequence[Measurement]) -> Table:
    """Tabulate the measurements of a workload."""
    rows = [
        [one.case, results.system(one.system).title, *_cells(one, find(measurements, one.case, TORCH))]
        for one in measurements
    ]
    return Table(("case", "system", *COLUMNS), rows, ["bad" if one.failed else "" for one in measurements])


def _cells(one: Measurement, baseline: Measurement | None) -> list[str]:
    """Format a measurement for `COLUMNS`."""
    seconds, rate = one.seconds, one.bytes_per_s
    if seconds is None:
        return ["–", "", "", "", "", one.problem or "not measured"]
    wires = [done.wire_bytes for done in one.rounds if done.wire_bytes is not None]
    peaks = [done.peak_bytes for done in one.rounds if done.peak_bytes is not None]
    return [
        format_seconds(seconds.median),
        f"{seconds.relative_iqr:.0%}" if len(one.rounds) > 1 else "one round",
        format_rate(rate.median) if rate else "",
        format_bytes(max(wires)) if wires else "",
        format_bytes(max(peaks)) if peaks else "",
        format_speed(one, baseline),
    ]


def format_speed(one: Measurement, baseline: Measurement | None) -> str:
    """Format how many times as fast as the baseline a system is, and whether that is within noise."""
    seconds, base = one.seconds, baseline.seconds if baseline is not None else None
    if seconds is None or base is None or one is baseline:
        return ""
    noise = " (within noise)" if seconds.overlaps(base) else ""
    return f"{format_ratio(base.median / seconds.median)}×{noise}"


def _format_range(ratio: Quartiles | None, unit: str) -> str:
    if ratio is None:
        return "–"
    low, middle, high = (format_ratio(one) for one in (ratio.q1, ratio.median, ratio.q3))
    return f"{middle}{unit} ({low} to {high})" if low != high else f"{middle}{unit}"


class Progress:
    """Shows what is being measured: a status line in a terminal, one line for each case in a log."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status: Status | None = None

    def __call__(self, event: Event) -> None:
        match event:
            case Started(name) if not self._console.is_terminal:
                self._console.print(f"measuring {name}", highlight=False)
            case RoundDone(case, system, number, seconds) if self._console.is_terminal:
                # Not earlier: the status line has a thread, and workers are forked before their first event.
                if self._status is None:
                    self._status = self._console.status("")
                    self._status.start()
                which = f"round {number}" if number else "warm-up"
                self._status.update(f"measuring {case}: {system}, {which}, {format_seconds(seconds)}")
            case Skipped(reason):
                self._console.print(f"[yellow]skipped[/yellow]: {escape(reason)}", highlight=False)

    def stop(self) -> None:
        """Remove the status line."""
        if self._status is not None:
            self._status.stop()


def print_results(results: Results, console: Console) -> None:
    """Print a table for each workload, and one of the targets."""
    for workload in results.workloads:
        if measurements := results.of(workload.name):
            console.print(_rich(workload.title, workload_table(results, measurements)))
    console.print(_LEGEND, highlight=False)
    if results.targets:
        console.print(_rich("targets", target_table(results.targets)))
        if results.size != "full":
            console.print(f"Targets apply to --size full; this run has size {results.size}.", highlight=False)


def print_choices(size: Size, console: Console) -> None:
    """Print the workloads and systems to choose from."""
    rows = [[one.name, one.title, str(one.ranks)] for one in workloads(size)]
    console.print(_rich("workloads", Table(("workload", "title", "processes"), rows)))
    rows = [[one.name, one.title, one.missing() or "yes"] for one in SYSTEMS.values()]
    console.print(_rich("systems", Table(("system", "title", "available"), rows)))


def _rich(title: str, table: Table) -> RichTable:
    rich = RichTable(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for header in table.headers:
        right = header in RIGHT_ALIGNED
        rich.add_column(header, justify="right" if right else "left", no_wrap=right)
    for row, cells in enumerate(table.rows):
        *others, last = (escape(cell) for cell in cells)
        style = _STYLES.get(table.tones[row]) if table.tones else None
        rich.add_row(*others, f"[{style}]{last}[/{style}]" if style else last)
    return rich
