"""Which bytes of a storage its tensors really use: extents, each byte in exactly one of them.

Rules of this file:
- An extent is a run of bytes, or a regular pattern of equal runs (a column of a matrix is one run per
  row). Patterns are what keeps a strided view cheap to describe: a column of a million rows is three
  numbers, not a million.
- Bytes between the runs belong to someone else. They are never sent, and never written.
- Both ends compute extents from the same manifest, so the result depends on nothing but the arguments.

Tensors that only touch stay apart: each is an extent of its own, and moves as one. Tensors that overlap
are one extent, so that a shared byte moves once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from math import prod
from operator import lt

from msgspec import Struct

from torchferry.core.figures import Repeats, figure, figure_of, levels
from torchferry.core.manifest import TensorSpec

MAX_RUNS = 1 << 20
"""Overlapping views that form no regular pattern are listed run by run, up to this many in a state. A million
runs take about a second; what would need more is refused, or a hostile manifest could ask for 2**60."""

ITEM_BYTES = 16
"""The largest item of any dtype. Items lie at multiples of their size, so a cut at a multiple of this
never goes through one."""

Run = tuple[int, int]


class TooIntricate(ValueError):
    """Views that overlap in a pattern too irregular to list."""


class Patience:
    """How many runs may still be listed, or extents compared, before a state is called too intricate."""

    def __init__(self) -> None:
        self._left = MAX_RUNS

    def spend(self, runs: int) -> None:
        """Take some of it, before the work is done.

        Raises:
            TooIntricate: there is none left.
        """
        self._left -= runs
        if self._left < 0:
            raise TooIntricate(f"more than {MAX_RUNS} runs")


class Extent(Struct, frozen=True, gc=False):
    """`run_bytes` bytes at `offset` of a storage, repeated.

    `repeats` has (count, stride in bytes) for each level of repetition, the widest stride first. An
    extent without repeats is plain: one run.
    """

    storage: int
    offset: int
    run_bytes: int
    repeats: Repeats = ()

    @property
    def nbytes(self) -> int:
        """The bytes in it, without the gaps."""
        if not self.repeats:
            return self.run_bytes
        return self.run_bytes * prod(count for count, _ in self.repeats)

    @property
    def end(self) -> int:
        """Where its last run ends."""
        return self.offset + self.run_bytes + sum((n - 1) * step for n, step in self.repeats)


def footprint(spec: TensorSpec, patience: Patience | None = None) -> list[Extent]:
    """Give the extents that one tensor uses: one, if its strides nest; several, if they interlock.

    >>> footprint(TensorSpec("float32", 4, (3, 2), (10, 1), 0, 8))
    [Extent(storage=0, offset=8, run_bytes=8, repeats=((3, 40),))]
    >>> footprint(TensorSpec("float32", 4, (5,), (0,), 0, 8))
    [Extent(storage=0, offset=8, run_bytes=4, repeats=())]

    Raises:
        TooIntricate: the strides interlock in more than MAX_RUNS runs.
    """
    shape = figure_of(spec)
    if not shape.items:
        return []
    if shape.repeats is None:
        return _interlocked(spec, patience or Patience())
    return [Extent(spec.storage, spec.offset, shape.run_bytes, shape.repeats)]


def overlaps_itself(spec: TensorSpec) -> bool:
    """Say whether two items of the tensor share memory, or may: strides too intricate to tell count too.

    >>> overlaps_itself(TensorSpec("float32", 4, (3, 2), (2, 3), 0, 0))
    False
    """
    shape = figure_of(spec)
    if shape.repeats == ():
        return shape.run_bytes < shape.items * spec.itemsize
    try:
        return sum(extent.nbytes for extent in footprint(spec)) < shape.items * spec.itemsize
    except TooIntricate:
        return True


def extents_of(tensors: Sequence[TensorSpec]) -> list[Extent]:
    """Give the extents that the tensors use, by storage and address; every byte used is in exactly one.

    Raises:
        TooIntricate: views overlap in more than MAX_RUNS runs.
    """
    storages = [spec.storage for spec in tensors]
    figures = [figure(spec.shape, spec.stride, spec.itemsize) for spec in tensors]
    repeats = [seen.repeats for seen in figures if seen.repeats is not None]
    if all(map(lt, storages, storages[1:])) and len(repeats) == len(tensors):
        # Each tensor has a storage to itself, as nearly always: it is its own extent.
        runs = [seen.run_bytes for seen in figures]
        found = list(map(Extent, storages, [spec.offset for spec in tensors], runs, repeats))
        return found if all(runs) else [extent for extent in found if extent.run_bytes]
    patience = Patience()
    by_storage: defaultdict[int, list[Extent]] = defaultdict(list)
    for spec in tensors:
        by_storage[spec.storage] += footprint(spec, patience)
    merged: list[Extent] = []
    for _, extents in sorted(by_storage.items()):
        merged += extents if len(extents) == 1 else union(extents, patience)
    return merged


def union(extents: Iterable[Extent], patience: Patience | None = None) -> list[Extent]:
    """Merge extents of one storage so that every byte is in exactly one of them.

    Raises:
        TooIntricate: they overlap in more than MAX_RUNS runs.
    """
    patience = patience or Patience()
    merged: list[Extent] = []
    for cluster in _clusters(sorted(set(extents), key=lambda extent: (extent.offset, -extent.end))):
        merged.extend(cluster if len(cluster) == 1 else _merge(cluster, patience))
    return merged


def split(extent: Extent, most_bytes: int) -> Iterator[Extent]:
    """Cut an extent into pieces of at most `most_bytes`, in address order, never through an item.

    >>> [(e.offset, e.nbytes) for e in split(Extent(0, 8, 100), 64)]
    [(8, 56), (64, 44)]
    >>> [(e.offset, e.repeats) for e in split(Extent(0, 0, 16, ((5, 32),)), 64)]
    [(0, ((4, 32),)), (128, ())]
    """
    if extent.nbytes <= most_bytes:
        yield extent
        return
    if not extent.repeats:
        yield from _split_run(extent, most_bytes)
        return
    (count, step), inner = extent.repeats[0], extent.repeats[1:]
    row = Extent(extent.storage, extent.offset, extent.run_bytes, inner)
    together = most_bytes // row.nbytes
    for first in range(0, count, max(together, 1)):
        start = extent.offset + first * step
        if together <= 1:
            yield from split(Extent(row.storage, start, row.run_bytes, inner), most_bytes)
        else:
            rows = min(together, count - first)
            outer = ((rows, step),) if rows > 1 else ()
            yield Extent(extent.storage, start, extent.run_bytes, outer + inner)


def _split_run(extent: Extent, most_bytes: int) -> Iterator[Extent]:
    # Cuts fall on multiples of ITEM_BYTES of the storage, where no item of any dtype can straddle them.
    stride = max(most_bytes // ITEM_BYTES, 1) * ITEM_BYTES
    start, end = extent.offset, extent.offset + extent.run_bytes
    while start < end:
        cut = min((start // ITEM_BYTES) * ITEM_BYTES + stride, end)
        yield Extent(extent.storage, start, cut - start)
        start = cut


def _clusters(ordered: Sequence[Extent]) -> Iterator[list[Extent]]:
    """Group extents, given by address, whose spans overlap."""
    cluster: list[Extent] = []
    end = 0
    for extent in ordered:
        if cluster and extent.offset >= end:
            yield cluster
            cluster = []
            end = 0
        cluster.append(extent)
        end = max(end, extent.end)
    if cluster:
        yield cluster


def _merge(cluster: list[Extent], patience: Patience) -> list[Extent]:
    """Merge extents whose spans overlap: the three common shapes exactly and fast, others by listing."""
    storage = cluster[0].storage
    plain = _merge_runs([(e.offset, e.end) for e in cluster if not e.repeats])
    patterns = [e for e in cluster if e.repeats and not _inside(e, plain)]
    if not patterns:
        return [Extent(storage, start, end - start) for start, end in plain]
    if not plain and len({e.repeats for e in patterns}) == 1:
        # Columns of one matrix: alike in every row, so merge them within the first row.
        repeats = patterns[0].repeats
        first = min(e.offset for e in patterns)
        last = max(e.offset + e.run_bytes for e in patterns)
        if _nest(last - first, repeats):
            row = _merge_runs([(e.offset, e.offset + e.run_bytes) for e in patterns])
            return [Extent(storage, start, end - start, repeats) for start, end in row]
    listed = [run for e in patterns for run in _runs(e, patience)]
    return _regular(storage, _merge_runs(plain + listed, touching=True))


def _nest(run_bytes: int, repeats: Repeats) -> bool:
    """Say whether a run of this size can be so repeated and never meet itself."""
    span = run_bytes
    for count, step in reversed(repeats):
        if span > step:
            return False
        span += (count - 1) * step
    return True


def _inside(extent: Extent, runs: Sequence[Run]) -> bool:
    """Say whether an extent lies in one of some runs, which are given in order and do not overlap."""
    before = bisect_right(runs, extent.offset, key=lambda run: run[0])
    return before > 0 and extent.end <= runs[before - 1][1]


def _merge_runs(runs: list[Run], *, touching: bool = False) -> list[Run]:
    """Merge runs that overlap; those that only touch stay apart, unless asked for too."""
    merged: list[Run] = []
    for start, end in sorted(runs):
        if merged and start < merged[-1][1] + touching:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _runs(extent: Extent, patience: Patience) -> list[Run]:
    """List an extent's runs.

    Raises:
        TooIntricate: there are more than patience is left for.
    """
    patience.spend(prod(count for count, _ in extent.repeats))
    starts = [extent.offset]
    for count, step in extent.repeats:
        starts = [start + index * step for start in starts for index in range(count)]
    return [(start, start + extent.run_bytes) for start in starts]


def _interlocked(spec: TensorSpec, patience: Patience) -> list[Extent]:
    """List the runs of a tensor whose strides do not nest, and find the regular patterns in them."""
    runs: list[Run] = [(spec.offset, spec.offset + spec.itemsize)]
    for step, count in levels(spec.shape, spec.stride, spec.itemsize):
        patience.spend(len(runs) * count)
        runs = _merge_runs(
            [(a + i * step, b + i * step) for i in range(count) for a, b in runs], touching=True
        )
    return _regular(spec.storage, runs)


def _regular(storage: int, runs: Sequence[Run]) -> list[Extent]:
    """Describe runs, given in order, as few patterns: equal runs at equal distances are one extent."""
    found: list[Extent] = []
    index = 0
    while index < len(runs):
        start, end = runs[index]
        size = end - start
        last = index
        if index + 1 < len(runs):
            step = runs[index + 1][0] - start
            while (
                last + 1 < len(runs)
                and runs[last + 1][0] - runs[last][0] == step
                and runs[last + 1][1] - runs[last + 1][0] == size
            ):
                last += 1
        count = last - index + 1
        found.append(Extent(storage, start, size, ((count, step),) if count > 1 else ()))
        index = last + 1
    return found
