"""Which processes this test session started, however far removed, and which of them still live.

Read from /proc; where there is none, nobody is found. A process counts as ours if it descends from
this one, or if its environment has the mark that this session put into its own: that is how one is
found whose parent is gone.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

MARK = "TORCHFERRY_TEST_SESSION"
PROC = Path("/proc")
# multiprocessing keeps one such process for as long as the interpreter lives, and ends it itself.
EXPECTED = "multiprocessing.resource_tracker"


def without_gloo(lines: Iterable[str]) -> Iterator[str]:
    """Skip the lines that gloo prints in torch 2.9: they go to stdout, among a program's own."""
    return (line for line in lines if not line.startswith("[Gloo]"))


@dataclass(frozen=True)
class Process:
    """A living process, as /proc has it."""

    pid: int
    parent: int
    command: str
    environment: str


def mark_session() -> str:
    """Puts a mark into the environment, for every process started from now on to inherit."""
    mark = uuid.uuid4().hex
    os.environ[MARK] = mark
    return mark


def left_behind(mark: str, *, patience_s: float = 5.0) -> list[Process]:
    """The processes of this session that live on, once they have had some time to leave."""
    deadline = time.monotonic() + patience_s
    while (found := ours(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def ours(mark: str) -> list[Process]:
    """All living processes of this session but this one."""
    everyone = [p for p in map(_read, PROC.glob("[0-9]*")) if p is not None]
    family = {os.getpid()}
    while children := {p.pid for p in everyone if p.parent in family} - family:
        family |= children
    return [
        p
        for p in everyone
        if (p.pid in family or f"{MARK}={mark}" in p.environment)
        and p.pid != os.getpid()
        and EXPECTED not in p.command
    ]


def _read(folder: Path) -> Process | None:
    """Nothing for a process that has ended, reaped or not, or that is not ours to look at."""
    try:
        # The name, in parentheses, may hold anything; what follows it is regular.
        state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
        command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        environment = (folder / "environ").read_bytes().decode(errors="replace")
    except OSError:
        return None
    if state == "Z":
        return None
    return Process(int(folder.name), int(parent), command.strip(), environment)
