"""Landing: straight into memory wherever that touches no neighbour."""

from __future__ import annotations

from torchferry.core.compare import TensorPair
from torchferry.core.extents import extents_of
from torchferry.core.landing import LAND_ALIKE, Direct, Landing, Landings, Spread, land_in_place
from torchferry.core.manifest import Leaf, Manifest, TensorSpec
from torchferry.core.plan import make_plan


def state(*tensors: TensorSpec) -> Manifest:
    return Manifest(0, (), (Leaf("tensor", (0,)),), tensors, (1 << 20,) * 4)


def tensor(shape: tuple[int, ...], stride: tuple[int, ...], storage: int = 0, offset: int = 0) -> TensorSpec:
    return TensorSpec("float32", 4, shape, stride, storage, offset)


def land(incoming: Manifest, local: Manifest, *pairs: tuple[int, int]) -> Landings:
    named = [TensorPair((str(a),), a, b) for a, b in pairs]
    return land_in_place(extents_of(incoming.tensors), incoming, local, named)


ROW, OTHER_ROW = tensor((8,), (1,)), tensor((8,), (1,), storage=1)


def test_fresh_extents_keep_their_places() -> None:
    plan = make_plan(state(ROW, OTHER_ROW))
    assert [LAND_ALIKE.of(chunk) for chunk in plan.chunks] == [
        Landing((Direct(chunk.piece.storage, 0),)) for chunk in plan.chunks
    ]


def test_the_same_layout_is_landed_directly_at_a_distance() -> None:
    assert land(state(ROW), state(tensor((8,), (1,), 2, 40)), (0, 0)).by_extent == (
        Landing((Direct(2, 40),)),
    )


def test_another_layout_is_spread() -> None:
    assert land(state(ROW), state(tensor((8,), (3,))), (0, 0)).by_extent == (
        Landing((), (Spread(0, 0, True),)),
    )


def test_what_nobody_wants_lands_nowhere() -> None:
    assert land(state(ROW, OTHER_ROW), state(ROW), (0, 0)).by_extent[1] == Landing()


def test_a_tensor_that_is_tied_there_and_not_here_lands_in_both() -> None:
    (landing,) = land(state(ROW, ROW), state(ROW, OTHER_ROW), (0, 0), (1, 1)).by_extent
    assert set(landing.direct) == {Direct(0, 0), Direct(1, 0)}


def test_an_extent_is_never_written_whole_for_a_part_of_it() -> None:
    incoming = state(ROW, tensor((2,), (1,), offset=8))
    (landing,) = land(incoming, state(tensor((2,), (1,), 3, 8)), (1, 0)).by_extent
    assert landing == Landing((), (Spread(1, 0, False),))


def test_overlapping_views_that_move_together_land_directly() -> None:
    views = state(tensor((8,), (1,)), tensor((8,), (1,), offset=16))
    moved = state(tensor((8,), (1,), 2, 100), tensor((8,), (1,), 2, 116))
    assert land(views, moved, (0, 0), (1, 1)).by_extent == (Landing((Direct(2, 100),)),)


def test_items_without_an_order_in_memory_are_kept_until_all_are_there() -> None:
    windows = state(tensor((5, 3), (1, 1)))
    landings = land(windows, state(tensor((5, 3), (3, 1))), (0, 0))
    assert landings.by_extent == (Landing((Direct(~0, 0),)),)
    assert [(pair.incoming, pair.local) for pair in landings.whole] == [(0, 0)]


def test_whoever_is_copied_whole_finds_all_of_itself() -> None:
    # Interlocked: several extents, of which another tensor shares only some.
    knot, row = tensor((3, 3), (2, 7)), tensor((3,), (1,))
    incoming = state(knot, row)
    landings = land(incoming, state(tensor((3, 3), (3, 1)), tensor((3,), (1,), 1)), (0, 0), (1, 1))
    assert len(landings.by_extent) > 1
    assert all(Direct(~0, 0) in landing.direct for landing in landings.by_extent)
