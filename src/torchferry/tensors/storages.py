"""Who shares memory with whom: the storages behind a state's tensors.

Rules of this file:
- Memory is memory. Two torch storages that lie in the same bytes (an ndarray and the tensor made from it)
  are one storage here.
- A storage starts at the first byte that some tensor uses and ends at the last, so that a small view of a
  large storage does not cost its size, here or at the receiver. Where ndarrays may lie in it, whose items are
  entered as bytes but want to be aligned too, it starts up to 15 bytes before.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from torchferry.core.extents import ITEM_BYTES
from torchferry.core.manifest import TensorSpec
from torchferry.tensors.memory import Memory, dtype_name, memory_at


class _Block(NamedTuple):
    """One torch storage as it lies in memory."""

    address: int
    nbytes: int
    device: torch.device
    storage: torch.UntypedStorage


class _Home(NamedTuple):
    """Where a block lies: `shift` bytes into memory that may be cut at multiples of `unit`."""

    memory: Memory
    shift: int
    unit: int


class StorageTable:
    """Collects tensors, then says what they are in terms of as few storages as there are."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self._blocks: list[_Block] = []
        self._widest: list[int] = []
        self._block_of: list[int] = []
        self._known: dict[int, int] = {}

    def enter(self, tensor: torch.Tensor) -> int:
        """Enter a strided tensor and give its number."""
        storage = tensor.untyped_storage()
        block = self._known.get(storage._cdata)
        if block is None:
            block = len(self._blocks)
            self._blocks.append(_Block(storage.data_ptr(), storage.nbytes(), tensor.device, storage))
            self._widest.append(1)
            self._known[storage._cdata] = block
        self._widest[block] = max(self._widest[block], tensor.itemsize)
        self._block_of.append(block)
        self.tensors.append(tensor)
        return len(self.tensors) - 1

    def finish(self) -> tuple[tuple[TensorSpec, ...], tuple[Memory, ...], tuple[int, ...]]:
        """Give a spec for each tensor, and the memory and size of each storage."""
        homes = _homes(self._blocks, self._widest)
        places: dict[int, int] = {}
        rough: list[TensorSpec] = []
        memories: list[Memory] = []
        units: list[int] = []
        for tensor, block in zip(self.tensors, self._block_of, strict=True):
            memory, shift, unit = homes[block]
            storage = places.setdefault(id(memory.storage), len(memories))
            if storage == len(memories):
                memories.append(memory)
                units.append(unit)
            rough.append(_spec(tensor, storage, shift))
        return _trimmed(rough, memories, units)


def _spec(tensor: torch.Tensor, storage: int, shift: int) -> TensorSpec:
    itemsize = tensor.dtype.itemsize
    return TensorSpec(
        dtype_name(tensor.dtype),
        itemsize,
        tuple(tensor.shape),
        tensor.stride(),
        storage,
        shift + int(tensor.storage_offset()) * itemsize if tensor.numel() else 0,
        tensor.is_conj(),
        tensor.is_neg(),
    )


def _homes(blocks: list[_Block], widest: list[int]) -> list[_Home]:
    """Find a home for each block: the same for blocks in the same memory.

    `widest` has the size of the largest item that is seen in each block.
    """
    homes = [
        _Home(Memory(block.storage, 0, block.device), 0, unit)
        for block, unit in zip(blocks, widest, strict=True)
    ]
    order = sorted(
        (n for n, block in enumerate(blocks) if block.nbytes and block.device.type == "cpu"),
        key=lambda n: blocks[n].address,
    )
    cluster: list[int] = []
    end = 0
    for number in order:
        block = blocks[number]
        if block.address >= end:
            _share(blocks, widest, cluster, homes)
            cluster = []
        cluster.append(number)
        end = max(end, block.address + block.nbytes)
    _share(blocks, widest, cluster, homes)
    return homes


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


def _trimmed(
    rough: list[TensorSpec], memories: list[Memory], units: list[int]
) -> tuple[tuple[TensorSpec, ...], tuple[Memory, ...], tuple[int, ...]]:
    """Cut each storage to what its tensors use, keeping items at multiples of their size."""
    starts: dict[int, int] = {}
    ends = [0] * len(memories)
    for spec in rough:
        if 0 in spec.shape:
            continue
        starts[spec.storage] = min(starts.get(spec.storage, spec.offset), spec.offset)
        ends[spec.storage] = max(ends[spec.storage], _end(spec))
    bases = [starts.get(n, 0) // unit * unit for n, unit in enumerate(units)]
    specs = tuple(
        TensorSpec(
            s.dtype,
            s.itemsize,
            s.shape,
            s.stride,
            s.storage,
            s.offset - bases[s.storage] if 0 not in s.shape else 0,
            s.conj,
            s.neg,
        )
        for s in rough
    )
    sizes = tuple(max(end - base, 0) for end, base in zip(ends, bases, strict=True))
    return specs, tuple(m.at(base) for m, base in zip(memories, bases, strict=True)), sizes


def _end(spec: TensorSpec) -> int:
    last = sum((n - 1) * step for n, step in zip(spec.shape, spec.stride, strict=True))
    return spec.offset + (last + 1) * spec.itemsize
