"""Run an example by its real command, and find the processes and files that it leaves behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

from tests.support import processes

ROOT = Path(__file__).parents[2]
_MARK = "TORCHFERRY_EXAMPLE_UNDER_TEST"


class Run:
    """An example that runs in a process group of its own. `output` is what it has printed so far."""

    def __init__(self, process: subprocess.Popen[str], mark: str, temporary: Path) -> None:
        self.process = process
        self.output = ""
        self._mark = mark
        self._temporary = temporary

    def read_until(self, text: str) -> None:
        """Read lines up to the first one that contains `text`."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output += line
            if text in line:
                return
        raise AssertionError(f"the example ended without printing {text!r}:\n{self.output}")

    def finish(self) -> int:
        """Read the rest of the output, and return the exit code."""
        assert self.process.stdout is not None
        self.output += self.process.stdout.read()
        return self.process.wait()

    def processes(self) -> list[processes.Process]:
        """All living processes of this run."""
        session = processes.ours(os.environ[processes.MARK])
        return [process for process in session if self._mark in process.environment]

    def left_behind(self) -> list[object]:
        """The processes that still live and the files that still exist after the run."""
        files = [path for path in self._temporary.iterdir() if not _is_written_by_torch(path)]
        return [*self.processes(), *files]


@contextlib.contextmanager
def running(example: str, *options: str, deadline_s: float = 60.0) -> Iterator[Run]:
    """Run `examples/<example>` with these options. After the block, all its processes have ended."""
    mark = uuid.uuid4().hex
    with tempfile.TemporaryDirectory() as temporary:
        process = subprocess.Popen(
            [sys.executable, ROOT / "examples" / example, *options],
            env={**os.environ, "PYTHONPATH": str(ROOT / "src"), _MARK: mark, "TMPDIR": temporary},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # A session of its own: a Ctrl-C for the example does not reach the tests.
            start_new_session=True,
        )
        run = Run(process, mark, Path(temporary))
        # The whole process group: a worker that outlives the coordinator holds stdout open.
        timer = threading.Timer(deadline_s, os.killpg, (process.pid, signal.SIGKILL))
        timer.start()
        try:
            yield run
        finally:
            timer.cancel()
            timer.join()
            process.kill()
            process.wait()
            for stray in run.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(stray.pid, signal.SIGKILL)
            assert process.stdout is not None
            process.stdout.close()


def _is_written_by_torch(path: Path) -> bool:
    """Whether torch wrote this path: a cache, or a folder that torch 2.9 writes at import."""
    if path.name.startswith("torchinductor_"):
        return True
    return path.is_dir() and all(p.name.startswith(("_remote_module", "__pycache__")) for p in path.iterdir())
