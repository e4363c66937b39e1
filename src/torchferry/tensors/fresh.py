"""New memory for a state that arrives: for each storage its own.

Most storages are one plain tensor, and most tensors are small. Those come packed, many in one message, and
are made out of it all at once, which takes half the time of setting memory aside and copying into it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import accumulate, groupby
from math import prod
from operator import mul
from typing import NamedTuple

import torch

from torchferry.core.extents import Extent
from torchferry.core.manifest import Manifest, TensorSpec
from torchferry.core.plan import Chunk
from torchferry.core.strides import find_pattern
from torchferry.errors import StateError
from torchferry.tensors.memory import (
    CPU,
    DTYPES,
    Memory,
    check_room,
    new_memory,
    scatter,
)
from torchferry.tensors.pages import WORTH_IT_BYTES, HugePages

# Torch's own stubs have these return nothing.
_unbind_copy: Callable[[torch.Tensor], Sequence[torch.Tensor]] = torch.unbind_copy  # type: ignore[assignment]
_split_copy: Callable[[torch.Tensor, list[int]], Sequence[torch.Tensor]] = torch.split_with_sizes_copy  # type: ignore[assignment]


class _Look(NamedTuple):
    """What a plain tensor is like."""

    dtype: str
    shape: tuple[int, ...]


class Layout:
    """Which of a manifest's storages are one plain tensor each, worked out when it is first asked."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest

    @cached_property
    def only(self) -> list[int]:
        """For each storage, the last tensor in it: the only one, if it is a plain tensor."""
        found = [0] * len(self.manifest.storages)
        for number, spec in enumerate(self.manifest.tensors):
            found[spec.storage] = number
        return found

    @cached_property
    def looks(self) -> list[_Look | None]:
        """For each storage, say what plain tensor it is; None if it is not one, or more."""
        tensors, sizes = self.manifest.tensors, self.manifest.storages
        owners = [spec.storage for spec in tensors]
        forms = [
            (spec.dtype, spec.shape, spec.stride, spec.conj or spec.neg, sizes[spec.storage])
            for spec in tensors
        ]
        known = {
            form: _fills(spec, form[-1]) for form, spec in dict(zip(forms, tensors, strict=True)).items()
        }
        looks = list(map(known.__getitem__, forms))
        if owners == list(range(len(sizes))):
            return looks
        found: list[_Look | None] = [None] * len(sizes)
        for owner, look in zip(owners, looks, strict=True):
            found[owner] = look
        for owner, count in Counter(owners).items():
            if count > 1:
                found[owner] = None
        return found


class Fresh:
    """New memory on the CPU, set aside storage by storage when it is first asked for.

    `tensors` has those that were made out of messages, by number.
    """

    def __init__(self, layout: Layout, pages: HugePages | None = None) -> None:
        """Check that there can be enough of it. With `pages`, large memory is had in those.

        Raises:
            StateError: the machine has less.
        """
        manifest = layout.manifest
        check_room(sum(manifest.storages), "the incoming state")
        self.tensors: dict[int, torch.Tensor] = {}
        # Tensors are made in a thread of their own, which does not know of the caller's mode.
        self._inference = torch.is_inference_mode_enabled()
        self._layout = layout
        self._manifest = manifest
        self._memories: dict[int, Memory] = {}
        self._pages = pages

    def memory(self, storage: int) -> Memory:
        """Give the memory of a storage.

        Raises:
            StateError: there is not enough.
        """
        found = self._memories.get(storage)
        if found is None:
            nbytes = self._manifest.storages[storage]
            try:
                self._memories[storage] = found = new_memory(nbytes, CPU)
            except (RuntimeError, MemoryError) as error:
                raise self._no_memory(error) from None
        return found

    def fault_in(self, piece: Extent) -> None:
        """Have the pages ready that a piece is about to be received into, if they can be had fast."""
        nbytes = self._manifest.storages[piece.storage]
        if self._pages is not None and nbytes >= WORTH_IT_BYTES:
            first = self.memory(piece.storage).storage.data_ptr()
            self._pages.fault_in(first + piece.offset, first + piece.end, first + nbytes)

    def set_aside(self, storages: Iterable[int]) -> None:
        """Set memory aside for these storages now.

        Raises:
            StateError: there is not enough.
        """
        for storage in storages:
            self.memory(storage)

    def unpack(self, chunks: Sequence[Chunk], buffer: torch.Tensor) -> None:
        """Take chunks out of a buffer, where they lie one after the other.

        Raises:
            StateError: there is not enough memory for them.
        """
        storages = [chunk.piece.storage for chunk in chunks]
        looks = list(map(self._layout.looks.__getitem__, storages))
        if looks.count(looks[0]) == len(looks) and self._make(storages, looks, buffer):
            return
        start = 0
        for dtype, run in groupby(zip(looks, chunks, strict=True), key=_dtype):
            some = list(run)
            pieces = [chunk.piece for _, chunk in some]
            storages = [piece.storage for piece in pieces]
            end = start + sum(chunk.nbytes for _, chunk in some)
            flat = buffer[start:end]
            if dtype is None or not self._make(storages, [look for look, _ in some], flat):
                scatter(list(map(self.memory, storages)), pieces, flat)
            start = end

    def _make(self, storages: Sequence[int], looks: Sequence[_Look | None], flat: torch.Tensor) -> bool:
        """Make tensors of one dtype out of their bytes; say whether that could be done so."""
        shapes = [look.shape for look in looks if look]
        if looks[0] is None:
            return False
        try:
            with torch.inference_mode(self._inference):
                made = _copies(flat.cpu().view(DTYPES[looks[0].dtype]), shapes)
        except RuntimeError:
            # They do not begin at a multiple of their size. Or there is no memory, which is found out again.
            return False
        except MemoryError as error:
            raise self._no_memory(error) from None
        self.tensors.update(zip(map(self._layout.only.__getitem__, storages), made, strict=True))
        return True

    def _no_memory(self, error: Exception) -> StateError:
        total = sum(self._manifest.storages)
        return StateError(f"no memory for the {total} bytes of the incoming state: {error}")


def _copies(items: torch.Tensor, shapes: Sequence[tuple[int, ...]]) -> Sequence[torch.Tensor]:
    """Make tensors of these shapes, each in memory of its own, out of items that lie one after the other."""
    if shapes.count(shapes[0]) == len(shapes):
        return _unbind_copy(items.view(len(shapes), *shapes[0]))
    made = _split_copy(items, list(map(prod, shapes)))
    for tensor, shape in zip(made, shapes, strict=True):
        if len(shape) != 1:
            tensor.resize_(shape)
    return made


def _dtype(pair: tuple[_Look | None, Chunk]) -> str | None:
    return pair[0].dtype if pair[0] else None


def _fills(spec: TensorSpec, nbytes: int) -> _Look | None:
    """Say what a tensor is like, if it is all of a storage of this size and just as torch would make it anew.

    Of its own size, and not just seen as often as a peer says: an expanded one would be a claim.
    """
    seen = find_pattern(spec.shape, spec.stride, spec.itemsize)
    # Of whatever is in a bool torch makes 0 or 1 when it copies it; all else it copies as it is.
    if spec.dtype == "bool" or spec.conj or spec.neg or not seen.items:
        return None
    if not seen.items * spec.itemsize == seen.run_bytes == nbytes:
        return None
    as_new = tuple(accumulate(reversed(spec.shape[1:]), mul, initial=1))[::-1] if spec.shape else ()
    return _Look(spec.dtype, spec.shape) if as_new == spec.stride else None
