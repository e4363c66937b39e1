"""Results as tables, numbers with units, and the terminal output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from benchmarks.results import Measurement, Quartiles, Results, TargetResult, find
from benchmarks.workloads import TORCH

COLUMNS = ("median", "IQR", "rate", "on the wire", "peak memory", "speed vs torch")
_LEGEND = (
    "median: time from the common start until the last rank is done. IQR: interquartile range / median. "
    "rate: to all receivers whose time counts. speed vs torch: torch's PGTransport = 1."
)
# By the start of a row's last cell.
_STYLES = {
    **dict.fromkeys(("met (", "missed (", "not measured"), "yellow"),
    "met": "green",
    "missed": "red",
    "rank ": "red",
}
_DECIMAL = (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3), ("", 1.0), ("m", 1e-3), ("µ", 1e-6))
_BINARY = (("Gi", 2.0**30), ("Mi", 2.0**20), ("Ki", 2.0**10), ("", 1.0))


class Table(NamedTuple):
    """A table of text."""

    headers: Sequence[str]
    rows: list[list[str]]


def target_table(targets: Sequence[TargetResult]) -> Table:
    """Tabulate the targets and the measured ratios."""
    rows = []
    for one in targets:
        limit = f"{'≥' if one.at_least else '≤'} {one.limit:g}{one.unit}"
        rows.append([one.title, limit, _format_range(one.ratio, one.unit), one.verdict])
    return Table(("what", "target", "measured (at the quartiles)", "verdict"), rows)


def workload_table(results: Results, measurements: Sequence[Measurement]) -> Table:
    """Tabulate the measurements of a workload."""
    rows = [
        [one.case, results.system(one.system).title, *_cells(one, find(measurements, one.case, TORCH))]
        for one in measurements
    ]
    return Table(("case", "system", *COLUMNS), rows)


def _cells(one: Measurement, baseline: Measurement | None) -> list[str]:
    """Format a measurement for `COLUMNS`."""
    seconds, rate = one.seconds, one.bytes_per_s
    if seconds is None:
        return ["–", "", "", "", "", one.problem or "not measured"]
    wires = [done.wire_bytes for done in one.rounds if done.wire_bytes is not None]
    peaks = [done.peak_bytes for done in one.rounds if done.peak_bytes is not None]
    iqr = f"{(seconds.q3 - seconds.q1) / seconds.median:.0%}"
    return [
        format_seconds(seconds.median),
        iqr if len(one.rounds) > 1 else "one round",
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
    return f"{_format_ratio(base.median / seconds.median)}×{noise}"


def _format_range(ratio: Quartiles | None, unit: str) -> str:
    if ratio is None:
        return "–"
    low, middle, high = (_format_ratio(one) for one in (ratio.q1, ratio.median, ratio.q3))
    return f"{middle}{unit} ({low} to {high})" if low != high else f"{middle}{unit}"


def _format_ratio(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio < 100 else f"{ratio:,.0f}"


def format_seconds(seconds: float) -> str:
    """Format a time.

    >>> format_seconds(0.00123), format_seconds(0.45), format_seconds(12.345)
    ('1.23 ms', '450 ms', '12.3 s')
    """
    return _scaled(seconds, "s", _DECIMAL[4:])


def format_bytes(size: float) -> str:
    """Format a number of bytes in decimal units.

    >>> format_bytes(40_000_000), format_bytes(999_600), format_bytes(0)
    ('40 MB', '1 MB', '0 B')
    """
    return _scaled(size, "B", _DECIMAL[:5])


def format_rate(bytes_per_s: float) -> str:
    """Format a rate: `1.23 GB/s`."""
    return f"{format_bytes(bytes_per_s)}/s"


def format_binary(size: float) -> str:
    """Format a power of two of bytes: `64 KiB`."""
    return _scaled(size, "B", _BINARY)


def _scaled(value: float, unit: str, prefixes: tuple[tuple[str, float], ...]) -> str:
    # 999.6 kB would round to "1,000 kB".
    prefix, scale = next((one for one in prefixes if value >= one[1] * 0.9995), prefixes[-1])
    scaled = value / scale
    return f"{scaled:,.0f} {prefix}{unit}" if scaled >= 100 else f"{scaled:.3g} {prefix}{unit}"


def print_results(results: Results, console: Console) -> None:
    """Print a table for each workload, and one of the targets."""
    for workload in results.workloads:
        if measurements := results.of(workload.name):
            print_table(workload.title, workload_table(results, measurements), console)
    console.print(_LEGEND, highlight=False)
    if results.targets:
        print_table("targets", target_table(results.targets), console)
        if results.size != "full":
            console.print(f"Targets apply to --size full; this run has size {results.size}.", highlight=False)


def print_table(title: str, table: Table, console: Console) -> None:
    """Print a table with a title."""
    rich = RichTable(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for header in table.headers:
        number = header in COLUMNS[:-1]
        rich.add_column(header, justify="right" if number else "left", no_wrap=number)
    for row in table.rows:
        style = next((style for start, style in _STYLES.items() if row[-1].startswith(start)), "default")
        *others, last = (escape(cell) for cell in row)
        rich.add_row(*others, f"[{style}]{last}[/{style}]")
    console.print(rich)
