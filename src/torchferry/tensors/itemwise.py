"""Writes chunks of one layout into tensors of another layout, without a copy of the whole tensor.

The sender's items arrive in the order of their addresses. A chunk's range of items is split into a few
boxes, and each box is one strided copy.
"""

from __future__ import annotations

from itertools import accumulate
from operator import mul

import torch

from torchferry.core.extents import Extent, count_items_below, memory_order, split_into_boxes
from torchferry.core.manifest import TensorSpec
from torchferry.tensors.memory import RAW, Memory, raw_over, reread, strided


def write_items(
    buffer: torch.Tensor,
    piece: Extent,
    position: int,
    incoming: TensorSpec,
    memory: Memory,
    local: TensorSpec,
    *,
    covers: bool,
) -> None:
    """Write the items of `incoming` that a chunk holds into the local tensor in `memory`.

    `position` is where the chunk starts in the packed bytes of its extent. With `covers`, the incoming tensor
    is the whole extent, so the position tells which items the chunk holds. Otherwise their addresses do.
    """
    dims = memory_order(incoming)
    assert dims is not None, "a tensor whose items have no order in memory is not written item by item"
    size = incoming.itemsize
    shape = [incoming.shape[d] for d in dims]
    stride = [incoming.stride[d] for d in dims]
    if covers:
        first, end = position // size, (position + piece.nbytes) // size
        # The chunk holds only items, without gaps.
        stride = [*accumulate(reversed(shape[1:]), mul, initial=1)][::-1][: len(shape)]
        chunk_start = first * size
        tensor_start = misaligned = 0
    else:
        levels = [(count, step * size) for count, step in zip(shape, stride, strict=True)]
        first = count_items_below(piece.offset - incoming.offset, levels)
        end = count_items_below(piece.end - incoming.offset, levels)
        chunk_start, tensor_start = piece.offset, incoming.offset
        # The chunk may begin with bytes of other tensors, between two items.
        misaligned = piece.offset % size
    buffer = _readable(buffer, memory, size, misaligned)
    source = Memory(buffer.untyped_storage(), int(buffer.storage_offset()), buffer.device)
    # Dimensions of size one and expanded dimensions have no items of their own.
    others = [d for d in range(len(incoming.shape)) if d not in dims]
    target = without_repeats(raw_over(memory, local)).permute((*dims, *others))
    for start, lengths in split_into_boxes(shape, first, end):
        into = target
        for dim, (at, length) in enumerate(zip(start, lengths, strict=True)):
            into = into.narrow(dim, at, length)
        offset = tensor_start + size * sum(map(mul, start, stride)) - chunk_start
        items = strided(source, RAW[size], offset, lengths, tuple(stride))
        into.copy_(reread(items, incoming, local)[(..., *[None] * len(others))])


def without_repeats(tensor: torch.Tensor) -> torch.Tensor:
    """Narrow expanded dimensions to size one, because torch does not write a tensor whose items repeat."""
    for dim, step in enumerate(tensor.stride()):
        if step == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _readable(buffer: torch.Tensor, memory: Memory, itemsize: int, misaligned: int) -> torch.Tensor:
    """Return the buffer, or a copy whose items can be viewed and don't change when `memory` is written.

    A tensor can view items only at multiples of their size. The buffer, which must start `misaligned` bytes
    after one, may be memory of a local tensor with smaller items, or of a neighbour of the written one.
    """
    low = memory.storage.data_ptr()
    overlaps = buffer.data_ptr() < low + memory.storage.nbytes() and low < buffer.data_ptr() + buffer.nbytes
    if not overlaps and int(buffer.storage_offset()) % itemsize == misaligned:
        return buffer
    room = torch.empty(misaligned + buffer.numel(), dtype=torch.uint8, device=buffer.device)
    return room[misaligned:].copy_(buffer)
