"""Processes without a process group, for tests of serve and fetch.

    def add_one(amount: int) -> int:
        return amount + 1

    def test_a_process_answers(solos: Solos) -> None:
        assert solos.get("receiver").run(add_one, 1) == 2

A process runs a function of a module with plain arguments, and persists from test to test. One that died is
replaced when it is next asked for. SIGTERM ends it through `sys.exit(7)`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import resource
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing import connection
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn, Self, TypeVar

import torch

from tests.support.worker import (
    SHOW_STACKS,
    STOP,
    Answer,
    Call,
    answer_to,
    exit_when_the_parent_dies,
    run_call,
)

T = TypeVar("T")

EXIT_CODE = 7
TIMEOUT_S = 60.0


class SoloError(Exception):
    """A process raised something, died, or did not answer."""


class Solo:
    """One process that runs functions. A call that is not answered within `TIMEOUT_S` is an error."""

    def __init__(self, name: str, scratch: Path) -> None:
        self.name = name
        context = multiprocessing.get_context("forkserver")
        self._conn, other_end = context.Pipe()
        self._stacks_file = scratch / f"{name}-{time.monotonic_ns()}.txt"
        self._process = context.Process(
            target=main, name=name, args=(self._stacks_file, other_end), daemon=True
        )
        self._process.start()
        # With this copy closed, the death of the process closes the pipe.
        other_end.close()
        assert self._process.pid is not None
        self.pid = self._process.pid
        self.is_busy = False  # whether a call has not been answered

    @property
    def alive(self) -> bool:
        """Whether the process has not ended."""
        return self._process.is_alive()

    @property
    def exitcode(self) -> int | None:
        """The exit code of a process that has ended, negative for a signal."""
        return self._process.exitcode

    def start(self, fn: Callable[..., Any], *args: Any) -> None:
        """Call a function. `answer` returns its value."""
        self.is_busy = True
        self._conn.send_bytes(pickle.dumps(Call(list(sys.path), pickle.dumps((fn, args)))))

    def answer(self, timeout_s: float = TIMEOUT_S) -> Any:
        """Return the value of the last call; raises SoloError."""
        if not self._conn.poll(timeout_s):
            raise SoloError(f"{self.name} did not answer within {timeout_s:g} s:\n{self.stacks()}")
        try:
            answer = pickle.loads(self._conn.recv_bytes())
        except (EOFError, OSError):
            raise SoloError(f"{self.name} died") from None
        self.is_busy = False
        assert isinstance(answer, Answer)
        if answer.failure is not None:
            raise SoloError(f"{self.name} raised:\n{answer.failure.traceback_text}")
        return answer.value

    def run(self, fn: Callable[..., T], *args: Any) -> T:
        """Call a function and return its value; raises SoloError."""
        self.start(fn, *args)
        value: T = self.answer()
        return value

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        os.kill(self.pid, number)

    def join(self, timeout_s: float = 5.0) -> None:
        """Wait until the process has ended."""
        self._process.join(timeout_s)
        assert not self.alive, f"{self.name} has not ended after {timeout_s:g} s:\n{self.stacks()}"

    def limit_memory(self, headroom_bytes: int | None) -> None:
        """Let allocations beyond so many bytes fail; None removes the limit."""
        soft = resource.RLIM_INFINITY
        if headroom_bytes is not None:
            pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[0])
            soft = pages * resource.getpagesize() + headroom_bytes
        resource.prlimit(self.pid, resource.RLIMIT_AS, (soft, resource.RLIM_INFINITY))

    def stacks(self) -> str:
        """Return the Python stack of each thread of the process."""
        before = self._stacks_file.read_text() if self._stacks_file.exists() else ""
        if self.alive:
            self.signal(SHOW_STACKS)
        limit_s = time.monotonic() + 0.5
        while time.monotonic() < limit_s:
            if self._stacks_file.exists() and (shown := self._stacks_file.read_text()[len(before) :]):
                return shown
            time.sleep(0.01)
        return "(the process wrote no stacks)"

    def close(self) -> None:
        """End the process."""
        if self.alive:
            self.signal(signal.SIGCONT)
            with contextlib.suppress(OSError):
                self._conn.send_bytes(STOP)
            self._process.join(2.0)
        if self.alive:
            self.signal(signal.SIGKILL)
            self._process.join(5.0)
        self._conn.close()


class Solos:
    """The processes of a test session, by name."""

    def __init__(self) -> None:
        self._scratch = tempfile.TemporaryDirectory(prefix="torchferry-solos-")
        self._solos: dict[str, Solo] = {}

    def get(self, name: str) -> Solo:
        """Return the process of this name; start it if there is none, or if it died."""
        found = self._solos.get(name)
        if found is None or not found.alive:
            if found is not None:
                found.close()
            self._solos[name] = found = Solo(name, Path(self._scratch.name))
        return found

    def discard(self, name: str) -> None:
        """End a process that can't be used any more."""
        if name in self._solos:
            self._solos.pop(name).close()

    def discard_busy(self) -> None:
        """End the processes that have not answered a call."""
        for name in [name for name, solo in self._solos.items() if solo.is_busy]:
            self.discard(name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for solo in self._solos.values():
            solo.close()
        self._scratch.cleanup()


def main(stacks_file: Path, conn: connection.Connection) -> None:
    """Answer calls until the parent sends STOP, closes the pipe or dies."""
    # Ctrl-C reaches the whole process group. The parent handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _exit)
    threading.Thread(target=exit_when_the_parent_dies, daemon=True).start()
    torch.set_num_threads(1)
    with stacks_file.open("a") as stacks:
        faulthandler.register(SHOW_STACKS, file=stacks, all_threads=True)
        with contextlib.suppress(EOFError, OSError):
            while (request := conn.recv_bytes()) != STOP:
                conn.send_bytes(_answer(request))
    # A normal exit would take a second.
    os._exit(0)


def _answer(request: bytes) -> bytes:
    """Answer a call. SystemExit ends the process."""
    exits: list[SystemExit] = []

    def run() -> Any:
        try:
            return run_call(request)
        except SystemExit as error:
            exits.append(error)

    answer = answer_to(run)
    if exits:
        raise exits[0]
    return answer


def _exit(_number: int, _frame: FrameType | None) -> NoReturn:
    sys.exit(EXIT_CODE)
