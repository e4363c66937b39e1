"""The bytes of a storage that its tensors use, as extents, and the order of a tensor's items in memory.

Every used byte is in exactly one extent. An extent is a run of bytes, or equal runs at regular distances,
such as a column of a matrix. The bytes between the runs are neither sent nor written. Tensors that overlap
share an extent, so that a shared byte is sent once. Tensors that only touch share one only if they interleave
irregularly. Both sides compute the same extents from the same manifest. The extent of a tensor that shares no
memory does not depend on where the tensor lies.

A function that would have to list more than MAX_RUNS runs raises TooIrregular.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import groupby, pairwise
from math import prod

from msgspec import Struct

from torchferry.core.manifest import TensorSpec
from torchferry.errors import StateError

MAX_RUNS = 1 << 20
"""The limit for irregular patterns, which are listed run by run. A million runs take about a second."""

ITEM_BYTES = 16
"""The largest item of any dtype. The sizes of all items divide it."""

Run = tuple[int, int]
"""(start, end) in a storage, in bytes."""

Repeats = tuple[tuple[int, int], ...]
"""(count, stride in bytes) for each level of repetition, widest stride first."""


class TooIrregular(ValueError):
    """The views overlap in a pattern that needs more than MAX_RUNS runs."""


def check_held(held: int, end: int) -> None:
    """Raise StateError if a storage holds fewer than `end` bytes: torch would allocate the rest silently."""
    if end > held:
        raise StateError(
            f"the memory of a tensor was freed during the transfer: its storage holds {held} bytes of the "
            f"{end} that are used"
        )


class Budget(Struct):
    """Limits how many runs are listed, or extents compared."""

    left: int = MAX_RUNS

    def spend(self, runs: int) -> None:
        """Deduct runs before they are listed; raises TooIrregular if fewer are left."""
        self.left -= runs
        if self.left < 0:
            raise TooIrregular(f"more than {MAX_RUNS:,} byte ranges")


class Extent(Struct, frozen=True, gc=False):
    """`run_bytes` bytes at `offset` of a storage, repeated as `repeats` says; without repeats, one run."""

    storage: int
    offset: int
    run_bytes: int
    repeats: Repeats = ()

    @property
    def nbytes(self) -> int:
        """The number of bytes in the runs, without the gaps."""
        if not self.repeats:
            return self.run_bytes
        return self.run_bytes * prod(count for count, _ in self.repeats)

    @property
    def end(self) -> int:
        """The end of its last run."""
        if not self.repeats:
            return self.offset + self.run_bytes
        return self.offset + self.run_bytes + sum((count - 1) * step for count, step in self.repeats)


class Use(Struct, frozen=True, gc=False):
    """An extent, the first of the tensors that it was merged from, and the size of their largest item."""

    extent: Extent
    tensor: int = 0
    item_bytes: int = 1


class Pattern(Struct, frozen=True, gc=False):
    """The bytes that a tensor uses: a run of `run_bytes` at its first item, repeated.

    `span_bytes` is the distance from the start of the first item to the end of the last; 0 without items.
    If the pattern is not `regular`, its runs may overlap or interleave.
    """

    span_bytes: int
    run_bytes: int
    repeats: Repeats
    regular: bool = True


@lru_cache(maxsize=4096)
def find_pattern(shape: tuple[int, ...], stride: tuple[int, ...], itemsize: int) -> Pattern:
    """Return the pattern of a tensor's bytes. Cached: thousands of tensors have a few dozen patterns."""
    if 0 in shape:
        return Pattern(0, 0, ())
    dims = sorted(zip(stride, shape, strict=True))
    steps = [(count, step * itemsize) for step, count in dims if count > 1 and step > 0]
    span_bytes = itemsize + sum((count - 1) * step for count, step in steps)
    run = reach = itemsize
    repeats: list[tuple[int, int]] = []  # narrowest first
    for count, step in steps:
        if not repeats and step <= run:
            run += (count - 1) * step
        elif step < reach:
            return Pattern(span_bytes, itemsize, tuple(reversed(steps)), regular=False)
        elif repeats and step == repeats[-1][0] * repeats[-1][1]:
            repeats[-1] = (repeats[-1][0] * count, repeats[-1][1])
        else:
            repeats.append((count, step))
        reach += (count - 1) * step
    return Pattern(span_bytes, run, tuple(reversed(repeats)))


def footprint(spec: TensorSpec, budget: Budget | None = None) -> list[Extent]:
    """Return the extents of one tensor: one if its bytes form a regular pattern, several if not.

    >>> footprint(TensorSpec("float32", 4, (3, 2), (10, 1), 0, 8))
    [Extent(storage=0, offset=8, run_bytes=8, repeats=((3, 40),))]
    """
    pattern = find_pattern(spec.shape, spec.stride, spec.itemsize)
    if not pattern.span_bytes:
        return []
    extent = Extent(spec.storage, spec.offset, pattern.run_bytes, pattern.repeats)
    if pattern.regular:
        return [extent]
    return _find_extents(spec.storage, _list_runs(extent, budget or Budget()))


def overlaps_itself(spec: TensorSpec) -> bool:
    """Return whether two items of the tensor share memory; True if the strides are too irregular to tell."""
    try:
        used_bytes = sum(extent.nbytes for extent in footprint(spec))
    except TooIrregular:
        return True
    return used_bytes < prod(spec.shape) * spec.itemsize


def extents_of(tensors: Sequence[TensorSpec]) -> list[Extent]:
    """Return the extents that the tensors use, sorted by storage and offset."""
    return [use.extent for use in uses_of(tensors)]


def uses_of(tensors: Sequence[TensorSpec]) -> list[Use]:
    """Return the extents that the tensors use, sorted by storage and offset, as a plan needs them."""
    budget = Budget()
    by_storage: defaultdict[int, list[Use]] = defaultdict(list)
    for number, spec in enumerate(tensors):
        for extent in footprint(spec, budget):
            by_storage[spec.storage].append(Use(extent, number, spec.itemsize))
    return [use for storage in sorted(by_storage) for use in _unite(by_storage[storage], budget)]


def union(extents: Collection[Extent], budget: Budget | None = None) -> list[Extent]:
    """Merge extents of one storage so that every byte is in exactly one of them."""
    return [use.extent for use in _unite([Use(extent) for extent in extents], budget or Budget())]


def _unite(uses: list[Use], budget: Budget) -> list[Use]:
    if len(uses) <= 1:
        return uses
    united: list[Use] = []
    overlapping: list[Use] = []
    end = 0
    for use in sorted(uses, key=_address_order):
        if use.extent.offset >= end:
            united += _merge(overlapping, budget)
            overlapping = []
        overlapping.append(use)
        end = max(end, use.extent.end)
    return united + _merge(overlapping, budget)


def _address_order(use: Use) -> tuple[int, int, int, Repeats]:
    extent = use.extent
    return extent.offset, -extent.end, extent.run_bytes, extent.repeats


def are_disjoint(extents: Sequence[Extent], budget: Budget | None = None) -> bool:
    """Return whether no two of these extents of one storage share a byte."""
    used_bytes = sum(extent.nbytes for extent in union(extents, budget))
    return used_bytes == sum(extent.nbytes for extent in extents)


def split(extent: Extent, max_bytes: int, item_bytes: int) -> Iterator[Extent]:
    """Split an extent into pieces of at most `max_bytes`, in address order, never within an item.

    `item_bytes` is the size of the largest item in it. A run is cut at multiples of 16 bytes from its start.
    If it starts within an item, because overlapping tensors were merged, it is cut at multiples of 16 bytes
    from the start of that item.

    >>> [(piece.offset, piece.nbytes) for piece in split(Extent(0, 8, 100), 64, item_bytes=4)]
    [(8, 64), (72, 36)]
    >>> [(piece.offset, piece.nbytes) for piece in split(Extent(0, 9, 99), 64, item_bytes=4)]
    [(9, 63), (72, 36)]
    >>> [(piece.offset, piece.repeats) for piece in split(Extent(0, 0, 16, ((5, 32),)), 64, item_bytes=4)]
    [(0, ((4, 32),)), (128, ())]
    """
    if extent.nbytes <= max_bytes:
        yield extent
        return
    if not extent.repeats:
        piece_bytes = max(max_bytes // ITEM_BYTES, 1) * ITEM_BYTES
        first_cut = extent.offset // item_bytes * item_bytes + piece_bytes
        for start, end in pairwise((extent.offset, *range(first_cut, extent.end, piece_bytes), extent.end)):
            yield Extent(extent.storage, start, end - start)
        return
    (count, step), inner = extent.repeats[0], extent.repeats[1:]
    max_rows = max(max_bytes * count // extent.nbytes, 1)
    for first in range(0, count, max_rows):
        rows = min(max_rows, count - first)
        outer = ((rows, step),) if rows > 1 else ()
        piece = Extent(extent.storage, extent.offset + first * step, extent.run_bytes, outer + inner)
        yield from split(piece, max_bytes, item_bytes)


def _merge(uses: list[Use], budget: Budget) -> list[Use]:
    """Merge extents whose spans overlap. The common cases are fast; other patterns are listed run by run."""
    if len(uses) <= 1:
        return uses
    # Equal extents are dropped by sorting, not by a set: a peer can choose extents whose hashes collide.
    extents = [extent for extent, _ in groupby(use.extent for use in uses)]
    if len(extents) == 1:
        return _uses_by(uses, extents)
    storage = extents[0].storage
    runs = _merge_runs([(e.offset, e.end) for e in extents if not e.repeats])
    repeated = [e for e in extents if e.repeats and not _is_inside(e, runs)]
    if not repeated:
        return _uses_by(uses, [Extent(storage, start, end - start) for start, end in runs])
    repeats = repeated[0].repeats
    if not runs and all(e.repeats == repeats for e in repeated):
        # Columns of one matrix: it is enough to merge the columns of one row.
        columns = _merge_runs([(e.offset, e.offset + e.run_bytes) for e in repeated])
        if is_nested(columns[-1][1] - columns[0][0], repeats):
            starts = [start for start, _ in columns]
            by_column = groupby(uses, lambda use: bisect_right(starts, use.extent.offset))
            return [
                use
                for (start, end), (_, members) in zip(columns, by_column, strict=True)
                for use in _uses_by(list(members), [Extent(storage, start, end - start, repeats)])
            ]
    for e in repeated:
        runs += _list_runs(e, budget)
    return _uses_by(uses, _find_extents(storage, _merge_runs(runs, touching=True)))


def _uses_by(merged: Sequence[Use], extents: Iterable[Extent]) -> list[Use]:
    """Return the uses of extents that were merged from others."""
    tensor, item_bytes = min(use.tensor for use in merged), max(use.item_bytes for use in merged)
    return [Use(extent, tensor, item_bytes) for extent in extents]


def _is_inside(extent: Extent, runs: Sequence[Run]) -> bool:
    """Return whether one of the sorted, disjoint runs contains the extent."""
    before = bisect_right(runs, extent.offset, key=lambda run: run[0])
    return before > 0 and extent.end <= runs[before - 1][1]


def _merge_runs(runs: list[Run], *, touching: bool = False) -> list[Run]:
    """Merge runs that overlap, and with `touching` also runs that touch."""
    merged: list[Run] = []
    for start, end in sorted(runs):
        if merged and start < merged[-1][1] + touching:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _list_runs(extent: Extent, budget: Budget) -> list[Run]:
    """List the runs of an extent in address order. Runs that overlap or touch are merged."""
    runs = [(extent.offset, extent.offset + extent.run_bytes)]
    for count, step in reversed(extent.repeats):
        budget.spend(len(runs) * count)
        shifted = [(start + i * step, end + i * step) for i in range(count) for start, end in runs]
        runs = _merge_runs(shifted, touching=True)
    return runs


def _find_extents(storage: int, runs: Sequence[Run]) -> list[Extent]:
    """Describe sorted runs as extents: consecutive runs of equal size and distance become one."""
    found: list[Extent] = []
    index = 0
    while index < len(runs):
        start, end = runs[index]
        step = runs[index + 1][0] - start if index + 1 < len(runs) else 0
        count = 1
        while index + count < len(runs) and runs[index + count] == (start + count * step, end + count * step):
            count += 1
        found.append(Extent(storage, start, end - start, ((count, step),) if count > 1 else ()))
        index += count
    return found


def memory_order(spec: TensorSpec) -> list[int] | None:
    """Return the dimensions that step through memory, widest stride first.

    A walk in this order visits each address once, in rising order. Expanded dimensions and those of size
    one are left out. The result is None if no such order exists, because the rest overlap or interleave.
    """
    dims = [d for d, count in enumerate(spec.shape) if count > 1 and spec.stride[d] > 0]
    dims.sort(key=lambda d: spec.stride[d], reverse=True)
    return dims if is_nested(1, [(spec.shape[d], spec.stride[d]) for d in dims]) else None


def is_nested(length: int, repeats: Sequence[tuple[int, int]]) -> bool:
    """Return whether a run of this length can be repeated like this without overlapping or interleaving."""
    for count, step in reversed(repeats):
        if step < length:
            return False
        length += (count - 1) * step
    return True


def split_into_boxes(
    shape: Sequence[int], first: int, end: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Split the items `first` to `end`, in row-major order, into boxes: at most two for each dimension.

    A box is its start and its size in each dimension.

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
