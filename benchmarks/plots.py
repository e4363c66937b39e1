"""The plots of a run, each made of the results and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.results import Results, Series, WorkTitle
from benchmarks.spread import Spread, spread_of
from benchmarks.svg import Drawing, Scale, dot, line, path, rect, round_up, text, ticks
from benchmarks.wording import say_binary, say_bytes, say_rate, say_seconds

_WIDTH = 860.0
_LABELS = 230.0
_VALUES = 100.0
_ROW = 26.0
_BAR = 16.0
_CURVES_HEIGHT = 330.0
# Labels at the ends of curves are not put closer than this to each other.
_APART = 16.0
# How much higher than the highest point a plot of curves goes, and lower than the lowest.
_ROOM = 1.25


@dataclass(frozen=True)
class Plot:
    """A drawing with the words that go with it; `name` is what its file is called."""

    name: str
    title: str
    says: str
    drawing: Drawing


def plots(results: Results) -> list[Plot]:
    """All plots that can be made of what was measured."""
    found: list[Plot] = []
    for work in results.works:
        series = [one for one in results.of(work.name) if one.takes]
        if not series:
            continue
        if work.axis is not None:
            found.append(_growth(results, work, series))
        else:
            found.append(_bars(results, work, series))
            found += _timelines(results, work, series)
    return found


@dataclass(frozen=True)
class _Measure:
    """What the bars of a work show."""

    title: str
    better: str
    values: Callable[[Series], Spread | None]
    say: Callable[[float], str]


def _rates(one: Series) -> Spread:
    spread = _spread(one)
    return Spread(*(_rate(one, seconds) for seconds in (spread.high, spread.median, spread.low)))


def _wire(one: Series) -> Spread | None:
    return spread_of([take.wire_bytes for take in one.takes if take.wire_bytes is not None])


def _memory(one: Series) -> Spread | None:
    return spread_of([take.peak_bytes for take in one.takes if take.peak_bytes is not None])


_MEASURES = {
    "rate": _Measure("rate", "Longer is faster; → is off the scale.", _rates, say_rate),
    "time": _Measure("time", "Shorter is faster.", lambda one: _spread(one), say_seconds),
    "wire": _Measure("bytes on the wire", "Shorter is less.", _wire, say_bytes),
    "memory": _Measure("memory beyond the state", "Shorter is less.", _memory, say_bytes),
}


def _bars(results: Results, work: WorkTitle, series: list[Series]) -> Plot:
    """A bar for each system, with a whisker from quartile to quartile."""
    measure = _MEASURES[work.shows]
    several = len({one.case for one in series}) > 1
    rows = []
    for one in series:
        title, spread = results.system_title(one.system), measure.values(one)
        if spread is not None:
            rows.append((f"{title.title}, {one.case}" if several else title.title, title.kind, spread))
    # What the machine can do may be a thousand times as much; it must not flatten the others.
    drawn = [spread for _, kind, spread in rows if kind != "limit"] or [spread for _, _, spread in rows]
    top = round_up(max((spread.high for spread in drawn), default=1.0))
    scale = Scale(0, top, _LABELS, _WIDTH - _VALUES)
    height = _ROW * len(rows) + 30
    shapes = [
        line(scale(top * part), 0, scale(top * part), height - 22, "grid") for part in (0.25, 0.5, 0.75, 1)
    ]
    for number, (label, kind, spread) in enumerate(rows):
        shapes += _bar(label, kind, spread, scale, number * _ROW + 4, measure.say)
    shapes += [
        text(scale(top * part), height - 6, measure.say(top * part) if part else "0", "tick", "middle")
        for part in (0, 0.5, 1)
    ]
    name = measure.title.replace(" ", "-")
    says = f"{_capital(measure.title)} by system: the median, and from quartile to quartile. {measure.better}"
    drawing = Drawing(_WIDTH, height, tuple(shapes), f"{_capital(measure.title)} by system: {work.title}")
    return Plot(f"{name}-{work.name}", work.title, says, drawing)


def _bar(
    label: str, kind: str, spread: Spread, scale: Scale, y: float, say: Callable[[float], str]
) -> list[str]:
    middle = y + _BAR / 2
    end = scale(min(spread.median, scale.high))
    shapes = [
        text(_LABELS - 10, middle + 4, label, "label", "end"),
        rect(_LABELS, y, end - _LABELS, _BAR, f"fill {kind}", f"{label}: {say(spread.median)}"),
    ]
    if spread.median > scale.high:
        return [*shapes, text(end + 6, middle + 4, f"→ {say(spread.median)}", "value")]
    high = scale(min(spread.high, scale.high))
    return [
        *shapes,
        line(scale(spread.low), middle, high, middle, "whisker"),
        text(max(end, high) + 8, middle + 4, say(spread.median), "value"),
    ]


def _capital(words: str) -> str:
    return words[:1].upper() + words[1:]


def _rate(one: Series, seconds: float) -> float:
    return one.state_bytes * one.receivers / seconds


def _timelines(results: Results, work: WorkTitle, series: list[Series]) -> list[Plot]:
    """Where the time of a transfer goes, phase after phase, on both sides."""
    if work.shows != "rate":
        return []
    lanes = [
        (f"{results.system_title(one.system).title}, {side}", phases)
        for one in series
        for side, phases in _middle(one).items()
    ]
    if not lanes:
        return []
    names = list(dict.fromkeys(name for _, phases in lanes for name in phases))
    longest = max(sum(phases.values()) for _, phases in lanes)
    scale = Scale(0, longest, _LABELS, _WIDTH - _VALUES)
    shapes: list[str] = []
    for number, (label, phases) in enumerate(lanes):
        y = number * _ROW + 4
        shapes.append(text(_LABELS - 10, y + _BAR / 2 + 4, label, "label", "end"))
        at = 0.0
        for name, seconds in phases.items():
            width = scale(at + seconds) - scale(at)
            shapes.append(
                rect(
                    scale(at),
                    y,
                    width,
                    _BAR,
                    f"phase p{names.index(name)}",
                    f"{name}: {say_seconds(seconds)}",
                )
            )
            at += seconds
        shapes.append(text(scale(at) + 8, y + _BAR / 2 + 4, say_seconds(at), "value"))
    y = len(lanes) * _ROW + 12
    for number, name in enumerate(names):
        x = _LABELS + (number % 4) * 155
        below = y + (number // 4) * 20
        shapes += [rect(x, below, 12, 12, f"phase p{number}"), text(x + 18, below + 11, name, "tick")]
    height = y + ((len(names) + 3) // 4) * 20 + 4
    return [
        Plot(
            f"timeline-{work.name}",
            f"{work.title}: a transfer's timeline",
            "Seconds by phase of the take in the middle, as each side reports them, from the common start.",
            Drawing(_WIDTH, height, tuple(shapes), f"Timeline by phase: {work.title}"),
        )
    ]


def _middle(one: Series) -> dict[str, dict[str, float]]:
    """The phases of the take with the median time."""
    ordered = sorted(one.takes, key=lambda take: take.seconds)
    return ordered[len(ordered) // 2].phases_s


def _growth(results: Results, work: WorkTitle, series: list[Series]) -> Plot:
    """A curve for each system, both axes by powers of ten."""
    axis = (
        _AXES[work.axis or ""]
        if work.axis in _AXES
        else _Axis(work.axis or "", "time", _seconds, say_seconds, str)
    )
    curves: dict[str, list[tuple[float, float]]] = {}
    for one in series:
        if one.x is not None:
            curves.setdefault(one.system, []).append((one.x, axis.value(one)))
    xs = sorted({x for curve in curves.values() for x, _ in curve})
    ys = [y for curve in curves.values() for _, y in curve]
    low, high = min(ys) / _ROOM, max(ys) * _ROOM
    marks = ticks(low, high)
    left, right, bottom = 80.0, _WIDTH - 220, _CURVES_HEIGHT - 45
    across = Scale(xs[0], xs[-1], left + 20, right, logarithmic=True)
    up = Scale(low, high, bottom, 14, logarithmic=True)
    shapes = [line(left, up(mark), right, up(mark), "grid") for mark in marks]
    shapes += [text(left - 8, up(mark) + 4, axis.say(mark), "tick", "end") for mark in marks]
    shapes += [text(across(x), bottom + 20, axis.say_x(x), "tick", "middle") for x in _unclutter(xs, across)]
    shapes.append(text((left + right) / 2, _CURVES_HEIGHT - 6, axis.x_title, "tick", "middle"))
    for system, curve in curves.items():
        title = results.system_title(system)
        places = [(across(x), up(y)) for x, y in curve]
        shapes.append(path(places, f"curve {title.kind} {system}"))
        shapes += [
            dot(*place, f"fill {title.kind} {system}", f"{title.title}, {axis.say_x(x)}: {axis.say(y)}")
            for place, (x, y) in zip(places, curve, strict=True)
        ]
    ends = {system: up(curve[-1][1]) for system, curve in curves.items()}
    for system, y in _spaced(ends).items():
        title = results.system_title(system)
        shapes.append(text(right + 12, y + 4, title.title, f"end {title.kind}"))
    return Plot(
        f"growth-{work.name}",
        work.title,
        f"{_capital(axis.title)}, both axes by powers of ten. {axis.better}",
        Drawing(_WIDTH, _CURVES_HEIGHT, tuple(shapes), f"{_capital(axis.title)}: {work.title}"),
    )


@dataclass(frozen=True)
class _Axis:
    """What a curve shows, and how its numbers are said."""

    x_title: str
    title: str
    value: Callable[[Series], float]
    say: Callable[[float], str]
    say_x: Callable[[float], str]
    better: str = "Lower is faster."


def _spread(one: Series) -> Spread:
    spread = one.spread()
    assert spread is not None, "only what was taken is drawn"
    return spread


def _seconds(one: Series) -> float:
    return _spread(one).median


def _bytes_per_second(one: Series) -> float:
    return _rate(one, _seconds(one))


def _count(number: float) -> str:
    return f"{number:,.0f}"


_AXES = {
    "tensors": _Axis("number of tensors", "time by number of tensors", _seconds, say_seconds, _count),
    "receivers": _Axis("number of receivers", "time by number of receivers", _seconds, say_seconds, _count),
    "bytes": _Axis(
        "size of each tensor",
        "rate by tensor size",
        _bytes_per_second,
        say_rate,
        say_binary,
        "Higher is faster.",
    ),
}


def _unclutter(xs: list[float], across: Scale) -> list[float]:
    """Those of the numbers on an axis that have room for their words; the first and the last always."""
    kept = xs[:1]
    for x in xs[1:-1]:
        if across(x) - across(kept[-1]) >= 60 <= across(xs[-1]) - across(x):
            kept.append(x)
    return [*kept, *xs[-1:]] if len(xs) > 1 else kept


def _spaced(ends: dict[str, float]) -> dict[str, float]:
    """Where to put labels that want to be at these heights, so that none covers another.

    >>> _spaced({"a": 10.0, "b": 12.0, "c": 90.0})
    {'a': 10.0, 'b': 26.0, 'c': 90.0}
    """
    ordered = sorted(ends, key=lambda name: ends[name])
    places = {name: ends[name] for name in ordered}
    for above, below in pairwise(ordered):
        places[below] = max(places[below], places[above] + _APART)
    return places
