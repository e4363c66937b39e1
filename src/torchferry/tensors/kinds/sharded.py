"""ShardedTensors: all local shards, with the metadata of the whole tensor.

The receiver's `local_shards()` get the receiver's rank and device. Its `metadata()` is a copy of the sender's
and describes the shards of all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Annotated, Any

import torch
import torch.distributed as dist
from msgspec import Meta

from torchferry.core.manifest import Item, Leaf, TensorSpec
from torchferry.core.text import show
from torchferry.tensors.kinds.base import AddTensor, Dims, Form, Kind, RebuildContext, dense_properties
from torchferry.tensors.kinds.dense import check_grad_flags
from torchferry.tensors.memory import DTYPES
from torchferry.tensors.values import from_wire, to_wire
from torchferry.torch_internals import make_sharded_tensor, sharded_tensor_module

_api = sharded_tensor_module()


class ShardedFixed(Form, frozen=True):
    """The shape of the whole tensor, and the offsets and sizes of each local shard."""

    size: Dims
    shards: tuple[tuple[Dims, Dims], ...]


class ShardedTraits(Form, frozen=True):
    """The metadata of the whole tensor: offsets, sizes and placement of each shard, and its properties."""

    all: Annotated[tuple[tuple[Dims, Dims, str], ...], Meta(min_length=1)]
    dtype: Item
    requires_grad: bool
    memory_format: Item


def _describe(tensor: Any, add_tensor: AddTensor) -> Leaf:
    shards, metadata = tensor.local_shards(), tensor.metadata()
    properties = metadata.tensor_properties
    fixed = ShardedFixed(tuple(metadata.size), tuple(_bounds(shard.metadata) for shard in shards))
    traits = ShardedTraits(
        tuple((*_bounds(shard), str(shard.placement)) for shard in metadata.shards_metadata),
        to_wire(properties.dtype),  # type: ignore[arg-type]
        properties.requires_grad,
        to_wire(properties.memory_format),  # type: ignore[arg-type]
    )
    parts = tuple(add_tensor(shard.tensor) for shard in shards)
    return Leaf(SHARDED.name, parts, fixed.packed(), traits.packed())


def _bounds(metadata: Any) -> tuple[Dims, Dims]:
    return tuple(metadata.shard_offsets), tuple(metadata.shard_sizes)


def _rebuild(leaf: Leaf, parts: list[torch.Tensor], context: RebuildContext) -> object:
    fixed, traits = ShardedFixed.read(leaf.fixed), ShardedTraits.read(leaf.traits)
    rank = dist.get_rank() if dist.is_initialized() else 0
    local_shards = []
    for (offsets, sizes), tensor in zip(fixed.shards, parts, strict=True):
        own = _api.ShardMetadata([*offsets], [*sizes], placement=f"rank:{rank}/{tensor.device}")
        local_shards.append(_api.Shard(tensor.requires_grad_(traits.requires_grad), own))
    properties = _api.TensorProperties(
        dtype=from_wire(traits.dtype),
        requires_grad=traits.requires_grad,
        memory_format=from_wire(traits.memory_format),
    )
    shards = [_api.ShardMetadata([*start], [*sizes], placement=place) for start, sizes, place in traits.all]
    metadata = _api.ShardedTensorMetadata(shards, torch.Size(fixed.size), properties)
    return make_sharded_tensor(local_shards, metadata)


def _check(leaf: Leaf, specs: Sequence[TensorSpec]) -> None:
    fixed, traits = ShardedFixed.read(leaf.fixed), ShardedTraits.read(leaf.traits)
    dtype, memory_format = from_wire(traits.dtype), from_wire(traits.memory_format)
    if not isinstance(dtype, torch.dtype) or not isinstance(memory_format, torch.memory_format):
        raise TypeError(f"its dtype is {show(dtype)} and its memory format is {show(memory_format)}")
    check_grad_flags(traits.requires_grad, dtype)
    if len(fixed.shards) != len(specs) or any(DTYPES[spec.dtype] is not dtype for spec in specs):
        raise ValueError(f"its {len(specs)} tensors are not the {len(fixed.shards)} local shards of {dtype}")
    if prod(n for n in fixed.size if n) * dtype.itemsize >= 2**63:
        raise ValueError(f"its shape {show(fixed.size)} has more bytes than torch can count")
    for offsets, sizes in (*fixed.shards, *(shard[:2] for shard in traits.all)):
        if not len(offsets) == len(sizes) == len(fixed.size):
            raise ValueError(f"a shard has {len(sizes)} dimensions, expected {len(fixed.size)}")
        if any(start + n > end for start, n, end in zip(offsets, sizes, fixed.size, strict=True)):
            raise ValueError(f"a shard of {show(sizes)} at {show(offsets)} ends outside {show(fixed.size)}")


def _properties(leaf: Leaf, specs: Sequence[TensorSpec]) -> dict[str, str]:
    fixed, traits = ShardedFixed.read(leaf.fixed), ShardedTraits.read(leaf.traits)
    shards = [
        "[" + ", ".join(f"{start}:{start + n}" for start, n in zip(offsets, sizes, strict=True)) + "]"
        for offsets, sizes in fixed.shards
    ]
    dtype = dense_properties(leaf, specs)["dtype"] or str(from_wire(traits.dtype))
    return {"dtype": dtype, "shape": str(list(fixed.size)), "local shards": ", ".join(shards) or "none"}


SHARDED = Kind("sharded", _describe, _rebuild, None, ShardedFixed, ShardedTraits, _check, _properties)
