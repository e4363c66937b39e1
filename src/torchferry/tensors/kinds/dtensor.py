"""DTensors: the local part, its position, the placements, and a mesh that is the receiver's.

A mesh can't travel: its process groups and this process's place in it belong to the sender. In place, the
target keeps its own. A fresh DTensor gets the receiver's `mesh=`, or a slice of it. Without `mesh=`, it gets
a mesh that is equal to the sender's, seen from the receiver's rank, with the process groups of the receiver
that have the same ranks. A receiver outside the mesh has no such groups, and collectives raise there.

A receiver only accepts the shard of its own position, fresh and in place: the coordinates along all mesh
dimensions that split the tensor must be equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Annotated, Any, TypeAlias

import torch
import torch.distributed as dist
from msgspec import Meta
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from torchferry.core.manifest import MAX_DIMS, Count, Leaf, TensorSpec
from torchferry.core.text import show, show_name
from torchferry.errors import BadManifest, Unsendable
from torchferry.tensors.kinds.base import Form, Kind, Misfit, Part, Site, look_dense, packed, read
from torchferry.tensors.kinds.dense import Grad, check_grad, grad_traits, with_grad_traits
from torchferry.torch_internals import (
    MeshLayout,
    give_groups,
    layout_of,
    living_groups,
    local_part,
    make_dtensor,
    make_mesh,
    strided_shard,
)

_StridedShard = strided_shard()
_REDUCTIONS = frozenset({"sum", "avg", "product", "min", "max"})


Dims: TypeAlias = Annotated[tuple[Count, ...], Meta(max_length=MAX_DIMS)]
PlacementForm: TypeAlias = Annotated[tuple[int | str, ...], Meta(max_length=3)]


Position: TypeAlias = Annotated[tuple[Count | None, ...], Meta(max_length=MAX_DIMS)]
"""A coordinate in a mesh, with None for the dimensions that do not split the tensor."""


class Spread(Form, frozen=True):
    """What DTensors have in common that hold the same part.

    `position` is None for a rank outside the mesh, if the mesh splits the tensor at all.
    """

    placements: Annotated[tuple[PlacementForm, ...], Meta(max_length=MAX_DIMS)]
    shape: Dims
    mesh: Dims
    position: Position | None


class Mesh(Form, frozen=True):
    """The sender's mesh."""

    device: str
    ranks: tuple[Count, ...]
    sizes: Annotated[tuple[Dims, ...], Meta(max_length=MAX_DIMS)]
    strides: Annotated[tuple[Dims, ...], Meta(max_length=MAX_DIMS)]
    coalesced: bool
    names: Annotated[tuple[str, ...], Meta(max_length=MAX_DIMS)] | None


class Traits(Form, frozen=True):
    """What a fresh one is given."""

    grad: Grad
    stride: Dims
    mesh: Mesh


def _describe(tensor: DTensor, part: Part) -> Leaf:
    local = local_part(tensor)
    if type(local) is not torch.Tensor:
        raise Unsendable(
            f"a DTensor over a {type(local).__qualname__} can't travel: only strided local tensors can"
        )
    mesh = tensor.device_mesh
    fixed = Spread(
        tuple(map(_placement_to_wire, tensor.placements)),
        tuple(tensor.shape),
        tuple(mesh.shape),
        _position(mesh.get_coordinate(), mesh.shape, tensor.placements),
    )
    traits = Traits(grad_traits(tensor), tuple(tensor.stride()), _mesh_to_wire(mesh))
    return Leaf(DTENSOR.name, (part(local),), packed(fixed), packed(traits))


def _position(
    coordinate: Sequence[int] | None, mesh: Sequence[int], placements: Sequence[Placement]
) -> Position | None:
    """Reduce a coordinate to the dimensions that split the tensor.

    A replicated dimension does not split it, nor does one of size 1. A partial one does: each rank has its
    own addend.
    """
    splits = [n > 1 and not isinstance(placed, Replicate) for n, placed in zip(mesh, placements, strict=True)]
    if coordinate is None:
        return None if any(splits) else (None,) * len(splits)
    return tuple(at if split else None for at, split in zip(coordinate, splits, strict=True))


def _rebuild(leaf: Leaf, parts: list[torch.Tensor], site: Site) -> object:
    fixed, traits = read(Spread, leaf.fixed), read(Traits, leaf.traits)
    mesh = _own_mesh(site.mesh, fixed.mesh, traits.mesh.names)
    if mesh is None:
        mesh = _mesh_from_wire(traits.mesh)
    placements = [_placement_from_wire(wire) for wire in fixed.placements]
    built = make_dtensor(parts[0], mesh, placements, torch.Size(fixed.shape), traits.stride)
    return with_grad_traits(built, traits.grad)


def _misfit(leaf: Leaf, site: Site) -> Misfit | None:
    """Compare the sender's mesh and position with those of this process."""
    fixed, wire = read(Spread, leaf.fixed), read(Traits, leaf.traits).mesh
    if site.mesh is not None:
        mesh = _own_mesh(site.mesh, fixed.mesh, wire.names)
        if mesh is None:
            local = _show_mesh(site.mesh.shape, site.mesh.mesh_dim_names)
            return Misfit("mesh", _show_mesh(fixed.mesh, wire.names), f"mesh={local}")
        coordinate: Sequence[int] | None = mesh.get_coordinate()
    else:
        coordinate = _layout(wire).coordinate(dist.get_rank()) if dist.is_initialized() else None
    placements = [_placement_from_wire(placement) for placement in fixed.placements]
    here = _position(coordinate, fixed.mesh, placements)
    if here == fixed.position:
        return None
    return Misfit("position of the shard in the mesh", _show_position(fixed.position), _show_position(here))


def _look(leaf: Leaf, specs: Sequence[TensorSpec]) -> dict[str, str]:
    fixed = read(Spread, leaf.fixed)
    return {
        "dtype": look_dense(leaf, specs)["dtype"],
        "shape": str(list(fixed.shape)),
        "placements": ", ".join(_show_placement(wire) for wire in fixed.placements) or "none",
        "mesh": _show_mesh(fixed.mesh, None),
        "position of the shard in the mesh": _show_position(fixed.position),
        "shape of the local part": str(list(specs[0].shape)),
    }


def _show_placement(wire: PlacementForm) -> str:
    match wire:
        case ["shard", int(dim)]:
            return f"Shard({dim})"
        case ["replicate"]:
            return "Replicate()"
        case ["partial", str(reduction)]:
            return f"Partial({show_name(reduction)})"
        case ["strided", int(dim), int(factor)]:
            return f"_StridedShard({dim}, split_factor={factor})"
    return show(wire)


def _show_mesh(shape: Sequence[int], names: Sequence[str] | None) -> str:
    named = f" ({', '.join(map(show_name, names))})" if names else ""
    return " x ".join(map(str, shape)) + named


def _show_position(position: Position | None) -> str:
    """Show a position, with a star for each dimension that does not split the tensor."""
    if position is None:
        return "outside the mesh"
    return "(" + ", ".join("*" if at is None else str(at) for at in position) + ")"


def _check(leaf: Leaf, specs: Sequence[TensorSpec]) -> None:
    fixed, traits = read(Spread, leaf.fixed), read(Traits, leaf.traits)
    check_grad(traits.grad, specs[0])
    shape, mesh = fixed.shape, traits.mesh
    if len(shape) != len(traits.stride):
        raise ValueError("a shape and strides that do not go together")
    if prod(n for n in shape if n) * specs[0].itemsize >= 2**63:
        raise ValueError("more items than can be counted")
    placements = [_placement_from_wire(wire) for wire in fixed.placements]
    for placement in placements:
        if isinstance(placement, (Shard, _StridedShard)) and not 0 <= placement.dim < len(shape):
            raise ValueError(f"{placement} of {len(shape)} dimensions")
    if fixed.position is not None and len(fixed.position) != len(placements):
        raise ValueError("a position and placements that do not go together")
    if fixed.mesh != tuple(map(prod, mesh.sizes)):
        raise ValueError("a mesh of two shapes")
    if not len(placements) == len(fixed.mesh) == len(mesh.sizes) == len(mesh.strides):
        raise ValueError("placements and a mesh that do not go together")
    _check_mesh(mesh)


def _check_mesh(mesh: Mesh) -> None:
    # torch lists all that a mesh claims to hold, so it may claim no more ranks than it brings.
    if torch.device(mesh.device).type != mesh.device:
        raise ValueError(f"no device type {show(mesh.device)}")
    if mesh.names is not None and len(mesh.names) != len(mesh.sizes):
        raise ValueError("as many names as dimensions, or none")
    sizes = [n for dim in mesh.sizes for n in dim]
    strides = [n for dim in mesh.strides for n in dim]
    reach = sum((n - 1) * step for n, step in zip(sizes, strides, strict=True))
    if 0 in sizes or prod(sizes) > len(mesh.ranks) or reach >= len(mesh.ranks):
        raise ValueError(f"a mesh of {len(mesh.ranks)} ranks that needs more")
    if max(mesh.ranks) >= 2**31:
        raise ValueError(f"a rank {max(mesh.ranks)}")


def _own_mesh(mesh: DeviceMesh | None, shape: Dims, names: tuple[str, ...] | None) -> DeviceMesh | None:
    """Give the receiver's mesh if it has the sender's shape, or its slice of the same names if that has.

    A model that is sharded along two dimensions has parameters on one of them as well.
    """
    if mesh is None or tuple(mesh.shape) == shape:
        return mesh
    if names is None:
        return None
    try:
        # Also what was flattened out of some of its dimensions has a name.
        part = mesh[names]
    except (KeyError, RuntimeError):
        return None
    return part if tuple(part.shape) == shape else None


def _placement_to_wire(placement: Placement) -> PlacementForm:
    kind = type(placement)
    if kind is Shard:
        return ("shard", placement.dim)  # type: ignore[attr-defined]
    if kind is Replicate:
        return ("replicate",)
    if kind is Partial and placement.reduce_op in _REDUCTIONS:  # type: ignore[attr-defined]
        return ("partial", placement.reduce_op)  # type: ignore[attr-defined]
    if kind is _StridedShard:
        return ("strided", placement.dim, placement.split_factor)  # type: ignore[attr-defined]
    raise Unsendable(
        f"a DTensor placed as {placement!r} can't travel: redistribute it to Shard or Replicate first"
    )


def _placement_from_wire(wire: PlacementForm) -> Placement:
    match wire:
        case ["shard", int(dim)]:
            return Shard(dim)
        case ["replicate"]:
            return Replicate()
        case ["partial", str(reduction)] if reduction in _REDUCTIONS:
            return Partial(reduction)
        case ["strided", int(dim), int(factor)]:
            return _StridedShard(dim, split_factor=factor)  # type: ignore[no-any-return]
    raise BadManifest(f"a placement {show(wire)} that is not known")


def _mesh_to_wire(mesh: DeviceMesh) -> Mesh:
    names = None if mesh.mesh_dim_names is None else tuple(mesh.mesh_dim_names)
    return Mesh(mesh.device_type, *layout_of(mesh), names)


def _layout(wire: Mesh) -> MeshLayout:
    return MeshLayout(wire.ranks, wire.sizes, wire.strides, wire.coalesced)


def _mesh_from_wire(wire: Mesh) -> DeviceMesh:
    # Outside any default group a process has no rank, and so no place in the mesh.
    rank = dist.get_rank() if dist.is_initialized() else None
    layout = _layout(wire)
    mesh = make_mesh(wire.device, layout, wire.names, rank)
    if rank is not None and rank in layout.ranks:
        groups = _groups_along(layout, rank, wire.names)
        if groups is not None:
            give_groups(mesh, groups)
    return mesh


def _groups_along(layout: MeshLayout, rank: int, names: tuple[str, ...] | None) -> list[Any] | None:
    """Find a group of this process for each dimension of a mesh; None if there is not one for each.

    An equal mesh that lives here has such groups, and this one must have them too: torch remembers the
    results of operations by what went in, so that one of two equal meshes is handed out for the other.
    """
    alive = {group: dist.get_process_group_ranks(group) for group in living_groups()}
    found = []
    for dim in range(len(layout.sizes)):
        name = names[dim] if names else f"dim_{dim}"
        # The one that torch makes, or takes, when it makes such a mesh itself; failing that, the oldest.
        made_for_meshes = (f"mesh_{name}", "mesh_default", "default_pg")
        ranks = layout.row(rank, dim)
        fitting = [group for group, members in alive.items() if members == ranks]
        fitting.sort(key=lambda group: group.group_desc not in made_for_meshes)
        found += fitting[:1]
    return found if len(found) == len(layout.sizes) else None


DTENSOR = Kind("dtensor", _describe, _rebuild, 1, Spread, Traits, check=_check, look=_look, misfit=_misfit)
