"""Sparse tensors: their index and value tensors travel, and are put together again unchanged."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from torchferry.core.manifest import Count, Leaf, TensorSpec
from torchferry.core.text import show, show_name
from torchferry.tensors.kinds.base import Form, Kind, Part, Site, look_dense, packed, read
from torchferry.tensors.kinds.dense import Grad, check_grad, grad_traits, with_grad_traits
from torchferry.torch_internals import check_compressed, check_coo, coo_members, set_coalesced

_COMPRESSED = {
    str(layout): layout for layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
}

_INDICES = {"sparse": ("int64",), "compressed": ("int64", "int32")}
"""What indices may be."""

_MOST_EXPANDED = 1 << 24
"""How many indices may be made out of fewer by expanding."""


class Size(Form, frozen=True):
    """What sparse tensors have in common that have the same place for an item."""

    layout: str
    size: tuple[Count, ...]


class Traits(Form, frozen=True):
    """What a fresh one is given."""

    grad: Grad
    coalesced: bool | None


def _describe_coo(tensor: torch.Tensor, part: Part) -> Leaf:
    # The plain accessors refuse a tensor that is not coalesced, and coalescing it would change it.
    data = tensor.detach()
    return _leaf(COO, tensor, coo_members(data), part, data.is_coalesced())


def _rebuild_coo(leaf: Leaf, parts: list[torch.Tensor], site: Site) -> object:
    traits = read(Traits, leaf.traits)
    built = torch.sparse_coo_tensor(
        parts[0],
        parts[1],
        read(Size, leaf.fixed).size,
        is_coalesced=traits.coalesced,
        check_invariants=True,
        device=parts[1].device,
    )
    return with_grad_traits(built, traits.grad)


def _check(leaf: Leaf, specs: Sequence[TensorSpec]) -> None:
    fixed, traits = read(Size, leaf.fixed), read(Traits, leaf.traits)
    check_grad(traits.grad, specs[-1])
    layout = fixed.layout
    if layout != str(torch.sparse_coo) if leaf.kind == COO.name else layout not in _COMPRESSED:
        raise ValueError(f"a layout {show(layout)}")
    if prod(fixed.size) >= 2**63:
        raise ValueError("more items than can be counted")
    if (leaf.kind == COO.name) != isinstance(traits.coalesced, bool):
        raise ValueError("coalesced or not is a question for COO")
    for indices in specs[:-1]:
        # Of any other dtype torch would make new ones, which are not those that arrived.
        if indices.dtype not in _INDICES[leaf.kind]:
            raise ValueError(f"indices of {indices.dtype}")
        # Every index is looked at when the tensor is made, and an expanded one may claim 2**60 of them.
        reach = 1 + sum((n - 1) * step for n, step in zip(indices.shape, indices.stride, strict=True))
        if prod(indices.shape) > max(reach, _MOST_EXPANDED):
            raise ValueError("indices that share memory")


def _look(leaf: Leaf, specs: Sequence[TensorSpec]) -> dict[str, str]:
    fixed = read(Size, leaf.fixed)
    return {
        "dtype": show_name(specs[-1].dtype),
        "shape": str(list(fixed.size)),
        "layout": show_name(fixed.layout),
        "shape of the values": str(list(specs[-1].shape)),
        "dtypes of the indices": look_dense(leaf, specs[:-1])["dtype"],
        "shapes of the indices": look_dense(leaf, specs[:-1])["shape"],
    }


def _adopt_coo(leaf: Leaf, local: Any) -> Any:
    # Not on a detached copy: whether it is coalesced is kept beside the data, once for each tensor.
    coalesced = read(Traits, leaf.traits).coalesced
    set_coalesced(local, bool(coalesced))
    check_coo(local, bool(coalesced))
    return local


def _describe_compressed(tensor: torch.Tensor, part: Part) -> Leaf:
    return _leaf(COMPRESSED, tensor, _members(tensor.detach()), part, None)


def _members(data: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if data.layout in (torch.sparse_csr, torch.sparse_bsr):
        return data.crow_indices(), data.col_indices(), data.values()
    return data.ccol_indices(), data.row_indices(), data.values()


def _adopt_compressed(leaf: Leaf, local: Any) -> Any:
    check_compressed(local, _members(local.detach()))
    return local


def _rebuild_compressed(leaf: Leaf, parts: list[torch.Tensor], site: Site) -> object:
    fixed = read(Size, leaf.fixed)
    compressed, plain, values = parts
    built = torch.sparse_compressed_tensor(
        compressed,
        plain,
        values,
        fixed.size,
        layout=_COMPRESSED[fixed.layout],
        check_invariants=True,
        device=values.device,
    )
    return with_grad_traits(built, read(Traits, leaf.traits).grad)


def _leaf(
    kind: Kind,
    tensor: torch.Tensor,
    members: tuple[torch.Tensor, ...],
    part: Part,
    coalesced: bool | None,
) -> Leaf:
    return Leaf(
        kind.name,
        tuple(part(member) for member in members),
        packed(Size(str(tensor.layout), tuple(tensor.shape))),
        packed(Traits(grad_traits(tensor), coalesced)),
    )


COO = Kind("sparse", _describe_coo, _rebuild_coo, 2, Size, Traits, _adopt_coo, _check, _look)
COMPRESSED = Kind(
    "compressed", _describe_compressed, _rebuild_compressed, 3, Size, Traits, _adopt_compressed, _check, _look
)
