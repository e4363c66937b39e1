"""The private APIs of torch, and the fallback for each if torch does not have it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, placement_types
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.support.transfer import transfer
from torchferry import torch_internals as internals
from torchferry.errors import UnknownType
from torchferry.tensors.kinds import kind_named
from torchferry.torch_internals import MeshLayout

RANK = 5


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """Two by two by two; this process is at (1, 0, 1)."""
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=8)
    yield init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
    dist.destroy_process_group()


SLICES = [("a", "b", "c"), ("a",), ("b",), ("c",), ("a", "b"), ("a", "c"), ("b", "c")]


def part_of(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    return mesh if len(names) == 3 else mesh[names]


@pytest.mark.parametrize("names", SLICES, ids="".join)
def test_a_layout_agrees_with_torch(names: tuple[str, ...], mesh: DeviceMesh) -> None:
    part = part_of(mesh, names)
    layout = internals.layout_of(part)
    coordinate = part.get_coordinate()
    assert coordinate is not None
    assert layout.coordinate(RANK) == tuple(coordinate)
    assert layout.row(RANK, *range(part.ndim)) == part.mesh.flatten().tolist()
    for dim in range(part.ndim):
        assert layout.row(RANK, dim) == dist.get_process_group_ranks(part.get_group(dim))
    # Every rank finds its own slice.
    for rank in range(8):
        found = layout.coordinate(rank)
        assert found is not None
        assert [layout.row(rank, dim)[at] for dim, at in enumerate(found)] == [rank] * part.ndim
    assert layout.coordinate(8) is None


def test_a_flattened_dimension_has_a_coordinate_for_each_rank(mesh: DeviceMesh) -> None:
    flat = mesh["a", "b"]._flatten()
    layout = internals.layout_of(flat)
    assert layout.coordinate(RANK) == tuple(flat.get_coordinate() or ())
    assert layout.row(RANK, 0) == flat.mesh.tolist()


def test_a_dimension_of_size_1_may_have_stride_0() -> None:
    layout = MeshLayout((3, 4), ((1,), (2,)), ((0,), (1,)), False, "cpu", None)
    assert layout.coordinate(4) == (0, 1)
    assert layout.row(4, 0) == [4]


def test_a_layout_that_reaches_beyond_its_ranks_raises_nothing() -> None:
    layout = MeshLayout((0, 1, 2), ((2,),), ((2,),), False, "cpu", None)
    assert layout.coordinate(1) == (0,)
    assert layout.row(1, 0) == [1]


@pytest.mark.parametrize("names", SLICES, ids="".join)
def test_a_mesh_from_a_layout_equals_the_original(names: tuple[str, ...], mesh: DeviceMesh) -> None:
    part = part_of(mesh, names)
    made = internals.make_mesh(internals.layout_of(part), RANK)
    assert made == part
    assert hash(made) == hash(part)
    assert list(made.get_coordinate() or ()) == list(part.get_coordinate() or ())
    internals.set_groups(made, part.get_all_groups())
    assert made.get_all_groups() == part.get_all_groups()


def no_import(*_: object) -> Any:
    raise ImportError("removed by the test")


def test_without_layouts_a_mesh_is_created_from_its_ranks(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = internals._layout_of_ranks(mesh, ("a", "b", "c"))
    assert layout == internals.layout_of(mesh)
    for name in ("_layout_by_dims", "_layout_by_tuples"):
        monkeypatch.setattr(internals, name, no_import)
    made = internals.make_mesh(layout, RANK)
    assert made == mesh
    assert tuple(made.get_coordinate() or ()) == (1, 0, 1)
    slice_of_it = msgspec.structs.replace(
        layout, sizes=layout.sizes[1:], strides=layout.strides[1:], names=("b", "c")
    )
    assert internals.make_mesh(slice_of_it, RANK).mesh.tolist() == [[4, 5], [6, 7]]


@pytest.mark.parametrize(
    ("shape", "stride", "sizes", "strides"),
    [
        ((2, 4), (4, 1), ((2,), (4,)), ((4,), (1,))),
        (((2, 2), 2), ((4, 1), 2), ((2, 2), (2,)), ((4, 1), (2,))),
        (8, 1, ((8,),), ((1,),)),
    ],
    ids=["two dimensions", "one flattened from two", "coalesced"],
)
def test_layouts_of_torch_2_10_to_2_12_are_read_and_created(
    shape: Any, stride: Any, sizes: Any, strides: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    old: Any = SimpleNamespace(
        _layout=SimpleNamespace(shape=shape, stride=stride),
        _flatten_rank_map=range(8),
        mesh_dim_names=None,
        device_type="cpu",
    )
    layout = internals.layout_of(old)
    assert layout == MeshLayout(tuple(range(8)), sizes, strides, isinstance(shape, int), "cpu", None)
    module = SimpleNamespace(_MeshLayout=lambda shape, stride: (shape, stride))
    monkeypatch.setitem(sys.modules, "torch.distributed._mesh_layout", module)
    assert internals._layout_by_tuples(layout) == (shape, stride)


def test_without_torch_s_list_only_the_default_group_is_found(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert set(mesh.get_all_groups()) <= set(internals.process_groups())
    monkeypatch.setattr(dist.distributed_c10d, "_world", SimpleNamespace(default_pg="the default group"))
    assert internals.process_groups() == ["the default group"]


def test_without_dtensor_specs_a_dtensor_is_created_by_the_public_api(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    local, shape = torch.ones(2, 3), torch.Size((4, 3))
    placements = [Shard(0), Replicate(), Replicate()]
    made: Any = internals.make_dtensor(local, mesh, placements, shape, (3, 1))
    monkeypatch.setitem(sys.modules, "torch.distributed.tensor._dtensor_spec", None)
    again: Any = internals.make_dtensor(local, mesh, placements, shape, (3, 1))
    for each in (made, again):
        assert type(each) is DTensor
        assert (each.shape, each.stride(), each.placements) == (shape, (3, 1), tuple(placements))
        assert torch.equal(internals.local_tensor_of(each), local)


def test_without_the_attribute_the_local_tensor_comes_from_the_public_api(mesh: DeviceMesh) -> None:
    class Other:
        """The public API of a DTensor."""

        def detach(self) -> Other:
            return self

        def to_local(self) -> torch.Tensor:
            return torch.ones(3)

    assert internals.local_tensor_of(Other()).tolist() == [1, 1, 1]


def test_without_strided_shards_no_placement_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert internals.strided_shard_class() is placement_types._StridedShard
    monkeypatch.delattr(placement_types, "_StridedShard")
    assert not isinstance(Shard(0), internals.strided_shard_class())


def test_without_sharded_tensors_their_kind_is_an_unknown_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torchferry.tensors.kinds.sharded", raising=False)
    monkeypatch.setattr(internals, "sharded_tensor_module", no_import)
    with pytest.raises(UnknownType, match="this version of torch has no ShardedTensor"):
        kind_named("sharded")


def test_without_the_api_a_group_is_its_own_backend_and_has_no_name(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = torch.device("cpu")
    group = dist.group.WORLD
    assert internals.backend_of(group, cpu) is not group
    assert internals.backend_of("no group", cpu) == "no group"
    monkeypatch.delattr(dist.ProcessGroup, "_get_backend")
    assert internals.backend_of(group, cpu) is group
    monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", None)
    assert internals.backend_name(group) is None


def test_without_neg_views_the_result_is_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.arange(3.0)
    assert internals.neg_view(tensor).is_neg()
    monkeypatch.delattr(torch, "_neg_view")
    assert internals.neg_view(tensor).tolist() == [-0.0, -1, -2]
    assert transfer({"w": tensor}).state["w"].tolist() == [0, 1, 2]


class Plain:
    """A tensor or storage without private attributes."""

    def is_inference(self) -> bool:
        return False

    def data_ptr(self) -> int:
        return 42


def test_without_version_counters_tensors_are_uncounted() -> None:
    counted = torch.ones(2)
    before = internals.versions_of([counted])
    counted.add_(1)
    assert internals.versions_of([counted]) == [before[0] + 1]
    with torch.inference_mode():
        inference = torch.ones(1)
    other: Any = Plain()
    found = internals.versions_of([counted, inference, other])
    assert found == [before[0] + 1, internals.UNCOUNTED, internals.UNCOUNTED]
    assert not internals.is_zerotensor(other)
    assert internals.is_zerotensor(torch._efficientzerotensor((2,)))


def test_without_its_number_a_storage_is_identified_by_its_address() -> None:
    storage = torch.ones(2).untyped_storage()
    assert internals.storage_id(storage) == storage._cdata
    other: Any = Plain()
    assert internals.storage_id(other) == 42


class Coalesced:
    """A coalesced COO tensor without private accessors."""

    def __init__(self) -> None:
        self.tensor = torch.eye(2).to_sparse().coalesce()

    def indices(self) -> torch.Tensor:
        return self.tensor.indices()

    def values(self) -> torch.Tensor:
        return self.tensor.values()


def test_without_private_accessors_a_coalesced_tensor_is_read_by_the_public_api() -> None:
    other: Any = Coalesced()
    indices, values = internals.coo_members(other)
    assert (indices.tolist(), values.tolist()) == ([[0, 1], [0, 1]], [1, 1])
    internals.set_coalesced(other, True)
    loose = torch.sparse_coo_tensor(torch.tensor([[0, 0]]), torch.tensor([1.0, 2.0]), (2,))
    assert internals.coo_members(loose)[1].tolist() == [1, 2]


def test_without_pytree_only_the_metadata_of_torch_s_pgtransport_is_unsupported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert internals.pytree().tree_unflatten([1], internals.pytree().tree_flatten([0])[1]) == [1]
    monkeypatch.setattr(torch.utils, "_pytree", None)
    monkeypatch.delattr(torch.utils, "_pytree")
    monkeypatch.setitem(sys.modules, "torch.utils._pytree", None)
    with pytest.raises(ImportError):
        internals.pytree()
    assert transfer({"w": torch.ones(2)}).state["w"].tolist() == [1, 1]


def test_without_private_lookups_the_store_of_a_group_is_found_otherwise(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = dist.group.WORLD
    assert internals.store_of(group) is not None
    monkeypatch.delattr(dist.distributed_c10d, "_world")
    store = SimpleNamespace()
    assert internals.store_of(SimpleNamespace(get_group_store=lambda: store)) is store
    # The last resort is the store at MASTER_ADDR, with a prefix for the group.
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(server.port))
    one, two = (internals.store_of(SimpleNamespace(group_name=name)) for name in ("one", "two"))
    one.set("key", "1")
    two.set("key", "2")
    assert (one.get("key"), two.get("key")) == (b"1", b"2")
    monkeypatch.delenv("MASTER_ADDR")
    assert internals.store_of(SimpleNamespace()) is None


def test_a_backend_has_a_timeout_if_it_has_options() -> None:
    timeout = timedelta(seconds=7)
    assert internals.backend_timeout(dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timeout)) == timeout
    for without in (SimpleNamespace(), SimpleNamespace(options=SimpleNamespace(_timeout=7)), None):
        assert internals.backend_timeout(without) is None
