"""`torchferry bench-cluster`: its options, what it prints, and its exit code."""

import os
import shlex
import signal
import sys
from types import FrameType
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

from benchmarks.options import JsonOption, RepeatsOption, ReportOption, SizeOption

_LOG_COLUMNS = 132
_FAILED, _REFUSED = 1, 2
_INTERRUPTED = 128 + signal.SIGINT
_MOST_HOSTS = 7


def bench_cluster(
    size: SizeOption = "full",
    repeats: RepeatsOption = None,
    hosts: Annotated[
        int, typer.Option(min=2, max=_MOST_HOSTS, help="How many hosts. The marks are for 7.")
    ] = _MOST_HOSTS,
    json: JsonOption = None,
    report: ReportOption = None,
) -> None:
    """Measure on a cluster how the time grows with the number of receivers.

    Builds hosts with links of 1 Gbit/s out of network namespaces on this machine, and removes them
    again whatever happens. That takes Linux, root, and iproute2; where something is lacking, it says
    so, with exit code 2. Otherwise the exit code is 0 if torchferry did all that was asked of it,
    whether or not it reached the marks.
    """
    # So that to be terminated, or to lose the terminal, also means to clean up.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _exit_by_signal)
    # c10d warns of every address that has no name, and on this cluster none has one.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # A log is as wide as it needs to be.
    console = Console() if sys.stdout.isatty() else Console(width=_LOG_COLUMNS)
    # Here, because it imports torch, which takes seconds that `--help` need not take.
    from benchmarks import asking, measuring_cluster
    from benchmarks.fleet import FleetFailed
    from benchmarks.hosts import ClusterRefused
    from benchmarks.works import Size

    if size not in list(Size):
        _stop(console, f"there is no size {size!r}; there are: {', '.join(Size)}", _REFUSED)
    outputs = asking.Outputs(json=json, report=report)
    try:
        outputs.check()
        command = _command(size, hosts, repeats)
        results = measuring_cluster.measure(Size(size), hosts, repeats, command, console)
        console.print(measuring_cluster.growth_table(results))
        exit_code = asking.show(results, outputs, console)
    except asking.Refused as refusal:
        _stop(console, str(refusal), refusal.exit_code)
    except ClusterRefused as refusal:
        _stop(console, f"no cluster can be built here: {refusal}", _REFUSED)
    except FleetFailed as failure:
        _stop(console, f"{failure}\nThe cluster has been removed.", _FAILED)
    except KeyboardInterrupt:
        _stop(console, "interrupted. The cluster has been removed.", _INTERRUPTED)
    raise typer.Exit(exit_code)


def _stop(console: Console, message: str, exit_code: int) -> NoReturn:
    console.print(f"[bold red]Not done[/bold red]: {escape(message)}", soft_wrap=True, highlight=False)
    raise typer.Exit(exit_code)


def _command(size: str, hosts: int, repeats: int | None) -> str:
    """How to ask it again. Where the results were written to is nobody else's concern.

    >>> _command("small", 7, 3)
    'torchferry bench-cluster --size small --hosts 7 --repeats 3'
    """
    words = ["torchferry", "bench-cluster", "--size", size, "--hosts", str(hosts)]
    return shlex.join(words + ([] if repeats is None else ["--repeats", str(repeats)]))


def _exit_by_signal(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)
