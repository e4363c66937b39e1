"""Who takes what from whom: pure decisions from the tables of all ranks."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchferry.core.assignment import Assignment, Part, Table, assign
from torchferry.core.manifest import VALUE, Branch, Leaf, Manifest, TensorSpec
from torchferry.core.tree import occurrences
from torchferry.errors import Difference, LostPart, PartsLost, ReplicasDiffer

TENSORS = TensorSpec("float32", 4, (1,), (1,), 0, 0), TensorSpec("float32", 4, (0,), (1,), 0, 0)


def table(rank: int, leaves: dict[str, Any], **more: Any) -> Table:
    """A rank with tensors: a text is its bytes, "bytes@position" a shard. Numbers are values.

    A tensor of "nothing" has no elements.
    """
    found, digests = [], []
    for content in leaves.values():
        content, _, position = str(content).partition("@")
        kind = VALUE if content.isdigit() else "tensor"
        found.append(
            Leaf(kind, () if kind == VALUE else (int(content == "nothing"),), fixed=position or None)
        )
        digests.append(content.encode().ljust(16))
    children = tuple(range(len(found)))
    manifest = Manifest(~0, (Branch("dict", children, tuple(leaves)),), tuple(found), TENSORS, (4,))
    return Table(rank, manifest, digests, **more)


def part_of(leaf: Leaf, rank: int | None) -> Part | None:
    """The position of a shard is in the leaf; rank n would hold position n % 2."""
    if leaf.fixed is None:
        return None
    return Part(b"split in two", str(leaf.fixed) if rank is None else str(rank % 2))


def takes(assignment: Assignment, tables: dict[int, Table]) -> dict[int, dict[str, tuple[int, ...]]]:
    """Return from whom each rank takes each path."""
    found: dict[int, dict[str, tuple[int, ...]]] = {}
    for bundle in assignment.bundles:
        for rank in bundle.receivers:
            paths = [path for path, _ in occurrences(tables[assignment.trees[rank]].manifest)]
            for number in bundle.numbers[rank]:
                found.setdefault(rank, {})[str(paths[number][0])] = bundle.sources
    return found


def assigned(
    sources: dict[int, Table], receivers: dict[int, Table], trust: int | None = None
) -> dict[int, dict[str, tuple[int, ...]]]:
    return takes(assign(sources, receivers, trust, part_of), {**sources, **receivers})


def test_a_rank_behind_takes_everything_from_all_that_have_it() -> None:
    sources = {rank: table(rank, {"w": "new", "step": 5}) for rank in (0, 2)}
    assert assigned(sources, {1: table(1, {"w": "old", "step": 3})}) == {1: {"w": (0, 2), "step": (0, 2)}}


def test_it_takes_paths_that_it_does_not_have_yet() -> None:
    sources = {0: table(0, {"w": "a", "moment": "m"})}
    assert assigned(sources, {1: table(1, {"w": "b"})}) == {1: {"w": (0,), "moment": (0,)}}


def test_it_takes_its_own_shard_also_of_tensors_that_it_does_not_have_yet() -> None:
    sources = {rank: table(rank, {"w": f"w{rank % 2}@{rank % 2}", "m": f"m@{rank % 2}"}) for rank in range(3)}
    assert assigned(sources, {3: table(3, {"w": "old@1"})}) == {3: {"w": (1,), "m": (1,)}}
    # On a mesh of other ranks, the position of its other shards tells.
    assert assigned(sources, {4: table(4, {"w": "old@1"})}) == {4: {"w": (1,), "m": (1,)}}


def test_different_leaves_may_come_from_different_ranks() -> None:
    sources = {0: table(0, {"d": "d@0", "e": "f@1"}), 1: table(1, {"d": "x@1", "e": "e@0"})}
    assert assigned(sources, {2: table(2, {"d": "?@0", "e": "?@0"})}) == {2: {"d": (0,), "e": (1,)}}


def test_without_a_rank_that_has_all_paths_it_takes_only_its_own() -> None:
    sources = {0: table(0, {"one": "a", "x": "x"}), 1: table(1, {"two": "b", "y": "y"})}
    assert assigned(sources, {2: table(2, {"one": "?", "two": "?"})}) == {2: {"one": (0,), "two": (1,)}}


def test_tensors_that_vary_need_not_be_anywhere() -> None:
    sources = {0: table(0, {"w": "a"})}
    receivers = {1: table(1, {"w": "b", "history": "h"}, optional=("history",))}
    assert assigned(sources, receivers) == {1: {"w": (0,)}}


def test_what_nobody_has_is_listed_for_all_that_need_it() -> None:
    sources = {0: table(0, {"w": "a@0", "b": "b"})}
    receivers = {rank: table(rank, {"w": "?@1", "b": "?"}) for rank in (1, 3)}
    with pytest.raises(PartsLost) as raised:
        assigned(sources, {**receivers, 5: table(5, {"other": "?"})})
    assert raised.value.parts == (LostPart("w", "1", (1, 3)), LostPart("other", "", (5,)))


def test_shards_without_elements_are_never_lost() -> None:
    sources = {0: table(0, {"w": "a@0", "b": "b", "m": "m@0"})}
    receiver = {1: table(1, {"w": "nothing@1", "b": "?", "m": "nothing@1"})}
    assert assigned(sources, receiver) == {1: {"b": (0,)}}
    with pytest.raises(PartsLost) as raised:
        assigned(sources, {1: table(1, {"w": "nothing@1", "b": "?", "other": "?"})})
    assert raised.value.parts == (LostPart("other", "", (1,)),)


def test_another_kind_of_tensor_is_left_to_the_comparison() -> None:
    assert assigned({0: table(0, {"w": "a"})}, {1: table(1, {"w": "?@1"})}) == {1: {"w": (0,)}}


def test_replicas_that_differ_are_listed_with_their_ranks() -> None:
    sources = {rank: table(rank, {"w": "a" if rank else "b", "s": f"s@{rank}"}) for rank in range(3)}
    with pytest.raises(ReplicasDiffer) as raised:
        assigned(sources, {})
    assert raised.value.differences == (Difference("w", "", ((0,), (1, 2))),)


def test_a_trusted_rank_and_those_that_agree_with_it_serve_the_others() -> None:
    sources = {rank: table(rank, {"w": "b" if rank == 1 else "a", "v": "v"}) for rank in range(3)}
    assert assigned(sources, {}, trust=2) == {1: {"w": (0, 2)}}
    receivers = {3: table(3, {"w": "?", "v": "?"})}
    # Rank 1 takes something itself, so it serves nothing that others have too.
    assert assigned(sources, receivers, trust=2) == {1: {"w": (0, 2)}, 3: {"w": (0, 2), "v": (0, 2)}}


def test_paths_of_each_rank_are_taken_from_the_lowest_and_not_compared() -> None:
    sources = {rank: table(rank, {"w": "a", "rng": f"seed {rank}"}, per_rank=("rng",)) for rank in (1, 2)}
    assert assigned(sources, {0: table(0, {"w": "?", "rng": "?"})}) == {0: {"w": (1, 2), "rng": (1,)}}


PATHS = ["a", "b", "c"]


@given(
    st.dictionaries(
        st.integers(0, 3), st.dictionaries(st.sampled_from(PATHS), st.booleans(), min_size=1), min_size=1
    ),
    st.dictionaries(st.sampled_from(PATHS), st.booleans(), min_size=1),
)
def test_every_part_comes_from_ranks_that_hold_exactly_it_or_is_lost(
    held: dict[int, dict[str, bool]], wanted: dict[str, bool]
) -> None:
    """A part is a path and a position, and its bytes follow from both."""

    def build(rank: int, parts: dict[str, bool]) -> Table:
        return table(rank, {path: f"{path}{second}@{int(second)}" for path, second in parts.items()})

    sources = {rank: build(rank, parts) for rank, parts in held.items()}
    holders = defaultdict(list)
    for rank in sorted(held):
        for part in held[rank].items():
            holders[part].append(rank)
    lost = {part for part in wanted.items() if part not in holders}
    try:
        found = assigned(sources, {4: build(4, wanted)})[4]
    except PartsLost as error:
        named = {(part.path, part.position == "1") for part in error.parts}
        # What it needs, and what comes with the tree that it gets.
        assert lost <= named
        assert all(part not in holders for part in named)
        return
    assert not lost
    assert all(tuple(holders[path, second]) == found[path] for path, second in wanted.items())
