"""The worker process of a cluster: it joins the group, then answers calls."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

# The signal that makes a worker write the stacks of its threads.
SHOW_STACKS = signal.SIGUSR1
# Sent instead of a call.
STOP = b""


@dataclass(frozen=True)
class Call:
    """A function to call, pickled apart from the path on which its module is found."""

    sys_path: list[str]
    fn_and_args: bytes


@dataclass(frozen=True)
class Failure:
    """An exception of a worker: its text, and itself if it can be pickled."""

    type_name: str
    message: str
    traceback_text: str
    pickled: bytes | None


@dataclass(frozen=True)
class Answer:
    value: Any = None
    failure: Failure | None = None


def main(
    rank: int,
    world_size: int,
    host: str,
    port: int,
    group_timeout_s: float,
    stacks_file: Path,
    conn: connection.Connection,
) -> NoReturn:
    """Answer calls until the parent sends STOP, closes the pipe or dies."""
    # Ctrl-C reaches the whole process group. The parent handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=exit_when_the_parent_dies, daemon=True).start()
    torch.set_num_threads(1)

    def join_the_group() -> None:
        timeout = timedelta(seconds=group_timeout_s)
        store = dist.TCPStore(host, port, is_master=False, timeout=timeout)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)

    with stacks_file.open("a") as stacks:
        faulthandler.register(SHOW_STACKS, file=stacks, all_threads=True)
        conn.send_bytes(answer_to(join_the_group))
        with contextlib.suppress(EOFError):
            while (request := conn.recv_bytes()) != STOP:
                conn.send_bytes(answer_to(run_call, request, rank))
        faulthandler.unregister(SHOW_STACKS)
    # A normal exit would take a second per worker.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def run_call(request: bytes, *first_args: Any) -> Any:
    """Call the function that a request names, with `first_args` before its own arguments."""
    call: Call = pickle.loads(request)
    sys.path.extend(entry for entry in call.sys_path if entry not in sys.path)
    fn, args = pickle.loads(call.fn_and_args)
    return fn(*first_args, *args)


def answer_to(fn: Callable[..., Any], *args: Any) -> bytes:
    """Call a function, and return its value or exception as a pickled Answer."""
    # BaseException: outcomes of pytest and SystemExit are answers too.
    try:
        return pickle.dumps(Answer(value=fn(*args)))
    except BaseException as error:
        return pickle.dumps(Answer(failure=_describe(error)))


def _describe(error: BaseException) -> Failure:
    kind = type(error)
    try:
        pickled = pickle.dumps(error)
        # An exception whose __init__ needs more than its message can be pickled, but not loaded.
        pickle.loads(pickled)
    except Exception:
        pickled = None
    return Failure(
        type_name=f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins."),
        message=str(error),
        traceback_text="".join(traceback.format_exception(error)),
        pickled=pickled,
    )


def exit_when_the_parent_dies() -> NoReturn:
    """Wait for the end of the parent process, and exit."""
    parent = multiprocessing.parent_process()
    if parent is None:
        raise RuntimeError("a worker must be started by multiprocessing")
    connection.wait([parent.sentinel])
    os._exit(1)
