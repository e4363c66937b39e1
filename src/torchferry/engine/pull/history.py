"""Remembers which memory fetches have written, so that the next fetch into it compares first."""

import threading
from collections.abc import Iterator
from operator import add

from torch import UntypedStorage

from torchferry.links.lifecycle import close_after_fork
from torchferry.tensors.describe import Description

_MAX_STORAGES = 1 << 17
"""With more storages, only those of the last fetch are remembered."""


class History:
    """The memory of local states that fetches of this process have written to, by address.

    Each entry is the highest version counter of the tensors in that memory after the fetch.
    """

    def __init__(self) -> None:
        self._written: dict[int, int] = {}
        self._lock = threading.Lock()

    def of(self, local: Description) -> tuple[set[int], set[int]]:
        """Return the storages of a local state that an earlier fetch had, and those that torch wrote since.

        Other tensors may use the same memory by now. Comparing them is correct, and only wastes time.
        """
        with self._lock:
            before = list(map(self._written.get, _addresses(local)))
        found = {number: then for number, then in enumerate(before) if then is not None}
        versions = _versions(local)
        return {*found}, {number for number, then in found.items() if versions[number] > then}

    def note(self, local: Description) -> None:
        """Remember the memory of a local state that a fetch writes, or has written, to."""
        entries = dict(zip(_addresses(local), _versions(local), strict=True))
        with self._lock:
            self._written.update(entries)
            if len(self._written) > _MAX_STORAGES:
                self._written = entries

    def close_inherited(self) -> None:
        """Replace the lock in a forked child: another thread of the parent may have held it."""
        self._lock = threading.Lock()


def _addresses(local: Description) -> Iterator[int]:
    starts = map(UntypedStorage.data_ptr, [memory.storage for memory in local.memories])
    return map(add, starts, [memory.base for memory in local.memories])


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
