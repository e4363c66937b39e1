"""Says what happens as it happens, in one line each, so that it reads well in a CI log too."""

from __future__ import annotations

import time

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from torchferry.demo import happenings
from torchferry.demo.happenings import Happening
from torchferry.demo.proof import Verdict
from torchferry.demo.scenario import STEPS, Scenario

_SHOWN_DIFFERENCES = 5


class Show:
    """The demo's voice. Call it with each happening."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._start = time.monotonic()

    def __call__(self, happening: Happening) -> None:
        """Print one happening, with the time since the start."""
        who, what, style = describe(happening)
        elapsed = time.monotonic() - self._start
        self._line(f"[dim]{elapsed:6.2f} s[/dim]  {who:<12} [{style}]{escape(what)}[/{style}]")

    def title(self, scenario: Scenario) -> None:
        """Say what is going to be shown."""
        self._line(
            f"[bold]torchferry demo[/bold]: {scenario.workers} workers train for {STEPS} steps "
            f"over gloo; worker {scenario.victim} is killed in step {scenario.kill_at} "
            f"(seed {scenario.seed})"
        )

    def verdict(self, verdict: Verdict) -> None:
        """Print the digests of all workers' weights, and what the comparison found."""
        table = Table("worker", "weights after the kill", "weights undisturbed", "bit for bit")
        for one in verdict.comparisons:
            same = "[red]DIFFERENT[/red]" if one.differences else "[green]identical[/green]"
            table.add_row(str(one.rank), one.disturbed_digest, one.undisturbed_digest, same)
        self._console.print(table)
        elapsed = time.monotonic() - self._start
        if verdict.identical:
            self._line(
                f"[bold green]PROVED[/bold green] in {elapsed:.1f} s: the final weights are "
                "bit-identical to those of the undisturbed run, and so are AdamW's moments, the "
                f"random state and the step: {verdict.tensors} tensors, "
                f"{_megabytes(verdict.compared_bytes)} on each worker."
            )
            return
        for one in verdict.comparisons:
            for line in one.differences[:_SHOWN_DIFFERENCES]:
                self._line(f"  worker {one.rank}, {escape(line)}")
            if (more := len(one.differences) - _SHOWN_DIFFERENCES) > 0:
                self._line(f"  worker {one.rank}, and {more} more")
        self._line(
            "[bold red]NOT IDENTICAL[/bold red]: the run with the kill ended with another state "
            "than the undisturbed one. This is a bug; please report it with all of the above."
        )

    def failure(self, reason: str) -> None:
        """Say that the demo could not be played to its end."""
        self._line(f"[bold red]The demo failed[/bold red]: {escape(reason)}")

    def interrupted(self) -> None:
        """Say that the user has ended it."""
        self._line("Interrupted; all workers have been stopped.")

    def _line(self, markup: str) -> None:
        # Unwrapped: a log is not as wide as a terminal, and its reader may want to grep.
        self._console.print(markup, soft_wrap=True, highlight=False)


def describe(happening: Happening) -> tuple[str, str, str]:
    """Who did it, what it was, and the style to say it in."""
    match happening:
        case happenings.Starting(workers):
            return "coordinator", f"starts {workers} workers", "default"
        case happenings.Started(rank, pid, replacement):
            what = f"is its replacement, pid {pid}: knows nothing yet" if replacement else f"runs, pid {pid}"
            return _worker(rank), what, "yellow" if replacement else "default"
        case happenings.Training(generation, disturbed):
            return "coordinator", _describe_training(generation, disturbed), "default"
        case happenings.Stepped(step, loss):
            return "all", f"step {step:>2} of {STEPS}, loss {loss:.4f}", "dim"
        case happenings.Killed(rank, pid, step):
            what = f"SIGKILL to worker {rank}, pid {pid}, whose gradients of step {step} are under way"
            return "coordinator", what, "bold red"
        case happenings.Died(rank, signal_name, seconds):
            return (
                _worker(rank),
                f"died of {signal_name}, {_ms(seconds)} after the kill",
                "bold red",
            )
        case happenings.Noticed(rank, step, reason, seconds):
            what = f"all-reduce of step {step} failed {_ms(seconds)} after the kill: {reason}"
            return _worker(rank), what, "yellow"
        case happenings.StillBlocked(ranks, seconds):
            names = ", ".join(map(str, ranks))
            what = f"still blocked {_ms(seconds)} after the kill, called out: workers {names}"
            return "coordinator", what, "yellow"
        case happenings.CaughtUp(rank, source, step, payload_bytes, seconds, replacement):
            what = (
                f"{'healed' if replacement else 'was a step behind; healed'} from worker {source}: "
                f"state of step {step}, {_megabytes(payload_bytes)} in {seconds:.3f} s"
            )
            return _worker(rank), what, "bold green"
        case happenings.Completed(step, loss, disturbed):
            run = "disturbed" if disturbed else "undisturbed"
            return (
                "all",
                f"step {step:>2} of {STEPS}, loss {loss:.4f}: the {run} run is done",
                "default",
            )


def _describe_training(generation: int, disturbed: bool) -> str:
    if not disturbed:
        return f"all start again from the same seed, undisturbed, in group {generation}"
    if generation > 0:
        return f"survivors and replacement form group {generation}"
    return f"training starts in group {generation}"


def _worker(rank: int) -> str:
    return f"worker {rank}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms"


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB"
