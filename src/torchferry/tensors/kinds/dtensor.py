"""DTensors: the local part, the placements, and a mesh that is the receiver's.

A mesh can't travel: its process groups and this process's place in it belong to the sender. In place, the
target keeps its own. A fresh DTensor gets the mesh that the receiver names, or a slice of it, if its shape
fits; failing that, one that is equal to the sender's, seen from the receiver's rank, with those groups of
this process that have the same ranks. Where it has none, for it is not in that mesh, collectives such as
`full_tensor` do not work.
"""

from __future__ import annotations

from typing import Any, TypedDict

import torch
import torch.distributed as dist
from torch.distributed._mesh_layout import _FlatLayout, _MeshLayout
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _world
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from torchferry.core.manifest import Count, Leaf, Value
from torchferry.errors import BadManifest, Unsendable
from torchferry.tensors.kinds.base import Kind, Part, Site
from torchferry.tensors.kinds.dense import check_dense, grad_traits, with_grad_traits

_REDUCTIONS = frozenset({"sum", "avg", "product", "min", "max"})


class _Fixed(TypedDict):
    placements: list[list[int | str]]
    shape: list[Count]
    mesh: list[Count]


class _Mesh(TypedDict):
    device: str
    ranks: list[Count]
    sizes: list[list[Count]]
    strides: list[list[Count]]
    names: list[str] | None


class _Traits(TypedDict):
    grad: int
    stride: list[Count]
    mesh: _Mesh


def _describe(tensor: DTensor, part: Part) -> Leaf:
    local = tensor._local_tensor
    if type(local) is not torch.Tensor:
        raise Unsendable(
            f"a DTensor over a {type(local).__qualname__} can't travel: only strided local tensors can"
        )
    check_dense(local)
    mesh = tensor.device_mesh
    fixed = {
        "placements": [_placement_to_wire(placement) for placement in tensor.placements],
        "shape": list(tensor.shape),
        "mesh": list(mesh.shape),
    }
    traits = {
        "grad": grad_traits(tensor),
        "stride": list(tensor.stride()),
        "mesh": _mesh_to_wire(mesh),
    }
    return Leaf(DTENSOR.name, (part(local),), fixed, traits)


def _rebuild(leaf: Leaf, parts: list[torch.Tensor], site: Site) -> object:
    fixed, traits = leaf.fixed, leaf.traits
    mesh = _own_mesh(site.mesh, fixed["mesh"], traits["mesh"]["names"])
    if mesh is None:
        mesh = _mesh_from_wire(traits["mesh"])
    meta = TensorMeta(torch.Size(fixed["shape"]), tuple(traits["stride"]), parts[0].dtype)
    placements = tuple(_placement_from_wire(wire) for wire in fixed["placements"])
    spec = DTensorSpec(mesh, placements, tensor_meta=meta)
    built = DTensor(parts[0], spec, requires_grad=False)
    return with_grad_traits(built, traits["grad"])


def _own_mesh(mesh: DeviceMesh | None, shape: list[int], names: list[str] | None) -> DeviceMesh | None:
    """Give the receiver's mesh if it has the sender's shape, or its slice of the same names if that has.

    A model that is sharded along two dimensions has parameters on one of them as well.
    """
    if mesh is None or list(mesh.shape) == shape:
        return mesh
    if names is None or not set(names) < set(mesh.mesh_dim_names or ()):
        return None
    part = mesh[tuple(names)]
    return part if list(part.shape) == shape else None


def _placement_to_wire(placement: Placement) -> Value:
    kind = type(placement)
    if kind is Shard:
        return ["shard", placement.dim]  # type: ignore[attr-defined]
    if kind is Replicate:
        return ["replicate"]
    if kind is Partial and placement.reduce_op in _REDUCTIONS:  # type: ignore[attr-defined]
        return ["partial", placement.reduce_op]  # type: ignore[attr-defined]
    if kind is _StridedShard:
        return ["strided", placement.dim, placement.split_factor]  # type: ignore[attr-defined]
    raise Unsendable(
        f"a DTensor placed as {placement!r} can't travel: redistribute it to Shard or Replicate first"
    )


def _placement_from_wire(wire: Any) -> Placement:
    match wire:
        case ["shard", int(dim)]:
            return Shard(dim)
        case ["replicate"]:
            return Replicate()
        case ["partial", str(reduction)] if reduction in _REDUCTIONS:
            return Partial(reduction)
        case ["strided", int(dim), int(factor)]:
            return _StridedShard(dim, split_factor=factor)
    raise BadManifest(f"a placement {wire!r} that is not known")


def _mesh_to_wire(mesh: DeviceMesh) -> Value:
    # A slice of a larger mesh is equal to its like only if it knows the larger one's ranks too.
    layout = mesh._layout
    return {
        "device": mesh.device_type,
        "ranks": list(mesh._flatten_rank_map),
        "sizes": [list(dim.shape) for dim in layout],
        "strides": [list(dim.stride) for dim in layout],
        "names": None if mesh.mesh_dim_names is None else list(mesh.mesh_dim_names),
    }


def _mesh_from_wire(wire: Any) -> DeviceMesh:
    names = wire["names"]
    layout = _MeshLayout(
        tuple(
            _FlatLayout(tuple(sizes), tuple(strides))
            for sizes, strides in zip(wire["sizes"], wire["strides"], strict=True)
        )
    )
    mesh = DeviceMesh(
        wire["device"],
        mesh_dim_names=None if names is None else tuple(names),
        _layout=layout,
        _rank_map=torch.tensor(wire["ranks"], dtype=torch.int),
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


DTENSOR = Kind("dtensor", _describe, _rebuild, 1, _Fixed, _Traits)
