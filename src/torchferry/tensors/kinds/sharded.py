"""ShardedTensors: all local shards, with the metadata of the whole.

The receiver holds the sender's shards in its own right, so its `local_shards()` are placed on its own rank
and device. `metadata()` is of everybody's shards, and stays as the sender told it: there they are still the
sender's.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Annotated, Any, TypeAlias

import torch
import torch.distributed as dist
from msgspec import Meta
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensorBase
from torch.distributed._shard.sharded_tensor.metadata import (
    ShardedTensorMetadata,
    TensorProperties,
)
from torch.distributed._shard.sharding_spec.api import _infer_sharding_spec_from_shards_metadata

from torchferry.core.manifest import MAX_DIMS, Count, Item, Leaf, TensorSpec
from torchferry.tensors.kinds.base import Form, Kind, Part, Site, packed, read
from torchferry.tensors.memory import DTYPES
from torchferry.tensors.values import from_wire, to_wire

Dims: TypeAlias = Annotated[tuple[Count, ...], Meta(max_length=MAX_DIMS)]


class Shards(Form, frozen=True):
    """What ShardedTensors have in common that hold the same part: where each shard begins, and its size."""

    size: Dims
    shards: tuple[tuple[Dims, Dims], ...]


class Whole(Form, frozen=True):
    """What a fresh one is told of everybody's shards."""

    all: tuple[tuple[Dims, Dims, str], ...]
    dtype: Item
    requires_grad: bool
    memory_format: Item


def _describe(tensor: ShardedTensor, part: Part) -> Leaf:
    shards = tensor.local_shards()
    whole = tensor.metadata()
    properties = whole.tensor_properties
    fixed = Shards(tuple(whole.size), tuple(_bounds(shard.metadata) for shard in shards))
    traits = Whole(
        tuple((*_bounds(meta), str(meta.placement)) for meta in whole.shards_metadata),
        to_wire(properties.dtype),  # type: ignore[arg-type]
        properties.requires_grad,
        to_wire(properties.memory_format),  # type: ignore[arg-type]
    )
    parts = tuple(part(shard.tensor) for shard in shards)
    return Leaf(SHARDED.name, parts, packed(fixed), packed(traits))


def _bounds(meta: ShardMetadata) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(meta.shard_offsets), tuple(meta.shard_sizes)


def _rebuild(leaf: Leaf, parts: list[torch.Tensor], site: Site) -> object:
    fixed, traits = read(Shards, leaf.fixed), read(Whole, leaf.traits)
    rank = dist.get_rank() if dist.is_initialized() else 0
    mine = [
        ShardMetadata([*offsets], [*sizes], placement=f"rank:{rank}/{tensor.device}")
        for (offsets, sizes), tensor in zip(fixed.shards, parts, strict=True)
    ]
    whole = _whole_metadata(fixed, traits)
    requires_grad = traits.requires_grad
    # Not through an initialiser: ShardedTensor's own insists that this rank already owned these shards, and
    # its base's compares each shard with each other, which of a peer's shards may take for ever.
    built: Any = ShardedTensorBase.__new__(
        ShardedTensor,
        _infer_sharding_spec_from_shards_metadata(whole.shards_metadata),
        whole.size,
        dtype=whole.tensor_properties.dtype,
        layout=torch.strided,
        pin_memory=False,
        requires_grad=requires_grad,
    )
    built._local_shards = [
        Shard(tensor.requires_grad_() if requires_grad else tensor, meta)
        for tensor, meta in zip(parts, mine, strict=True)
    ]
    built._metadata = whole
    if dist.is_initialized():
        built._prepare_init()
    else:
        built._process_group = None  # for what needs none: without it, even size() fails
    return built


def _check(leaf: Leaf, specs: Sequence[TensorSpec]) -> None:
    fixed, traits = read(Shards, leaf.fixed), read(Whole, leaf.traits)
    size, shards = fixed.size, fixed.shards
    dtype, memory_format = from_wire(traits.dtype), from_wire(traits.memory_format)
    if not isinstance(dtype, torch.dtype) or not isinstance(memory_format, torch.memory_format):
        raise TypeError("a dtype or memory format that is none")
    if traits.requires_grad and not (dtype.is_floating_point or dtype.is_complex):
        raise ValueError(f"{dtype} has no gradient")
    if any(DTYPES[spec.dtype] is not dtype for spec in specs) or len(shards) != len(specs):
        raise ValueError("shards that are not those of the whole")
    if prod(n for n in size if n) * dtype.itemsize >= 2**63:
        raise ValueError("more items than can be counted")
    if not traits.all:
        raise ValueError("no shards at all")
    for offsets, sizes in (*shards, *(each[:2] for each in traits.all)):
        if not len(offsets) == len(sizes) == len(size):
            raise ValueError(f"a shard of {len(sizes)} dimensions, not {len(size)}")
        if any(at + n > end for at, n, end in zip(offsets, sizes, size, strict=True)):
            raise ValueError("a shard beyond the end of the whole")


def _whole_metadata(fixed: Shards, traits: Whole) -> ShardedTensorMetadata:
    return ShardedTensorMetadata(
        shards_metadata=[
            ShardMetadata([*offsets], [*sizes], placement=placement)
            for offsets, sizes, placement in traits.all
        ],
        size=torch.Size(fixed.size),
        tensor_properties=TensorProperties(
            dtype=from_wire(traits.dtype),  # type: ignore[arg-type]
            requires_grad=traits.requires_grad,
            memory_format=from_wire(traits.memory_format),  # type: ignore[arg-type]
        ),
    )


SHARDED = Kind("sharded", _describe, _rebuild, None, Shards, Whole, check=_check)
