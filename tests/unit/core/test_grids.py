"""Views of a tensor in two layouts: they are one map however they step, and two values never are."""

from __future__ import annotations

import pytest

from torchferry.core.grids import one_map
from torchferry.core.manifest import TensorSpec


def rows(step: int, columns: int, between: int, *, start: int = 0) -> TensorSpec:
    """Take every so-many-th row of a tensor whose rows lie three items apart, its columns `between`."""
    shape, stride = (6 // step, columns), (3 * step, between)
    return TensorSpec("float32", 4, shape, stride, 0, 4 * 3 * start)


@pytest.mark.parametrize(("one", "two"), [(1, 1), (1, 2), (2, 3), (3, 2)])
def test_views_whose_rows_lie_between_the_columns_at_one_side_only_are_one_map(one: int, two: int) -> None:
    """The step from row to row is the same at both sides, and so is the step from byte to byte."""
    a, x = rows(one, 2, 30), rows(one, 2, 1)
    b, y = rows(two, 2, 30), rows(two, 2, 1)
    assert one_map(a, x, b, y)


@pytest.mark.parametrize("start", range(1, 4))
def test_views_that_lie_apart_at_one_side_and_not_at_the_other_are_not(start: int) -> None:
    a, x = rows(2, 2, 30), rows(2, 2, 1)
    assert one_map(a, x, rows(3, 2, 30, start=start), rows(3, 2, 1, start=start))
    assert not one_map(a, x, rows(3, 2, 30, start=start), rows(3, 2, 1))
    assert not one_map(a, x, rows(3, 2, 30), rows(3, 2, 1, start=start))
