"""One of the processes that the command starts: it joins the others, runs the plan, and tells its parent."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
import threading
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

import msgspec
import torch
import torch.distributed as dist

from benchmarks.assembly import PATIENCE
from benchmarks.processes import stay_on_this_machine
from benchmarks.run import Began, Event, LeftOut, Measured, Plan, Took, perform

# How long the processes may take to find each other.
_MEETING_TIMEOUT = timedelta(seconds=60)


class Seat(msgspec.Struct, frozen=True):
    """A process's place in the run."""

    rank: int
    size: int
    store_port: int
    folder: str

    @property
    def muttering(self) -> Path:
        """Where goes what this process prints."""
        return Path(self.folder) / f"printed-by-{self.rank}.txt"


class Finished(msgspec.Struct, frozen=True, tag=True):
    """This rank is through."""


class Crashed(msgspec.Struct, frozen=True, tag=True):
    """This rank can't go on."""

    report: str


Word = Began | Took | Measured | LeftOut | Finished | Crashed

_words: msgspec.msgpack.Decoder[Word] = msgspec.msgpack.Decoder(Word)


def main(channel: Connection, seat: Seat, plan: Plan) -> NoReturn:
    """Run one rank to its end, or to that of the process that has started it."""
    # Ctrl-C goes to the parent too, and the parent decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _leave_with_the_parent(channel, seat)
    _mutter(seat.muttering)
    # What was imported stays: not to look through it makes the collections between takes short.
    gc.freeze()
    # As torchrun does: the ranks are as many as the cores, or more.
    torch.set_num_threads(1)
    status = 1
    try:
        _join(seat)
        perform(plan, Path(seat.folder), lambda event: say(channel, event))
        say(channel, Finished())
        status = 0
    except Exception:
        try:
            say(channel, Crashed(traceback.format_exc()))
        except OSError:
            _clear_up(seat)
    finally:
        # Without the interpreter's clean-up, which would wait for what is still blocked.
        os._exit(status)


def say(channel: Connection, word: Event | Finished | Crashed) -> None:
    """Tell the parent.

    Raises:
        OSError: it is gone.
    """
    channel.send_bytes(msgspec.msgpack.encode(word))


def hear(channel: Connection) -> Word:
    """The next word of a worker; blocks until there is one.

    Raises:
        EOFError, OSError: it is gone.
    """
    return _words.decode(channel.recv_bytes())


def _mutter(file: Path) -> None:
    """Have all that is printed here, by the systems or by torch, go to a file and not into the table."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for printed in (1, 2):
        os.dup2(descriptor, printed)
    os.close(descriptor)


def _join(seat: Seat) -> None:
    stay_on_this_machine()
    store = dist.TCPStore("127.0.0.1", seat.store_port, is_master=False, timeout=_MEETING_TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=seat.rank, world_size=seat.size, timeout=PATIENCE)


def _leave_with_the_parent(channel: Connection, seat: Seat) -> None:
    def watch() -> None:
        # The parent says nothing; that this returns means that it is gone.
        with contextlib.suppress(EOFError, OSError):
            channel.recv_bytes()
        _clear_up(seat)
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def _clear_up(seat: Seat) -> None:
    """Do what the parent no longer can: what lies on tmpfs is memory."""
    shutil.rmtree(seat.folder, ignore_errors=True)
