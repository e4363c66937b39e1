"""Strides: patterns of used bytes, and the order of items in memory. tests/properties has random tests."""

from __future__ import annotations

import pytest

from torchferry.core.manifest import TensorSpec
from torchferry.core.strides import Pattern, find_pattern, is_nested, memory_order


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
        ((3, 3), (2, 3), Pattern(44, 4, None)),
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
