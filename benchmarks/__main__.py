"""`python -m benchmarks` and `python -m benchmarks cluster`: options, output files and exit codes."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

from benchmarks.hosts import ClusterError
from benchmarks.measure import measure
from benchmarks.results import BenchmarkError, Results, merge, read_json, write_json
from benchmarks.run import Event, Plan, Skipped, Started
from benchmarks.systems import SYSTEMS
from benchmarks.tables import Table, print_results, print_table
from benchmarks.workloads import MAX_HOSTS, Size, choose, cluster_workloads, workloads

_LOG_COLUMNS = 132
# This command, which has just imported torch, and little else.
_IDLE_LOAD = 1.0

WorkOption = Annotated[
    list[str] | None, typer.Option(help="Run only workloads that match, such as 'big-*'. Repeatable.")
]
SystemOption = Annotated[
    list[str] | None, typer.Option(help="Run only systems that match, such as 'torch*'. Repeatable.")
]
SizeOption = Annotated[Size, typer.Option(help="The size of the states. Targets apply to full.")]
RepeatsOption = Annotated[
    int | None, typer.Option(min=1, max=1000, help="The number of rounds after the warm-up.")
]
JsonOption = Annotated[Path | None, typer.Option(help="Write the results to this file.")]
ReportOption = Annotated[Path | None, typer.Option(help="Write one HTML page with tables and plots.")]


def local(
    work: WorkOption = None,
    system: SystemOption = None,
    size: SizeOption = Size.FULL,
    repeats: RepeatsOption = None,
    json: JsonOption = None,
    report: ReportOption = None,
    markdown: Annotated[
        Path | None, typer.Option(help="Write a Markdown file, and plots into a folder of the same name.")
    ] = None,
    read: Annotated[
        list[Path] | None,
        typer.Option("--from", help="Measure nothing: show a file that --json wrote. Repeatable."),
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="List the workloads and systems, and exit.")] = False,
) -> None:
    """Compare torchferry with other ways to move a state, and with the limits of the machine.

    Runs two processes on this machine, or more where a workload has several receivers. Under torchrun, it
    uses torchrun's ranks. Each received state is compared with the sent state bit for bit. The exit code is 0
    if torchferry delivered every state, whether or not it met the targets.

    `python -m benchmarks cluster` measures several hosts.
    """
    with _errors_printed() as console:
        if list_:
            rows = [[one.name, one.title, str(one.ranks)] for one in workloads(size)]
            print_table("workloads", Table(("workload", "title", "processes"), rows), console)
            rows = [[one.name, one.title, one.missing() or "yes"] for one in SYSTEMS.values()]
            print_table("systems", Table(("system", "title", "available"), rows), console)
            return
        _check_files(json, report, markdown)
        if read and (work or system or repeats):
            raise BenchmarkError("--from can't be combined with --work, --system or --repeats")
        if read:
            results: Results | None = merge(*(read_json(file) for file in read))
        else:
            plan = Plan(
                size=size,
                workloads=choose(work or (), [one.name for one in workloads(size)], "workload"),
                systems=choose(system or (), list(SYSTEMS), "system"),
                repeats=repeats or size.repeats,
            )
            command = _command_line("--size", size, work=work, system=system, repeats=repeats)
            results = _measure(plan, command, console)
        # Under torchrun, only one rank has the results.
        if results is not None:
            _show(results, console, json, report, markdown)


def cluster(
    work: WorkOption = None,
    system: SystemOption = None,
    size: SizeOption = Size.FULL,
    repeats: RepeatsOption = None,
    hosts: Annotated[
        int, typer.Option(min=2, max=MAX_HOSTS, help="The number of hosts. Targets apply to 7.")
    ] = MAX_HOSTS,
    json: JsonOption = None,
    report: ReportOption = None,
) -> None:
    """Measure on a cluster: several receivers, several sources, and receivers that fail.

    Builds hosts with links of 1 Gbit/s from network namespaces on this machine, and removes them afterwards.
    Needs Linux, root and iproute2; the exit code is 2 if one of them is missing, and 0 if torchferry
    delivered every state, whether or not it met the targets.
    """
    with _errors_printed() as console:
        _check_files(json, report)
        if (load := os.getloadavg()[0]) > _IDLE_LOAD:
            console.print(
                f"[yellow]this machine is busy[/yellow]: its load is {load:.1f}. "
                "Transfers to many hosts need most of its cores, and will be slower than on an idle machine.",
                highlight=False,
            )
        plan = Plan(
            size=size,
            workloads=choose(work or (), [one.name for one in cluster_workloads(size, hosts)], "workload"),
            systems=choose(system or (), list(SYSTEMS), "system"),
            repeats=repeats or size.cluster_repeats,
            hosts=hosts,
        )
        words = ("cluster", "--size", size, "--hosts", str(hosts))
        command = _command_line(*words, work=work, system=system, repeats=repeats)
        results = _measure(plan, command, console)
        assert results is not None, "only torchrun has ranks without results"
        _show(results, console, json, report)


@contextlib.contextmanager
def _errors_printed() -> Iterator[Console]:
    """Print errors and exit with their code. SIGTERM and SIGHUP exit too, so that `finally` blocks run."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    console = Console() if sys.stdout.isatty() else Console(width=_LOG_COLUMNS)
    try:
        yield console
        return
    except BenchmarkError as error:
        message, code = str(error), error.exit_code
    except ClusterError as refusal:
        message, code = f"no cluster can be built here: {refusal}", 2
    except KeyboardInterrupt:
        message, code = "interrupted; all processes have been stopped", 128 + signal.SIGINT
    console.print(f"[bold red]Error[/bold red]: {escape(message)}", soft_wrap=True, highlight=False)
    raise typer.Exit(code)


def _command_line(
    *words: str, work: Sequence[str] | None, system: Sequence[str] | None, repeats: int | None
) -> str:
    """Return the command that measures the same, without the files that it wrote.

    >>> _command_line("--size", "small", work=["big-*"], system=None, repeats=3)
    "python -m benchmarks --size small --work 'big-*' --repeats 3"
    """
    given = [word for one in work or () for word in ("--work", one)]
    given += [word for one in system or () for word in ("--system", one)]
    given += [] if repeats is None else ["--repeats", str(repeats)]
    return shlex.join(["python", "-m", "benchmarks", *words, *given])


def _check_files(*files: Path | None) -> None:
    """Check, before the run, that the files can be written."""
    given = [file for file in files if file is not None]
    if len({file.absolute() for file in given}) < len(given):
        raise BenchmarkError(f"{given[-1].name} is given for two outputs")
    for file in given:
        if not file.absolute().parent.is_dir():
            raise BenchmarkError(f"can't write {file}: there is no folder {file.parent}")
        if file.is_dir():
            raise BenchmarkError(f"can't write {file}: it is a folder")


def _measure(plan: Plan, command: str, console: Console) -> Results | None:
    def show_progress(event: Event) -> None:
        match event:
            case Started(name):
                console.print(f"measuring {name}", highlight=False)
            case Skipped(reason):
                console.print(f"[yellow]skipped[/yellow]: {escape(reason)}", highlight=False)

    try:
        return measure(plan, command, show_progress)
    except RuntimeError as error:
        raise BenchmarkError(str(error), 1) from None


def _show(
    results: Results,
    console: Console,
    json: Path | None = None,
    report: Path | None = None,
    markdown: Path | None = None,
) -> NoReturn:
    """Write and print the results.

    Raises:
        BenchmarkError: there are no results, or a file can't be written.
        typer.Exit: otherwise; the code is 1 if torchferry failed in a case.
    """
    if not results.measurements:
        raise BenchmarkError(f"nothing was measured: {'; '.join(results.skipped)}", 1)
    written = [file for file in (json, report) if file is not None]
    try:
        if json is not None:
            write_json(results, json)
        if report is not None or markdown is not None:
            # Not at the top: it imports matplotlib, which most runs do not need.
            from benchmarks.document import to_html, write_markdown
            from benchmarks.plots import make_plots

            plots = make_plots(results)
            if report is not None:
                report.write_text(to_html(results, plots), encoding="utf-8")
            if markdown is not None:
                written += write_markdown(results, plots, markdown)
    except OSError as error:
        raise BenchmarkError(f"can't write the results: {error}", 1) from None
    print_results(results, console)
    for file in written:
        console.print(f"wrote {file}", highlight=False, soft_wrap=True)
    ours = {one.name for one in results.systems if one.kind == "torchferry"}
    raise typer.Exit(any(one.failed and one.system in ours for one in results.measurements))


def build_app(*, for_cluster: bool) -> typer.Typer:
    """Build the command line of one of the two commands."""
    # typer's own help, which it formats with rich, shows `<bool>` after a flag.
    app = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False, rich_markup_mode=None)
    app.command()(cluster if for_cluster else local)
    return app


def main() -> None:
    """Run the command line.

    Raises:
        SystemExit: always, with the exit code.
    """
    if sys.argv[1:2] == ["cluster"]:
        build_app(for_cluster=True)(sys.argv[2:], prog_name="python -m benchmarks cluster")
    build_app(for_cluster=False)(prog_name="python -m benchmarks")


if __name__ == "__main__":
    main()
