"""DTensors: the local part, the placements, and a mesh that is the receiver's.

A mesh can't travel: its process groups and this process's place in it belong to the sender. In place, the
target keeps its own. A fresh DTensor gets the mesh that the receiver names, or a slice of it, if its shape
fits; failing that, one that is equal to the sender's, seen from the receiver's rank, with those groups of
this process that have the same ranks. Where it has none, for it is not in that mesh, collectives such as
`full_tensor` do not work.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Annotated, Any, TypeAlias

import torch
import torch.distributed as dist
from msgspec import Meta
from torch.distributed._mesh_layout import _FlatLayout, _MeshLayout
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _world
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from torchferry.core.manifest import MAX_DIMS, Count, Leaf, TensorSpec
from torchferry.core.showing import show
from torchferry.errors import BadManifest, Unsendable
from torchferry.tensors.kinds.base import Form, Kind, Part, Site, packed, read
from torchferry.tensors.kinds.dense import Grad, check_grad, grad_traits, with_grad_traits

_REDUCTIONS = frozenset({"sum", "avg", "product", "min", "max"})


Dims: TypeAlias = Annotated[tuple[Count, ...], Meta(max_length=MAX_DIMS)]
PlacementForm: TypeAlias = Annotated[tuple[int | str, ...], Meta(max_length=3)]


class Spread(Form, frozen=True):
    """What DTensors have in common that hold the same part."""

    placements: Annotated[tuple[PlacementForm, ...], Meta(max_length=MAX_DIMS)]
    shape: Dims
    mesh: Dims


class Mesh(Form, frozen=True):
    """The sender's mesh."""

    device: str
    ranks: tuple[Count, ...]
    sizes: Annotated[tuple[Dims, ...], Meta(max_length=MAX_DIMS)]
    strides: Annotated[tuple[Dims, ...], Meta(max_length=MAX_DIMS)]
    names: Annotated[tuple[str, ...], Meta(max_length=MAX_DIMS)] | None


class Traits(Form, frozen=True):
    """What a fresh one is given."""

    grad: Grad
    stride: Dims
    mesh: Mesh


def _describe(tensor: DTensor, part: Part) -> Leaf:
    local = tensor._local_tensor
    if type(local) is not torch.Tensor:
        raise Unsendable(
            f"a DTensor over a {type(local).__qualname__} can't travel: only strided local tensors can"
        )
    mesh = tensor.device_mesh
    fixed = Spread(tuple(map(_placement_to_wire, tensor.placements)), tuple(tensor.shape), tuple(mesh.shape))
    traits = Traits(grad_traits(tensor), tuple(tensor.stride()), _mesh_to_wire(mesh))
    return Leaf(DTENSOR.name, (part(local),), packed(fixed), packed(traits))


def _rebuild(leaf: Leaf, parts: list[torch.Tensor], site: Site) -> object:
    fixed, traits = read(Spread, leaf.fixed), read(Traits, leaf.traits)
    mesh = _own_mesh(site.mesh, fixed.mesh, traits.mesh.names)
    if mesh is None:
        mesh = _mesh_from_wire(traits.mesh)
    meta = TensorMeta(torch.Size(fixed.shape), traits.stride, parts[0].dtype)
    placements = tuple(_placement_from_wire(wire) for wire in fixed.placements)
    spec = DTensorSpec(mesh, placements, tensor_meta=meta)
    built = DTensor(parts[0], spec, requires_grad=False)
    return with_grad_traits(built, traits.grad)


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
    if names is None or not set(names) < set(mesh.mesh_dim_names or ()):
        return None
    part = mesh[names]
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
            return _StridedShard(dim, split_factor=factor)
    raise BadManifest(f"a placement {show(wire)} that is not known")


def _mesh_to_wire(mesh: DeviceMesh) -> Mesh:
    # A slice of a larger mesh is equal to its like only if it knows the larger one's ranks too.
    layout = mesh._layout
    return Mesh(
        mesh.device_type,
        tuple(mesh._flatten_rank_map),
        tuple(tuple(dim.shape) for dim in layout),
        tuple(tuple(dim.stride) for dim in layout),
        None if mesh.mesh_dim_names is None else tuple(mesh.mesh_dim_names),
    )


def _mesh_from_wire(wire: Mesh) -> DeviceMesh:
    layout = _MeshLayout(
        tuple(_FlatLayout(sizes, strides) for sizes, strides in zip(wire.sizes, wire.strides, strict=True))
    )
    mesh = DeviceMesh(
        wire.device,
        mesh_dim_names=wire.names,
        _layout=layout,
        _rank_map=torch.tensor(wire.ranks, dtype=torch.int),
        _init_backend=False,
        # Outside any default group a process has no rank, and so no place in the mesh.
        _rank=dist.get_rank() if dist.is_initialized() else -1,
    )
    groups = _groups_along(mesh)
    if groups is not None:
        mesh._dim_group_names = [group.group_name for group in groups]
        mesh._pg_registry = {group.group_name: group for group in groups}
    return mesh


def _groups_along(mesh: DeviceMesh) -> list[Any] | None:
    """Find a group of this process for each dimension of a mesh; None if there is not one for each.

    An equal mesh that lives here has such groups, and this one must have them too: torch remembers the
    results of operations by what went in, so that one of two equal meshes is handed out for the other.
    """
    if mesh.get_coordinate() is None:
        return None
    alive = {group: dist.get_process_group_ranks(group) for group in _world.pg_names}
    found = []
    for number, dim in enumerate(mesh._layout):
        rows = _MeshLayout((dim,)).remap_to_tensor(mesh._rank_map).tolist()
        ranks = next(row for row in rows if dist.get_rank() in row)
        name = mesh.mesh_dim_names[number] if mesh.mesh_dim_names else f"dim_{number}"
        # The one that torch makes, or takes, when it makes such a mesh itself; failing that, the oldest.
        made_for_meshes = (f"mesh_{name}", "mesh_default", "default_pg")
        fitting = [group for group, members in alive.items() if members == ranks]
        fitting.sort(key=lambda group: group.group_desc not in made_for_meshes)
        found += fitting[:1]
    return found if len(found) == mesh.ndim else None


DTENSOR = Kind("dtensor", _describe, _rebuild, 1, Spread, Traits, check=_check)
