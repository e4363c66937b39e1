"""Sparse tensors: their index and value tensors are sent, and a sparse tensor is created from them."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from torchferry.core.manifest import Leaf, TensorSpec
from torchferry.core.text import show, show_name
from torchferry.tensors.kinds.base import AddTensor, Dims, Form, Kind, RebuildContext, dense_properties
from torchferry.tensors.kinds.dense import GradFlags, check_grad_flags, grad_flags, with_grad_flags
from torchferry.tensors.memory import DTYPES
from torchferry.torch_internals import coo_members, set_coalesced

COMPRESSED_LAYOUTS = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)

_MAX_EXPANDED = 1 << 24
"""The most indices that an expanded index tensor may have."""


class SparseFixed(Form, frozen=True):
    """The layout and shape of a sparse tensor."""

    layout: str
    size: Dims


class SparseTraits(Form, frozen=True):
    """The flags of a sparse tensor. `coalesced` is None for all layouts but COO."""

    grad: GradFlags
    coalesced: bool | None


def _members(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    data = tensor.detach()
    if data.layout is torch.sparse_coo:
        return coo_members(data)
    if data.layout in (torch.sparse_csr, torch.sparse_bsr):
        return data.crow_indices(), data.col_indices(), data.values()
    return data.ccol_indices(), data.row_indices(), data.values()


def _describe(tensor: torch.Tensor, add_tensor: AddTensor) -> Leaf:
    is_coo = tensor.layout is torch.sparse_coo
    fixed = SparseFixed(str(tensor.layout), tuple(tensor.shape))
    traits = SparseTraits(grad_flags(tensor), tensor.detach().is_coalesced() if is_coo else None)
    parts = tuple(map(add_tensor, _members(tensor)))
    return Leaf(COO.name if is_coo else COMPRESSED.name, parts, fixed.packed(), traits.packed())


def _create(leaf: Leaf, members: Sequence[Any]) -> torch.Tensor:
    """Create a sparse tensor over its members. torch checks every index."""
    fixed, device = SparseFixed.read(leaf.fixed), members[-1].device
    options: dict[str, Any] = {"size": fixed.size, "check_invariants": True}
    if leaf.kind == COO.name:
        coalesced = SparseTraits.read(leaf.traits).coalesced
        return torch.sparse_coo_tensor(*members, is_coalesced=coalesced, device=device, **options)
    (layout,) = (each for each in COMPRESSED_LAYOUTS if str(each) == fixed.layout)
    return torch.sparse_compressed_tensor(*members, layout=layout, device=device, **options)


def _rebuild(leaf: Leaf, parts: list[torch.Tensor], context: RebuildContext) -> object:
    return with_grad_flags(_create(leaf, parts), SparseTraits.read(leaf.traits).grad)


def _finish_in_place(leaf: Leaf, local: Any) -> object:
    if leaf.kind == COO.name:
        # Set the flag on the tensor itself: a detached copy has a flag of its own.
        set_coalesced(local, bool(SparseTraits.read(leaf.traits).coalesced))
    _create(leaf, _members(local))
    return local


def _check(leaf: Leaf, specs: Sequence[TensorSpec]) -> None:
    fixed, traits = SparseFixed.read(leaf.fixed), SparseTraits.read(leaf.traits)
    is_coo = leaf.kind == COO.name
    check_grad_flags(traits.grad, DTYPES[specs[-1].dtype])
    if fixed.layout not in map(str, [torch.sparse_coo] if is_coo else COMPRESSED_LAYOUTS):
        raise ValueError(f"its layout is {show(fixed.layout)}")
    if prod(n for n in fixed.size if n) >= 2**63:
        raise ValueError(f"its shape {show(fixed.size)} has more items than torch can count")
    if is_coo != isinstance(traits.coalesced, bool):
        raise ValueError(f"coalesced is {traits.coalesced} in the layout {fixed.layout}")
    for indices in specs[:-1]:
        # torch converts indices of any other dtype, and the result is not what was sent.
        if indices.dtype != "int64" and (is_coo or indices.dtype != "int32"):
            raise ValueError(f"its indices are {indices.dtype}")
        # torch reads every index, and an expanded tensor of a few bytes can have 2**60 of them.
        span = 1 + sum((n - 1) * step for n, step in zip(indices.shape, indices.stride, strict=True))
        if prod(indices.shape) > max(span, _MAX_EXPANDED):
            raise ValueError(f"its {prod(indices.shape)} indices are expanded from {span}")


def _properties(leaf: Leaf, specs: Sequence[TensorSpec]) -> dict[str, str]:
    fixed, indices = SparseFixed.read(leaf.fixed), dense_properties(leaf, specs[:-1])
    return {
        "dtype": show_name(specs[-1].dtype),
        "shape": str(list(fixed.size)),
        "layout": show_name(fixed.layout),
        "shape of the values": str(list(specs[-1].shape)),
        "dtypes of the indices": indices["dtype"],
        "shapes of the indices": indices["shape"],
    }


_REST = (SparseFixed, SparseTraits, _check, _properties, _finish_in_place)
COO = Kind("sparse", _describe, _rebuild, 2, *_REST)
COMPRESSED = Kind("compressed", _describe, _rebuild, 3, *_REST)
