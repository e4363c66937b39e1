"""Who shares memory with whom: the storages behind a state's tensors.

Rules of this file:
- Memory is memory. Two torch storages that lie in the same bytes (an ndarray and the tensor made from it)
  are one storage here.
- A storage starts at the first byte that some tensor uses and ends at the last, so that a small view of a
  large storage does not cost its size, here or at the receiver. Where ndarrays may lie in it, whose items are
  entered as bytes but want to be aligned too, it starts up to 15 bytes before.
"""

from __future__ import annotations

import torch
from msgspec import Struct

from torchferry.core.extents import ITEM_BYTES
from torchferry.core.figures import figure
from torchferry.core.manifest import MAX_DIMS, TensorSpec
from torchferry.tensors.memory import CPU, DTYPES, Memory, memory_at
from torchferry.tensors.sendable import check_dense

_PLAIN = {
    dtype: (name, dtype.itemsize, dtype.is_complex)
    for name, dtype in DTYPES.items()
    if not name.startswith("q")
}
"""What there is to know of each dtype whose tensors are their bytes and nothing more."""

_STRIDED = torch.strided


class _Block(Struct, frozen=True, gc=False):
    """One torch storage as it lies in memory."""

    address: int
    nbytes: int
    device: torch.device
    storage: torch.UntypedStorage


class _Home(Struct, frozen=True, gc=False):
    """Where a block lies: `shift` bytes into memory that may be cut at multiples of `unit`."""

    memory: Memory
    shift: int
    unit: int


class _Row(Struct, frozen=True, gc=False):
    """What was seen of one tensor; its offset is in its block. A tensor without items spans nothing."""

    dtype: str
    itemsize: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    block: int
    offset: int
    span: int
    conj: bool
    neg: bool


class StorageTable:
    """Collects tensors, then says what they are in terms of as few storages as there are."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self._rows: list[_Row] = []
        self._blocks: list[_Block] = []
        self._known: dict[int, int] = {}

    def enter(self, tensor: torch.Tensor) -> int:
        """Enter a strided tensor and give its number.

        Raises:
            Unsendable: it is not its bytes and nothing more.
        """
        dtype, conj, neg = tensor.dtype, False, tensor.is_neg()
        if (
            neg
            or dtype not in _PLAIN
            or tensor.layout is not _STRIDED
            or tensor.is_nested
            or not tensor.is_cpu
            or tensor.ndim > MAX_DIMS
        ):
            check_dense(tensor)
        name, itemsize, is_complex = _PLAIN[dtype]
        if is_complex:
            conj = tensor.is_conj()
        storage = tensor.untyped_storage()
        block = self._known.get(storage._cdata)
        if block is None:
            block = self._new_block(tensor, storage)
        shape, stride = tuple(tensor.shape), tensor.stride()
        seen = figure(shape, stride, itemsize)
        offset = int(tensor.storage_offset()) * itemsize if seen.items else 0
        if offset + seen.span > self._blocks[block].nbytes:
            check_dense(tensor)
        self._rows.append(_Row(name, itemsize, shape, stride, block, offset, seen.span, conj, neg))
        self.tensors.append(tensor)
        return len(self._rows) - 1

    def _new_block(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> int:
        try:
            block = _Block(storage.data_ptr(), storage.nbytes(), tensor.device, storage)
        except RuntimeError:
            check_dense(tensor)
            raise
        self._known[storage._cdata] = len(self._blocks)
        self._blocks.append(block)
        return len(self._blocks) - 1

    def __len__(self) -> int:
        return len(self._rows)

    def forget(self, count: int) -> None:
        """Take back all but the first so many tensors."""
        del self._rows[count:], self.tensors[count:]

    def finish(self) -> tuple[tuple[TensorSpec, ...], tuple[Memory, ...], tuple[int, ...]]:
        """Give a spec for each tensor, and the memory and size of each storage."""
        homes = self._homes()
        numbers: dict[int, int] = {}
        memories: list[Memory] = []
        units: list[int] = []
        # By storage: where its tensors begin and end. By tensor: its storage, and where it begins there.
        lows: list[int] = []
        highs: list[int] = []
        places: list[tuple[int, int]] = []
        for row in self._rows:
            home = homes[row.block]
            number = numbers.get(id(home.memory))
            start = row.offset + home.shift
            if number is None:
                number = numbers[id(home.memory)] = len(memories)
                memories.append(home.memory)
                units.append(home.unit)
                lows.append(start if row.span else _NOWHERE)
                highs.append(start + row.span if row.span else 0)
            elif row.span:
                lows[number] = min(lows[number], start)
                highs[number] = max(highs[number], start + row.span)
            places.append((number, start))
        bases = [low // unit * unit if low < _NOWHERE else 0 for low, unit in zip(lows, units, strict=True)]
        specs = tuple(
            TensorSpec(
                row.dtype,
                row.itemsize,
                row.shape,
                row.stride,
                number,
                start - bases[number] if row.span else 0,
                row.conj,
                row.neg,
            )
            for row, (number, start) in zip(self._rows, places, strict=True)
        )
        sizes = tuple(max(high - base, 0) for high, base in zip(highs, bases, strict=True))
        return specs, tuple(m.at(base) for m, base in zip(memories, bases, strict=True)), sizes

    def _homes(self) -> list[_Home]:
        """Find a home for each block: the same for blocks in the same memory."""
        blocks = self._blocks
        widest = [1] * len(blocks)
        for row in self._rows:
            if row.itemsize > widest[row.block]:
                widest[row.block] = row.itemsize
        homes = [
            _Home(Memory(block.storage, 0, block.device), 0, unit)
            for block, unit in zip(blocks, widest, strict=True)
        ]
        order = sorted(range(len(blocks)), key=[block.address for block in blocks].__getitem__)
        cluster: list[int] = []
        end = 0
        for number in order:
            block = blocks[number]
            if not block.nbytes or block.device != CPU:
                continue
            if block.address >= end:
                if len(cluster) > 1:
                    _share(blocks, widest, cluster, homes)
                cluster = []
            cluster.append(number)
            end = max(end, block.address + block.nbytes)
        _share(blocks, widest, cluster, homes)
        return homes


_NOWHERE = 1 << 64


def _share(blocks: list[_Block], widest: list[int], cluster: list[int], homes: list[_Home]) -> None:
    """Give blocks that overlap, in order of address, one home: or as few as their items allow."""
    while len(cluster) > 1:
        # Items must lie at multiples of their size from the storage's start, or no tensor could see them. So
        # it starts at a multiple of ITEM_BYTES, unless the widest items are not aligned themselves.
        leader = max(cluster, key=lambda n: widest[n])
        astray = blocks[leader].address % widest[leader]
        group = [n for n in cluster if (blocks[n].address - astray) % widest[n] == 0]
        cluster = [n for n in cluster if (blocks[n].address - astray) % widest[n]]
        if len(group) < 2:
            continue
        first = blocks[group[0]].address
        start = first - (first - astray) % ITEM_BYTES
        # What lies before the first block is only counted from, and never read or written.
        memory = memory_at(start, max(blocks[n].address + blocks[n].nbytes for n in group) - start)
        for number in group:
            homes[number] = _Home(memory, blocks[number].address - start, ITEM_BYTES)
