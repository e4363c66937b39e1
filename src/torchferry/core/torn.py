"""The truth about a target after a failure: which paths are whole, which torn, which untouched."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import NamedTuple

from torchferry.core.extents import Extent, TooIrregular
from torchferry.core.manifest import Manifest
from torchferry.core.placement import tensors_by_extent
from torchferry.core.plan import Plan
from torchferry.core.tree import Path, format_path, occurrences


class Truth(NamedTuple):
    """Paths of leaves that have tensors, by what happened to them."""

    whole: tuple[str, ...]
    torn: tuple[str, ...]
    untouched: tuple[str, ...]


def truth(
    manifest: Manifest,
    plan: Plan,
    *,
    posted: int,
    verified: Collection[int],
    scratched: Collection[int],
    paired: Collection[Path] | None = None,
) -> Truth:
    """Say what a failed transfer did to each path that both sides have: those in `paired`.

    `posted` counts the chunks, from the first, whose memory may have been written to; `verified` has the
    numbers of those that arrived and were found right. The tensors in `scratched` are only copied to their
    places when all is there, so they are not whole for having arrived. `paired` is None if it is all of them.
    """
    fates: dict[int, set[str]] = {}
    users = _users(plan.extents, manifest)
    for number, chunk in enumerate(plan.chunks):
        fate = "torn" if number < posted else "untouched"
        fate = "whole" if number in verified else fate
        for tensor in users[chunk.extent]:
            late = fate == "whole" and tensor in scratched
            fates.setdefault(tensor, set()).add("torn" if late else fate)
    found: dict[str, list[str]] = {"whole": [], "torn": [], "untouched": []}
    for path, number in occurrences(manifest):
        parts = manifest.leaves[number].parts
        if not parts or (paired is not None and path not in paired):
            continue
        seen = set().union(*(fates.get(part, {"whole"}) for part in parts))
        found[seen.pop() if len(seen) == 1 else "torn"].append(format_path(path))
    return Truth(tuple(found["whole"]), tuple(found["torn"]), tuple(found["untouched"]))


def paths_of(manifest: Manifest, extents: Sequence[Extent], numbers: Collection[int]) -> list[str]:
    """Name the leaves that have bytes in the given extents, or in storages too intricate to tell."""
    users = _users(extents, manifest)
    tensors = {tensor for number in numbers for tensor in users[number]}
    return [
        format_path(path)
        for path, leaf in occurrences(manifest)
        if tensors.intersection(manifest.leaves[leaf].parts)
    ]


def _users(extents: Sequence[Extent], manifest: Manifest) -> Sequence[Sequence[int]]:
    """For each extent, list the tensors that have bytes in it; all of its storage if that takes too long.

    Then more is called torn than is, but never less.
    """
    try:
        return tensors_by_extent(extents, manifest)
    except TooIrregular:
        by_storage: defaultdict[int, list[int]] = defaultdict(list)
        for number, spec in enumerate(manifest.tensors):
            by_storage[spec.storage].append(number)
        return [by_storage[extent.storage] for extent in extents]
