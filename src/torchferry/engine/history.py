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
        keys = [(each.storage.data_ptr() + each.base, each.storage.nbytes()) for each in local.memories]
        with self._lock:
            known = {number for number, key in enumerate(keys) if key in self._written}
            for number in known:
                self._written.pop(keys[number], None)
            self._written.update(dict.fromkeys(keys))
            while len(self._written) > _MAX_STORAGES:
                self._written.popitem(last=False)
        return known

    def close_inherited(self) -> None:
        """Replace the lock in a forked child: another thread of the parent may have held it."""
        self._lock = threading.Lock()


history = History()
close_after_fork(history)
