"""Decides where the bytes of each extent go in a local state.

There are three ways, best first:
- Direct: copy the extent as it is into a local storage. Every byte of it must belong to a paired tensor.
- Itemwise: copy the items of each chunk, as it arrives, into a local tensor of another layout.
- Via scratch: receive the whole tensor into scratch memory and copy it at the end. This is for tensors that
  overlap themselves, and for tensors that share an extent of several runs with other tensors.

An extent with no destination is received and dropped.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import accumulate, groupby
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from torchferry.core.compare import Pair, can_copy_as_block
from torchferry.core.extents import (
    Budget,
    Extent,
    TooIrregular,
    are_disjoint,
    extents_of,
    footprint,
    memory_order,
)
from torchferry.core.manifest import Manifest
from torchferry.core.plan import Piece
from torchferry.core.tree import Path
from torchferry.errors import BadManifest


class Direct(Struct, frozen=True, gc=False):
    """Copy to a local storage, at the incoming offset plus `delta`.

    Storage ~n is the scratch memory of incoming storage n.
    """

    storage: int
    delta: int


class Itemwise(Struct, frozen=True, gc=False):
    """Copy the items of an incoming tensor into a local tensor.

    If `covers`, the tensor is the whole extent, so its items are found by position, otherwise by address.
    """

    incoming: int
    local: int
    covers: bool


class Destinations(Struct, frozen=True, gc=False):
    """All the destinations of one extent's bytes."""

    direct: tuple[Direct, ...] = ()
    itemwise: tuple[Itemwise, ...] = ()


class DestinationMap(NamedTuple):
    """A destination for each extent of the plan, and the tensors to copy from scratch memory at the end.

    If `identical`, storages and offsets are those of the sender, and `by_extent` is empty.
    """

    by_extent: tuple[Destinations, ...]
    via_scratch: tuple[Pair, ...] = ()
    identical: bool = False

    def of(self, piece: Piece) -> Destinations:
        """Return the destination of a piece."""
        if self.identical:
            return Destinations((Direct(piece.storage, 0),))
        return self.by_extent[piece.extent]


IDENTICAL = DestinationMap((), identical=True)


def place_in_local_state(
    extents: Sequence[Extent],
    incoming: Manifest,
    local: Manifest,
    pairs: Sequence[Pair],
    fresh: Collection[int] = (),
) -> DestinationMap:
    """Place every extent in the local tensors that are paired with the incoming ones.

    The incoming tensors in `fresh` have no local tensor. They are received into scratch memory,
    which then belongs to the returned state.
    Raises BadManifest if the incoming tensors overlap in too irregular a pattern.
    """
    try:
        tensors_of = tensors_by_extent(extents, incoming)
        footprints = [footprint(spec) for spec in incoming.tensors]
    except TooIrregular as error:
        raise BadManifest(f"the incoming views overlap in too irregular a pattern ({error})") from None
    pairs_of: defaultdict[int, list[Pair]] = defaultdict(list)
    for pair in dict.fromkeys(pair._replace(path=()) for pair in pairs):
        pairs_of[pair.incoming].append(pair)
    destinations: list[Destinations] = []
    via_scratch: dict[Pair, None] = {}
    for extent, tensors in zip(extents, tensors_of, strict=True):
        paired = [pair for tensor in tensors for pair in pairs_of[tensor]]
        covering = {tensor for tensor in tensors if footprints[tensor] == [extent]}
        direct: list[Direct] = []
        copied: set[Pair] = set()
        for target, members in _group_by_place(paired, incoming, local):
            moved = {pair.incoming for pair in members}
            # They must cover the extent: one tensor alone, or all tensors in it together.
            if moved & covering or moved.issuperset(tensors):
                direct.append(target)
                copied.update(members)
        itemwise: list[Itemwise] = []
        for pair in paired:
            if pair in copied:
                continue
            covers = pair.incoming in covering
            has_order = memory_order(incoming.tensors[pair.incoming]) is not None
            if has_order and (covers or not extent.repeats):
                itemwise.append(Itemwise(pair.incoming, pair.local, covers))
            else:
                via_scratch[pair] = None
        destinations.append(Destinations(tuple(direct), tuple(itemwise)))
    # Scratch memory receives every extent of its tensors.
    in_scratch = {pair.incoming for pair in via_scratch}.union(fresh)
    for number, extent in enumerate(extents):
        if in_scratch.intersection(tensors_of[number]):
            place = destinations[number]
            destinations[number] = Destinations((*place.direct, Direct(~extent.storage, 0)), place.itemwise)
    return DestinationMap(tuple(destinations), tuple(via_scratch))


def _group_by_place(
    pairs: Iterable[Pair], incoming: Manifest, local: Manifest
) -> Iterator[tuple[Direct, list[Pair]]]:
    """Group the pairs whose bytes can be copied as a block by where they would be copied to."""
    found: list[tuple[int, int, Pair]] = []
    for pair in pairs:
        theirs, ours = incoming.tensors[pair.incoming], local.tensors[pair.local]
        if can_copy_as_block(theirs, ours):
            found.append((ours.storage, ours.offset - theirs.offset, pair))
    # Grouped by sorting, not in a dict: a peer can choose distances whose hashes collide.
    found.sort()
    for (storage, delta), group in groupby(found, lambda each: each[:2]):
        yield Direct(storage, delta), [pair for *_, pair in group]


def tensors_by_extent(extents: Sequence[Extent], manifest: Manifest) -> list[list[int]]:
    """List the tensors that have bytes in each extent; raises TooIrregular if that takes too long."""
    tensors_of: list[list[int]] = [[] for _ in extents]
    # Extents are sorted, and no two start at the same byte. `reach[n]` is the last end among extents 0 to n.
    starts = [(extent.storage, extent.offset) for extent in extents]
    reach = list(accumulate(((extent.storage, extent.end) for extent in extents), max))
    footprint_budget, comparison_budget = Budget(), Budget()
    for tensor, spec in enumerate(manifest.tensors):
        for used in footprint(spec, footprint_budget):
            # Found by bisection, not by hash: a peer can choose extents whose hashes collide.
            number = bisect_left(starts, (used.storage, used.offset))
            if number < len(extents) and extents[number] == used:
                tensors_of[number].append(tensor)
                continue
            number = bisect_left(starts, (used.storage, used.end)) - 1
            while number >= 0 and reach[number] > (used.storage, used.offset):
                comparison_budget.spend(1)
                if not are_disjoint((used, extents[number]), comparison_budget):
                    tensors_of[number].append(tensor)
                number -= 1
    return [list(dict.fromkeys(tensors)) for tensors in tensors_of]


def unwritten_paths(
    local: Manifest, places: Sequence[tuple[Path, int]], written: Collection[int]
) -> list[Path]:
    """Return which paths, given with their leaves, share no memory with local tensors that are written."""
    parts = [part for _, leaf in places for part in local.leaves[leaf].parts]
    if not parts:
        return [path for path, _ in places]
    try:
        extents = extents_of([local.tensors[number] for number in written])
        asked = replace(local, tensors=tuple(local.tensors[part] for part in parts))
        overwritten = {parts[n] for numbers in tensors_by_extent(extents, asked) for n in numbers}
    except TooIrregular:
        overwritten = set(parts)
    return [path for path, leaf in places if overwritten.isdisjoint(local.leaves[leaf].parts)]
