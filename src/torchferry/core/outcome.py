"""What a transfer did to the local state: which paths are whole, which are torn, which are untouched."""

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from enum import IntEnum
from typing import NamedTuple

from torchferry.core.destinations import tensors_by_extent
from torchferry.core.extents import TooIrregular
from torchferry.core.manifest import Manifest
from torchferry.core.plan import Plan
from torchferry.core.tree import Path, format_path, occurrences


class ChunkState(IntEnum):
    """What happened to the local bytes of one chunk."""

    UNTOUCHED = 0
    WRITTEN = 1  # some or all of its bytes may have been overwritten
    WHOLE = 2  # written, and verified unless verification is off
    DAMAGED = 3  # its bytes are not those that were sent
    EQUAL = 4  # not written, because the local bytes are equal


class Outcome(NamedTuple):
    """Paths of leaves with tensors, by what happened to them."""

    whole: tuple[str, ...]
    torn: tuple[str, ...]
    untouched: tuple[str, ...]


def outcome_of(
    manifest: Manifest,
    plan: Plan,
    chunk_states: Sequence[int],
    *,
    unfinished: Collection[int] = (),
    paired: Collection[Path] | None = None,
) -> Outcome:
    """Return what happened to each path that both sides have, given the state of each chunk.

    The tensors in `unfinished` are still to be copied from scratch memory, so they are not whole even if
    their chunks are. `paired` lists the paths that both sides have; None means all.
    """
    whole, torn, untouched = list[str](), list[str](), list[str]()
    for path, found in _states_by_path(manifest, plan, chunk_states, unfinished):
        if paired is None or path in paired:
            # A tensor without bytes has no chunks. A leaf of only such tensors is whole.
            is_whole = found <= {ChunkState.WHOLE, ChunkState.EQUAL}
            is_untouched = found <= {ChunkState.UNTOUCHED, ChunkState.EQUAL}
            paths = whole if is_whole else untouched if is_untouched else torn
            paths.append(format_path(path))
    return Outcome(tuple(whole), tuple(torn), tuple(untouched))


def paths_of(manifest: Manifest, plan: Plan, chunk_numbers: Collection[int]) -> list[str]:
    """Return the paths of the leaves that have bytes in the extents of the given chunks."""
    if not chunk_numbers:
        return []
    is_given = [number in chunk_numbers for number in range(len(plan.chunks))]
    return [format_path(path) for path, found in _states_by_path(manifest, plan, is_given) if True in found]


def _states_by_path(
    manifest: Manifest, plan: Plan, chunk_states: Sequence[int], unfinished: Collection[int] = ()
) -> Iterator[tuple[Path, set[int]]]:
    """Yield each path of a leaf with tensors, and the states of the chunks of its extents."""
    try:
        tensors_of = tensors_by_extent(plan.extents, manifest)
    except TooIrregular:
        # It is too irregular to compute which tensors use an extent, so assume all tensors of its storage. A
        # path may then be reported as torn although it is not.
        by_storage: defaultdict[int, list[int]] = defaultdict(list)
        for number, spec in enumerate(manifest.tensors):
            by_storage[spec.storage].append(number)
        tensors_of = [by_storage[extent.storage] for extent in plan.extents]
    states: defaultdict[int, set[int]] = defaultdict(set)
    for chunk, state in zip(plan.chunks, chunk_states, strict=True):
        for piece in chunk.pieces:
            for tensor in tensors_of[piece.extent]:
                states[tensor].add(state)
    for tensor in unfinished:
        if ChunkState.WHOLE in states[tensor]:
            states[tensor].add(ChunkState.WRITTEN)
    for path, leaf in occurrences(manifest):
        if parts := manifest.leaves[leaf].parts:
            yield path, set().union(*(states[part] for part in parts))
