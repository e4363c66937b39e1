"""Extents: every used byte is in exactly one. tests/properties/test_extents.py has the random tests."""

from __future__ import annotations

import pytest

from torchferry.core.extents import (
    MAX_RUNS,
    Extent,
    Pattern,
    TooIrregular,
    extents_of,
    find_pattern,
    footprint,
    is_nested,
    memory_order,
    overlaps_itself,
    split,
)
from torchferry.core.manifest import TensorSpec


def spec(shape: tuple[int, ...], stride: tuple[int, ...], offset: int = 0, itemsize: int = 4) -> TensorSpec:
    return TensorSpec("any", itemsize, shape, stride, 0, offset)


def used_bytes(extents: list[Extent]) -> int:
    return sum(extent.nbytes for extent in extents)


def test_a_dense_tensor_is_one_run_whatever_the_order_of_its_dimensions() -> None:
    assert footprint(spec((3, 4), (4, 1))) == footprint(spec((4, 3), (1, 4))) == [Extent(0, 0, 48)]


def test_a_column_is_one_extent_with_a_run_for_each_row() -> None:
    (extent,) = footprint(spec((1000,), (1000,), offset=8))
    assert extent == Extent(0, 8, 4, ((1000, 4000),))
    assert extent.nbytes == 4000
    assert extent.end == 8 + 999 * 4000 + 4


def test_an_expanded_dimension_costs_nothing() -> None:
    assert used_bytes(footprint(spec((7, 1000), (1, 0)))) == 7 * 4


def test_a_sliding_window_is_the_run_that_it_slides_over() -> None:
    assert footprint(spec((5, 3), (1, 1))) == [Extent(0, 0, 28)]


def test_irregular_strides_are_listed_exactly() -> None:
    tensor = spec((3, 3), (2, 3))
    used = {4 * (2 * i + 3 * j) + b for i in range(3) for j in range(3) for b in range(4)}
    assert used_bytes(footprint(tensor)) == len(used)


def test_an_empty_tensor_uses_nothing() -> None:
    assert extents_of([spec((0, 3), (3, 1)), spec((3, 0), (1, 1))]) == []


def test_a_shared_byte_is_in_one_extent() -> None:
    assert extents_of([spec((10,), (1,)), spec((10,), (1,), offset=20)]) == [Extent(0, 0, 60)]
    assert extents_of([spec((10,), (1,)), spec((5,), (2,))]) == [Extent(0, 0, 40)]


def test_tensors_that_only_touch_stay_apart() -> None:
    assert extents_of([spec((10,), (1,)), spec((10,), (1,), offset=40)]) == [
        Extent(0, 0, 40),
        Extent(0, 40, 40),
    ]


def test_columns_of_one_matrix_are_merged_without_listing_their_rows() -> None:
    rows = 10 * MAX_RUNS
    columns = [
        spec((rows, 2), (8, 1), offset=0),
        spec((rows, 2), (8, 1), offset=4),
        spec((rows,), (8,), offset=20),
    ]
    assert extents_of(columns) == [Extent(0, 0, 12, ((rows, 32),)), Extent(0, 20, 4, ((rows, 32),))]


def test_different_storages_never_mix() -> None:
    first, second = spec((4,), (1,)), TensorSpec("any", 4, (4,), (1,), 1, 0)
    assert extents_of([second, first]) == [Extent(0, 0, 16), Extent(1, 0, 16)]


def test_a_pattern_with_too_many_runs_is_refused_before_it_is_listed() -> None:
    with pytest.raises(TooIrregular):
        footprint(spec((2**40, 2**40), (2, 3)))
    with pytest.raises(TooIrregular):
        extents_of([spec((2**40,), (2,)), spec((2**40,), (3,))])


@pytest.mark.parametrize("max_bytes", [16, 40, 64, 1000])
def test_pieces_cover_an_extent_in_order(max_bytes: int) -> None:
    extent = Extent(0, 8, 24, ((3, 1000), (5, 64)))
    pieces = list(split(extent, max_bytes, 4))
    assert sum(piece.nbytes for piece in pieces) == extent.nbytes
    assert all(piece.nbytes <= max_bytes for piece in pieces)
    assert [piece.offset for piece in pieces] == sorted(piece.offset for piece in pieces)


def test_a_tensor_overlaps_itself_if_two_items_share_memory() -> None:
    assert overlaps_itself(spec((3, 2), (0, 1)))
    assert overlaps_itself(spec((5, 3), (1, 1)))
    assert not overlaps_itself(spec((1, 2), (0, 1)))
    assert not overlaps_itself(spec((3, 2), (5, 1)))
    assert not overlaps_itself(spec((3, 2), (2, 3))), "items may lie between each other"
    assert not overlaps_itself(spec((0, 2), (0, 1)))


def test_memory_order_goes_from_the_widest_stride_to_the_narrowest() -> None:
    assert memory_order(TensorSpec("any", 4, (2, 3, 4), (1, 8, 2), 0, 0)) == [1, 2, 0]
    assert memory_order(TensorSpec("any", 4, (5, 3), (1, 1), 0, 0)) is None


@pytest.mark.parametrize(
    ("shape", "stride", "pattern"),
    [
        ((3, 4), (4, 1), Pattern(48, 48, ())),
        ((3, 4), (1, 3), Pattern(48, 48, ())),
        ((3, 2), (10, 1), Pattern(88, 8, ((3, 40),))),
        ((2, 3), (6, 2), Pattern(44, 4, ((6, 8),))),
        ((5,), (0,), Pattern(4, 4, ())),
        ((3, 3), (2, 3), Pattern(44, 4, ((3, 12), (3, 8)), regular=False)),
        ((0, 3), (3, 1), Pattern(0, 0, ())),
        ((), (), Pattern(4, 4, ())),
    ],
    ids=["dense", "transposed", "columns", "every second item", "expanded", "irregular", "empty", "scalar"],
)
def test_a_pattern_describes_the_bytes_of_a_tensor(
    shape: tuple[int, ...], stride: tuple[int, ...], pattern: Pattern
) -> None:
    assert find_pattern(shape, stride, 4) == pattern


def test_repeats_are_nested_if_each_stride_is_at_least_the_span_of_the_narrower_ones() -> None:
    assert is_nested(4, ((3, 12), (2, 8)))
    assert not is_nested(4, ((3, 8), (2, 8)))
    assert not is_nested(9, ((3, 8),))
