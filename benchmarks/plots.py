"""The plots of a run, drawn by matplotlib as SVG."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from benchmarks.results import Measurement, Quartiles, Results, WorkloadInfo
from benchmarks.units import format_binary, format_bytes, format_rate, format_seconds
from benchmarks.workloads import UNVERIFIED

# The same results give the same file: ids are not random, and text stays text.
_SETTINGS: Any = {"svg.hashsalt": "torchferry", "svg.fonttype": "none", "font.size": 9.5}
_WIDTH_IN = 8.6
_ROW_IN = 0.28
_COLORS = {"torchferry": "#1769d6", "transport": "#d9730d", "files": "#8250c4", "limit": "#8a94a0"}
_PHASE_COLORS = ("#9ecae9", "#1769d6", "#f2b880", "#d9730d", "#7fc8a0", "#8250c4", "#c9a227", "#8a94a0")

Format = Callable[[float], str]


@dataclass(frozen=True)
class Plot:
    """An SVG with its title and caption. `name` is its file name."""

    name: str
    title: str
    caption: str
    svg: str


def make_plots(results: Results) -> list[Plot]:
    """Draw all plots that the measurements allow."""
    plots: list[Plot] = []
    with matplotlib.rc_context(_SETTINGS):
        for workload in results.workloads:
            measured = [one for one in results.of(workload.name) if one.rounds]
            if measured and workload.axis is not None:
                plots.append(_curves(results, workload, measured))
            elif measured:
                plots.append(_bars(results, workload, measured))
                plots += _phases(results, workload, measured)
    return plots


# By `shows`: what the bars are, and the direction that is better.
_BARS: dict[str, tuple[str, Callable[[Measurement], Quartiles | None], Format, str]] = {
    "rate": ("rate", lambda one: one.bytes_per_s, format_rate, "Longer is faster."),
    "time": ("time", lambda one: one.seconds, format_seconds, "Shorter is faster."),
    "wire": ("bytes on the wire", lambda one: one.wire_bytes, format_bytes, "Shorter is better."),
    "memory": ("peak memory", lambda one: one.peak_bytes, format_bytes, "Shorter is better."),
}
# By `axis`: the label of x, its format, and what y is.
_CURVES: dict[str, tuple[str, Format, str]] = {
    "tensors": ("number of tensors", "{:,.0f}".format, "time"),
    "receivers": ("number of receivers", "{:,.0f}".format, "time"),
    "bytes": ("size of each tensor", format_binary, "rate"),
}


def _bars(results: Results, workload: WorkloadInfo, measured: Sequence[Measurement]) -> Plot:
    """Draw a bar for each system, with an error bar between the quartiles."""
    what, values, text, better = _BARS[workload.shows]
    several = len({one.case for one in measured}) > 1
    rows = []
    for one in measured:
        system, value = results.system(one.system), values(one)
        if value is not None:
            rows.append((f"{system.title}, {one.case}" if several else system.title, system.kind, value))
    # A limit may be a thousand times as fast. It must not flatten the other bars.
    top = 1.15 * max((value.q3 for _, kind, value in rows if kind != "limit"), default=0.0) or 1.0
    figure, axes = _horizontal(len(rows), what, text)
    axes.set_xlim(0, top)
    for y, (_, kind, value) in enumerate(rows):
        off_scale = value.median > top
        axes.barh(y, min(value.median, top), height=0.62, color=_COLORS[kind])
        if not off_scale:
            error = [[value.median - value.q1], [min(value.q3, top) - value.median]]
            axes.errorbar(value.median, y, xerr=error, color="#1b2330", linewidth=1.2, capsize=2.5)
        label = f"→ {text(value.median)}" if off_scale else text(value.median)
        axes.annotate(
            label, (min(max(value.median, value.q3), top), y), (6, 0), textcoords="offset points", va="center"
        )
    axes.set_yticks(range(len(rows)), [label for label, _, _ in rows])
    off_scale_note = " → marks a bar beyond the scale." if workload.shows == "rate" else ""
    caption = f"Median {what} by system, with quartiles. {better}{off_scale_note}"
    return Plot(
        f"{what.replace(' ', '-')}-{workload.name}", workload.title, caption, _svg(figure, workload.title)
    )


def _phases(results: Results, workload: WorkloadInfo, measured: Sequence[Measurement]) -> list[Plot]:
    """Draw the seconds by phase, for each side of the systems that report them."""
    lanes = []
    for one in measured if workload.shows == "rate" else ():
        median_round = sorted(one.rounds, key=lambda done: done.seconds)[len(one.rounds) // 2]
        lanes += [
            (f"{results.system(one.system).title}, {side}", phases)
            for side, phases in median_round.phases_s.items()
        ]
    if not lanes:
        return []
    names = list(dict.fromkeys(name for _, phases in lanes for name in phases))
    figure, axes = _horizontal(len(lanes), "time", format_seconds, extra_in=0.5)
    for name, color in zip(names, _PHASE_COLORS * len(names), strict=False):
        before = [_sum_before(phases, name) for _, phases in lanes]
        axes.barh(
            range(len(lanes)),
            [phases.get(name, 0.0) for _, phases in lanes],
            left=before,
            height=0.62,
            color=color,
            label=name,
        )
    for y, (_, phases) in enumerate(lanes):
        total = sum(phases.values())
        axes.annotate(format_seconds(total), (total, y), (6, 0), textcoords="offset points", va="center")
    axes.margins(x=0.12)
    axes.set_yticks(range(len(lanes)), [label for label, _ in lanes])
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    caption = "Seconds by phase in the round with the median time, as each side reports them."
    return [
        Plot(f"phases-{workload.name}", f"{workload.title}: phases", caption, _svg(figure, workload.title))
    ]


def _sum_before(phases: dict[str, float], name: str) -> float:
    """Return when a phase starts.

    >>> _sum_before({"a": 1.0, "b": 2.0, "c": 3.0}, "c")
    3.0
    """
    names = list(phases)
    return sum(phases[one] for one in names[: names.index(name)]) if name in phases else 0.0


def _curves(results: Results, workload: WorkloadInfo, measured: Sequence[Measurement]) -> Plot:
    """Draw a curve for each system, on logarithmic axes."""
    x_label, x_text, shows = _CURVES[workload.axis or ""]
    what, values, text, _ = _BARS[shows]
    points = [
        (one, one.x, value) for one in measured if (value := values(one)) is not None and one.x is not None
    ]
    figure = Figure(figsize=(_WIDTH_IN, 3.6), layout="constrained")
    axes = figure.add_subplot()
    for name in dict.fromkeys(one.system for one, _, _ in points):
        curve = [(x, value) for one, x, value in points if one.system == name]
        system = results.system(name)
        axes.errorbar(
            [x for x, _ in curve],
            [value.median for _, value in curve],
            yerr=[
                [value.median - value.q1 for _, value in curve],
                [value.q3 - value.median for _, value in curve],
            ],
            color=_COLORS[system.kind],
            linestyle="--" if name == UNVERIFIED else ":" if system.kind == "limit" else "-",
            marker="o",
            markersize=4,
            capsize=2.5,
            label=system.title,
        )
    axes.set(xscale="log", yscale="log", xlabel=x_label, ylabel=what)
    axes.set_xticks(sorted({x for _, x, _ in points}))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: x_text(x)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: text(y)))
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high / low < 300 else (1.0,)))
    axes.yaxis.set_minor_locator(NullLocator())
    _clean(axes, "y")
    figure.legend(loc="outside right center", frameon=False)
    better = "Higher is faster." if shows == "rate" else "Lower is faster."
    caption = f"Median {what} by {x_label}, with quartiles, on logarithmic axes. {better}"
    return Plot(f"{what}-{workload.name}", workload.title, caption, _svg(figure, workload.title))


def _horizontal(rows: int, what: str, text: Format, extra_in: float = 0.0) -> tuple[Figure, Axes]:
    """Create a figure for `rows` horizontal bars, the first at the top."""
    figure = Figure(figsize=(_WIDTH_IN, 0.8 + _ROW_IN * rows + extra_in), layout="constrained")
    axes = figure.add_subplot()
    axes.set_ylim(rows - 0.4, -0.6)
    axes.set_xlabel(what)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: text(x) if x else "0"))
    axes.tick_params(axis="y", length=0)
    _clean(axes, "x")
    return figure, axes


def _clean(axes: Axes, grid: str) -> None:
    axes.grid(axis="x" if grid == "x" else "y", color="#dde2e8", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _svg(figure: Figure, title: str) -> str:
    figure.suptitle(title, fontsize="medium", x=0.01, horizontalalignment="left")
    file = io.StringIO()
    # Without metadata and prolog, the SVG can be part of an HTML page.
    figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg = file.getvalue()
    return re.sub(r"\s*<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
