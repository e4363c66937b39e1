"""Remembers which memory fetches have written, so that the next fetch into it compares first."""

import threading
from operator import add

from torch import UntypedStorage

from torchferry.links.lifecycle import close_after_fork
from torchferry.tensors.describe import Description

_MAX_STORAGES = 1 << 17
"""With more storages, only those of the last fetch are remembered."""


class History:
    """The memory that fetches of this process have written, by address and size.

    Each entry is the highest version counter of the tensors in that memory after the fetch.
    """

    def __init__(self) -> None:
        self._written: dict[tuple[int, int], int] = {}
        self._lock = threading.Lock()

    def of(self, local: Description) -> tuple[set[int], set[int]]:
        """Return the storages of a local state that an earlier fetch wrote, and those that torch wrote since.

        Other tensors may use the same memory by now. Comparing them is correct, and only wastes time.
        """
        with self._lock:
            before = [self._written.get(key) for key in _keys(local)]
        found = {number: then for number, then in enumerate(before) if then is not None}
        versions = _versions(local)
        return {*found}, {number for number, then in found.items() if versions[number] > then}

    def note(self, local: Description) -> None:
        """Remember that a fetch writes, or has written, to all tensors of a local state."""
        entries = dict(zip(_keys(local), _versions(local), strict=True))
        with self._lock:
            self._written.update(entries)
            if len(self._written) > _MAX_STORAGES:
                self._written = entries

    def close_inherited(self) -> None:
        """Replace the lock in a forked child: another thread of the parent may have held it."""
        self._lock = threading.Lock()


def _keys(local: Description) -> list[tuple[int, int]]:
    storages = [memory.storage for memory in local.memories]
    addresses = map(add, map(UntypedStorage.data_ptr, storages), [memory.base for memory in local.memories])
    return list(zip(addresses, map(UntypedStorage.nbytes, storages), strict=True))


def _versions(local: Description) -> list[int]:
    """Return the highest version counter of the tensors in each storage."""
    versions = local.current_versions()
    if len(versions) == len(local.memories):  # each tensor has its own storage, of the same number
        return versions
    found = [0] * len(local.memories)
    for spec, version in zip(local.manifest.tensors, versions, strict=True):
        found[spec.storage] = max(found[spec.storage], version)
    return found


history = History()
close_after_fork(history)
