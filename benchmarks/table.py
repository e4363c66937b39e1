"""The results in the terminal: what is going on while it runs, and the tables at the end."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.status import Status
from rich.table import Table

from benchmarks.results import Judgement, Results, Series, find
from benchmarks.run import Began, Event, LeftOut, Measured, Took
from benchmarks.wording import COLUMNS, say_ratio, say_seconds, say_series, say_wanted
from benchmarks.works import TORCH

_LEGEND = (
    "median: from the common start to the end of the last side. spread: between the quartiles, as a part "
    f"of it. rate: to all receivers together. to {TORCH}: times as fast; within noise if quartiles overlap."
)


class Progress:
    """Says what is being measured; call it with each event. One line a case where there is no terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status: Status | None = None
        self._case = ""

    def __call__(self, event: Event) -> None:
        match event:
            case Began(_, case):
                self._case = case
                self._say(f"measuring {case}", last=True)
            case Took(system, number, seconds):
                which = f"take {number}" if number else "warm-up"
                self._say(f"measuring {self._case}: {system}, {which}, {say_seconds(seconds)}", last=False)
            case LeftOut(reason):
                self._console.print(f"[yellow]left out[/yellow]: {escape(reason)}", highlight=False)
            case Measured():
                pass

    def done(self) -> None:
        """Leave the line to others."""
        if self._status is not None:
            self._status.stop()

    def _say(self, text: str, *, last: bool) -> None:
        if not self._console.is_terminal:
            if last:
                self._console.print(text, highlight=False)
        elif self._status is None:
            self._status = self._console.status(escape(text))
            self._status.start()
        else:
            self._status.update(escape(text))


def print_results(results: Results, console: Console) -> None:
    """Print a table for each work, and one of the marks."""
    for work in results.works:
        series = results.of(work.name)
        if series:
            console.print(_work_table(work.title, series))
    console.print(_LEGEND, highlight=False)
    if results.judgements:
        console.print(marks_table(results.judgements))
        if results.size != "full":
            console.print(f"The marks are for --size full; this was {results.size}.", highlight=False)


def marks_table(judgements: tuple[Judgement, ...]) -> Table:
    """What must be reached, what was, and whether that is enough."""
    table = _table("the marks", "work", "must reach", "measured", "verdict")
    for one in judgements:
        style = "yellow" if one.doubtful else "green" if one.reached else "red"
        verdict = one.verdict if one.problem is None else f"{one.verdict}: {one.problem}"
        table.add_row(
            escape(one.title), say_wanted(one), say_ratio(one), f"[{style}]{escape(verdict)}[/{style}]"
        )
    return table


def _work_table(title: str, series: list[Series]) -> Table:
    table = _table(title)
    several = len({one.case for one in series}) > 1
    if several:
        table.add_column("case", no_wrap=True)
    table.add_column("system", no_wrap=True)
    for name in COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column(f"to {TORCH}")
    for one, following in zip(series, [*series[1:], None], strict=True):
        row = _row(one, find(series, one.case, TORCH))
        ends = following is not None and following.case != one.case
        table.add_row(*([one.case] if several else []), *row, end_section=ends)
    return table


def _row(one: Series, baseline: Series | None) -> list[str]:
    if cells := say_series(one, baseline):
        return [one.system, *cells]
    style = "red" if one.failed else "dim"
    return [one.system, *[""] * len(COLUMNS), f"[{style}]{escape(one.problem or 'not measured')}[/{style}]"]


def _table(title: str, *headers: str) -> Table:
    return Table(*headers, title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
