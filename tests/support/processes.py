"""The processes that this test session started, directly or not, and that are still alive.

They are read from /proc; without /proc, none is found. A process belongs to the session if it descends from
this one, or if its environment has the session's tag, which orphans keep. A process that changed its
environment after it was orphaned is not found.
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
# multiprocessing keeps one such process until the interpreter ends, and ends it itself.
EXPECTED = "multiprocessing.resource_tracker"


def without_gloo(lines: Iterable[str]) -> Iterator[str]:
    """Skip the lines that gloo prints to stdout in torch 2.9."""
    return (line for line in lines if not line.startswith("[Gloo]"))


@dataclass(frozen=True)
class Process:
    """A running process as read from /proc."""

    pid: int
    parent: int
    command: str
    environment: str


def tag_session() -> str:
    """Put a tag into the environment, which every process started from now on inherits."""
    tag = uuid.uuid4().hex
    os.environ[MARK] = tag
    return tag


def left_behind(tag: str, *, patience_s: float = 5.0) -> list[Process]:
    """Return the processes of this session that are still alive after `patience_s`."""
    deadline = time.monotonic() + patience_s
    while (found := ours(tag)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def ours(tag: str) -> list[Process]:
    """Return all running processes of this session except this one."""
    running = [p for p in map(_read, PROC.glob("[0-9]*")) if p is not None]
    family = {os.getpid()}
    while children := {p.pid for p in running if p.parent in family} - family:
        family |= children
    return [
        p
        for p in running
        if (p.pid in family or f"{MARK}={tag}" in p.environment)
        and p.pid != os.getpid()
        and EXPECTED not in p.command
    ]


def _read(folder: Path) -> Process | None:
    """Return a process, or None if it has ended or can't be read."""
    try:
        # The name in parentheses may have any characters; the fields after it are separated by spaces.
        state, parent = (folder / "stat").read_bytes().rpartition(b")")[2].split()[:2]
        command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        environment = (folder / "environ").read_bytes().decode(errors="replace")
    except OSError:
        return None
    if state == b"Z":
        return None
    return Process(int(folder.name), int(parent), command.strip(), environment)
