"""Finds the storages behind a state's tensors: which tensors share memory, and which bytes they use.

CPU storages of torch that overlap, such as those of a tensor and of an ndarray over the same memory, become
one storage here. A storage starts at the first byte that a tensor uses and ends at the last, so a small view
of a large torch storage costs only its own size. Tensors that share a storage must stay aligned in it, so it
may start up to 15 bytes earlier.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import repeat
from operator import add, gt, le, mul

import torch
from msgspec import Struct

from torchferry.core.extents import ITEM_BYTES, find_pattern
from torchferry.core.manifest import MAX_DIMS, TensorSpec
from torchferry.errors import Unsendable
from torchferry.tensors.memory import CPU, Memory, dtype_name, memory_at
from torchferry.torch_internals import is_zerotensor, storage_id


def find_storages(
    tensors: Sequence[torch.Tensor],
) -> tuple[tuple[TensorSpec, ...], tuple[Memory, ...], tuple[int, ...]]:
    """Return a spec for each strided tensor, and the memory and the size in bytes of each storage.

    Raises Unsendable if a tensor can't be sent, and torch's RuntimeError if one has no strides or no storage.
    """
    if not tensors:
        return (), (), ()
    dtypes = [tensor.dtype for tensor in tensors]
    layouts = map(_layout, dtypes, [tensor.shape for tensor in tensors], map(torch.Tensor.stride, tensors))
    names, itemsizes, shapes, strides, spans = zip(*layouts, strict=False)
    is_all_cpu = False not in [tensor.is_cpu for tensor in tensors]
    negs = list(map(torch.Tensor.is_neg, tensors))
    storages = list(map(torch.Tensor.untyped_storage, tensors))
    held = list(map(torch.UntypedStorage.nbytes, storages))
    starts: list[int] = list(map(mul, map(torch.Tensor.storage_offset, tensors), itemsizes))
    # Querying tensor metadata dominates description time, so nothing is checked if nothing is unusual.
    if not is_all_cpu or True in negs or any(map(gt, map(add, starts, spans), held)):
        for tensor in tensors:
            check_tensor(tensor)
    devices = repeat(CPU) if is_all_cpu else [CPU if each.is_cpu else each.device for each in tensors]
    addresses = list(map(torch.UntypedStorage.data_ptr, storages))
    # Nearly always, every tensor has its own storage.
    owners: Sequence[int] = range(len(tensors))
    offsets: Iterable[int] = repeat(0)
    memories = list(map(Memory, storages, starts, devices))
    storage_sizes: Sequence[int] = spans
    if not _are_disjoint(addresses, held):
        owners, offsets, memories, storage_sizes = _share(memories, starts, spans, itemsizes)
    is_complex = any(dtype.is_complex for dtype in set(dtypes))
    conjs = map(torch.Tensor.is_conj, tensors) if is_complex else repeat(False)
    specs = map(TensorSpec, names, itemsizes, shapes, strides, owners, offsets, conjs, negs)
    return tuple(specs), tuple(memories), tuple(storage_sizes)


def check_tensor(tensor: torch.Tensor) -> None:
    """Raise Unsendable if a tensor is not fully described by its dtype, shape, strides and bytes."""
    if tensor.is_nested or tensor.layout is not torch.strided:
        raise Unsendable(
            f"a tensor of layout {tensor.layout}{' (nested)' if tensor.is_nested else ''} can't be sent: "
            "send the strided tensors that it is made of"
        )
    span = _layout(tensor.dtype, tensor.shape, tensor.stride())[-1]
    if tensor.device.type == "meta":
        raise Unsendable("a tensor on the meta device has no data: materialise it first")
    if tensor.is_neg() and not (tensor.is_floating_point() or tensor.is_complex()):
        raise Unsendable(f"a {tensor.dtype} tensor with the neg bit set can't be sent: clone() it first")
    if is_zerotensor(tensor):
        raise Unsendable("a zero tensor that autograd made without data can't be sent: clone() it first")
    # Sharded training frees the storage of a parameter and keeps its shape. Viewing such a tensor as bytes
    # would silently allocate new, uninitialized memory for it.
    held = tensor.untyped_storage().nbytes()
    needed = int(tensor.storage_offset()) * tensor.itemsize + span
    if span and needed > held:
        raise Unsendable(
            f"a tensor of shape {list(tensor.shape)} whose storage holds {held} bytes of the {needed} "
            "needed: its memory was freed. Gather it first, or leave it out"
        )


@lru_cache(maxsize=4096)
def _layout(
    dtype: torch.dtype, shape: torch.Size, stride: tuple[int, ...]
) -> tuple[str, int, tuple[int, ...], tuple[int, ...], int]:
    """Return the first four fields of a TensorSpec, and the bytes from the first item to the last."""
    name = dtype_name(dtype)
    if name.startswith("q"):
        raise Unsendable(
            f"a quantized tensor ({dtype}) can't be sent: send .int_repr() with its scale and zero point, or "
            ".dequantize()"
        )
    if len(shape) > MAX_DIMS:
        raise Unsendable(f"a tensor of {len(shape)} dimensions can't be sent: the limit is {MAX_DIMS}")
    sizes = tuple(shape)
    return name, dtype.itemsize, sizes, stride, find_pattern(sizes, stride, dtype.itemsize).span_bytes


def _are_disjoint(addresses: list[int], held: list[int]) -> bool:
    """Return whether no two tensors have the same torch storage, or storages that overlap."""
    size_at = dict(zip(addresses, held, strict=True))
    if len(size_at) < len(addresses):
        return False
    # Not with torch.sort, which would run on the user's default device.
    starts = sorted(addresses)
    return all(map(le, map(add, starts, map(size_at.__getitem__, starts)), starts[1:]))


class _Block(Struct, gc=False):
    """One torch storage, the tensors that have it, and the largest item size among them."""

    memory: Memory
    address: int
    end: int
    tensors: list[int] = []
    itemsize: int = 1


def _share(
    memories: Sequence[Memory], starts: Sequence[int], spans: Sequence[int], itemsizes: Sequence[int]
) -> tuple[list[int], list[int], list[Memory], list[int]]:
    """Return each tensor's storage and offset in it, and each storage's memory and size."""
    blocks: dict[int, _Block] = {}
    for number, memory in enumerate(memories):
        owner = storage_id(memory.storage)
        if owner not in blocks:
            address = memory.storage.data_ptr()
            blocks[owner] = _Block(memory.at(-memory.base), address, address + memory.storage.nbytes())
        blocks[owner].tensors.append(number)
        blocks[owner].itemsize = max(blocks[owner].itemsize, itemsizes[number])
    owners, offsets = [0] * len(starts), [0] * len(starts)
    shared: list[Memory] = []
    sizes: list[int] = []
    # Storages are numbered by first tensor, so that the numbers don't depend on addresses.
    groups = sorted(_groups(blocks.values()), key=lambda each: min(block.tensors[0] for block in each[1]))
    for misaligned, group in groups:
        memory, address, alignment = group[0].memory, group[0].address, group[0].itemsize
        if len(group) > 1:
            # The memory starts up to 15 bytes before the first block. These bytes are never read or written.
            alignment = ITEM_BYTES
            address -= (address - misaligned) % alignment
            memory = memory_at(address, max(block.end for block in group) - address)
        places = {n: block.address - address + starts[n] for block in group for n in block.tensors}
        low = min((place for n, place in places.items() if spans[n]), default=0)
        base = low - low % alignment
        for number, place in places.items():
            owners[number] = len(shared)
            offsets[number] = place - base if spans[number] else 0
        shared.append(memory.at(base))
        sizes.append(max(offsets[number] + spans[number] for number in places))
    return owners, offsets, shared, sizes


def _groups(blocks: Iterable[_Block]) -> Iterator[tuple[int, list[_Block]]]:
    """Put blocks that overlap into one group, or into as few groups as the alignment of items allows.

    An item must lie at a multiple of its size from the start of its storage, or no tensor can view it. The
    blocks of a group are in the order of their addresses. Before each group, yields the number of bytes by
    which the addresses of its largest items exceed a multiple of their size.
    """
    overlapping: list[list[_Block]] = []
    end = 0
    for block in sorted(blocks, key=lambda block: block.address):
        if block.address == block.end or block.memory.device is not CPU:
            yield 0, [block]
            continue
        if block.address >= end:
            overlapping.append([])
        overlapping[-1].append(block)
        end = max(end, block.end)
    for rest in overlapping:
        while rest:
            largest = max(rest, key=lambda block: block.itemsize)
            misaligned = largest.address % largest.itemsize
            yield misaligned, [block for block in rest if (block.address - misaligned) % block.itemsize == 0]
            rest = [block for block in rest if (block.address - misaligned) % block.itemsize]
