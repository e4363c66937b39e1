"""Processes on this machine, for commands that start some: made fast, and meeting on loopback."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess

_REAP_S = 10.0


def context_with(*modules: str) -> BaseContext:
    """How processes are made. On Linux, by a server that has imported `modules`, once for all of them.

    To import torch with all that an optimizer needs takes some four seconds of a core. A process
    forked from that server, which does nothing but import, has it at once. Elsewhere it is not safe
    to fork with torch loaded, and each process starts from nothing.
    """
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(modules))
    # Ctrl-C in a terminal goes to every process in the foreground. Only the one that started the
    # others is to act on it, and "ignored" is inherited.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        multiprocessing.forkserver.ensure_running()
    except OSError:
        # Its socket lies in TMPDIR, and the path of a socket has room for some 100 characters.
        return multiprocessing.get_context("spawn")
    finally:
        signal.signal(signal.SIGINT, before)
    return context


@contextlib.contextmanager
def processes(
    context: BaseContext, main: Callable[..., object], seats: Sequence[tuple[object, ...]], name: str
) -> Iterator[list[tuple[BaseProcess, Connection]]]:
    """Start a process for each seat, which calls `main` with its end of a channel and what is in the seat.

    Gives each with this end of its channel. They are killed when the block is left, whatever they are doing.
    """
    started: list[tuple[BaseProcess, Connection]] = []
    try:
        for number, seat in enumerate(seats):
            ours, theirs = context.Pipe()
            # mypy's view of a context does not know that the contexts have processes.
            process: BaseProcess = context.Process(  # type: ignore[attr-defined]
                target=main, args=(theirs, *seat), name=f"{name}-{number}", daemon=True
            )
            process.start()
            # Only the process holds its end now; when it dies, ours is at its end.
            theirs.close()
            started.append((process, ours))
        yield started
    finally:
        for process, _ in started:
            process.kill()
        for process, channel in started:
            process.join(_REAP_S)
            channel.close()


def dismiss_server() -> None:
    """End the process that `context_with` has started, if it has; a next call would start another.

    It would end by itself, but only once this process has ended, and to unload torch takes it a second
    in which it looks left behind. multiprocessing has no public way to say so.
    """
    server = multiprocessing.forkserver._forkserver
    pid = getattr(server, "_forkserver_pid", None)
    stop = getattr(server, "_stop", None)
    if pid is not None and stop is not None:
        os.kill(pid, signal.SIGKILL)
        stop()


def stay_on_this_machine() -> None:
    """Have gloo use loopback, unless the user has said otherwise.

    By default it binds to what the host's name resolves to, which on a laptop may be nothing.
    """
    loopbacks = {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}
    if loopbacks:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopbacks.pop())
