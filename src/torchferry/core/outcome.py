"""What a transfer did to the local state: which paths are whole, which are torn, which are untouched."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from enum import IntEnum
from typing import NamedTuple

from torchferry.core.extents import Extent, TooIrregular
from torchferry.core.manifest import Manifest
from torchferry.core.placement import tensors_by_extent
from torchferry.core.plan import Plan
from torchferry.core.tree import Path, format_path, occurrences


class ChunkState(IntEnum):
    """What happened to the local bytes of one chunk."""

    UNTOUCHED = 0
    WRITTEN = 1  # its bytes, or some of them, may be overwritten
    WHOLE = 2  # written, and verified unless verification is off
    DAMAGED = 3  # its bytes are not those that were sent


class Outcome(NamedTuple):
    """Paths of leaves with tensors, by what happened to them."""

    whole: tuple[str, ...]
    torn: tuple[str, ...]
    untouched: tuple[str, ...]


def outcome_of(
    manifest: Manifest,
    plan: Plan,
    chunks: Sequence[int],
    *,
    unfinished: Collection[int] = (),
    paired: Collection[Path] | None = None,
) -> Outcome:
    """Return what happened to each path that both sides have, given the state of each chunk.

    The tensors in `unfinished` are still to be copied from scratch memory, so they are not whole even if
    their chunks are. `paired` lists the paths that both sides have; None means all.
    """
    users = _users(plan.extents, manifest)
    states: defaultdict[int, set[int]] = defaultdict(set)
    for chunk, state in zip(plan.chunks, chunks, strict=True):
        for tensor in users[chunk.extent]:
            is_unfinished = state == ChunkState.WHOLE and tensor in unfinished
            states[tensor].add(ChunkState.WRITTEN if is_unfinished else state)
    whole, torn, untouched = list[str](), list[str](), list[str]()
    for path, number in occurrences(manifest):
        parts = manifest.leaves[number].parts
        if not parts or (paired is not None and path not in paired):
            continue
        # A tensor without bytes has no chunks. A leaf of only such tensors is whole.
        found = set().union(*(states.get(part, ()) for part in parts)) or {ChunkState.WHOLE}
        if found == {ChunkState.WHOLE}:
            whole.append(format_path(path))
        elif found == {ChunkState.UNTOUCHED}:
            untouched.append(format_path(path))
        else:
            torn.append(format_path(path))
    return Outcome(tuple(whole), tuple(torn), tuple(untouched))


def paths_of(manifest: Manifest, plan: Plan, chunks: Collection[int]) -> list[str]:
    """Return the paths of the leaves that have bytes in the extents of the given chunks."""
    if not chunks:
        return []
    users = _users(plan.extents, manifest)
    extents = {plan.chunks[number].extent for number in chunks}
    tensors = {tensor for extent in extents for tensor in users[extent]}
    return [
        format_path(path)
        for path, leaf in occurrences(manifest)
        if tensors.intersection(manifest.leaves[leaf].parts)
    ]


def _users(extents: Sequence[Extent], manifest: Manifest) -> Sequence[Sequence[int]]:
    """Return the tensors that have bytes in each extent.

    If the views are too irregular, return all tensors of each extent's storage. Paths may then be reported as
    torn although they are not.
    """
    try:
        return tensors_by_extent(extents, manifest)
    except TooIrregular:
        by_storage: defaultdict[int, list[int]] = defaultdict(list)
        for number, spec in enumerate(manifest.tensors):
            by_storage[spec.storage].append(number)
        return [by_storage[extent.storage] for extent in extents]
