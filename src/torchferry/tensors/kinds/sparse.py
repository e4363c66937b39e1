"""Sparse tensors: their index and value tensors are sent, and a sparse tensor is created from them."""

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

import torch

from torchferry.core.manifest import Leaf, Manifest, TensorSpec
from torchferry.core.text import show, show_name
from torchferry.errors import BadManifest
from torchferry.tensors.kinds.base import AddTensor, Dims, Form, Kind, RebuildContext, dense_properties
from torchferry.tensors.kinds.dense import GradFlags, check_grad_flags, grad_flags, with_grad_flags
from torchferry.torch_internals import coo_members, set_coalesced

_COO = "torch.sparse_coo"
_BY_ROW = (torch.sparse_csr, torch.sparse_bsr)
SPARSE_LAYOUTS = (torch.sparse_coo, *_BY_ROW, torch.sparse_csc, torch.sparse_bsc)
_LAYOUTS = {str(layout): layout for layout in SPARSE_LAYOUTS}

_FREE_INDICES = 1 << 24
"""So many indices are read in a fraction of a second, whatever they are made of."""


class SparseFixed(Form, frozen=True):
    """The layout and shape of a sparse tensor."""

    layout: str
    size: Dims


class SparseTraits(Form, frozen=True):
    """The flags of a sparse tensor. Only COO tensors are coalesced or not."""

    grad: GradFlags
    coalesced: bool


def _members(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    data = tensor.detach()
    if data.layout is torch.sparse_coo:
        return coo_members(data)
    if data.layout in _BY_ROW:
        return data.crow_indices(), data.col_indices(), data.values()
    return data.ccol_indices(), data.row_indices(), data.values()


def _describe(tensor: torch.Tensor, add_tensor: AddTensor) -> Leaf:
    coalesced = tensor.layout is torch.sparse_coo and tensor.detach().is_coalesced()
    fixed = SparseFixed(str(tensor.layout), tuple(tensor.shape))
    traits = SparseTraits(grad_flags(tensor), coalesced)
    return Leaf(SPARSE.name, tuple(map(add_tensor, _members(tensor))), fixed.packed(), traits.packed())


def _rebuild(leaf: Leaf, members: Sequence[Any], context: RebuildContext | None = None) -> object:
    """Create a sparse tensor over its members. torch checks every index."""
    fixed, traits = SparseFixed.read(leaf.fixed), SparseTraits.read(leaf.traits)
    options: dict[str, Any] = {"size": fixed.size, "check_invariants": True}
    device, layout = members[-1].device, _LAYOUTS[fixed.layout]
    if fixed.layout == _COO:
        built = torch.sparse_coo_tensor(*members, is_coalesced=traits.coalesced, device=device, **options)
    else:
        built = torch.sparse_compressed_tensor(*members, layout=layout, device=device, **options)
    return with_grad_flags(built, traits.grad)


def _finish_in_place(leaf: Leaf, local: Any, parts: Sequence[torch.Tensor]) -> object:
    if local.layout is torch.sparse_coo:
        # Set the flag on the tensor itself: a detached copy has a flag of its own.
        set_coalesced(local, SparseTraits.read(leaf.traits).coalesced)
    _rebuild(leaf, parts)
    return local


def _check(leaf: Leaf, specs: Sequence[TensorSpec]) -> None:
    fixed, traits = SparseFixed.read(leaf.fixed), SparseTraits.read(leaf.traits)
    if fixed.layout not in _LAYOUTS:
        raise ValueError(f"its layout is {show(fixed.layout)}, expected one of {', '.join(_LAYOUTS)}")
    is_coo = fixed.layout == _COO
    if len(specs) != (2 if is_coo else 3):
        raise ValueError(f"it has {len(specs)} tensors, expected {2 if is_coo else 3} for {fixed.layout}")
    check_grad_flags(traits.grad, specs[-1].dtype)
    if prod(n for n in fixed.size if n) >= 2**63:
        raise ValueError(f"its shape {show(fixed.size)} has more items than torch can count")
    # torch converts indices of any other dtype, and the result is not what was sent.
    dtypes = ("int64",) if is_coo else ("int64", "int32")
    for indices in specs[:-1]:
        if indices.dtype not in dtypes:
            raise ValueError(f"its indices are {show_name(indices.dtype)}, expected {' or '.join(dtypes)}")


def check_index_count(manifest: Manifest, leaves: Iterable[Leaf]) -> None:
    """Check that the sparse tensors have about as many indices as were sent; raises BadManifest.

    torch reads every index. A tensor of a few bytes can be expanded to 2**60, and be in many leaves.
    """
    parts = [part for leaf in leaves if leaf.kind == SPARSE.name for part in leaf.parts[:-1]]
    count, nbytes = sum(prod(manifest.tensors[part].shape) for part in parts), sum(manifest.storages)
    if count > max(nbytes, _FREE_INDICES):
        raise BadManifest(
            f"the sparse tensors have {count} indices in all, expected at most {max(nbytes, _FREE_INDICES)}: "
            f"the whole state has {nbytes} bytes, so they are expanded or in many tensors"
        )


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


SPARSE = Kind(
    "sparse", _describe, _rebuild, None, SparseFixed, SparseTraits, _check, _properties, _finish_in_place
)
