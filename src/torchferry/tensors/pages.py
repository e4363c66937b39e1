"""Pages for new memory, before it is written to.

New memory is given page by page as it is first written to, and 4 KiB at a time that takes longer than the
bytes take to arrive. So it is asked for in pages of 2 MiB. But those do not always pay: a system whose memory
is in pieces has to move some together first, and a virtual machine may have returned to its host what it has
in pieces that large, so that they take five times as long as small ones. Nobody can tell beforehand; it is
measured as it goes on, and no more are asked for once they turn out to be slow.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable

HUGE_PAGE_BYTES = 2 << 20
WORTH_IT_BYTES = 4 * HUGE_PAGE_BYTES
"""Memory of this size is worth huge pages."""

_SLOW_S = 0.002
"""As long as this, small pages take for the same memory. A huge one takes a fifth of it, if it is there."""

_SLOW_IN_A_ROW = 2
"""One may be slow because somebody else had the processor."""

_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23


class HugePages:
    """Asks for huge pages as long as they are given at once, and fast, by the given clock."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._slow = 0
        self.wanted = _madvise is not None

    def fault_in(self, start: int, end: int, limit: int) -> None:
        """Have the pages ready that begin in the memory from `start` to `end`, and are over before `limit`.

        What lies in them is not changed.
        """
        page = -(-start // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        # Only pages that are this memory's alone: the rest is somebody else's to decide on.
        while self.wanted and page < end and page + HUGE_PAGE_BYTES <= limit:
            self._take(page)
            page += HUGE_PAGE_BYTES

    def _take(self, page: int) -> None:
        assert _madvise is not None, "nothing is wanted where there is nobody to ask"
        began_s = self._clock()
        _madvise(page, HUGE_PAGE_BYTES, _MADV_HUGEPAGE)
        # A kernel older than 5.14 refuses. Then it would be had when it is written to, however slowly.
        given = _madvise(page, HUGE_PAGE_BYTES, _MADV_POPULATE_WRITE) == 0
        self._slow = self._slow + 1 if self._clock() - began_s > _SLOW_S else 0
        self.wanted = given and self._slow < _SLOW_IN_A_ROW


def _find_madvise() -> Callable[[int, int, int], int] | None:
    if sys.platform != "linux":
        return None
    try:
        madvise = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return madvise


_madvise = _find_madvise()
