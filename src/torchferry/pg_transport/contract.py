"""How torch's PGTransport describes a state, as the contract fixes it, and what that means as a manifest.

It differs from a manifest in what it sends: the whole storage behind every tensor, one message a tensor,
aliases or not. `to_envelope` says just that, so that the engine can receive such a state, in place and
with all its checks, without knowing that it exists.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import index
from typing import Any

import torch

from torchferry.core.codec import Envelope
from torchferry.core.manifest import VALUE, Leaf, Manifest, TensorSpec
from torchferry.core.text import show
from torchferry.core.validation import validate
from torchferry.errors import BadManifest, Unsendable
from torchferry.tensors.describe import describe
from torchferry.tensors.memory import dtype_name
from torchferry.tensors.values import to_wire
from torchferry.torch_internals import pytree

_UNCUT = 2**62
"""A chunk size that no storage reaches: torch's PGTransport never cuts one."""


@dataclass
class ContractTensorMeta:
    """A strided tensor. `nbytes` is the size of its whole storage, which is what is sent."""

    shape: torch.Size
    dtype: torch.dtype
    storage_offset: int
    stride: tuple[int, ...]
    nbytes: int


@dataclass
class ContractStateMeta:
    """A state: its tree, the path of each leaf, and each leaf, tensors as ContractTensorMeta."""

    treespec: Any
    paths: list[Any]
    non_tensor_leaves: list[object]


def storage_as(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """See the whole storage of a tensor, whatever its offset and strides, as a flat tensor of a dtype.

    Raises:
        Unsendable: a subclass of Tensor, whose storage may not be all there is to it.
    """
    if type(tensor) is not torch.Tensor:
        raise Unsendable(f"only plain tensors have a storage to cast, not {type(tensor)}")
    return torch.tensor(tensor.untyped_storage(), dtype=dtype, device=tensor.device)


def describe_tensor(tensor: torch.Tensor) -> tuple[torch.Tensor, ContractTensorMeta]:
    """Give a tensor's storage as bytes, and its description."""
    meta = ContractTensorMeta(
        shape=tensor.shape,
        dtype=tensor.dtype,
        storage_offset=int(tensor.storage_offset()),
        stride=tensor.stride(),
        nbytes=tensor.untyped_storage().nbytes(),
    )
    return storage_as(tensor, torch.uint8), meta


def describe_state(state_dict: object, device: torch.device) -> tuple[ContractStateMeta, list[torch.Tensor]]:
    """Describe a state of plain tensors and values as torch's PGTransport does, with its storages' bytes.

    `device` is part of the contract and makes no difference to the description.
    """
    found, treespec = pytree().tree_flatten_with_path(state_dict)
    leaves: list[object] = []
    storages: list[torch.Tensor] = []
    for _, value in found:
        if isinstance(value, torch.Tensor):
            storage, meta = describe_tensor(value.detach() if _is_parameter(value) else value)
            storages.append(storage)
            leaves.append(meta)
        else:
            leaves.append(value)
    return ContractStateMeta(treespec, [path for path, _ in found], leaves), storages


def to_envelope(meta: ContractStateMeta) -> Envelope:
    """Say what such a description means: a storage for each tensor, sent whole.

    Raises:
        BadManifest: it does not describe a state.
        Unsendable: it has a leaf or container that can't be carried.
    """
    leaves = meta.non_tensor_leaves
    # A tree of numbers: where number n comes out, leaf n belongs.
    tree = describe(pytree().tree_unflatten(list(range(len(leaves))), meta.treespec)).manifest
    tensors: list[TensorSpec] = []
    storages: list[int] = []
    carried: list[Leaf] = []
    for placeholder in tree.leaves:
        value = leaves[placeholder.traits]  # type: ignore[index]
        if isinstance(value, ContractTensorMeta):
            carried.append(Leaf("tensor", (len(tensors),)))
            tensors.extend(_specs(value, len(storages)))
            storages.append(_count(value.nbytes))
        else:
            carried.append(Leaf(VALUE, traits=to_wire(value)))
    manifest = Manifest(tree.root, tree.branches, tuple(carried), tuple(tensors), tuple(storages))
    validate(manifest)
    return Envelope(manifest, _UNCUT)


def _specs(meta: ContractTensorMeta, storage: int) -> tuple[TensorSpec, TensorSpec]:
    """Describe the tensor, and next to it the whole storage: a tensor of no leaf, so it is only moved."""
    itemsize = meta.dtype.itemsize
    tensor = TensorSpec(
        dtype_name(meta.dtype),
        itemsize,
        tuple(map(_count, meta.shape)),
        tuple(map(_count, meta.stride)),
        storage,
        _count(meta.storage_offset) * itemsize,
    )
    return tensor, TensorSpec("uint8", 1, (_count(meta.nbytes),), (1,), storage, 0)


def _count(number: object) -> int:
    """Give a number of such a description as one of ours.

    What only equals one (2.0 for 2, numpy's) would be taken for it by all that remembers answers, and be in
    them.

    Raises:
        BadManifest: it is not a whole number, or negative, or larger than any tensor.
    """
    try:
        count = int(index(number))  # type: ignore[arg-type]
    except TypeError:
        raise BadManifest(f"a tensor with {show(number)} for a size, stride or offset") from None
    if not 0 <= count < 2**63:
        raise BadManifest(f"a tensor with a size, stride or offset of {show(count)}, which can't be")
    return count


def _is_parameter(value: torch.Tensor) -> bool:
    return type(value) is torch.nn.Parameter
