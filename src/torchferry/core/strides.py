"""Arithmetic on shapes and strides: which bytes a tensor uses, and in which order its items lie in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import prod

from msgspec import Struct

from torchferry.core.manifest import TensorSpec

Repeats = tuple[tuple[int, int], ...]
"""(count, stride in bytes) for each level of repetition, widest stride first."""

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""(start, size) in each dimension."""


class Pattern(Struct, frozen=True, gc=False):
    """The bytes that a tensor uses: a run of `run_bytes` at its first item, repeated.

    `span_bytes` is the distance from the start of the first item to the end of the last; 0 if there are no
    items. `repeats` is None if no single pattern describes the bytes.
    """

    span_bytes: int
    run_bytes: int
    repeats: Repeats | None


@lru_cache(maxsize=4096)
def find_pattern(shape: tuple[int, ...], stride: tuple[int, ...], itemsize: int) -> Pattern:
    """Return the pattern of a tensor's bytes. Cached: thousands of tensors have a few dozen patterns."""
    if 0 in shape:
        return Pattern(0, 0, ())
    steps = byte_steps(shape, stride, itemsize)
    span_bytes = itemsize + sum((count - 1) * step for count, step in steps)
    run = reach = itemsize
    repeats: list[tuple[int, int]] = []  # narrowest first
    for count, step in steps:
        if not repeats and step <= run:
            run += (count - 1) * step
        elif step < reach:
            return Pattern(span_bytes, itemsize, None)
        elif repeats and step == repeats[-1][0] * repeats[-1][1]:
            repeats[-1] = (repeats[-1][0] * count, repeats[-1][1])
        else:
            repeats.append((count, step))
        reach += (count - 1) * step
    return Pattern(span_bytes, run, tuple(reversed(repeats)))


def byte_steps(shape: Sequence[int], stride: Sequence[int], itemsize: int) -> list[tuple[int, int]]:
    """Return (count, stride in bytes) of the dimensions that step through memory, narrowest first."""
    dims = zip(stride, shape, strict=True)
    return [(count, step * itemsize) for step, count in sorted(dims) if count > 1 and step > 0]


def memory_order(spec: TensorSpec) -> list[int] | None:
    """Return the dimensions that step through memory, widest stride first.

    A walk in this order visits each address once, in rising order. Expanded dimensions are left out. If the
    tensor overlaps itself in any other way, no such order exists, and the result is None.
    """
    dims = [d for d, count in enumerate(spec.shape) if count > 1 and spec.stride[d] > 0]
    dims.sort(key=lambda d: spec.stride[d], reverse=True)
    return dims if is_nested(1, [(spec.shape[d], spec.stride[d]) for d in dims]) else None


def is_nested(run: int, repeats: Sequence[tuple[int, int]]) -> bool:
    """Return whether a run of this length can be repeated like this without overlapping itself."""
    for count, step in reversed(repeats):
        if step < run:
            return False
        run += (count - 1) * step
    return True


def split_into_boxes(shape: Sequence[int], first: int, end: int) -> Iterator[Box]:
    """Split the items `first` to `end`, in row-major order, into boxes: at most two for each dimension.

    >>> list(split_into_boxes((3, 4), 2, 9))
    [((0, 2), (1, 2)), ((1, 0), (1, 4)), ((2, 0), (1, 1))]
    """
    if first >= end:
        return
    if not shape:
        yield (), ()
        return
    row_items = prod(shape[1:])
    row, skipped = divmod(first, row_items)
    if skipped or end - first < row_items:
        done = min(end, (row + 1) * row_items)
        for start, size in split_into_boxes(shape[1:], skipped, done - row * row_items):
            yield (row, *start), (1, *size)
    else:
        rows = (end - first) // row_items
        done = first + rows * row_items
        yield (row,) + (0,) * (len(shape) - 1), (rows, *shape[1:])
    yield from split_into_boxes(shape, done, end)


def count_items_below(address: int, repeats: Sequence[tuple[int, int]]) -> int:
    """Count the items that start below `address`, where the first item starts at 0.

    >>> count_items_below(9, ((3, 8), (2, 4)))
    3
    """
    if address <= 0:
        return 0
    below = 0
    for count, stride in repeats:
        row = min(count - 1, (address - 1) // stride)
        below = below * count + row
        address -= row * stride
    return below + 1
