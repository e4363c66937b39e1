"""Destinations: bytes are copied directly wherever that overwrites no other tensor."""

from __future__ import annotations

from torchferry.core.compare import Pair
from torchferry.core.destinations import (
    IDENTICAL,
    DestinationMap,
    Destinations,
    Direct,
    Itemwise,
    place_in_local_state,
)
from torchferry.core.extents import extents_of
from torchferry.core.manifest import Leaf, Manifest, TensorSpec
from torchferry.core.plan import make_plan


def state(*tensors: TensorSpec) -> Manifest:
    return Manifest(0, (), (Leaf("tensor", (0,)),), tensors, (1 << 20,) * 4)


def tensor(shape: tuple[int, ...], stride: tuple[int, ...], storage: int = 0, offset: int = 0) -> TensorSpec:
    return TensorSpec("float32", 4, shape, stride, storage, offset)


def place(incoming: Manifest, local: Manifest, *pairs: tuple[int, int]) -> DestinationMap:
    named = [Pair((str(a),), a, b) for a, b in pairs]
    return place_in_local_state(extents_of(incoming.tensors), incoming, local, named)


ROW, OTHER_ROW = tensor((8,), (1,)), tensor((8,), (1,), storage=1)


def test_fresh_extents_keep_their_storages_and_offsets() -> None:
    plan = make_plan(state(ROW, OTHER_ROW))
    assert [IDENTICAL.of(chunk.pieces[0]) for chunk in plan.chunks] == [
        Destinations((Direct(chunk.pieces[0].storage, 0),)) for chunk in plan.chunks
    ]


def test_a_tensor_of_the_same_layout_is_copied_directly() -> None:
    assert place(state(ROW), state(tensor((8,), (1,), 2, 40)), (0, 0)).by_extent == (
        Destinations((Direct(2, 40),)),
    )


def test_a_tensor_of_another_layout_is_copied_itemwise() -> None:
    assert place(state(ROW), state(tensor((8,), (3,))), (0, 0)).by_extent == (
        Destinations((), (Itemwise(0, 0, True),)),
    )


def test_an_unpaired_tensor_has_no_placement() -> None:
    assert place(state(ROW, OTHER_ROW), state(ROW), (0, 0)).by_extent[1] == Destinations()


def test_a_tensor_tied_only_at_the_sender_is_copied_to_both_local_tensors() -> None:
    (placement,) = place(state(ROW, ROW), state(ROW, OTHER_ROW), (0, 0), (1, 1)).by_extent
    assert set(placement.direct) == {Direct(0, 0), Direct(1, 0)}


def test_an_extent_is_not_copied_directly_if_only_part_of_it_is_paired() -> None:
    incoming = state(ROW, tensor((2,), (1,), offset=8))
    (placement,) = place(incoming, state(tensor((2,), (1,), 3, 8)), (1, 0)).by_extent
    assert placement == Destinations((), (Itemwise(1, 0, False),))


def test_overlapping_views_at_one_distance_are_copied_directly() -> None:
    views = state(tensor((8,), (1,)), tensor((8,), (1,), offset=16))
    moved = state(tensor((8,), (1,), 2, 100), tensor((8,), (1,), 2, 116))
    assert place(views, moved, (0, 0), (1, 1)).by_extent == (Destinations((Direct(2, 100),)),)


def test_a_tensor_that_overlaps_itself_goes_via_scratch() -> None:
    windows = state(tensor((5, 3), (1, 1)))
    placements = place(windows, state(tensor((5, 3), (3, 1))), (0, 0))
    assert placements.by_extent == (Destinations((Direct(~0, 0),)),)
    assert [(pair.incoming, pair.local) for pair in placements.via_scratch] == [(0, 0)]


def test_scratch_memory_receives_every_extent_of_its_tensors() -> None:
    # The irregular tensor has several extents, and the row shares only some of them.
    irregular, row = tensor((3, 3), (2, 7)), tensor((3,), (1,))
    incoming = state(irregular, row)
    placements = place(incoming, state(tensor((3, 3), (3, 1)), tensor((3,), (1,), 1)), (0, 0), (1, 1))
    assert len(placements.by_extent) > 1
    assert all(Direct(~0, 0) in placement.direct for placement in placements.by_extent)
