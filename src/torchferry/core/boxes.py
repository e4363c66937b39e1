"""Ranges of items of a strided tensor, cut into boxes that indexing can name.

A chunk that goes into a tensor of another layout covers a range of its items in the sender's order. Such
a range is rarely a box, but always a few of them: at most two for each dimension.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

Box = tuple[tuple[int, ...], tuple[int, ...]]


def boxes(shape: Sequence[int], first: int, end: int) -> Iterator[Box]:
    """Cut the items `first` to `end`, counted in row-major order, into (start, size) boxes, in order.

    >>> list(boxes((3, 4), 2, 9))
    [((0, 2), (1, 2)), ((1, 0), (1, 4)), ((2, 0), (1, 1))]
    """
    if first >= end:
        return
    if not shape:
        yield (), ()
        return
    inner = prod(shape[1:])
    row, last_row = first // inner, (end - 1) // inner
    if row == last_row or len(shape) == 1:
        yield from _within(shape, row, last_row, first, end, inner)
        return
    if first % inner:
        yield from boxes(shape, first, (row + 1) * inner)
        row += 1
    full_rows = end // inner - row
    if full_rows:
        yield (row,) + (0,) * (len(shape) - 1), (full_rows, *shape[1:])
    if end % inner:
        yield from boxes(shape, (row + full_rows) * inner, end)


def _within(shape: Sequence[int], row: int, last_row: int, first: int, end: int, inner: int) -> Iterator[Box]:
    if len(shape) == 1:
        yield (row,), (last_row - row + 1,)
        return
    for start, size in boxes(shape[1:], first - row * inner, end - row * inner):
        yield (row, *start), (1, *size)


def items_below(address: int, levels: Sequence[tuple[int, int]]) -> int:
    """Count the items that start below `address`, for nested (count, stride) levels, widest first.

    >>> items_below(9, ((3, 8), (2, 4)))
    3
    """
    if address <= 0:
        return 0
    below = 0
    for depth, (count, stride) in enumerate(levels):
        row = min(count - 1, (address - 1) // stride)
        below += row * prod(n for n, _ in levels[depth + 1 :])
        address -= row * stride
    return below + 1
