"""What is closed when a process ends, and in a child that it forks.

Python aborts if it ends a thread inside torch's code, so threads end before. A forked child, such as a
DataLoader's worker, must not keep a dead parent's sockets and memory.
"""

import atexit
import os
import time
import weakref
from typing import Protocol

_EXIT_S = 0.5
"""How long the exit of the process waits for threads."""


class Inherited(Protocol):
    """Something that a forked child closes. There, its locks may be held by threads of the parent."""

    def close_inherited(self) -> None: ...


class Running(Protocol):
    """Something with threads. `join` waits for them until a time of the monotonic clock."""

    def shut_down(self) -> None: ...
    def join(self, until_s: float) -> None: ...


_inherited: weakref.WeakSet[Inherited] = weakref.WeakSet()
_running: weakref.WeakSet[Running] = weakref.WeakSet()


def close_after_fork(inherited: Inherited) -> None:
    """Call `inherited.close_inherited()` in every child that this process forks from now on."""
    _inherited.add(inherited)


def end_at_exit(running: Running) -> None:
    """Shut down and join when the process ends."""
    _running.add(running)


def _close_inherited() -> None:
    # Their threads are not in the child, and may have held locks that ending them would wait for.
    _running.clear()
    for inherited in list(_inherited):
        inherited.close_inherited()


@atexit.register
def _end_running() -> None:
    found = list(_running)
    for running in found:
        running.shut_down()
    until_s = time.monotonic() + _EXIT_S
    for running in found:
        running.join(until_s)


os.register_at_fork(after_in_child=_close_inherited)
