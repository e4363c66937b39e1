"""The truth about a target after a failure: which paths are whole, which torn, which untouched."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from torchferry.core.extents import Extent, TooIntricate
from torchferry.core.landing import users_of
from torchferry.core.manifest import Manifest
from torchferry.core.plan import Plan
from torchferry.core.tree import format_path, occurrences


class Truth(NamedTuple):
    """Paths of leaves that have tensors, by what happened to them."""

    whole: tuple[str, ...]
    torn: tuple[str, ...]
    untouched: tuple[str, ...]


def truth(manifest: Manifest, plan: Plan, *, posted: int, verified: Collection[int]) -> Truth:
    """Say what a failed transfer did to each path.

    `posted` counts the chunks, from the first, whose memory may have been written to; `verified` has the
    numbers of those that arrived and were found right.
    """
    fates: dict[int, set[str]] = {}
    users = users_of(plan.extents, manifest)
    for number, chunk in enumerate(plan.chunks):
        fate = "torn" if number < posted else "untouched"
        fate = "whole" if number in verified else fate
        for tensor in users[chunk.extent]:
            fates.setdefault(tensor, set()).add(fate)
    found: dict[str, list[str]] = {"whole": [], "torn": [], "untouched": []}
    for path, number in occurrences(manifest):
        parts = manifest.leaves[number].parts
        if not parts:
            continue
        seen = set().union(*(fates.get(part, {"whole"}) for part in parts))
        found[seen.pop() if len(seen) == 1 else "torn"].append(format_path(path))
    return Truth(tuple(found["whole"]), tuple(found["torn"]), tuple(found["untouched"]))


def paths_of(manifest: Manifest, extents: Sequence[Extent], numbers: Collection[int]) -> list[str]:
    """Name the leaves that have bytes in the given extents; all, if it would take too long to find out."""
    try:
        users = users_of(extents, manifest)
        tensors = {tensor for number in numbers for tensor in users[number]}
    except TooIntricate:
        tensors = set(range(len(manifest.tensors)))
    return [
        format_path(path)
        for path, leaf in occurrences(manifest)
        if tensors.intersection(manifest.leaves[leaf].parts)
    ]
