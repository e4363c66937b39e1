"""ShardedTensors: all local shards, with the metadata of the whole tensor.

The receiver's `local_shards()` get the receiver's rank and device. Its `metadata()` is a copy of the sender's
and describes the shards of all ranks.
"""

from collections.abc import Sequence
from math import prod
from typing import Annotated, Any

import torch
import torch.distributed as dist
from msgspec import Meta

from torchferry.core.assignment import Part
from torchferry.core.codec import encode_value
from torchferry.core.manifest import Leaf, TensorSpec
from torchferry.core.text import show, show_name
from torchferry.tensors.kinds.base import AddTensor, Dims, Form, Kind, RebuildContext
from torchferry.tensors.kinds.dense import check_grad_flags
from torchferry.tensors.memory import DTYPES, dtype_name
from torchferry.torch_internals import make_sharded_tensor, sharded_tensor_module

_api = sharded_tensor_module()

_MEMORY_FORMATS = {str(each): each for each in vars(torch).values() if isinstance(each, torch.memory_format)}


class ShardedFixed(Form, frozen=True):
    """The shape of the whole tensor, and the offsets and sizes of each local shard."""

    size: Dims
    shards: tuple[tuple[Dims, Dims], ...]


class ShardedTraits(Form, frozen=True):
    """The metadata of the whole tensor: offsets, sizes and placement of each shard, and its properties."""

    all: Annotated[tuple[tuple[Dims, Dims, str], ...], Meta(min_length=1)]
    dtype: str
    requires_grad: bool
    memory_format: str


def _describe(tensor: Any, add_tensor: AddTensor) -> Leaf:
    shards, metadata = tensor.local_shards(), tensor.metadata()
    fixed = ShardedFixed(tuple(metadata.size), tuple(_bounds(shard.metadata) for shard in shards))
    placed = tuple((*_bounds(shard), str(shard.placement)) for shard in metadata.shards_metadata)
    whole = metadata.tensor_properties
    traits = ShardedTraits(placed, dtype_name(whole.dtype), whole.requires_grad, str(whole.memory_format))
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
    dtype, memory_format = DTYPES[traits.dtype], _MEMORY_FORMATS[traits.memory_format]
    properties = _api.TensorProperties(dtype, requires_grad=traits.requires_grad, memory_format=memory_format)
    metadata = _api.ShardedTensorMetadata(_all_shards(traits), torch.Size(fixed.size), properties)
    return make_sharded_tensor(local_shards, metadata)


def _all_shards(traits: ShardedTraits) -> list[Any]:
    return [_api.ShardMetadata([*start], [*sizes], placement=place) for start, sizes, place in traits.all]


def _check(leaf: Leaf, specs: Sequence[TensorSpec]) -> None:
    fixed, traits = ShardedFixed.read(leaf.fixed), ShardedTraits.read(leaf.traits)
    if traits.dtype not in DTYPES:
        raise ValueError(f"torch {torch.__version__} has no dtype {show(traits.dtype)}")
    if traits.memory_format not in _MEMORY_FORMATS:
        raise ValueError(f"torch {torch.__version__} has no memory format {show(traits.memory_format)}")
    check_grad_flags(traits.requires_grad, traits.dtype)
    if len(fixed.shards) != len(specs):
        raise ValueError(f"it has {len(specs)} tensors, expected one for each of {len(fixed.shards)} shards")
    for spec, (_, sizes) in zip(specs, fixed.shards, strict=True):
        if (spec.dtype, spec.shape) != (traits.dtype, sizes):
            found, expected = f"{spec.dtype} {show(spec.shape)}", f"{traits.dtype} {show(sizes)}"
            raise ValueError(f"the tensor of a local shard is {found}, expected {expected}")
    if prod(n for n in fixed.size if n) * DTYPES[traits.dtype].itemsize >= 2**63:
        raise ValueError(f"its shape {show(fixed.size)} has more bytes than torch can count")
    for offsets, sizes in (*fixed.shards, *(shard[:2] for shard in traits.all)):
        if not len(offsets) == len(sizes) == len(fixed.size):
            raise ValueError(
                f"a shard has {len(offsets)} offsets and {len(sizes)} sizes, expected {len(fixed.size)} each"
            )
        if any(start + n > end for start, n, end in zip(offsets, sizes, fixed.size, strict=True)):
            raise ValueError(f"a shard of {show(sizes)} at {show(offsets)} ends outside {show(fixed.size)}")
    _all_shards(traits)  # raises if torch can't parse a placement


def _properties(leaf: Leaf, specs: Sequence[TensorSpec]) -> dict[str, str]:
    fixed = ShardedFixed.read(leaf.fixed)
    return {
        "dtype": show_name(ShardedTraits.read(leaf.traits).dtype),
        "shape": str(list(fixed.size)),
        "local shards": _show_shards(fixed.shards),
    }


def _show_shards(shards: Sequence[tuple[Dims, Dims]]) -> str:
    shown = [
        "[" + ", ".join(f"{start}:{start + n}" for start, n in zip(offsets, sizes, strict=True)) + "]"
        for offsets, sizes in shards
    ]
    return ", ".join(shown) or "none"


def _part(leaf: Leaf, rank: int | None) -> Part:
    fixed, placed = ShardedFixed.read(leaf.fixed), ShardedTraits.read(leaf.traits).all
    shards = list(fixed.shards)
    if rank is not None:
        shards = [(start, sizes) for start, sizes, place in placed if place.startswith(f"rank:{rank}/")]
    return Part(encode_value(fixed.size), _show_shards(shards))


SHARDED = Kind(
    "sharded", _describe, _rebuild, None, ShardedFixed, ShardedTraits, _check, _properties, part=_part
)
