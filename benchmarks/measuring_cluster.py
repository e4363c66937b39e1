"""From a cluster to results, and to what is printed of them: each time as a multiple of that of one link."""

from __future__ import annotations

import os

import msgspec
from rich import box
from rich.console import Console
from rich.status import Status
from rich.table import Table

from benchmarks.fanout_works import ONE_LINK, fanout_works
from benchmarks.fleet import run_on
from benchmarks.hosts import cluster
from benchmarks.measuring import make_results
from benchmarks.processes import dismiss_server
from benchmarks.results import Results, Series, find
from benchmarks.run import Began, Event, Measured, Took
from benchmarks.wording import say_seconds
from benchmarks.works import Size

# This command itself, which has just imported torch, and little else.
_IDLE_LOAD = 1.0
_FORCED = {"-direct": ", relays off", "-chain": ", relays on"}
_REPEATS = {Size.SMOKE: 1, Size.SMALL: 3, Size.FULL: 5}


def measure(size: Size, hosts: int, repeats: int | None, command: str, console: Console) -> Results:
    """Build a cluster, measure everything on it, remove it, and return what was found.

    Raises:
        ClusterRefused: no cluster can be built here.
        FleetFailed: the measuring could not be brought to its end.
    """
    progress = _Progress(console)
    busy = _others_load()
    if busy > _IDLE_LOAD:
        console.print(
            f"[yellow]this machine is busy[/yellow], with a load of {busy:.1f}: what needs most of it, "
            "a chain of many hosts, will look slower than it is",
            highlight=False,
        )
    rounds = repeats or _REPEATS[size]
    try:
        with cluster(hosts) as built:
            console.print(f"{hosts} hosts are built, with links of 1 Gbit/s", highlight=False)
            run_on(built, size, rounds, progress)
    finally:
        progress.done()
        dismiss_server()
    works = fanout_works(size, hosts)
    results = make_results(works, progress.series, command=command, size=size, repeats=rounds, left_out=())
    return msgspec.structs.replace(results, machine={**results.machine, "load before": f"{busy:.1f}"})


def _others_load() -> float:
    """How many processes have been running or waiting to run here, over the last minute."""
    return os.getloadavg()[0]


def growth_table(results: Results) -> Table:
    """Each case of fan-out by each system, as a multiple of the time of one link."""
    table = Table(
        "receivers",
        "system",
        title="as a multiple of the time of one link, which is torchferry's to one receiver",
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
    )
    for name in ("median", "× one link", "between"):
        table.add_column(name, justify="right", no_wrap=True)
    one_link = find(results.series, ONE_LINK.case, ONE_LINK.system)
    for series in sorted(results.of("fan-out"), key=lambda one: one.receivers):
        title = results.system_title(series.system).title
        forced = next((said for end, said in _FORCED.items() if series.case.endswith(end)), "")
        table.add_row(str(series.receivers), f"{title}{forced}", *_against(series, one_link))
    return table


def _against(series: Series, one_link: Series | None) -> list[str]:
    spread, base = series.spread(), one_link.spread() if one_link is not None else None
    if spread is None or base is None:
        return [series.problem or "not measured"]
    ratio = spread.over(base)
    return [say_seconds(spread.median), f"{ratio.median:.2f}×", f"{ratio.low:.2f} and {ratio.high:.2f}"]


class _Progress:
    """Collects what is measured, and says meanwhile what is going on: in a log, a line a round."""

    def __init__(self, console: Console) -> None:
        self.series: list[Series] = []
        self._console = console
        self._status: Status | None = None
        self._began = Began("", "")
        self._round = ""

    def __call__(self, event: Event) -> None:
        match event:
            case Began():
                self._began = event
            case Took(system, number, seconds):
                which = f"{self._began.work}, {f'round {number}' if number else 'warm-up'}"
                if self._console.is_terminal:
                    self._show(f"{which}: {self._began.case} by {system} took {say_seconds(seconds)}")
                elif which != self._round:
                    self._console.print(f"measuring {which}", highlight=False)
                self._round = which
            case Measured(series):
                self.series.append(series)

    def done(self) -> None:
        """Leave the line to others."""
        if self._status is not None:
            self._status.stop()

    def _show(self, text: str) -> None:
        if self._status is None:
            self._status = self._console.status(text)
            self._status.start()
        else:
            self._status.update(text)
