"""Remembers which memory fetches have written, so that the next fetch into it compares first."""

import threading
from collections import OrderedDict

from torchferry.links.forks import close_after_fork
from torchferry.tensors.describe import Description

_MAX_STORAGES = 1 << 17


class History:
    """The memory that fetches of this process have written, by address and size."""

    def __init__(self) -> None:
        self._written: OrderedDict[tuple[int, int], None] = OrderedDict()
        self._lock = threading.Lock()

    def written_before(self, local: Description) -> set[int]:
        """Return the storages of a local state that an earlier fetch wrote, and remember that this one does.

        If other tensors use that memory by now, the comparison only costs time.
        """
        known = set()
        with self._lock:
            for number, memory in enumerate(local.memories):
                key = memory.storage.data_ptr() + memory.base, memory.storage.nbytes()
                if key in self._written:
                    known.add(number)
                    self._written.move_to_end(key)
                self._written[key] = None
            while len(self._written) > _MAX_STORAGES:
                self._written.popitem(last=False)
        return known

    def close_inherited(self) -> None:
        """Replace the lock in a forked child: another thread of the parent may have held it."""
        self._lock = threading.Lock()


history = History()
close_after_fork(history)
