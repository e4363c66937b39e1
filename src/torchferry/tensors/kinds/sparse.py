"""Sparse tensors: their index and value tensors travel, and are put together again unchanged."""

from __future__ import annotations

from typing import Any, TypedDict

import torch

from torchferry.core.manifest import Count, Leaf
from torchferry.errors import BadManifest
from torchferry.tensors.kinds.base import Kind, Part, Site
from torchferry.tensors.kinds.dense import check_dense, grad_traits, with_grad_traits

_COMPRESSED = {
    str(layout): layout for layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
}


class _Fixed(TypedDict):
    layout: str
    size: list[Count]


class _Traits(TypedDict):
    grad: int
    coalesced: bool | None


def _describe_coo(tensor: torch.Tensor, part: Part) -> Leaf:
    # The plain accessors refuse a tensor that is not coalesced, and coalescing it would change it.
    data = tensor.detach()
    return _leaf(COO, tensor, (data._indices(), data._values()), part, data.is_coalesced())


def _rebuild_coo(leaf: Leaf, parts: list[torch.Tensor], site: Site) -> object:
    built = torch.sparse_coo_tensor(
        parts[0],
        parts[1],
        leaf.fixed["size"],
        is_coalesced=leaf.traits["coalesced"],
        check_invariants=True,
    )
    return with_grad_traits(built, leaf.traits["grad"])


def _adopt_coo(leaf: Leaf, local: Any) -> Any:
    # Not on a detached copy: whether it is coalesced is kept beside the data, once for each tensor.
    with torch.no_grad():
        local._coalesced_(leaf.traits["coalesced"])
    return local


def _describe_compressed(tensor: torch.Tensor, part: Part) -> Leaf:
    data = tensor.detach()
    if data.layout in (torch.sparse_csr, torch.sparse_bsr):
        members = (data.crow_indices(), data.col_indices(), data.values())
    else:
        members = (data.ccol_indices(), data.row_indices(), data.values())
    return _leaf(COMPRESSED, tensor, members, part, None)


def _rebuild_compressed(leaf: Leaf, parts: list[torch.Tensor], site: Site) -> object:
    layout = _COMPRESSED.get(leaf.fixed["layout"])
    if layout is None:
        raise BadManifest(f"a sparse layout {leaf.fixed['layout']!r} that is not known")
    compressed, plain, values = parts
    built = torch.sparse_compressed_tensor(
        compressed, plain, values, leaf.fixed["size"], layout=layout, check_invariants=True
    )
    return with_grad_traits(built, leaf.traits["grad"])


def _leaf(
    kind: Kind,
    tensor: torch.Tensor,
    members: tuple[torch.Tensor, ...],
    part: Part,
    coalesced: bool | None,
) -> Leaf:
    for member in members:
        check_dense(member)
    return Leaf(
        kind.name,
        tuple(part(member) for member in members),
        {"layout": str(tensor.layout), "size": list(tensor.shape)},
        {"grad": grad_traits(tensor), "coalesced": coalesced},
    )


COO = Kind("sparse", _describe_coo, _rebuild_coo, 2, _Fixed, _Traits, _adopt_coo)
COMPRESSED = Kind("compressed", _describe_compressed, _rebuild_compressed, 3, _Fixed, _Traits)
