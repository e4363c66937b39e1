"""New memory on the CPU for a state that is received.

Most storages are one contiguous tensor, and most tensors are small. Small tensors arrive packed, many in one
message. All tensors of a message are created in one call, in half the time of allocating and copying each.
"""

from __future__ import annotations

import ctypes
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from itertools import accumulate, groupby
from math import prod
from operator import mul
from typing import Any

import torch

from torchferry.core.extents import Extent
from torchferry.core.manifest import Manifest
from torchferry.core.plan import Chunk
from torchferry.tensors.memory import DTYPES, Memory, check_room, new_memory, scatter


class FreshMemory:
    """New memory on the CPU, allocated storage by storage. `tensors` has what `unpack` created, by number."""

    def __init__(self, manifest: Manifest, pages: HugePages | None = None) -> None:
        """Check that the machine has enough memory. With `pages`, large storages get huge pages.

        Raises:
            StateError: it has less.
        """
        self.tensors: dict[int, torch.Tensor] = {}
        self._manifest = manifest
        self._memories: dict[int, Memory] = {}
        self._pages = pages
        # `unpack` runs in another thread, and inference mode belongs to this one.
        self._inference = torch.is_inference_mode_enabled()
        check_room(sum(manifest.storages), "the incoming state")

    def memory(self, storage: int) -> Memory:
        """Return the memory of a storage.

        Raises:
            StateError: the allocation failed.
        """
        if storage not in self._memories:
            self._memories[storage] = new_memory(self._manifest.storages[storage])
        return self._memories[storage]

    def fault_in(self, piece: Extent) -> None:
        """Fault in the pages that a piece is about to be received into, if that is fast."""
        nbytes = self._manifest.storages[piece.storage]
        if self._pages is not None and nbytes >= _MIN_HUGE_BYTES:
            first = self.memory(piece.storage).storage.data_ptr()
            self._pages.fault_in(first + piece.offset, first + piece.end, first + nbytes)

    def unpack(self, chunks: Sequence[Chunk], buffer: torch.Tensor) -> None:
        """Create tensors from chunks, or copy chunks to their storages. They follow each other in the buffer.

        Raises:
            StateError: an allocation failed.
        """
        tensors = self._manifest.tensors
        numbers = [self._only_tensor[chunk.piece.storage] for chunk in chunks]
        dtypes = [None if number is None else tensors[number].dtype for number in numbers]
        first = start = 0
        for dtype, run in groupby(dtypes):
            last = first + len(list(run))
            pieces = [chunk.piece for chunk in chunks[first:last]]
            end = start + sum([chunk.nbytes for chunk in chunks[first:last]])
            created = [number for number in numbers[first:last] if number is not None]
            if dtype is None or not self._create(created, dtype, buffer[start:end]):
                scatter([self.memory(piece.storage) for piece in pieces], pieces, buffer[start:end])
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
            # The bytes are not aligned to the item size, or they are one chunk of a large tensor, or an
            # allocation failed, which `memory` reports.
            return False
        self.tensors.update(zip(numbers, created, strict=True))
        return True

    @cached_property
    def _only_tensor(self) -> list[int | None]:
        """For each storage the number of its tensor, if that is the only one, contiguous, and fills it."""
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
    """Return whether a tensor is contiguous, not empty, and has this many bytes."""
    # torch changes the bytes of a bool that is neither 0 nor 1 when it copies it.
    if dtype == "bool" or nbytes == 0 or prod(shape) * itemsize != nbytes:
        return False
    return stride == tuple(accumulate(reversed(shape[1:]), mul, initial=1))[::-1][: len(shape)]


_HUGE_PAGE_BYTES = 2 << 20

_MIN_HUGE_BYTES = 4 * _HUGE_PAGE_BYTES
"""Smaller storages get no huge pages."""

_SLOW_S = 0.002
"""Faulting in 2 MiB of small pages takes this long. An available huge page takes a fifth of it."""

_MAX_SLOW_PAGES = 2

_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23


class HugePages:
    """Faults in new memory in huge pages, as long as that is fast.

    Faulting in 4 KiB pages on first write takes longer than receiving their bytes. Huge pages of 2 MiB are
    faster, except where the kernel must first compact memory, or a virtual machine must get it from its host:
    there they take five times as long as small pages. So each request is timed with the given clock, and
    after a few slow ones in a row no more huge pages are requested.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._slow_pages = 0
        self.wanted = _madvise is not None

    def fault_in(self, start: int, end: int, limit: int) -> None:
        """Fault in the huge pages that begin between two addresses and end at or before `limit`."""
        # The first and the last page of an allocation may be shared with other allocations.
        page = -(-start // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
        while self.wanted and page < end and page + _HUGE_PAGE_BYTES <= limit:
            began_s = self._clock()
            _madvise(page, _HUGE_PAGE_BYTES, _MADV_HUGEPAGE)
            # Kernels before 5.14 return an error.
            succeeded = _madvise(page, _HUGE_PAGE_BYTES, _MADV_POPULATE_WRITE) == 0
            self._slow_pages = self._slow_pages + 1 if self._clock() - began_s > _SLOW_S else 0
            self.wanted = succeeded and self._slow_pages < _MAX_SLOW_PAGES
            page += _HUGE_PAGE_BYTES


_madvise: Any = getattr(ctypes.CDLL(None), "madvise", None) if sys.platform == "linux" else None
if _madvise is not None:
    _madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
