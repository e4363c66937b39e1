"""The plots of a run, drawn by matplotlib as SVG."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from itertools import accumulate, cycle
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from benchmarks.results import Measurement, Quartiles, Results, WorkloadInfo
from benchmarks.tables import format_binary, format_bytes, format_rate, format_seconds

_SETTINGS: Any = {
    # The same results give the same file: ids are not random, and text stays text.
    "svg.hashsalt": "torchferry",
    "svg.fonttype": "none",
    "font.size": 9.5,
    "figure.constrained_layout.use": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dde2e8",
    "errorbar.capsize": 2.5,
    "legend.frameon": False,
}
_WIDTH_IN, _ROW_IN, _BAR = 8.6, 0.28, 0.62
_COLORS = {"torchferry": "#1769d6", "transport": "#d9730d", "files": "#8250c4", "limit": "#8a94a0"}
_PHASE_COLORS = ("#9ecae9", "#1769d6", "#f2b880", "#d9730d", "#7fc8a0", "#8250c4", "#c9a227", "#8a94a0")

Format = Callable[[float], str]
# By `shows`: the label, the values, their format, and how to read a bar.
_BARS: dict[str, tuple[str, Callable[[Measurement], Quartiles | None], Format, str]] = {
    "rate": ("rate", lambda one: one.bytes_per_s, format_rate, "Longer is faster; → is beyond the scale."),
    "time": ("time", lambda one: one.seconds, format_seconds, "Shorter is faster."),
    "wire": ("bytes on the wire", lambda one: one.wire_bytes, format_bytes, "Shorter is better."),
    "memory": ("peak memory", lambda one: one.peak_bytes, format_bytes, "Shorter is better."),
}
# By `axis`: the label of x, its format, what y shows, and how to read it.
_CURVES: dict[str, tuple[str, Format, str, str]] = {
    "tensors": ("number of tensors", "{:,.0f}".format, "time", "Lower is faster."),
    "receivers": ("number of receivers", "{:,.0f}".format, "time", "Lower is faster."),
    "bytes": ("size of each tensor", format_binary, "rate", "Higher is faster."),
}


class Plot(NamedTuple):
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


def _bars(results: Results, workload: WorkloadInfo, measured: Sequence[Measurement]) -> Plot:
    """Draw a bar for each system, with an error bar between the quartiles."""
    what, values, text, better = _BARS[workload.shows]
    rows = [
        (one, results.system(one.system), value) for one in measured if (value := values(one)) is not None
    ]
    several = len({one.case for one in measured}) > 1
    labels = [f"{system.title}, {one.case}" if several else system.title for one, system, _ in rows]
    # A limit may be a thousand times as fast. It must not flatten the other bars.
    top = 1.15 * max((value.q3 for _, system, value in rows if system.kind != "limit"), default=0.0) or 1.0
    figure, axes = _horizontal(labels, what, text)
    axes.set_xlim(0, top)
    for y, (_, system, value) in enumerate(rows):
        axes.barh(y, min(value.median, top), height=_BAR, color=_COLORS[system.kind])
        if value.median > top:
            _annotate(axes, top, y, f"→ {text(value.median)}")
        else:
            end = min(value.q3, top)
            error = [[value.median - value.q1], [end - value.median]]
            axes.errorbar(value.median, y, xerr=error, color="#1b2330", linewidth=1.2)
            _annotate(axes, end, y, text(value.median))
    caption = f"Median {what} by system, with quartiles. {better}"
    return Plot(f"{what.replace(' ', '-')}-{workload.name}", workload.title, caption, _svg(figure, workload))


def _phases(results: Results, workload: WorkloadInfo, measured: Sequence[Measurement]) -> list[Plot]:
    """Draw the seconds by phase, for each side of the systems that report them."""
    lanes: dict[str, dict[str, float]] = {}
    several = len({one.case for one in measured}) > 1
    for one in measured if workload.shows == "rate" else ():
        median_round = sorted(one.rounds, key=lambda done: done.seconds)[len(one.rounds) // 2]
        for side, phases in median_round.phases_s.items():
            title = results.system(one.system).title
            lanes[f"{title}, {one.case}, {side}" if several else f"{title}, {side}"] = phases
    if not lanes:
        return []
    names = list(dict.fromkeys(name for phases in lanes.values() for name in phases))
    colors = {name: _PHASE_COLORS[number % len(_PHASE_COLORS)] for number, name in enumerate(names)}
    figure, axes = _horizontal(list(lanes), "time", format_seconds, extra_in=0.5)
    for y, phases in enumerate(lanes.values()):
        starts = [0.0, *accumulate(phases.values())]
        for start, (name, seconds) in zip(starts, phases.items(), strict=False):
            axes.barh(y, seconds, left=start, height=_BAR, color=colors[name])
        _annotate(axes, starts[-1], y, format_seconds(starts[-1]))
    axes.margins(x=0.12)
    figure.legend(
        [Patch(color=color) for color in colors.values()], names, loc="outside lower center", ncols=4
    )
    caption = "Seconds by phase in the round with the median time, as each side reports them."
    title = f"{workload.title}: phases"
    return [Plot(f"phases-{workload.name}", title, caption, _svg(figure, workload))]


def _curves(results: Results, workload: WorkloadInfo, measured: Sequence[Measurement]) -> Plot:
    """Draw a curve for each system, on logarithmic axes."""
    x_label, x_text, shows, better = _CURVES[workload.axis or ""]
    what, values, text, _ = _BARS[shows]
    points = [(one, value) for one in measured if (value := values(one)) is not None and one.x is not None]
    figure = Figure(figsize=(_WIDTH_IN, 3.6))
    axes = figure.add_subplot()
    styles = {kind: cycle(("-", "--", "-.")) for kind in _COLORS} | {"limit": cycle((":",))}
    for name in dict.fromkeys(one.system for one, _ in points):
        system = results.system(name)
        curve = [(one.x or 0.0, value) for one, value in points if one.system == name]
        below = [value.median - value.q1 for _, value in curve]
        above = [value.q3 - value.median for _, value in curve]
        axes.errorbar(
            [x for x, _ in curve],
            [value.median for _, value in curve],
            yerr=[below, above],
            color=_COLORS[system.kind],
            linestyle=next(styles[system.kind]),
            marker=".",
            label=system.title,
        )
    axes.set(xscale="log", yscale="log", xlabel=x_label, ylabel=what)
    axes.set_xticks(sorted({one.x or 0.0 for one, _ in points}))
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high / low < 300 else (1.0,)))
    for axis, formatted in ((axes.xaxis, x_text), (axes.yaxis, text)):
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda value, _, formatted=formatted: formatted(value)))
    figure.legend(loc="outside right center")
    caption = f"Median {what} by {x_label}, with quartiles, on logarithmic axes. {better}"
    return Plot(f"{what}-{workload.name}", workload.title, caption, _svg(figure, workload))


def _horizontal(labels: Sequence[str], what: str, text: Format, extra_in: float = 0.0) -> tuple[Figure, Axes]:
    """Create a figure for horizontal bars, the first at the top."""
    figure = Figure(figsize=(_WIDTH_IN, 1.0 + _ROW_IN * len(labels) + extra_in))
    axes = figure.add_subplot()
    axes.grid(visible=False, axis="y")
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.set_xlabel(what)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: text(x) if x else "0"))
    return figure, axes


def _annotate(axes: Axes, x: float, y: float, text: str) -> None:
    axes.annotate(text, (x, y), (6, 0), textcoords="offset points", verticalalignment="center")


def _svg(figure: Figure, workload: WorkloadInfo) -> str:
    figure.suptitle(workload.title, fontsize="medium", x=0.01, horizontalalignment="left")
    file = io.StringIO()
    # Without metadata and prolog, the SVG can be part of an HTML page.
    figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg = file.getvalue()
    return re.sub(r"\s*<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
