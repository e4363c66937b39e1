"""Bytes that have arrived, put where `core.landing` says: the memory side of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import groupby

import torch

from torchferry.core.compare import TensorPair
from torchferry.core.extents import Extent
from torchferry.core.landing import Direct, Landing
from torchferry.core.manifest import Manifest
from torchferry.core.plan import Chunk
from torchferry.errors import StateError
from torchferry.tensors.describe import Description
from torchferry.tensors.fresh import FreshMemory
from torchferry.tensors.itemwise import without_repeats, write_items
from torchferry.tensors.memory import (
    CPU,
    Memory,
    check_room,
    new_memory,
    raw_over,
    reread,
    run_of,
    scatter,
    store,
)

_AT_ONCE = 1024
"""So many pieces are written before it is asked whether that is still wanted."""


class Ground:
    """The memory that a transfer lands in: fresh storages, or those of a local state."""

    def __init__(
        self,
        incoming: Manifest,
        fresh: FreshMemory | None = None,
        target: Description | None = None,
        written: Collection[int] = (),
    ) -> None:
        self._incoming = incoming
        self._fresh = fresh
        self._target = target
        self._written = written
        self._scratch: dict[int, Memory] = {}

    @classmethod
    def nowhere(cls) -> Ground:
        """Make a ground for messages that are dropped."""
        return cls(Manifest(0, (), (), (), ()))

    @property
    def is_local(self) -> bool:
        """Whether it is a local state's."""
        return self._target is not None

    @property
    def is_all_cpu(self) -> bool:
        """Whether all of it is in the CPU's memory, as what is fresh always is."""
        return self._target is None or self._target.is_all_cpu

    def straight(
        self, chunk: Chunk, landing: Landing, takes: Callable[[torch.device], bool]
    ) -> tuple[torch.Tensor, Landing] | None:
        """Give memory that the link can write a chunk into, pages and all, and what is left to do after that.

        None if the chunk must be staged: nowhere to go, gaps, or memory that the link can't reach.
        """
        if chunk.piece.repeats:
            return None
        for place in landing.direct:
            memory = self._memory(place)
            if takes(memory.device):
                if self._fresh is not None:
                    self._fresh.fault_in(chunk.piece)
                rest = tuple(other for other in landing.direct if other is not place)
                return run_of(memory, chunk.piece), Landing(rest, landing.spread)
        return None

    def put(
        self,
        chunks: Sequence[Chunk],
        landings: Sequence[Landing],
        buffer: torch.Tensor,
        before_each: Callable[[], None] = lambda: None,
    ) -> None:
        """Copy chunks, which lie in a buffer one after the other, to every place of their landings.

        `before_each` is called before every place that is written, or thousand small ones, and may raise.
        """
        start = 0
        for is_simple, run in groupby(zip(chunks, landings, strict=True), key=_has_one_place):
            some = list(run)
            nbytes = [chunk.nbytes for chunk, _ in some]
            flat = buffer[start : start + sum(nbytes)]
            start += flat.nbytes
            if is_simple:
                memories = [self._memory(landing.direct[0]) for _, landing in some]
                self._scatter(memories, [chunk.piece for chunk, _ in some], flat, before_each)
                continue
            for (chunk, landing), bytes_of_it in zip(some, flat.split(nbytes), strict=True):
                self._put(chunk, landing, bytes_of_it, before_each)

    def put_alike(
        self, chunks: Sequence[Chunk], buffer: torch.Tensor, before_each: Callable[[], None] = lambda: None
    ) -> None:
        """Copy chunks to where they were, in memory that is laid out alike.

        `before_each` is called before every thousand that are written to a local state, and may raise.

        Raises:
            StateError: there is not enough memory for what is fresh.
        """
        if self._fresh is not None:
            # All at once: nobody sees it before it is complete.
            self._fresh.unpack(chunks, buffer)
        elif self._target is not None:
            pieces, memories = [chunk.piece for chunk in chunks], self._target.memories
            self._scatter([memories[piece.storage] for piece in pieces], pieces, buffer, before_each)

    def _scatter(
        self,
        memories: Sequence[Memory],
        pieces: Sequence[Extent],
        buffer: torch.Tensor,
        before_each: Callable[[], None],
    ) -> None:
        start = 0
        for first in range(0, len(pieces), _AT_ONCE):
            before_each()
            some = pieces[first : first + _AT_ONCE]
            end = start + sum(piece.nbytes for piece in some)
            scatter(memories[first : first + _AT_ONCE], some, buffer[start:end])
            start = end

    def _put(
        self, chunk: Chunk, landing: Landing, buffer: torch.Tensor, before_each: Callable[[], None]
    ) -> None:
        for place in landing.direct:
            before_each()
            store(self._memory(place), chunk.piece, buffer)
        for each in landing.spread:
            before_each()
            assert self._target is not None, "only a local state has tensors to spread into"
            write_items(
                buffer,
                chunk.piece,
                chunk.position,
                self._incoming.tensors[each.incoming],
                self._target.tensors[each.local],
                self._target.manifest.tensors[each.local],
                covers=each.covers,
            )

    def copy_whole(self, pairs: Sequence[TensorPair]) -> None:
        """Copy the tensors that had to arrive whole out of scratch."""
        for pair in pairs:
            assert self._target is not None, "only a local state has tensors to copy into"
            theirs = self._incoming.tensors[pair.incoming]
            ours = self._target.manifest.tensors[pair.local]
            arrived = without_repeats(raw_over(self._scratch[theirs.storage], theirs))
            without_repeats(raw_over(self._target.memories[ours.storage], ours)).copy_(
                reread(arrived, theirs, ours)
            )

    def set_aside(self, storages: Collection[int]) -> None:
        """Set memory aside now for incoming storages that have no local one.

        Raises:
            StateError: there is not enough.
        """
        check_room(sum(self._incoming.storages[storage] for storage in storages), "the fresh tensors")
        for storage in storages:
            self.scratch(storage)

    def scratch(self, storage: int) -> Memory:
        """Give the scratch memory in which an incoming storage has arrived, as much of it as was wanted.

        Raises:
            StateError: there is not enough memory for it.
        """
        return self._memory(Direct(~storage, 0))

    def mark_changed(self) -> None:
        """Tell autograd that local tensors were written to, since it was done behind its back."""
        if self._target is None:
            return
        tensors: Sequence[torch.Tensor] = self._target.tensors
        if len(self._written) < len(tensors):
            tensors = [tensors[number] for number in self._written]
        if self._target.uncounted:
            tensors = [tensor for tensor in tensors if not tensor.is_inference()]
        torch.autograd.graph.increment_version(tensors)

    def _memory(self, place: Direct) -> Memory:
        if self._fresh is not None:
            return self._fresh.memory(place.storage)
        if place.storage >= 0:
            assert self._target is not None, "what is neither fresh nor local has no place"
            return self._target.memories[place.storage].at(place.delta)
        storage = ~place.storage
        if storage not in self._scratch:
            nbytes = self._incoming.storages[storage]
            check_room(nbytes, "a storage of the incoming state")
            try:
                self._scratch[storage] = new_memory(nbytes, CPU)
            except (RuntimeError, MemoryError) as error:
                raise StateError(f"no memory for {nbytes} bytes of the incoming state: {error}") from None
        return self._scratch[storage]


def _has_one_place(pair: tuple[Chunk, Landing]) -> bool:
    _, landing = pair
    return len(landing.direct) == 1 and not landing.spread
