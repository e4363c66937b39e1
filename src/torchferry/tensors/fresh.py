"""New memory on the CPU for a state that is received.

Most storages are one contiguous tensor, and most tensors are small. Small tensors arrive packed, many in one
chunk. Consecutive tensors of one dtype are created in one call: half the time of allocating and copying each.
"""

import ctypes
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from itertools import groupby
from math import prod
from typing import Any

import torch

from torchferry.core.extents import Extent
from torchferry.core.manifest import BUFFER, Manifest
from torchferry.core.plan import Piece
from torchferry.tensors.memory import CPU, DTYPES, Memory, check_room, new_memory, scatter

_HUGE_PAGE_BYTES = 2 << 20

_MIN_HUGE_BYTES = 4 * _HUGE_PAGE_BYTES
"""Smaller storages get no huge pages."""

_SLOW_S = 0.002
"""Faulting in 2 MiB of small pages takes this long. An available huge page takes a fifth of it."""

_MAX_SLOW_PAGES = 2

_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23

_madvise: Any = getattr(ctypes.CDLL(None), "madvise", None) if sys.platform == "linux" else None
if _madvise is not None:
    _madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def find_bytes_storages(manifest: Manifest) -> set[int]:
    """Return the storages that hold the bytes of one large value and nothing else."""
    parts = [leaf.parts[0] for leaf in manifest.leaves if leaf.kind == BUFFER and leaf.parts]
    if not parts:
        return set()
    users = Counter([part for leaf in manifest.leaves for part in leaf.parts])
    tensors = Counter([spec.storage for spec in manifest.tensors])
    specs = [manifest.tensors[part] for part in parts if users[part] == 1]
    return {
        spec.storage
        for spec in specs
        if tensors[spec.storage] == 1
        and spec.offset == 0
        and spec.shape == (manifest.storages[spec.storage],)
    }


class FreshMemory:
    """New memory on the CPU, allocated storage by storage. `tensors` has what `unpack` created, by number."""

    def __init__(self, manifest: Manifest, clock: Callable[[], float]) -> None:
        """Raise StateError if the machine has too little memory. The clock times requests for huge pages."""
        self.tensors: dict[int, torch.Tensor] = {}
        self.wants_huge_pages = _madvise is not None
        self._slow_pages = 0
        self._clock = clock
        self._manifest = manifest
        self._memories: dict[int, Memory] = {}
        self._bytes_storages = find_bytes_storages(manifest)
        # Inference mode is set per thread, and `unpack` runs in another thread.
        self._inference = torch.is_inference_mode_enabled()
        check_room(sum(manifest.storages), "the incoming state")

    def memory(self, storage: int) -> Memory:
        """Return the memory of a storage; raises StateError if it can't be allocated."""
        if storage not in self._memories:
            if self.tensors and (number := self._only_tensor[storage]) in self.tensors:
                return Memory(self.tensors[number].untyped_storage(), 0, CPU)
            nbytes, as_bytes = self._manifest.storages[storage], storage in self._bytes_storages
            self._memories[storage] = new_memory(nbytes, as_bytes)
        return self._memories[storage]

    def fault_in(self, piece: Extent) -> None:
        """Fault in the huge pages that a piece is about to be received into, as long as that is fast.

        Faulting in 4 KiB pages on first write takes longer than receiving their bytes. Huge pages of 2 MiB
        are faster, except where the kernel must first compact memory, or a virtual machine must get it from
        its host: there they take five times as long as small pages. So each request is timed, and after a few
        slow ones in a row no more huge pages are requested.
        """
        nbytes = self._manifest.storages[piece.storage]
        if nbytes < _MIN_HUGE_BYTES:
            return
        first = self.memory(piece.storage).storage.data_ptr()
        # The first and the last page of an allocation may be shared with other allocations.
        page = -(-(first + piece.offset) // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
        end = min(first + piece.end, first + nbytes - _HUGE_PAGE_BYTES + 1)
        while self.wants_huge_pages and page < end:
            began_s = self._clock()
            _madvise(page, _HUGE_PAGE_BYTES, _MADV_HUGEPAGE)
            # Kernels before 5.14 return an error.
            succeeded = _madvise(page, _HUGE_PAGE_BYTES, _MADV_POPULATE_WRITE) == 0
            self._slow_pages = self._slow_pages + 1 if self._clock() - began_s > _SLOW_S else 0
            self.wants_huge_pages = succeeded and self._slow_pages < _MAX_SLOW_PAGES
            page += _HUGE_PAGE_BYTES

    def unpack(self, pieces: Sequence[Piece], buffer: torch.Tensor) -> None:
        """Create tensors from consecutive pieces, or copy the pieces; raises StateError as `memory` does."""
        tensors = self._manifest.tensors
        numbers = [self._only_tensor[piece.storage] for piece in pieces]
        dtypes = [None if number is None else tensors[number].dtype for number in numbers]
        first = start = 0
        for dtype, run in groupby(dtypes):
            last = first + len(list(run))
            end = start + sum([piece.nbytes for piece in pieces[first:last]])
            run_numbers = [number for number in numbers[first:last] if number is not None]
            if dtype is None or not self._create(run_numbers, dtype, buffer[start:end]):
                memories = [self.memory(piece.storage) for piece in pieces[first:last]]
                scatter(memories, pieces[first:last], buffer[start:end])
            first, start = last, end

    def _create(self, numbers: Sequence[int], dtype: str, flat: torch.Tensor) -> bool:
        """Create tensors of one dtype from their bytes, and return whether that was possible."""
        shapes = [self._manifest.tensors[number].shape for number in numbers]
        try:
            with torch.inference_mode(self._inference):
                items = flat.cpu().view(DTYPES[dtype])
                created: Any = torch.split_with_sizes_copy(items, list(map(prod, shapes)))  # type: ignore[func-returns-value]
                for tensor, shape in zip(created, shapes, strict=True):
                    if len(shape) != 1:
                        tensor.resize_(shape)
        except (RuntimeError, MemoryError):
            # The bytes are not aligned to the item size, or they are one piece of a large tensor, or an
            # allocation failed, which `memory` reports.
            return False
        self.tensors.update(zip(numbers, created, strict=True))
        return True

    @cached_property
    def _only_tensor(self) -> list[int | None]:
        """For each storage, the number of its only tensor if that is contiguous and fills it, else None."""
        sizes, tensors = self._manifest.storages, self._manifest.tensors
        counts = Counter([spec.storage for spec in tensors])
        found: list[int | None] = [None] * len(sizes)
        for number, spec in enumerate(tensors):
            is_plain = counts[spec.storage] == 1 and not spec.conj and not spec.neg
            if is_plain and _fills(spec.dtype, spec.shape, spec.stride, spec.itemsize, sizes[spec.storage]):
                found[spec.storage] = number
        return found


@lru_cache(maxsize=4096)
def _fills(dtype: str, shape: tuple[int, ...], stride: tuple[int, ...], itemsize: int, nbytes: int) -> bool:
    """Return whether a tensor is contiguous, has this many bytes but not 0, and is copied bit by bit."""
    # When torch copies a bool whose byte is neither 0 nor 1, the byte changes.
    if dtype == "bool" or nbytes == 0 or prod(shape) * itemsize != nbytes:
        return False
    return stride == torch.empty(shape, dtype=torch.uint8, device="meta").stride()
