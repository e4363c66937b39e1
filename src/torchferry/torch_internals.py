"""Every private API of torch that torchferry uses. No other module uses one.

torch 2.9 to 2.15 differ in some of these APIs, and a later version may remove any of them. Each function's
docstring says what happens without its API: it does something else, or it raises ImportError, and then that
kind of tensor is not supported. `tests/unit/test_torch_internals.py` removes each API and tests that.
"""

import os
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import chain
from math import prod
from typing import Annotated, Any, cast

import torch
import torch.distributed as dist
from msgspec import Meta, Struct
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

_Size = Annotated[int, Meta(ge=1)]
_Stride = Annotated[int, Meta(ge=0)]


class MeshLayout(Struct, frozen=True, forbid_unknown_fields=True):
    """A mesh as data: a flat list of ranks, and for each dimension its sizes and strides in that list.

    A dimension that torch made by flattening several has one size and one stride for each. A slice keeps the
    ranks of the mesh that it was sliced from, so every one of those ranks can find its own slice. `coalesced`
    marks a flattened mesh of torch 2.10 to 2.12, which is not equal to a one-dimensional mesh of its ranks.
    """

    ranks: tuple[Annotated[int, Meta(ge=0, lt=2**31)], ...]
    sizes: tuple[Annotated[tuple[_Size, ...], Meta(max_length=128)], ...]
    strides: tuple[Annotated[tuple[_Stride, ...], Meta(max_length=128)], ...]
    coalesced: bool
    device: str
    names: tuple[str, ...] | None

    def coordinate(self, rank: int) -> tuple[int, ...] | None:
        """Return the coordinate of a rank; None if it is not in the mesh.

        >>> MeshLayout((0, 1, 2, 3), ((2,), (2,)), ((2,), (1,)), False, "cpu", None).coordinate(2)
        (1, 0)
        """
        if rank not in self.ranks:
            return None
        return tuple(self.row(rank, dim).index(rank) for dim in range(len(self.sizes)))

    def row(self, rank: int, *dims: int) -> list[int]:
        """List the ranks along some dimensions, through a rank of the mesh, or else through the first one."""
        start = self.ranks.index(rank) if rank in self.ranks else 0
        offsets = [0]
        sizes, strides = (chain(*(column[dim] for dim in dims)) for column in (self.sizes, self.strides))
        for size, stride in zip(sizes, strides, strict=True):
            if size > 1:  # a dimension of size 1 may have stride 0
                start -= start // stride % size * stride
            offsets = [offset + index * stride for offset in offsets for index in range(size)]
        # The layout may come from a peer, and reach beyond its ranks.
        return [self.ranks[start + offset] for offset in offsets if start + offset < len(self.ranks)]


def layout_of(mesh: DeviceMesh) -> MeshLayout:
    """Read the layout of a mesh. Without torch's `_layout`, a flattened mesh has only its own ranks."""
    layout: Any = getattr(mesh, "_layout", None)
    ranks = getattr(mesh, "_flatten_rank_map", None)
    names = None if mesh.mesh_dim_names is None else tuple(mesh.mesh_dim_names)
    with suppress(AttributeError, TypeError):
        # From torch 2.13 on it is a sequence of dimensions; before that, two tuples, or two numbers.
        is_new = isinstance(layout, Sequence)
        shape = [dim.shape for dim in layout] if is_new else layout.shape
        stride = [dim.stride for dim in layout] if is_new else layout.stride
        coalesced = isinstance(shape, int)
        sizes = tuple(map(_flat, [shape] if coalesced else shape))
        strides = tuple(map(_flat, [stride] if coalesced else stride))
        return MeshLayout(tuple(ranks), sizes, strides, coalesced, mesh.device_type, names)  # type: ignore[arg-type]
    return _layout_of_ranks(mesh, names)


def _layout_of_ranks(mesh: DeviceMesh, names: tuple[str, ...] | None) -> MeshLayout:
    root, dims = mesh, list(range(mesh.ndim))
    with suppress(Exception):
        from torch.distributed.device_mesh import _mesh_resources

        # The mesh that this one was sliced from.
        parent = _mesh_resources.get_root_mesh(mesh)
        if parent is not mesh and names:
            dims = [list(parent.mesh_dim_names or ()).index(name) for name in names]
            root = parent
    ranks = tuple(root.mesh.flatten().tolist())
    sizes = tuple((int(root.shape[dim]),) for dim in dims)
    strides = tuple((prod(root.shape[dim + 1 :]),) for dim in dims)
    return MeshLayout(ranks, sizes, strides, False, mesh.device_type, names)


def _flat(numbers: int | tuple[Any, ...]) -> tuple[int, ...]:
    if isinstance(numbers, int):
        return (numbers,)
    return tuple(inner for number in numbers for inner in _flat(number))


def make_mesh(layout: MeshLayout, rank: int) -> DeviceMesh:
    """Create a mesh without process groups. `rank` is this process's global rank, -1 if it has none.

    Without `_MeshLayout`, the mesh is created from the ranks of the slice that contains `rank`.
    """
    # Some versions of DeviceMesh create tensors on the default device.
    with torch.device("cpu"):
        for make_layout in (_layout_by_dims, _layout_by_tuples):
            with suppress(ImportError, AttributeError, TypeError):
                options: Any = {"_layout": make_layout(layout), "_rank": rank, "_init_backend": False}
                ranks = torch.tensor(layout.ranks, dtype=torch.int, device="cpu")
                return DeviceMesh(layout.device, mesh_dim_names=layout.names, _rank_map=ranks, **options)
        return _mesh_of_ranks(layout, rank)


def _mesh_of_ranks(layout: MeshLayout, rank: int) -> DeviceMesh:
    shape = [prod(sizes) for sizes in layout.sizes]
    block = torch.tensor(layout.row(rank, *range(len(shape))), dtype=torch.int, device="cpu").view(shape)
    if dist.is_initialized():
        return DeviceMesh(layout.device, block, mesh_dim_names=layout.names, _init_backend=False)
    # The initializer calls get_rank(), which raises in a process without a default group.
    mesh: Any = DeviceMesh.__new__(DeviceMesh)
    mesh.device_type, mesh.mesh, mesh.mesh_dim_names = layout.device, block, layout.names
    mesh._flatten_mesh_list = tuple(block.flatten().tolist())
    mesh._coordinate_on_dim = mesh._thread_id = None
    return cast(DeviceMesh, mesh)


def _layout_by_dims(layout: MeshLayout) -> Any:
    from torch.distributed._mesh_layout import _FlatLayout, _MeshLayout

    return _MeshLayout(tuple(map(_FlatLayout, layout.sizes, layout.strides)))


def _layout_by_tuples(layout: MeshLayout) -> Any:
    from torch.distributed._mesh_layout import _MeshLayout

    columns: list[Any] = [
        tuple(numbers[0] if len(numbers) == 1 else numbers for numbers in column)
        for column in (layout.sizes, layout.strides)
    ]
    return _MeshLayout(*(column[0] for column in columns) if layout.coalesced else columns)


def set_groups(mesh: DeviceMesh, groups: Sequence[Any]) -> None:
    """Attach a process group to each dimension of a mesh. Collectives raise on a mesh without them."""
    mesh._dim_group_names = [group.group_name for group in groups]
    if hasattr(mesh, "_pg_registry"):
        mesh._pg_registry = {group.group_name: group for group in groups}


def process_groups() -> list[Any]:
    """List the process groups of this process. Without torch's `_world`, only the default group."""
    with suppress(ImportError, AttributeError):
        from torch.distributed.distributed_c10d import _world

        return list(_world.pg_names)
    return [dist.group.WORLD] if dist.is_initialized() else []


def store_of(group: Any) -> Any:
    """Return the store of a process group. Without torch's lookups, that at MASTER_ADDR; None without one."""
    with suppress(ImportError, AttributeError, KeyError, TypeError):
        from torch.distributed.distributed_c10d import _world

        return _world.pg_map[group][1]
    with suppress(AttributeError, RuntimeError):
        return group.get_group_store()
    with suppress(KeyError, ValueError, RuntimeError):
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=10))
        return dist.PrefixStore(f"torchferry/{getattr(group, 'group_name', '')}", store)
    return None


def make_dtensor(local: Tensor, mesh: DeviceMesh, placements: Any, shape: Any, stride: Any) -> Tensor:
    """Create a DTensor from a local tensor. Without `DTensorSpec`, this process must be in the mesh."""
    from torch.distributed.tensor import DTensor

    try:
        from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

        spec = DTensorSpec(mesh, tuple(placements), tensor_meta=TensorMeta(shape, stride, local.dtype))
        return DTensor(local, spec, requires_grad=False)
    except (ImportError, TypeError):
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def local_tensor_of(tensor: Any) -> Tensor:
    """Return the local tensor of a DTensor. Without `_local_tensor`, a view of it."""
    found = getattr(tensor, "_local_tensor", None)
    return found if isinstance(found, Tensor) else tensor.detach().to_local()


def strided_shard_class() -> Any:
    """Return the class `_StridedShard`. Without it, a class that no placement is an instance of."""
    from torch.distributed.tensor import placement_types

    return getattr(placement_types, "_StridedShard", type("_NoStridedShard", (), {}))


def nested_tensor_class() -> type:
    """Return the class of jagged nested tensors. Without it, raise ImportError."""
    from torch.nested._internal.nested_tensor import NestedTensor

    return cast(type, NestedTensor)


def sharded_tensor_module() -> Any:
    """Return torch's private package for ShardedTensors. Without it, raise ImportError."""
    from torch.distributed._shard import sharded_tensor

    return sharded_tensor


def make_sharded_tensor(shards: list[Any], metadata: Any) -> Any:
    """Create a ShardedTensor from local shards and the metadata of the whole tensor. Without it, ImportError.

    It bypasses the initializers: the one of ShardedTensor requires that this rank owned the shards before,
    and the one of its base compares all pairs of shards, of which a peer chooses the number.
    """
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor, ShardedTensorBase
    from torch.distributed._shard.sharding_spec.api import _infer_sharding_spec_from_shards_metadata

    properties = metadata.tensor_properties
    built: Any = ShardedTensorBase.__new__(
        ShardedTensor,
        _infer_sharding_spec_from_shards_metadata(metadata.shards_metadata),
        metadata.size,
        dtype=properties.dtype,
        layout=torch.strided,
        pin_memory=False,
        requires_grad=properties.requires_grad,
    )
    built._local_shards, built._metadata = shards, metadata
    if dist.is_initialized():
        built._prepare_init()
    else:
        built._process_group = None  # size() reads it
    return built


def pytree() -> Any:
    """Return torch's `_pytree`, for the metadata of torch's PGTransport. Without it, raise ImportError."""
    from torch.utils import _pytree

    return _pytree


def backend_of(group: Any, device: torch.device) -> Any:
    """Return the backend of a group for a device. Without `_get_backend`, the group itself."""
    with suppress(RuntimeError, AttributeError):
        return group._get_backend(device) if isinstance(group, dist.ProcessGroup) else group
    return group


def backend_name(backend: Any) -> str | None:
    """Return the name of one of torch's backends; None for any other object."""
    with suppress(ImportError):
        from torch._C._distributed_c10d import Backend

        return str(backend.name()) if isinstance(backend, Backend) else None
    return None


def backend_timeout(backend: Any) -> timedelta | None:
    """Return the timeout of one of torch's backends; None without `options._timeout`."""
    found = getattr(getattr(backend, "options", None), "_timeout", None)
    return found if isinstance(found, timedelta) else None


def neg_view(tensor: Tensor) -> Tensor:
    """Return a view of a tensor with the neg bit flipped. Without `_neg_view`, a negated copy."""
    return torch._neg_view(tensor) if hasattr(torch, "_neg_view") else -tensor


def storage_id(storage: torch.UntypedStorage) -> int:
    """Return a number that identifies a storage. Without `_cdata`, the address of its memory."""
    return getattr(storage, "_cdata", None) or storage.data_ptr()


def is_zerotensor(tensor: Tensor) -> bool:
    """Return whether a tensor is one of autograd's zeros without memory. Without `_is_zerotensor`, False."""
    return hasattr(tensor, "_is_zerotensor") and tensor._is_zerotensor()


UNCOUNTED = -1


def versions_of(tensors: Sequence[Tensor]) -> list[int]:
    """Return the version counter of each tensor; UNCOUNTED for inference tensors, and without `_version`."""
    try:
        return [tensor._version for tensor in tensors]
    except (RuntimeError, AttributeError):
        return [UNCOUNTED if t.is_inference() else getattr(t, "_version", UNCOUNTED) for t in tensors]


def coo_members(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return the indices and values of a COO tensor. Without `_indices`, it must be coalesced."""
    if hasattr(tensor, "_indices") and hasattr(tensor, "_values"):
        return tensor._indices(), tensor._values()
    return tensor.indices(), tensor.values()


def set_coalesced(tensor: Tensor, coalesced: bool) -> None:
    """Set whether a COO tensor is coalesced. Without `_coalesced_`, nothing changes."""
    with suppress(AttributeError), torch.no_grad():
        tensor._coalesced_(coalesced)
