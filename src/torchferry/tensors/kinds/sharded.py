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

from torchferry.core.manifest import MAX_DIMS, Count, Item, Leaf, TensorSpec
from torchferry.tensors.kinds.base import Form, Kind, Part, Site, look_dense, packed, read
from torchferry.tensors.memory import DTYPES
from torchferry.tensors.values import from_wire, to_wire
from torchferry.torch_internals import make_sharded_tensor, sharded_tensors

_API = sharded_tensors()

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


def _describe(tensor: Any, part: Part) -> Leaf:
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


def _bounds(meta: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(meta.shard_offsets), tuple(meta.shard_sizes)


def _rebuild(leaf: Leaf, parts: list[torch.Tensor], site: Site) -> object:
    fixed, traits = read(Shards, leaf.fixed), read(Whole, leaf.traits)
    rank = dist.get_rank() if dist.is_initialized() else 0
    mine = [
        _API.shard_metadata([*offsets], [*sizes], placement=f"rank:{rank}/{tensor.device}")
        for (offsets, sizes), tensor in zip(fixed.shards, parts, strict=True)
    ]
    whole = _whole_metadata(fixed, traits)
    shards = [
        _API.shard(tensor.requires_grad_() if traits.requires_grad else tensor, meta)
        for tensor, meta in zip(parts, mine, strict=True)
    ]
    return make_sharded_tensor(shards, whole)


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


def _look(leaf: Leaf, specs: Sequence[TensorSpec]) -> dict[str, str]:
    fixed = read(Shards, leaf.fixed)
    shards = [
        "[" + ", ".join(f"{at}:{at + n}" for at, n in zip(offsets, sizes, strict=True)) + "]"
        for offsets, sizes in fixed.shards
    ]
    dtype = look_dense(leaf, specs)["dtype"] or str(from_wire(read(Whole, leaf.traits).dtype))
    return {"dtype": dtype, "shape": str(list(fixed.size)), "local shards": ", ".join(shards) or "none"}


def _whole_metadata(fixed: Shards, traits: Whole) -> Any:
    return _API.tensor_metadata(
        shards_metadata=[
            _API.shard_metadata([*offsets], [*sizes], placement=placement)
            for offsets, sizes, placement in traits.all
        ],
        size=torch.Size(fixed.size),
        tensor_properties=_API.tensor_properties(
            dtype=from_wire(traits.dtype),
            requires_grad=traits.requires_grad,
            memory_format=from_wire(traits.memory_format),
        ),
    )


SHARDED = Kind("sharded", _describe, _rebuild, None, Shards, Whole, check=_check, look=_look)
