"""What shape, strides and item size say of a tensor, wherever it lies.

A state of thousands of tensors has a few dozen figures, so each is worked out once.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod

from msgspec import Struct

from torchferry.core.manifest import TensorSpec

Repeats = tuple[tuple[int, int], ...]
"""(count, stride in bytes) of each level of repetition, the widest stride first."""


class Figure(Struct, frozen=True, gc=False):
    """How a tensor lies in memory, from its first item on.

    `span` is the distance in bytes from its first item to the end of its last, 0 if it has none. `run_bytes`
    and `repeats` are those of its extent; `repeats` is None if it has several, because its strides interlock.
    """

    items: int
    span: int
    run_bytes: int
    repeats: Repeats | None


@lru_cache(maxsize=4096)
def figure(shape: tuple[int, ...], stride: tuple[int, ...], itemsize: int) -> Figure:
    """Work out a figure."""
    items = prod(shape)
    if items == 0:
        return Figure(0, 0, 0, ())
    span = (sum((n - 1) * step for n, step in zip(shape, stride, strict=True)) + 1) * itemsize
    run = itemsize
    repeats: list[tuple[int, int]] = []  # narrowest first
    reach = run
    for step, count in levels(shape, stride, itemsize):
        if not repeats and step <= run:
            run += (count - 1) * step
        elif step < reach:
            return Figure(items, span, itemsize, None)
        elif repeats and step == repeats[-1][0] * repeats[-1][1]:
            repeats[-1] = (repeats[-1][0] * count, repeats[-1][1])
        else:
            repeats.append((count, step))
        reach = run + sum((n - 1) * s for n, s in repeats)
    return Figure(items, span, run, tuple(reversed(repeats)))


def figure_of(spec: TensorSpec) -> Figure:
    """Give the figure of a tensor."""
    return figure(spec.shape, spec.stride, spec.itemsize)


def nested_dims(spec: TensorSpec) -> list[int] | None:
    """Give the dimensions in which the tensor steps through memory, widest stride first.

    Walking them in this order visits addresses in rising order, each once. None if no order does: the
    tensor overlaps itself other than by expanded dimensions, which are left out.
    """
    dims = [d for d, n in enumerate(spec.shape) if n > 1 and spec.stride[d] > 0]
    dims.sort(key=lambda d: spec.stride[d], reverse=True)
    inner = 1
    for d in reversed(dims):
        if spec.stride[d] < inner:
            return None
        inner += (spec.shape[d] - 1) * spec.stride[d]
    return dims


def levels(shape: tuple[int, ...], stride: tuple[int, ...], itemsize: int) -> list[tuple[int, int]]:
    """List (stride in bytes, count) of the dimensions that move, narrowest first."""
    return sorted(
        (step * itemsize, count) for count, step in zip(shape, stride, strict=True) if count > 1 and step > 0
    )
