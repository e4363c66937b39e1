"""Runs `torchferry demo` as a user would, in its own process, and finds what it leaves behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from tests.support import processes

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
_MARK = "TORCHFERRY_DEMO_UNDER_TEST"


class Run:
    """A demo that is running, or has run. Its output is read line by line."""

    def __init__(self, process: subprocess.Popen[str], mark: str, temporary: Path) -> None:
        self.process = process
        self.output = ""
        self._mark = mark
        self._temporary = temporary

    def read_until(self, text: str) -> None:
        """Read on until a line has this text in it."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output += line
            if text in line:
                return
        raise AssertionError(f"it ended without saying {text!r}:\n{self.output}")

    def finish(self) -> int:
        """Read the rest, and return the exit code."""
        assert self.process.stdout is not None
        self.output += self.process.stdout.read()
        return self.process.wait()

    def living(self, patience_s: float = 5.0) -> list[processes.Process]:
        """Those of its processes that still live, once they have had time to leave."""
        end = time.monotonic() + patience_s
        while (found := self._processes()) and time.monotonic() < end:
            time.sleep(0.05)
        return found

    def files(self) -> list[Path]:
        """What it left in its folder for temporary files, but for the cache that torch makes there."""
        return [p for p in self._temporary.iterdir() if not _is_torchs(p)]

    def _processes(self) -> list[processes.Process]:
        everyone = processes.ours(os.environ[processes.MARK])
        return [process for process in everyone if self._mark in process.environment]


@contextlib.contextmanager
def running(*options: str, deadline_s: float = 90.0) -> Iterator[Run]:
    """`torchferry demo` with these options; all of it is gone when the block is left."""
    mark = uuid.uuid4().hex
    # A short path, because a socket lies in it.
    with tempfile.TemporaryDirectory(prefix="tf") as temporary:
        process = subprocess.Popen(
            [sys.executable, "-m", "torchferry", "demo", *options],
            env={**ENVIRONMENT, _MARK: mark, "TMPDIR": temporary},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # A group of its own, for a Ctrl-C that goes to all of it and not to the tests.
            start_new_session=True,
        )
        run = Run(process, mark, Path(temporary))
        try:
            with _ended_after(deadline_s, run):
                yield run
        finally:
            process.kill()
            process.wait()
            for stray in run.living():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(stray.pid, signal.SIGKILL)
            assert process.stdout is not None
            process.stdout.close()


@contextlib.contextmanager
def _ended_after(seconds: float, run: Run) -> Iterator[None]:
    """Kill the run if it takes longer: whoever reads its output then sees the end of it."""
    timer = threading.Timer(seconds, run.process.kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def _is_torchs(path: Path) -> bool:
    """Whether torch left it: its caches, and what torch 2.9 writes at import and removes at exit."""
    if path.name.startswith("torchinductor_"):
        return True
    return path.is_dir() and all(p.name.startswith(("_remote_module", "__pycache__")) for p in path.iterdir())
