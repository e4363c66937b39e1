"""A process that runs one function of a test module, for tests that kill it or send it signals.

    def answer(pipe: Connection) -> None:
        pipe.send(pipe.recv() + 1)

    def test_a_child_answers() -> None:
        with child(answer) as process:
            process.send(1)
            assert process.receive() == 2

The tests that use it need the fixture `_fork_server`, from which processes start at once.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from tests.support.worker import Call

PATIENCE_S = 30.0


class Child:
    """A process. It ends when the block of `child` ends, or the tests do."""

    def __init__(self, fn: Callable[..., None], args: tuple[Any, ...]) -> None:
        context = multiprocessing.get_context("forkserver")
        self._pipe, other_end = context.Pipe()
        call = Call(list(sys.path), pickle.dumps((fn, args)))
        self._process = context.Process(target=_run, args=(call, other_end), daemon=True)
        self._process.start()
        # With this copy closed, the death of the process closes the pipe.
        other_end.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def send(self, value: Any) -> None:
        self._pipe.send(value)

    def receive(self, timeout_s: float = PATIENCE_S) -> Any:
        """Return what the process sent. Raises EOFError if it has ended."""
        assert self._pipe.poll(timeout_s), f"the process sent nothing for {timeout_s} s"
        return self._pipe.recv()

    def signal(self, how: signal.Signals = signal.SIGKILL) -> float:
        """Send a signal, and return the time."""
        os.kill(self.pid, how)
        return time.monotonic()

    def wait(self, timeout_s: float = PATIENCE_S) -> int | None:
        """Return the exit code, or None if the process still runs."""
        self._process.join(timeout_s)
        return self._process.exitcode

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self._process.close()
        self._pipe.close()


@contextmanager
def child(fn: Callable[..., None], *args: Any) -> Iterator[Child]:
    """Call `fn(pipe, *args)` in a process of its own."""
    process = Child(fn, args)
    try:
        yield process
    finally:
        process.close()


def wait_until(is_true: Callable[[], object], timeout_s: float = PATIENCE_S) -> float:
    """Wait for a condition, and return how long that took."""
    began_s = time.monotonic()
    while not is_true():
        assert time.monotonic() < began_s + timeout_s, f"not true within {timeout_s} s"
        time.sleep(0.002)
    return time.monotonic() - began_s


def unused_port() -> int:
    """Return a port of this machine on which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as unused:
        return int(unused.getsockname()[1])


def _run(call: Call, pipe: Connection) -> None:
    sys.path.extend(entry for entry in call.sys_path if entry not in sys.path)
    fn, args = pickle.loads(call.fn_and_args)
    fn(pipe, *args)
