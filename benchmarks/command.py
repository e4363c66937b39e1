"""`torchferry bench`: its options, what it writes, and its exit code."""

import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

from benchmarks.options import JsonOption, RepeatsOption, ReportOption, SizeOption

_LOG_COLUMNS = 132
_INTERRUPTED = 128 + signal.SIGINT
_TERMINATED = 128 + signal.SIGTERM


def bench(
    work: Annotated[
        list[str] | None,
        typer.Option(help="Only this workload, or those that match, as in 'big-*'. Repeatable."),
    ] = None,
    system: Annotated[
        list[str] | None, typer.Option(help="Only this system, or those that match. Repeatable.")
    ] = None,
    size: SizeOption = "full",
    repeats: RepeatsOption = None,
    json: JsonOption = None,
    report: ReportOption = None,
    markdown: Annotated[
        Path | None, typer.Option(help="Write a document with tables, and its plots beside it.")
    ] = None,
    read: Annotated[
        list[Path] | None,
        typer.Option("--from", help="Measure nothing: show what --json has written. Repeatable."),
    ] = None,
    list_: Annotated[
        bool, typer.Option("--list", metavar="", help="List the workloads and systems, and stop.")
    ] = False,
) -> None:
    """Compare torchferry with what else moves a state, and with what the machine can do.

    Two processes on this machine, or more where a workload has several receivers; under torchrun, the
    ranks that it has started. What arrives is compared with what was sent, bit for bit. The exit code
    is 0 if torchferry did all that was asked of it, whether or not it reached the marks.
    """
    # So that to be terminated, as by a CI job that is cancelled, also means to clean up.
    signal.signal(signal.SIGTERM, _exit_terminated)
    # A log is as wide as it needs to be.
    console = Console() if sys.stdout.isatty() else Console(width=_LOG_COLUMNS)
    # Here, because they import torch, which takes seconds that `--help` need not take.
    from benchmarks import asking

    try:
        if list_:
            asking.print_choices(console, size)
            return
        outputs = asking.Outputs(json=json, report=report, markdown=markdown)
        outputs.check()
        if read and (work or system or repeats):
            raise asking.Refused(
                "--from shows what was measured, and has no use for --work, --system or --repeats"
            )
        if read:
            raise typer.Exit(asking.show(asking.read_results(read), outputs, console))
        question = asking.Question(size, tuple(work or ()), tuple(system or ()), repeats)
        results = asking.measure_and_show(question, console)
        # Under torchrun, one rank shows what all have measured.
        if results is not None:
            raise typer.Exit(asking.show(results, outputs, console))
    except asking.Refused as refusal:
        console.print(
            f"[bold red]Not done[/bold red]: {escape(str(refusal))}", soft_wrap=True, highlight=False
        )
        raise typer.Exit(refusal.exit_code) from None
    except KeyboardInterrupt:
        console.print("Interrupted; all processes have been stopped.")
        raise typer.Exit(_INTERRUPTED) from None


def _exit_terminated(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(_TERMINATED)
