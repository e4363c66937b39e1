"""A sink: takes the chunks of an incoming state, in any order, and writes them where they belong.

They belong in fresh memory, or in the tensors of the local state. At any moment a sink can tell which paths
of the local state are whole, torn and untouched.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from xxhash import xxh3_64

from torchferry.core.destinations import (
    IDENTICAL,
    DestinationMap,
    Destinations,
    Direct,
)
from torchferry.core.extents import check_held
from torchferry.core.manifest import Manifest
from torchferry.core.outcome import ChunkState, Outcome, outcome_of, paths_of
from torchferry.core.plan import Chunk, Piece, Plan
from torchferry.core.tree import Path, occurrences
from torchferry.engine.source import digest
from torchferry.engine.workspace import Staging
from torchferry.errors import FerryError, StateError, torn_after
from torchferry.tensors.describe import Description
from torchferry.tensors.fresh import FreshMemory, find_bytes_storages
from torchferry.tensors.memory import (
    CPU,
    Memory,
    check_room,
    copy_items,
    gather,
    new_memory,
    read_items,
    run_of,
    scatter,
    view_of,
    write_items,
)

_ONE_PLACE = Destinations((Direct(0, 0),))
"""Stands for the places of all pieces, if each has one."""

_PIECES_AT_ONCE = 1024
"""How many pieces are written between two checks for cancellation."""


@dataclass(eq=False)
class Sink:
    """Writes chunks to fresh memory or to the local state. A sink with neither drops all chunks.

    `paired` lists the paths that both states have; None means all. `written` lists the local tensors that are
    written. `before_write` is called before local memory is written; if it raises, nothing more is written.
    `failure` is set when there is no memory for the fresh state: chunks are dropped from then on.
    Writing and hashing raise StateError if memory of the local state was freed.
    """

    manifest: Manifest
    plan: Plan
    destinations: DestinationMap = IDENTICAL
    fresh: FreshMemory | None = None
    local: Description | None = None
    written: Collection[int] = ()
    paired: Collection[Path] | None = None
    before_write: Callable[[], None] = lambda: None
    failure: StateError | None = None

    def __post_init__(self) -> None:
        self.pinned = self.local is not None and not self.local.is_all_cpu
        self._scratch: dict[int, Memory] = {}
        self._bytes_storages = find_bytes_storages(self.manifest)
        self._states = bytearray(len(self.plan.chunks))
        self._digests: dict[int, int] = {}  # of chunks whose expected digest is not known yet
        self._expected: dict[int, int] = {}  # of chunks that have not been hashed yet
        self._opened: dict[int, Direct] = {}
        # Tensors that are still to be copied from scratch memory.
        self._unfinished = {pair.incoming for pair in self.destinations.via_scratch}
        # In fresh memory and in an identical local state, every chunk has one place.
        self._has_one_place = self.destinations.identical

    def direct_place(self, chunk: Chunk, can_access: Callable[[torch.device], bool]) -> Direct | None:
        """Return a place where the link itself can write a chunk; None if it must be staged."""
        has_memory = self.fresh is not None or self.local is not None
        if not (has_memory and chunk.is_one_run):
            return None
        places = self.destinations.of(chunk.pieces[0]).direct
        return next((place for place in places if can_access(self._memory(place).device)), None)

    def open(self, chunk: Chunk, place: Direct) -> torch.Tensor:
        """Return the memory of a place, for the link to write. The chunk counts as written from now on."""
        return run_of(self._open(chunk, place), chunk.pieces[0])

    def open_view(self, chunk: Chunk) -> memoryview | None:
        """Like `open`, for a place in CPU memory; None if there is none. Faster than creating a tensor."""
        place = self.direct_place(chunk, _is_cpu)
        return None if place is None else view_of(self._open(chunk, place), chunk.pieces[0])

    def _open(self, chunk: Chunk, place: Direct) -> Memory:
        if self.fresh is not None:
            self.fresh.fault_in(chunk.pieces[0])
        memory = self._memory(place)
        check_held(memory.storage.nbytes(), memory.base + chunk.pieces[0].end)
        self._opened[chunk.number] = place
        self._mark_written(chunk)
        return memory

    def write(self, chunk: Chunk, buffer: torch.Tensor | None) -> None:
        """Write the pieces of a chunk to all their places, except the one that was opened.

        `buffer` is None if the chunk was received into that one. A chunk that is whole is not written again.
        """
        if self._states[chunk.number] == ChunkState.WHOLE:
            return
        opened = self._opened.pop(chunk.number, None)
        if opened is not None and self._has_one_place:
            return
        if buffer is None:
            assert opened is not None, "a chunk is in a buffer, or in the place that was opened"
            buffer = run_of(self._memory(opened), chunk.pieces[0])
        if self.local is not None:
            self._write_to(self.local, chunk, buffer, opened)
        elif self.fresh is not None and self.failure is None:
            try:
                self.fresh.unpack(chunk.pieces, buffer)
                self._mark_written(chunk)
            except StateError as error:
                self.failure = error

    def _write_to(
        self, local: Description, chunk: Chunk, buffer: torch.Tensor, opened: Direct | None
    ) -> None:
        if self.destinations.identical:
            self._mark_written(chunk)
            memories = [local.memories[piece.storage] for piece in chunk.pieces]
            self._scatter(chunk.pieces, memories, buffer)
            return
        destinations = [self.destinations.of(piece) for piece in chunk.pieces]
        if opened is not None:
            others = tuple(place for place in destinations[0].direct if place != opened)
            destinations = [Destinations(others, destinations[0].itemwise)]
        elif any(destination.direct or destination.itemwise for destination in destinations):
            self._mark_written(chunk)
        else:
            return
        start = 0
        placed = zip(chunk.pieces, destinations, strict=True)
        for is_copied_once, group in groupby(placed, key=_is_copied_once):
            pairs = list(group)
            sizes = [piece.nbytes for piece, _ in pairs]
            flat = buffer[start : start + sum(sizes)]
            start += flat.nbytes
            if is_copied_once:
                memories = [self._memory(destination.direct[0]) for _, destination in pairs]
                self._scatter([piece for piece, _ in pairs], memories, flat)
                continue
            for (piece, destination), data in zip(pairs, flat.split(sizes), strict=True):
                for place in destination.direct:
                    self._scatter([piece], [self._memory(place)], data)
                for items in destination.itemwise:
                    self.before_write()
                    theirs, ours = self.manifest.tensors[items.incoming], local.manifest.tensors[items.local]
                    memory = local.memories[ours.storage]
                    write_items(data, piece, theirs, memory, ours, covers=items.covers)

    def _scatter(self, pieces: Sequence[Piece], memories: Sequence[Memory], buffer: torch.Tensor) -> None:
        start = 0
        for first in range(0, len(pieces), _PIECES_AT_ONCE):
            self.before_write()
            some = pieces[first : first + _PIECES_AT_ONCE]
            end = start + sum(piece.nbytes for piece in some)
            scatter(memories[first : first + _PIECES_AT_ONCE], some, buffer[start:end])
            start = end

    def needs(self, chunk: Chunk) -> bool:
        """Return whether any byte of a chunk is written anywhere."""
        places = (self.destinations.of(piece) for piece in chunk.pieces)
        return self.destinations.identical or any(place.direct or place.itemwise for place in places)

    def digest(self, chunk: Chunk, staging: Staging, only_in: Collection[int] | None = None) -> int | None:
        """Return the digest that a chunk would have if it were read from the local state now.

        None if that is not known, because a piece shares bytes with other tensors of another layout, or is
        not copied to the local state, or lies in another storage than those in `only_in`.
        """
        if self.local is None:
            return None
        if self.destinations.identical:
            if only_in is not None and any(piece.storage not in only_in for piece in chunk.pieces):
                return None
            places = [_ONE_PLACE]
        else:
            places = [self.destinations.of(piece) for piece in chunk.pieces]
            if not all(self._is_readable(each, only_in) for each in places):
                return None
        found: int | None = None
        # Tensors that are tied only at the source go to several places. All must hold the same.
        for copy in range(max(len(each.direct) or 1 for each in places)):
            buffer = self._read_copy(self.local, chunk, places, copy, staging)
            earlier, found = found, digest(buffer)
            if not (chunk.is_one_run and places[0].direct):
                staging.give_back(buffer)
            if copy and found != earlier:
                return None
        return found

    def _is_readable(self, place: Destinations, only_in: Collection[int] | None) -> bool:
        """Return whether a piece can be read back from each of its places, and all are in known storages."""
        if place.itemwise:
            items = place.itemwise[0]
            theirs = self.manifest.tensors[items.incoming]
            # One item of an expanded tensor is many local items.
            is_expanded = any(n > 1 and not step for n, step in zip(theirs.shape, theirs.stride, strict=True))
            if place.direct or len(place.itemwise) > 1 or not items.covers or is_expanded:
                return False
        storages = self._storages(place)
        return bool(storages) and all(
            storage >= 0 and (only_in is None or storage in only_in) for storage in storages
        )

    def storages_of(self, chunk: Chunk) -> list[int]:
        """List the local storages that a chunk is written to. A negative number is scratch memory."""
        if self.destinations.identical:
            return [piece.storage for piece in chunk.pieces]
        places = map(self.destinations.of, chunk.pieces)
        return [storage for place in places for storage in self._storages(place)]

    def _storages(self, place: Destinations) -> list[int]:
        assert self.local is not None, "only local tensors are compared"
        tensors = self.local.manifest.tensors
        return [
            *(each.storage for each in place.direct),
            *(tensors[each.local].storage for each in place.itemwise),
        ]

    def _read_copy(
        self, local: Description, chunk: Chunk, places: Sequence[Destinations], copy: int, staging: Staging
    ) -> torch.Tensor:
        """Return the bytes of copy number `copy`. A piece with fewer places is read from its last one."""
        if self.destinations.identical:
            return self.read(chunk, staging)
        if not any(each.itemwise for each in places):
            return self._read_from(
                [each.direct[min(copy, len(each.direct) - 1)] for each in places], chunk, staging
            )
        buffer = staging.take(chunk.nbytes)
        flats = buffer.split([piece.nbytes for piece in chunk.pieces])
        for piece, place, flat in zip(chunk.pieces, places, flats, strict=True):
            if place.itemwise:
                items = place.itemwise[0]
                theirs, ours = self.manifest.tensors[items.incoming], local.manifest.tensors[items.local]
                read_items(flat, piece, theirs, local.memories[ours.storage], ours)
            else:
                gather([self._memory(place.direct[min(copy, len(place.direct) - 1)])], [piece], flat)
        return buffer

    def can_read(self, chunk: Chunk) -> bool:
        """Return whether every piece of a chunk is copied unchanged to some tensor."""
        return all(self.destinations.of(piece).direct for piece in chunk.pieces)

    def read(self, chunk: Chunk, staging: Staging) -> torch.Tensor:
        """Return the bytes of a chunk from where they were written: a tensor's memory, or a buffer."""
        return self._read_from(
            [self.destinations.of(piece).direct[0] for piece in chunk.pieces], chunk, staging
        )

    def _read_from(self, places: Sequence[Direct], chunk: Chunk, staging: Staging) -> torch.Tensor:
        memories = [self._memory(place) for place in places]
        if chunk.is_one_run:
            return run_of(memories[0], chunk.pieces[0]).cpu()
        buffer = staging.take(chunk.nbytes)
        gather(memories, chunk.pieces, buffer)
        return buffer

    def _mark_written(self, chunk: Chunk) -> None:
        self._states[chunk.number] = ChunkState.WRITTEN

    def add_digest(self, chunk: Chunk, buffer: torch.Tensor, hasher: xxh3_64 | None = None) -> None:
        """Record the digest of a received chunk. If `hasher` is given, it has hashed the chunk already."""
        self._digests[chunk.number] = digest(buffer) if hasher is None else hasher.intdigest()

    def expect(self, first: int, digests: Sequence[int]) -> None:
        """Note the digests of the sender, from the chunk `first` on."""
        self._expected.update(enumerate(digests, first))

    def verify(self) -> None:
        """Compare the digests of hashed chunks with the expected ones: each chunk is whole or damaged."""
        for number in self._digests.keys() & self._expected.keys():
            matches = self._digests.pop(number) == self._expected.pop(number)
            self._settle(number, ChunkState.WHOLE if matches else ChunkState.DAMAGED)

    def mark_whole(self, chunk: Chunk) -> None:
        """Mark a written chunk as whole. The caller has verified it, or verification is off."""
        self._settle(chunk.number, ChunkState.WHOLE)

    def _settle(self, number: int, state: ChunkState) -> None:
        # A chunk that was dropped stays UNTOUCHED, unless it is damaged.
        if self._states[number] == ChunkState.WRITTEN or state == ChunkState.DAMAGED:
            self._states[number] = state

    def mark(self, first: int, end: int, state: ChunkState) -> None:
        """Set the state of the chunks from `first` to `end`."""
        self._states[first:end] = bytes([state]) * (end - first)

    def unmark_whole(self) -> None:
        """Mark whole chunks as WRITTEN, so that their paths count as torn."""
        self._states = self._states.replace(bytes([ChunkState.WHOLE]), bytes([ChunkState.WRITTEN]))

    def mark_written_as_whole(self) -> None:
        """Mark written chunks as WHOLE."""
        self._states = self._states.replace(bytes([ChunkState.WRITTEN]), bytes([ChunkState.WHOLE]))

    def damaged_paths(self) -> list[str]:
        """Return the paths of the leaves that have bytes in damaged chunks."""
        damaged = {number for number, state in enumerate(self._states) if state == ChunkState.DAMAGED}
        return paths_of(self.manifest, self.plan, damaged)

    @property
    def has_written(self) -> bool:
        """Whether any local byte may have been overwritten."""
        return not {*self._states} <= {ChunkState.UNTOUCHED, ChunkState.EQUAL}

    def paths(self) -> list[Path]:
        """Return the paths of leaves with tensors that both states have."""
        leaves, paired = self.manifest.leaves, self.paired
        found = [path for path, leaf in occurrences(self.manifest) if leaves[leaf].parts]
        return found if paired is None else [path for path in found if path in paired]

    def outcome(self) -> Outcome:
        """Return which paths of the local state are whole, torn and untouched now."""
        return outcome_of(
            self.manifest, self.plan, self._states, unfinished=self._unfinished, paired=self.paired
        )

    def copy_from_scratch(self) -> None:
        """Copy the tensors that had to arrive completely before they could be written."""
        for pair in self.destinations.via_scratch:
            assert self.local is not None, "only local tensors are copied to"
            theirs = self.manifest.tensors[pair.incoming]
            ours = self.local.manifest.tensors[pair.local]
            copy_items(self._scratch[theirs.storage], theirs, self.local.memories[ours.storage], ours)
        self._unfinished.clear()

    def scratch(self, storage: int) -> Memory:
        """Return the scratch memory of an incoming storage; raises StateError if there is not enough."""
        if storage not in self._scratch:
            nbytes = self.manifest.storages[storage]
            check_room(nbytes, "a storage of the incoming state")
            self._scratch[storage] = new_memory(nbytes, storage in self._bytes_storages)
        return self._scratch[storage]

    def increment_versions(self) -> None:
        """Increment the version counters of written local tensors: the writes bypassed autograd."""
        if self.local is not None:
            self.local.increment_versions(self.written)

    def _memory(self, place: Direct) -> Memory:
        if self.fresh is not None:
            return self.fresh.memory(place.storage)
        if place.storage < 0:
            return self.scratch(~place.storage)
        assert self.local is not None, "a sink without memory has no places"
        return self.local.memories[place.storage].at(place.delta)


def _is_cpu(device: torch.device) -> bool:
    return device is CPU


def _is_copied_once(pair: tuple[Piece, Destinations]) -> bool:
    _, destination = pair
    return len(destination.direct) == 1 and not destination.itemwise


def with_outcome(
    error: BaseException,
    sink: Sink,
    *,
    peer: int | None,
    phase: str,
    keep: bool = False,
    outcome: Outcome | None = None,
) -> BaseException:
    """Return an error that says what a failed transfer did to the local state.

    With `keep`, it is the same error with a note, as KeyboardInterrupt and SystemExit always are.
    `outcome` is given if the sink does not know it.
    """
    if outcome is None and sink.has_written:
        outcome = sink.outcome()
    # What was received into fresh memory overwrites nothing.
    if outcome is None or not (outcome.whole or outcome.torn):
        unchanged = "; nothing was overwritten"
        return error.with_context(more=unchanged) if isinstance(error, FerryError) else error
    torn = torn_after(error, **outcome._asdict())
    if isinstance(error, Exception) and not keep:
        return torn.with_context(peer=peer, phase=phase)
    error.add_note(torn.what)
    return error
