"""What a forked child closes. A DataLoader's worker must not keep a dead parent's sockets and memory."""

import os
import weakref
from typing import Protocol


class Inherited(Protocol):
    """Something that a forked child has no use for."""

    def close_inherited(self) -> None:
        """Close it in the child. Locks may be held for ever there, by threads that only the parent has."""


_open: weakref.WeakSet[Inherited] = weakref.WeakSet()


def close_after_fork(inherited: Inherited) -> None:
    """Call `inherited.close_inherited()` in every child that this process forks from now on."""
    _open.add(inherited)


def _close_inherited() -> None:
    for inherited in list(_open):
        inherited.close_inherited()


os.register_at_fork(after_in_child=_close_inherited)
