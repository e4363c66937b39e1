"""`torchferry demo`: its options and its exit code."""

import os
import signal
import sys
from types import FrameType
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from torchferry.demo.scenario import MOST_WORKERS, STEPS, Scenario
from torchferry.demo.show import Show

_INTERRUPTED = 128 + signal.SIGINT
_TERMINATED = 128 + signal.SIGTERM


def demo(
    workers: Annotated[int, typer.Option(min=2, max=MOST_WORKERS, help="How many workers train.")] = 4,
    kill_at: Annotated[
        int,
        typer.Option(min=1, max=STEPS - 1, help=f"In which of the {STEPS} steps a worker is killed."),
    ] = 25,
    seed: Annotated[
        int,
        typer.Option(min=0, max=2**32 - 1, help="Decides the weights, the data, and who is killed."),
    ] = 0,
) -> None:
    """Kill a worker in mid-training, and show that the result is the same to the last bit.

    Workers train a small model together. One gets SIGKILL; a replacement takes its place and gets
    model, optimizer, random state and step from a living peer. At the end the weights are compared
    with those of a run that nothing disturbed. The exit code is 0 only if they are identical.
    """
    # So that to be terminated, as by a CI job that is cancelled, also means to clean up.
    signal.signal(signal.SIGTERM, _exit_terminated)
    show = Show(Console())
    if os.name != "posix":
        show.failure("it needs SIGKILL, which this system does not have")
        raise typer.Exit(1)
    raise typer.Exit(perform(Scenario(workers, kill_at, seed), show))


def perform(scenario: Scenario, show: Show) -> int:
    """Play the scenario, show it, and return the exit code."""
    # Here, because they import torch, which takes seconds that `--help` need not take.
    from torchferry.demo.coordinator import DemoFailed, play
    from torchferry.local import dismiss_server

    show.title(scenario)
    try:
        verdict = play(scenario, show)
    except DemoFailed as failure:
        show.failure(str(failure))
        return 1
    except KeyboardInterrupt:
        show.interrupted()
        return _INTERRUPTED
    finally:
        dismiss_server()
    show.verdict(verdict)
    return 0 if verdict.identical else 1


def _exit_terminated(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(_TERMINATED)
