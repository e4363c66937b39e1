"""A sink: takes the chunks of an incoming state, in any order, and writes them where they belong.

At any moment a sink can tell which paths of the local state are whole, torn and untouched.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from torchferry.core.manifest import Manifest
from torchferry.core.outcome import ChunkState, Outcome, outcome, paths_of
from torchferry.core.placement import SAME_LAYOUT, Direct, Placement, Placements
from torchferry.core.plan import Chunk, Message, Plan
from torchferry.core.tree import Path
from torchferry.engine.digest import digests
from torchferry.errors import StateError
from torchferry.tensors.describe import Description
from torchferry.tensors.fresh import FreshMemory
from torchferry.tensors.memory import Memory, check_room, copy_items, new_memory, run_of, scatter, write_items

_PIECES_AT_ONCE = 1024
"""How many pieces are written between two checks for cancellation."""

BeforeWrite = Callable[[], None]
"""Called before memory is written. It may raise, and then nothing more is written."""


@dataclass(eq=False)
class Sink:
    """Writes chunks to fresh memory, to the local state, or nowhere.

    `paired` lists the paths that both states have; None means all. `written` lists the local tensors that are
    written. `failure` is set when there is no memory for the fresh state: chunks are dropped from then on.
    `sender_changed` is set when the sender's state changed while it was being sent.
    """

    manifest: Manifest
    plan: Plan
    placements: Placements = SAME_LAYOUT
    fresh: FreshMemory | None = None
    local: Description | None = None
    written: Collection[int] = ()
    paired: Collection[Path] | None = None
    failure: StateError | None = None
    sender_changed: bool = False

    def __post_init__(self) -> None:
        self.pinned = self.local is not None and not self.local.is_all_cpu
        self._scratch: dict[int, Memory] = {}
        self._states = bytearray(len(self.plan.chunks))
        self._digests: dict[int, int] = {}
        self._opened: dict[int, Direct] = {}

    @classmethod
    def discarding(cls, manifest: Manifest, plan: Plan) -> Sink:
        """Make a sink that drops all chunks."""
        return cls(manifest, plan, Placements((Placement(),) * len(plan.extents)))

    @property
    def is_local(self) -> bool:
        """Whether the sink writes to the local state."""
        return self.local is not None

    def allocate(self, storages: Collection[int]) -> None:
        """Allocate fresh memory for these incoming storages now, before anything is written.

        Raises:
            StateError: there is not enough memory.
        """
        if self.fresh is not None:
            for storage in storages:
                self.fresh.memory(storage)
            return
        check_room(sum(self.manifest.storages[storage] for storage in storages), "the fresh tensors")
        for storage in storages:
            self.scratch(storage)

    def direct_place(self, message: Message, can_access: Callable[[torch.device], bool]) -> Direct | None:
        """Return a place where the link itself can write a message; None if it must be staged."""
        chunk = self.plan.chunks[message.first]
        if message.end - message.first > 1 or chunk.piece.repeats:
            return None
        places = self.placements.of(chunk).direct
        return next((place for place in places if can_access(self._memory(place).device)), None)

    def open(self, message: Message, place: Direct) -> torch.Tensor:
        """Return the memory of a place, for the link to write. `mark_written` follows when it may begin."""
        piece = self.plan.chunks[message.first].piece
        if self.fresh is not None:
            self.fresh.fault_in(piece)
        self._opened[message.first] = place
        return run_of(self._memory(place), piece)

    def write(self, message: Message, buffer: torch.Tensor, before_write: BeforeWrite = lambda: None) -> None:
        """Write the chunks of a message, which are consecutive in the buffer, to every place but an open one.

        Raises:
            StateError: memory of the local state was freed.
        """
        if self.failure is not None:
            return
        try:
            self._write(message, buffer, before_write)
        except StateError as error:
            if self.is_local:
                raise
            self.failure = error

    def _write(self, message: Message, buffer: torch.Tensor, before_write: BeforeWrite) -> None:
        chunks = self.plan.chunks_of(message)
        opened = self._opened.pop(message.first, None)
        if opened is not None:
            placement = self.placements.of(chunks[0])
            others = tuple(place for place in placement.direct if place != opened)
            self._write_one(chunks[0], Placement(others, placement.itemwise), buffer, before_write)
        elif not self.placements.same_layout:
            placements = [self.placements.of(chunk) for chunk in chunks]
            if any(placement.direct or placement.itemwise for placement in placements):
                self.mark_written(message)
                self._write_placed(chunks, placements, buffer, before_write)
        elif self.fresh is not None:
            self.fresh.unpack(chunks, buffer)
        elif self.local is not None:
            self.mark_written(message)
            memories = [self.local.memories[chunk.piece.storage] for chunk in chunks]
            self._scatter(chunks, memories, buffer, before_write)

    def _write_placed(
        self,
        chunks: Sequence[Chunk],
        placements: Sequence[Placement],
        buffer: torch.Tensor,
        before_write: BeforeWrite,
    ) -> None:
        start = 0
        for has_one_place, group in groupby(zip(chunks, placements, strict=True), key=_has_one_place):
            pairs = list(group)
            sizes = [chunk.nbytes for chunk, _ in pairs]
            flat = buffer[start : start + sum(sizes)]
            start += flat.nbytes
            if has_one_place:
                memories = [self._memory(placement.direct[0]) for _, placement in pairs]
                self._scatter([chunk for chunk, _ in pairs], memories, flat, before_write)
                continue
            for (chunk, placement), data in zip(pairs, flat.split(sizes), strict=True):
                self._write_one(chunk, placement, data, before_write)

    def _scatter(
        self,
        chunks: Sequence[Chunk],
        memories: Sequence[Memory],
        buffer: torch.Tensor,
        before_write: BeforeWrite,
    ) -> None:
        start = 0
        for first in range(0, len(chunks), _PIECES_AT_ONCE):
            before_write()
            pieces = [chunk.piece for chunk in chunks[first : first + _PIECES_AT_ONCE]]
            end = start + sum(piece.nbytes for piece in pieces)
            scatter(memories[first : first + _PIECES_AT_ONCE], pieces, buffer[start:end])
            start = end

    def _write_one(
        self, chunk: Chunk, placement: Placement, buffer: torch.Tensor, before_write: BeforeWrite
    ) -> None:
        for place in placement.direct:
            before_write()
            scatter([self._memory(place)], [chunk.piece], buffer)
        for items in placement.itemwise:
            before_write()
            assert self.local is not None, "only local tensors are written item by item"
            theirs, ours = self.manifest.tensors[items.incoming], self.local.manifest.tensors[items.local]
            memory = self.local.memories[ours.storage]
            write_items(buffer, chunk, theirs, memory, ours, covers=items.covers)

    def add_digests(self, message: Message, buffer: torch.Tensor) -> None:
        """Hash the received chunks of a message.

        Raises:
            StateError: memory of the local state was freed.
        """
        sizes = [chunk.nbytes for chunk in self.plan.chunks_of(message)]
        self._digests.update(zip(range(message.first, message.end), digests(buffer, sizes), strict=True))

    def verify(self, first: int, expected: Sequence[int]) -> None:
        """Compare the digests of received chunks, from the chunk `first` on, with those of the sender."""
        for number, digest in enumerate(expected, first):
            matches = self._digests.pop(number, None) == digest
            self._states[number] = ChunkState.WHOLE if matches else ChunkState.DAMAGED

    def mark_written(self, message: Message) -> None:
        """Count the chunks of a message as written, perhaps partly."""
        self._mark(message, ChunkState.WRITTEN)

    def accept(self, message: Message) -> None:
        """Count the chunks of a message as whole without verification."""
        self._mark(message, ChunkState.WHOLE)

    def mark_damaged(self, first: int, end: int) -> None:
        """Count chunks as damaged, because their digests did not arrive."""
        self._states[first:end] = bytes([ChunkState.DAMAGED]) * (end - first)

    def _mark(self, message: Message, state: ChunkState) -> None:
        self._states[message.first : message.end] = bytes([state]) * (message.end - message.first)

    def damaged_paths(self) -> list[str]:
        """Return the paths of the leaves that have bytes in damaged chunks."""
        damaged = {number for number, state in enumerate(self._states) if state == ChunkState.DAMAGED}
        return paths_of(self.manifest, self.plan, damaged)

    def unmark_whole(self) -> None:
        """Count whole chunks as torn: the sender aborted, or the tensors are being finished."""
        self._states = self._states.replace(bytes([ChunkState.WHOLE]), bytes([ChunkState.WRITTEN]))

    def outcome(self) -> Outcome:
        """Return which paths of the local state are whole, torn and untouched now."""
        unfinished = {pair.incoming for pair in self.placements.via_scratch}
        return outcome(self.manifest, self.plan, self._states, unfinished=unfinished, paired=self.paired)

    def copy_from_scratch(self) -> None:
        """Copy the tensors that had to arrive completely before they could be written."""
        for pair in self.placements.via_scratch:
            assert self.local is not None, "only local tensors are copied to"
            theirs = self.manifest.tensors[pair.incoming]
            ours = self.local.manifest.tensors[pair.local]
            copy_items(self._scratch[theirs.storage], theirs, self.local.memories[ours.storage], ours)

    def scratch(self, storage: int) -> Memory:
        """Return the scratch memory of an incoming storage.

        Raises:
            StateError: there is not enough memory.
        """
        if storage not in self._scratch:
            nbytes = self.manifest.storages[storage]
            check_room(nbytes, "a storage of the incoming state")
            self._scratch[storage] = new_memory(nbytes)
        return self._scratch[storage]

    def increment_versions(self) -> None:
        """Increment the version counters of written local tensors: the writes bypassed autograd."""
        if self.local is None:
            return
        tensors: Sequence[torch.Tensor] = self.local.tensors
        if len(self.written) < len(tensors):
            tensors = [tensors[number] for number in self.written]
        if self.local.uncounted:
            tensors = [tensor for tensor in tensors if not tensor.is_inference()]
        torch.autograd.graph.increment_version(tensors)

    def _memory(self, place: Direct) -> Memory:
        if self.fresh is not None:
            return self.fresh.memory(place.storage)
        if place.storage < 0:
            return self.scratch(~place.storage)
        assert self.local is not None, "a sink without memory has no places"
        return self.local.memories[place.storage].at(place.delta)


def _has_one_place(pair: tuple[Chunk, Placement]) -> bool:
    _, placement = pair
    return len(placement.direct) == 1 and not placement.itemwise
