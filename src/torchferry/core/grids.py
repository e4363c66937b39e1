"""Views of a tensor that lies in memory one way at the peer and another way here.

Each view takes incoming bytes to local ones. Two views that share local bytes must take the same incoming
bytes there, and they do if both are parts of one map. That can be told from a few numbers, without looking
at a single item: a step along a dimension is a step at either side, so what a view steps through is a box in
a grid of steps. If the second view lies some steps from the first at one side and the same steps at the
other, both are boxes in the same grid; and if that grid meets no local byte twice, then what they share
here they share there.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import product
from math import gcd

from torchferry.core.extents import nested_dims
from torchferry.core.manifest import TensorSpec

MAX_STEPS = 12
"""Grids of more dimensions are not looked into: the ways to cross one double with each."""

Step = tuple[int, int]
Box = Counter[Step]


def one_map(a: TensorSpec, x: TensorSpec, b: TensorSpec, y: TensorSpec) -> bool:
    """Say whether incoming `a` to local `x` and incoming `b` to local `y` are parts of one map.

    False is said too where it can't be told, of views that agree by chance.

    >>> rows, columns = ((3, 1), (1, 4))
    >>> a, x = (TensorSpec("uint8", 1, (2, 3), stride, 0, 0) for stride in (rows, columns))
    >>> b, y = (TensorSpec("uint8", 1, (1, 2), stride, 0, sum(stride)) for stride in (rows, columns))
    >>> one_map(a, x, b, y), one_map(a, x, b, x)
    (True, False)
    """
    first, second = _steps(a, x), _steps(b, y)
    here, there = y.offset - x.offset, b.offset - a.offset
    # Steps in one direction are best told apart if they are dimensions of one tensor, and best taken
    # together if one view takes every item and the other every second. The bytes of an item, which come
    # first, are then left out if other items may lie between these, and taken in if dtypes differ.
    return any(
        _in_one_grid(_box(first, unit), _box(second, unit), here, there)
        for unit in map(_common_unit, ([], first[1:] + second[1:], first + second))
    )


def _steps(incoming: TensorSpec, local: TensorSpec) -> list[tuple[Step, int]]:
    """List the steps, as (bytes there, bytes here), and how many a view takes; the bytes of an item too."""
    size = incoming.itemsize
    return [((1, 1), size - 1)] + [
        ((theirs * size, ours * size), n - 1)
        for n, theirs, ours in zip(incoming.shape, incoming.stride, local.stride, strict=True)
        if ours
    ]


def _common_unit(steps: list[tuple[Step, int]]) -> Callable[[Step], tuple[Step, int]]:
    """Give a function that says a step as a multiple of the longest that all in its direction are made of.

    A step that is none of the given ones is its own unit.
    """
    lengths: defaultdict[Step, int] = defaultdict(int)
    for step, _ in steps:
        direction, length = _direction(step)
        lengths[direction] = gcd(lengths[direction], length)
    known = {step for step, _ in steps}

    def unit(step: Step) -> tuple[Step, int]:
        if step not in known:
            return step, 1
        (theirs, ours), length = _direction(step)
        whole = lengths[theirs, ours]
        return (theirs * whole, ours * whole), length // whole

    return unit


def _direction(step: Step) -> tuple[Step, int]:
    length = gcd(*step)
    return (step[0] // length, step[1] // length), length


def _box(steps: list[tuple[Step, int]], unit: Callable[[Step], tuple[Step, int]]) -> Box:
    """Say how far a view goes along each unit: a box that holds all of it, and perhaps more."""
    box: Box = Counter()
    for step, count in steps:
        along, length = unit(step)
        box[along] += count * length
    return box


def _in_one_grid(first: Box, second: Box, here: int, there: int) -> bool:
    """Look for a way from the first box's corner to the second's that is so long here and so long there.

    Only along steps that one of them takes: boxes apart in another direction do not meet.
    """
    steps = sorted((first + second).keys(), key=lambda step: step[1], reverse=True)
    if len(steps) > MAX_STEPS:
        return False
    # Of each step so many as fit, or one more and then back along the others.
    for more in product((0, 1), repeat=len(steps)):
        rest, gone, way = here, 0, Box()
        for step, extra in zip(steps, more, strict=True):
            way[step] = rest // step[1] + extra
            rest -= way[step] * step[1]
            gone += way[step] * step[0]
        if rest == 0 and gone == there:
            sizes = [max(first[s], way[s] + second[s]) - min(0, way[s]) + 1 for s in steps]
            grid = TensorSpec("uint8", 1, tuple(sizes), tuple(ours for _, ours in steps), 0, 0)
            if nested_dims(grid) is not None:
                return True
    return False
