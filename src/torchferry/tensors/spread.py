"""Chunks of one layout into tensors of another, item by item and without a copy of the whole.

The sender's items come in order of their address there. `split_into_boxes` turns a chunk's range of items
into a few boxes, and each is one strided copy.
"""

from __future__ import annotations

import torch

from torchferry.core.extents import Extent
from torchferry.core.manifest import TensorSpec
from torchferry.core.strides import count_items_below, memory_order, split_into_boxes
from torchferry.tensors.memory import RAW, Memory, reread, strided


def spread(
    buffer: torch.Tensor,
    piece: Extent,
    position: int,
    incoming: TensorSpec,
    local: torch.Tensor,
    local_spec: TensorSpec,
    *,
    covers: bool,
) -> None:
    """Write the items of `incoming` that a chunk holds into the local tensor.

    `position` is where the chunk starts in the packed bytes of its extent. With `covers`, the tensor is
    all of the extent, so that says which items these are; otherwise their addresses do.
    """
    dims = memory_order(incoming)
    assert dims is not None, "a tensor whose items have no order in memory is never spread"
    shape = [incoming.shape[d] for d in dims]
    size = incoming.itemsize
    if covers:
        first, end = position // size, (position + piece.nbytes) // size
    else:
        levels = [(incoming.shape[d], incoming.stride[d] * size) for d in dims]
        first = count_items_below(piece.offset - incoming.offset, levels)
        end = count_items_below(piece.end - incoming.offset, levels)
    # A chunk found by address may begin with other tensors' bytes, somewhere between two items.
    source = _Source(_apart(buffer, local), 0 if covers else piece.offset % size, size)
    target = once(_raw(local)).permute((*dims, *_others(incoming, dims)))
    expand = (..., *[None] * (len(incoming.shape) - len(dims)))
    for start, lengths in split_into_boxes(shape, first, end):
        into = target
        for dim, (at, length) in enumerate(zip(start, lengths, strict=True)):
            into = into.narrow(dim, at, length)
        if covers:
            items = source.packed(_flat_index(shape, start) - first, lengths)
        else:
            address = incoming.offset + size * sum(
                at * incoming.stride[d] for at, d in zip(start, dims, strict=True)
            )
            strides = tuple(incoming.stride[d] for d in dims)
            items = source.by_address(address - piece.offset, lengths, strides)
        into.copy_(reread(items, incoming, local_spec)[expand])


class _Source:
    """A chunk's bytes as items, of no dtype but their size."""

    def __init__(self, buffer: torch.Tensor, start: int, itemsize: int) -> None:
        self._itemsize = itemsize
        buffer = _aligned(buffer, start, itemsize)
        self._memory = Memory(buffer.untyped_storage(), int(buffer.storage_offset()), buffer.device)

    def packed(self, first: int, lengths: tuple[int, ...]) -> torch.Tensor:
        """Give items that follow one another in the chunk."""
        strides: list[int] = []
        step = 1
        for length in reversed(lengths):
            strides.insert(0, step)
            step *= length
        return self.by_address(first * self._itemsize, lengths, tuple(strides))

    def by_address(self, offset: int, lengths: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
        """Give items that lie in the chunk as they lay at the sender."""
        return strided(self._memory, RAW[self._itemsize], offset, lengths, strides)


def _raw(local: torch.Tensor) -> torch.Tensor:
    """Give the local tensor in the dtype that the items come in."""
    size = local.itemsize
    memory = Memory(local.untyped_storage(), 0, local.device)
    return strided(memory, RAW[size], int(local.storage_offset()) * size, tuple(local.shape), local.stride())


def once(tensor: torch.Tensor) -> torch.Tensor:
    """See each item of an expanded tensor once, since torch will not write one that it sees twice."""
    for dim, step in enumerate(tensor.stride()):
        if step == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _apart(buffer: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Give the buffer, or a copy if it is the memory of the local tensor's neighbours and perhaps its own."""
    storage = local.untyped_storage()
    low, high = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    return buffer.clone() if buffer.data_ptr() < high and low < buffer.data_ptr() + buffer.nbytes else buffer


def _aligned(buffer: torch.Tensor, start: int, itemsize: int) -> torch.Tensor:
    """Give the buffer itself if items can be seen in it, and a copy in which they can if not.

    Items can only be seen at multiples of their size. `start` says how far past one the buffer should
    begin; but it may be the memory of some local tensor of smaller items, and begin anywhere.
    """
    if int(buffer.storage_offset()) % itemsize == start:
        return buffer
    room = torch.empty(start + buffer.numel(), dtype=torch.uint8, device=buffer.device)
    return room[start:].copy_(buffer)


def _others(spec: TensorSpec, dims: list[int]) -> list[int]:
    """List the dimensions that do not move through memory: of size one, or expanded."""
    return [d for d in range(len(spec.shape)) if d not in dims]


def _flat_index(shape: list[int], at: tuple[int, ...]) -> int:
    index = 0
    for size, position in zip(shape, at, strict=True):
        index = index * size + position
    return index
