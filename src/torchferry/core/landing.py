"""Where the bytes of each extent go in a local state: straight into memory wherever they may.

Three ways, best first:
- Direct: the extent's bytes are written, as they are, at a fixed distance in a local storage. Allowed
  only if every byte of the extent is some paired tensor's, or the neighbours would be overwritten.
- Spread: item by item into a local tensor of another layout, chunk by chunk.
- Whole: into scratch memory, and copied once all of it is there. For the few tensors whose items can't be
  taken in order of address; the only way that needs memory of the tensor's size.

An extent with none of them is received and thrown away.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Sequence
from itertools import accumulate
from typing import NamedTuple

from msgspec import Struct

from torchferry.core.compare import TensorPair, same_layout
from torchferry.core.extents import Extent, Patience, TooIntricate, footprint, union
from torchferry.core.figures import nested_dims
from torchferry.core.manifest import Manifest
from torchferry.core.plan import Chunk
from torchferry.errors import BadManifest


class Direct(Struct, frozen=True, gc=False):
    """Add `delta` to an incoming address to get the one in local storage `storage`.

    A storage below zero is scratch: ~storage is the incoming storage that it stands for.
    """

    storage: int
    delta: int


class Spread(Struct, frozen=True, gc=False):
    """Items of an incoming tensor go one by one into a local tensor.

    `covers` says that the tensor is all of the extent, so that the n-th item is at n * itemsize of the
    extent's packed bytes; otherwise the extent is plain and items are found by address.
    """

    incoming: int
    local: int
    covers: bool


class Landing(Struct, frozen=True, gc=False):
    """All the places for one extent's bytes."""

    direct: tuple[Direct, ...] = ()
    spread: tuple[Spread, ...] = ()


class Landings(NamedTuple):
    """A landing for each extent of the plan, and the tensors to copy out of scratch at the end.

    With `alike` every extent goes where it was, in memory that is laid out alike: because it is new, or a
    twin's. Landings are not listed then.
    """

    by_extent: tuple[Landing, ...]
    whole: tuple[TensorPair, ...] = ()
    alike: bool = False

    def of(self, chunk: Chunk) -> Landing:
        """Give the landing of a chunk."""
        return Landing((Direct(chunk.piece.storage, 0),)) if self.alike else self.by_extent[chunk.extent]


LAND_ALIKE = Landings((), alike=True)


def land_in_place(
    extents: Sequence[Extent],
    incoming: Manifest,
    local: Manifest,
    pairs: Sequence[TensorPair],
    fresh: Collection[int] = (),
) -> Landings:
    """Land every extent in the local tensors that were paired with the incoming ones.

    The incoming tensors in `fresh` have no local one, and arrive in scratch memory, which becomes theirs.

    Raises:
        BadManifest: the incoming tensors overlap too irregularly to say which bytes are whose.
    """
    try:
        users = users_of(extents, incoming)
        footprints = [footprint(spec) for spec in incoming.tensors]
    except TooIntricate as error:
        raise BadManifest(f"overlapping views too irregular to tell apart ({error})") from None
    takers: defaultdict[int, list[TensorPair]] = defaultdict(list)
    for pair in dict.fromkeys(pair._replace(path=()) for pair in pairs):
        takers[pair.incoming].append(pair)
    landings: list[Landing] = []
    whole: dict[TensorPair, None] = {}
    for extent, tensors in zip(extents, users, strict=True):
        covering = {tensor for tensor in tensors if footprints[tensor] == [extent]}
        landing, scratched = _land(extent, tensors, covering, incoming, local, takers)
        landings.append(landing)
        whole.update(dict.fromkeys(scratched))
    # A tensor that is copied out of scratch, or stays there, must find all of itself in it.
    needed = {pair.incoming for pair in whole}.union(fresh)
    for number, (extent, tensors) in enumerate(zip(extents, users, strict=True)):
        if needed.intersection(tensors):
            landing = landings[number]
            landings[number] = Landing((*landing.direct, Direct(~extent.storage, 0)), landing.spread)
    return Landings(tuple(landings), tuple(whole))


def _land(
    extent: Extent,
    tensors: Sequence[int],
    covering: set[int],
    incoming: Manifest,
    local: Manifest,
    takers: dict[int, list[TensorPair]],
) -> tuple[Landing, list[TensorPair]]:
    pairs = [pair for tensor in tensors for pair in takers.get(tensor, ())]
    blocks: defaultdict[Direct, list[TensorPair]] = defaultdict(list)
    for pair in pairs:
        theirs, ours = incoming.tensors[pair.incoming], local.tensors[pair.local]
        if same_layout(theirs, ours):
            blocks[Direct(ours.storage, ours.offset - theirs.offset)].append(pair)
    direct = {
        block: members
        for block, members in blocks.items()
        if any(pair.incoming in covering for pair in members)
        or {pair.incoming for pair in members} == set(tensors)
    }
    placed = {pair for members in direct.values() for pair in members}
    spread: list[Spread] = []
    scratched: list[TensorPair] = []
    for pair in pairs:
        if pair in placed:
            continue
        covers = pair.incoming in covering
        if nested_dims(incoming.tensors[pair.incoming]) is not None and (covers or not extent.repeats):
            spread.append(Spread(pair.incoming, pair.local, covers))
        else:
            scratched.append(pair)
    return Landing(tuple(direct), tuple(spread)), scratched


def users_of(extents: Sequence[Extent], incoming: Manifest) -> list[list[int]]:
    """For each extent, list the tensors that have bytes in it.

    Raises:
        TooIntricate: too many of them overlap without being alike.
    """
    users: list[list[int]] = [[] for _ in extents]
    exact = {extent: number for number, extent in enumerate(extents)}
    by_storage: defaultdict[int, list[int]] = defaultdict(list)
    for number, extent in enumerate(extents):
        by_storage[extent.storage].append(number)
    reaches = {
        storage: list(accumulate((extents[number].end for number in numbers), max))
        for storage, numbers in by_storage.items()
    }
    footprints_patience, patience = Patience(), Patience()
    for tensor, spec in enumerate(incoming.tensors):
        for used in footprint(spec, footprints_patience):
            if used in exact:
                users[exact[used]].append(tensor)
                continue
            numbers = by_storage[spec.storage]
            for number in _overlapping(used, extents, numbers, reaches[spec.storage], patience):
                if tensor not in users[number][-1:]:
                    users[number].append(tensor)
    return users


def _overlapping(
    used: Extent, extents: Sequence[Extent], numbers: Sequence[int], reach: Sequence[int], patience: Patience
) -> list[int]:
    """List the extents of a storage, given by address, that share bytes with `used`.

    `reach` says for each how far it and those before it go, so that the search knows where to stop.
    """
    past = bisect_left(numbers, used.end, key=lambda number: extents[number].offset)
    found: list[int] = []
    while past and reach[past - 1] > used.offset:
        past -= 1
        patience.spend(1)
        extent = extents[numbers[past]]
        if extent.end > used.offset and _share_bytes(used, extent, patience):
            found.append(numbers[past])
    return found[::-1]


def _share_bytes(one: Extent, two: Extent, patience: Patience) -> bool:
    together = sum(extent.nbytes for extent in union((one, two), patience))
    return together < one.nbytes + two.nbytes
