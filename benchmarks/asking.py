"""From what a user asks for to what is run, shown and written; and what can't be done, in words."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks import markdown, page
from benchmarks.crew import BenchFailed
from benchmarks.measuring import measure, under_torchrun
from benchmarks.processes import dismiss_server
from benchmarks.results import Results, merge, read_json, write_json
from benchmarks.run import Plan
from benchmarks.systems import SYSTEMS
from benchmarks.table import Progress, print_results
from benchmarks.works import Size, choose, works
from torchferry.errors import BadArgument

_MISUSED, _FAILED = 2, 1


class Refused(Exception):
    """What was asked for can't be done; `exit_code` is 2 if it was asked wrongly."""

    def __init__(self, message: str, exit_code: int = _MISUSED) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True)
class Outputs:
    """The files to write, if any."""

    json: Path | None = None
    report: Path | None = None
    markdown: Path | None = None

    def check(self) -> None:
        """See that they can be written: to learn it after the run would be a waste of it.

        Raises:
            Refused: one of them can't.
        """
        files = [file.absolute() for file in (self.json, self.report, self.markdown) if file is not None]
        if len(set(files)) < len(files):
            raise Refused(f"{files[-1].name} can't be two things at once: give each its own file")
        for file in (self.json, self.report, self.markdown):
            if file is not None and not file.absolute().parent.is_dir():
                raise Refused(f"{file} can't be written: there is no folder {file.parent}")
            if file is not None and file.is_dir():
                raise Refused(f"{file} can't be written: it is a folder")

    def write(self, results: Results) -> list[Path]:
        """Write them all, and return what was written.

        Raises:
            OSError: one can't be written.
        """
        written = []
        if self.json is not None:
            write_json(results, self.json)
            written.append(self.json)
        if self.report is not None:
            self.report.write_text(page.render(results), encoding="utf-8")
            written.append(self.report)
        if self.markdown is not None:
            written += markdown.write(results, self.markdown)
        return written


@dataclass(frozen=True)
class Question:
    """What was asked to be measured; works and systems by name or pattern, all of them if none is given."""

    size: str
    works: tuple[str, ...] = ()
    systems: tuple[str, ...] = ()
    repeats: int | None = None

    def plan(self) -> Plan:
        """Find out what is meant.

        Raises:
            Refused: there is no such work, system or size.
        """
        size = _size(self.size)
        try:
            return Plan(
                size=size,
                works=tuple(choose(self.works, [work.name for work in works(size)], "work")),
                systems=tuple(choose(self.systems, list(SYSTEMS), "system")),
                repeats=self.repeats or size.repeats,
            )
        except BadArgument as error:
            raise Refused(str(error)) from None

    @property
    def command(self) -> str:
        """How to ask it again. Where the results were written to is nobody else's concern.

        >>> Question("small", works=("big-*",), repeats=3).command
        "torchferry bench --size small --work 'big-*' --repeats 3"
        """
        words = ["torchferry", "bench", "--size", self.size]
        words += [word for work in self.works for word in ("--work", work)]
        words += [word for system in self.systems for word in ("--system", system)]
        return shlex.join(words + ([] if self.repeats is None else ["--repeats", str(self.repeats)]))


def read_results(files: Sequence[Path]) -> Results:
    """Read what earlier runs have written, and put them into one.

    Raises:
        Refused: one can't be read, or is something else.
    """
    try:
        return merge(*(read_json(file) for file in files))
    except (OSError, BadArgument) as error:
        raise Refused(str(error)) from None


def measure_and_show(question: Question, console: Console) -> Results | None:
    """Measure, and say meanwhile what is going on; None on a rank that has nothing to show.

    Raises:
        Refused: there is nothing of that name, or the run failed.
    """
    plan = question.plan()
    progress = Progress(console)
    try:
        return measure(plan, question.command, progress)
    except (BenchFailed, RuntimeError) as failure:
        raise Refused(str(failure), _FAILED) from None
    finally:
        progress.done()
        if not under_torchrun():
            dismiss_server()


def show(results: Results, outputs: Outputs, console: Console) -> int:
    """Write and print the results; returns the exit code.

    Raises:
        Refused: there is nothing to show, or a file can't be written.
    """
    if not results.series:
        left_out = "; ".join(results.left_out)
        raise Refused(f"nothing was measured{f': {left_out}' if left_out else ''}", _FAILED)
    # Written first: what took so long is not to be lost because a terminal is.
    try:
        written = outputs.write(results)
    except OSError as error:
        raise Refused(f"the results can't be written: {error}", _FAILED) from None
    print_results(results, console)
    for file in written:
        console.print(f"wrote {file}", highlight=False, soft_wrap=True)
    ferries = {one.name for one in results.systems if one.kind == "ferry"}
    return _FAILED if any(one.failed and one.system in ferries for one in results.series) else 0


def print_choices(console: Console, size: str) -> None:
    """Print what there is to choose from.

    Raises:
        Refused: there is no such size.
    """
    table = Table("work", f"what it is, at size {size}", "processes")
    for work in works(_size(size)):
        table.add_row(work.name, work.title, str(1 + max(case.receivers for case in work.cases)))
    console.print(table)
    systems = Table("system", "what it is", "")
    for system in SYSTEMS.values():
        systems.add_row(system.name, system.title, escape(system.missing() or ""))
    console.print(systems)


def _size(size: str) -> Size:
    try:
        return Size(size)
    except ValueError:
        raise Refused(f"there is no size {size!r}; there are: {', '.join(Size)}") from None
