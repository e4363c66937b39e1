"""DTensors: the local tensor, its position, the placements, and a mesh that belongs to the receiver.

In place, the target keeps its own mesh. A fresh DTensor gets the receiver's `mesh=`, or a slice of it.
Without `mesh=`, it gets a mesh that is equal to the sender's, with the receiver's process groups of the same
ranks. A receiver outside the mesh has no such groups, and collectives raise there.

A receiver only accepts the shard of its own position: the coordinates along all mesh dimensions that split
the tensor must be equal.
"""

from collections.abc import Sequence
from contextlib import suppress
from math import prod
from typing import Annotated, Any, TypeAlias

import torch
import torch.distributed as dist
from msgspec import Meta
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from torchferry import torch_internals as internals
from torchferry.core.assignment import Part
from torchferry.core.codec import encode_value
from torchferry.core.manifest import MAX_DIMS, Leaf, TensorSpec
from torchferry.core.text import show, show_name
from torchferry.errors import Unsendable
from torchferry.tensors import registry
from torchferry.tensors.kinds.base import AddTensor, Dims, Form, Kind, Misfit, RebuildContext
from torchferry.tensors.kinds.dense import GradFlags, check_grad_flags, grad_flags, with_grad_flags
from torchferry.tensors.kinds.subclass import (
    Nodes,
    build_nodes,
    check_nodes,
    describe_nodes,
    node_properties,
)
from torchferry.tensors.memory import DTYPES
from torchferry.torch_internals import MeshLayout

_PLACEMENTS: dict[Any, dict[str, type]] = {
    Shard: {"dim": int},
    Replicate: {},
    Partial: {"reduce_op": str},
    internals.strided_shard_class(): {"dim": int, "split_factor": int},
}
"""The arguments of each placement."""

_REDUCTIONS = frozenset({"sum", "avg", "product", "min", "max"})

WirePlacement: TypeAlias = Annotated[tuple[int | str, ...], Meta(max_length=3)]
"""The name of a placement's class, then its arguments."""


class DTensorFixed(Form, frozen=True):
    """What an in-place target must have in common with the incoming DTensor.

    `local` describes a local tensor that is a registered subclass. It is empty for a plain one.
    """

    placements: Annotated[tuple[WirePlacement, ...], Meta(max_length=MAX_DIMS)]
    shape: Dims
    mesh: Dims
    position: str
    local: Nodes


class DTensorTraits(Form, frozen=True):
    """The flags, stride and mesh of a fresh DTensor."""

    grad: GradFlags
    stride: Dims
    mesh: MeshLayout
    local: tuple[GradFlags, ...]


def _describe(tensor: DTensor, add_tensor: AddTensor) -> Leaf:
    local, mesh = internals.local_tensor_of(tensor), tensor.device_mesh
    parts: list[int] = []
    nodes: Nodes = ()
    flags: tuple[int, ...] = ()
    if registry.is_registered(type(local)):
        parts, nodes, flags = describe_nodes(local, add_tensor)
    elif type(local) is torch.Tensor:
        parts = [add_tensor(local)]
    else:
        name = registry.name_of(type(local))
        raise Unsendable(
            f"a DTensor with a local {name} can't be sent: only strided local tensors and registered "
            "tensor subclasses can"
        )
    placements = tuple(map(_placement_to_wire, tensor.placements))
    position = _position(mesh.get_coordinate(), mesh.shape, placements)
    fixed = DTensorFixed(placements, tuple(tensor.shape), tuple(mesh.shape), position, nodes)
    traits = DTensorTraits(grad_flags(tensor), tuple(tensor.stride()), internals.layout_of(mesh), flags)
    return Leaf(DTENSOR.name, tuple(parts), fixed.packed(), traits.packed())


def _placement_to_wire(placement: Placement) -> WirePlacement:
    cls = type(placement)
    wire = cls.__name__, *(getattr(placement, argument) for argument in _PLACEMENTS.get(cls, ()))
    if cls in _PLACEMENTS and (cls is not Partial or wire[1] in _REDUCTIONS):
        return wire
    raise Unsendable(
        f"a DTensor with the placement {placement!r} can't be sent: redistribute it to Shard or Replicate"
    )


def _placement_from_wire(wire: WirePlacement) -> Placement:
    for cls, arguments in _PLACEMENTS.items():
        matches = (cls.__name__, *arguments.values()) == (wire[0], *map(type, wire[1:]))
        if matches and (cls is not Partial or wire[1] in _REDUCTIONS):
            return cls(**dict(zip(arguments, wire[1:], strict=True)))  # type: ignore[no-any-return]
    raise ValueError(f"its placement {show(wire)} is unknown")


def _position(
    coordinate: Sequence[int] | None, mesh: Sequence[int], placements: Sequence[WirePlacement]
) -> str:
    """Return a coordinate as text, with a star for each dimension that does not split the tensor.

    Replicated dimensions and those of size 1 do not split it. Partial ones do: each rank has its own addend.
    """
    splits = [n > 1 and wire[0] != "Replicate" for n, wire in zip(mesh, placements, strict=True)]
    if coordinate is None and any(splits):
        return "outside the mesh"
    indices = zip(coordinate or splits, splits, strict=True)
    return "(" + ", ".join(str(index) if split else "*" for index, split in indices) + ")"


def _rebuild(leaf: Leaf, parts: list[torch.Tensor], context: RebuildContext) -> object:
    fixed, traits = DTensorFixed.read(leaf.fixed), DTensorTraits.read(leaf.traits)
    mesh = _slice_of(context.mesh, fixed.mesh, traits.mesh.names)
    if mesh is None:
        mesh = _create_mesh(traits.mesh)
    placements = [_placement_from_wire(wire) for wire in fixed.placements]
    local = build_nodes(fixed.local, parts, traits.local) if fixed.local else parts[0]
    built = internals.make_dtensor(local, mesh, placements, torch.Size(fixed.shape), traits.stride)
    return with_grad_flags(built, traits.grad)


def _slice_of(mesh: DeviceMesh | None, shape: Dims, names: tuple[str, ...] | None) -> DeviceMesh | None:
    """Return the receiver's mesh if it has the sender's shape, or its slice with the same names and shape.

    None if there is neither. A model on a two-dimensional mesh may have parameters on a slice of that mesh.
    """
    if mesh is None or tuple(mesh.shape) == shape:
        return mesh
    with suppress(KeyError, RuntimeError):
        # `names` may be the name of a flattened dimension, which only indexing by name finds.
        if names is not None and tuple(mesh[names].shape) == shape:
            return mesh[names]
    return None


def _create_mesh(layout: MeshLayout) -> DeviceMesh:
    # A process without a default group has no rank.
    rank = dist.get_rank() if dist.is_initialized() else -1
    mesh = internals.make_mesh(layout, rank)
    if rank in layout.ranks:
        groups = [_find_group(layout, rank, dim) for dim in range(len(layout.sizes))]
        if None not in groups:
            internals.set_groups(mesh, groups)
    return mesh


def _find_group(layout: MeshLayout, rank: int, dim: int) -> Any:
    """Find a group of this process for a dimension of a mesh; None if there is none.

    torch caches the results of operations by their inputs, and equal meshes are the same key. So a result may
    have either of two equal meshes, and both must have the same groups.
    """
    name = layout.names[dim] if layout.names else f"dim_{dim}"
    # The descriptions of the groups that torch itself creates or reuses for such a mesh. If no group has one,
    # the oldest group is used.
    preferred = (f"mesh_{name}", "mesh_default", "default_pg")
    row = layout.row(rank, dim)
    matching = [group for group in internals.process_groups() if dist.get_process_group_ranks(group) == row]
    return min(matching, key=lambda group: group.group_desc not in preferred, default=None)


def _misfit(leaf: Leaf, context: RebuildContext) -> Misfit | None:
    fixed, layout = DTensorFixed.read(leaf.fixed), DTensorTraits.read(leaf.traits).mesh
    coordinate: Sequence[int] | None = None
    if context.mesh is not None:
        mesh = _slice_of(context.mesh, fixed.mesh, layout.names)
        if mesh is None:
            local = _show_mesh(context.mesh.shape, context.mesh.mesh_dim_names)
            return "mesh", _show_mesh(fixed.mesh, layout.names), f"mesh={local}"
        coordinate = mesh.get_coordinate()
    elif dist.is_initialized():
        coordinate = layout.coordinate(dist.get_rank())
    here = _position(coordinate, fixed.mesh, fixed.placements)
    if here == fixed.position:
        return None
    return "position of the shard in the mesh", show_name(fixed.position), here


def _part(leaf: Leaf, rank: int | None) -> Part:
    fixed = DTensorFixed.read(leaf.fixed)
    position = fixed.position
    if rank is not None:
        coordinate = DTensorTraits.read(leaf.traits).mesh.coordinate(rank)
        position = _position(coordinate, fixed.mesh, fixed.placements)
    return Part(encode_value((fixed.placements, fixed.shape, fixed.mesh)), position)


def _properties(leaf: Leaf, specs: Sequence[TensorSpec]) -> dict[str, str]:
    fixed = DTensorFixed.read(leaf.fixed)
    local = {"dtype": show_name(specs[0].dtype), "shape": str(list(specs[0].shape))}
    if fixed.local:
        local = node_properties(fixed.local, specs)
    return local | {
        "shape": str(list(fixed.shape)),
        "placements": ", ".join(map(_show_placement, fixed.placements)) or "none",
        "mesh": _show_mesh(fixed.mesh, None),
        "position of the shard in the mesh": show_name(fixed.position),
        "shape of the local tensor": local["shape"],
    }


def _show_placement(wire: WirePlacement) -> str:
    name, *values = (show_name(str(value)) for value in wire)
    return f"{name}({', '.join(values)})"


def _show_mesh(shape: Sequence[int], names: Sequence[str] | None) -> str:
    named = f" ({', '.join(map(show_name, names))})" if names else ""
    return " x ".join(map(str, shape)) + named


def _check(leaf: Leaf, specs: Sequence[TensorSpec]) -> None:
    fixed, traits = DTensorFixed.read(leaf.fixed), DTensorTraits.read(leaf.traits)
    shape, mesh = fixed.shape, traits.mesh
    dtype = specs[0].dtype
    if fixed.local:
        check_nodes(fixed.local, traits.local, specs)
        dtype = fixed.local[0].dtype
    elif len(specs) != 1:
        raise ValueError(f"it has {len(specs)} tensors, expected 1")
    check_grad_flags(traits.grad, dtype)
    if len(shape) != len(traits.stride):
        raise ValueError(f"its shape has {len(shape)} dimensions and its stride {len(traits.stride)}")
    if prod(n for n in shape if n) * DTYPES[dtype].itemsize >= 2**63:
        raise ValueError(f"its shape {show(shape)} has more bytes than torch can count")
    for wire in fixed.placements:
        dim = getattr(_placement_from_wire(wire), "dim", None)
        if dim is not None and not 0 <= dim < len(shape):
            raise ValueError(f"it is sharded along dimension {dim} of {len(shape)}")
    per_dimension = (mesh.sizes, mesh.strides, fixed.mesh, fixed.placements, mesh.names)
    if len({len(column) for column in per_dimension if column is not None}) != 1:
        raise ValueError("its mesh, names and placements differ in their number of dimensions")
    if fixed.mesh != tuple(map(prod, mesh.sizes)):
        raise ValueError(f"the shape of its mesh is {show(fixed.mesh)}, and the sizes are {show(mesh.sizes)}")
    if torch.device(mesh.device).type != mesh.device:
        raise ValueError(f"{show(mesh.device)} is not a device type")
    # torch lists all ranks of a mesh, so a mesh must not have more ranks than were sent.
    dims = zip(mesh.sizes, mesh.strides, strict=True)
    steps = [step for sizes, strides in dims for step in zip(sizes, strides, strict=True)]
    last = sum((size - 1) * stride for size, stride in steps)
    if prod(fixed.mesh) > len(mesh.ranks) or last >= len(mesh.ranks):
        raise ValueError(f"its mesh of sizes {show(mesh.sizes)} does not fit {len(mesh.ranks)} ranks")
    if any(stride == 0 and size > 1 for size, stride in steps):
        raise ValueError(f"its mesh repeats ranks: its strides are {show(mesh.strides)}")


DTENSOR = Kind(
    "dtensor",
    _describe,
    _rebuild,
    None,
    DTensorFixed,
    DTensorTraits,
    _check,
    _properties,
    misfit=_misfit,
    part=_part,
)
