"""DTensors: the local tensor and the placements arrive, and the mesh belongs to the receiver.

One process acts as rank 1 of 4. tests/fsdp and tests/defects have tests with real ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.support.equality import assert_same
from tests.support.transfer import transfer
from tests.unit.tensors.refusing import refusal_at_a_path
from torchferry.core.push import MAX_METADATA_BYTES
from torchferry.engine.push import ReceiveOptions, SendOptions, receive_state, send_state
from torchferry.errors import BadManifest, StateMismatch
from torchferry.tensors.describe import describe
from torchferry.tensors.kinds import check_form
from torchferry.tensors.kinds.dtensor import DTENSOR, DTensorTraits
from torchferry.testing import MemoryNetwork


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """Two by two; this process is at (0, 1)."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    dist.destroy_process_group()


def on(mesh: DeviceMesh, *placements: Placement, local: torch.Tensor | None = None) -> DTensor:
    if local is None:
        local = torch.arange(6.0).view(2, 3)
    built = DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size((4, 6)), stride=(6, 1)
    )
    assert isinstance(built, DTensor)
    return built


EXAMPLES: dict[str, Callable[[DeviceMesh], Any]] = {
    "sharded twice": lambda mesh: on(mesh, Shard(0), Shard(1)),
    "replicated and sharded": lambda mesh: on(mesh, Replicate(), Shard(0)),
    "strided shard": lambda mesh: on(mesh, _StridedShard(0, split_factor=2), Shard(0)),
    "partial": lambda mesh: on(mesh, Partial(), Replicate()),
    "partial, the largest": lambda mesh: on(mesh, Partial("max"), Partial("max")),
    "on a slice of the mesh": lambda mesh: on(mesh["inner"], Shard(1)),
    "on the flattened mesh": lambda mesh: on(mesh._flatten(), Shard(0)),
    "that requires grad": lambda mesh: on(mesh, Shard(0), Replicate()).detach().requires_grad_(),
    "parameter": lambda mesh: torch.nn.Parameter(on(mesh, Shard(0), Replicate())),
    "with a strided local tensor": lambda mesh: on(
        mesh, Shard(0), Replicate(), local=torch.arange(12.0).view(4, 3)[::2]
    ),
    "of bfloat16": lambda mesh: on(mesh, Shard(0), Replicate(), local=torch.ones(2, 3, dtype=torch.bfloat16)),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_placement_arrives_on_an_equal_mesh(name: str, mesh: DeviceMesh) -> None:
    original = EXAMPLES[name](mesh)
    received = transfer({"d": original}).state["d"]
    assert_same(original, received)
    assert received._spec == original._spec
    assert received.device_mesh == original.device_mesh
    assert received.device_mesh.mesh_dim_names == original.device_mesh.mesh_dim_names
    assert received.device_mesh.get_coordinate() == original.device_mesh.get_coordinate()
    assert received.device_mesh.get_all_groups() == original.device_mesh.get_all_groups()


def test_operations_on_a_received_dtensor_do_not_affect_the_local_mesh(mesh: DeviceMesh) -> None:
    """torch caches results by their inputs, and may return one of two equal meshes for the other."""
    original = on(mesh, Shard(0), Shard(1))
    state: dict[str, Any] = {
        "tensor": original,
        "parameter": torch.nn.Parameter(on(mesh, Shard(1), Shard(1))),
    }
    received = transfer(state).state
    received["tensor"] * 7
    received["tensor"] + original
    results: list[Any] = [original * 7, original + original, state["parameter"].detach()]
    for result in results:
        result.full_tensor()


def test_groups_that_torch_created_for_meshes_are_preferred(mesh: DeviceMesh) -> None:
    """With two groups of the same ranks, ranks that use different groups wait for each other."""
    dist.new_group([0, 1])
    received = transfer({"d": on(mesh, Shard(0), Shard(1))}).state["d"]
    assert received.device_mesh.get_group("inner") == mesh.get_group("inner")


def test_a_mesh_without_this_process_has_no_groups(mesh: DeviceMesh) -> None:
    elsewhere = DeviceMesh("cpu", [2, 3], _init_backend=False)
    original = DTensor.from_local(
        torch.ones(2, 3), elsewhere, [Shard(0)], run_check=False, shape=torch.Size((4, 3)), stride=(3, 1)
    )
    received = transfer({"d": original}).state["d"]
    assert received.device_mesh.get_coordinate() is None
    with pytest.raises(RuntimeError, match="not initialized"):
        received.device_mesh.get_group()


def test_a_received_dtensor_can_be_added_to_a_local_one(mesh: DeviceMesh) -> None:
    original = on(mesh, Shard(0), Shard(1))
    received = transfer({"d": original}).state["d"]
    total = original + received
    assert torch.equal(total.to_local(), 2 * original.to_local())


@pytest.mark.parametrize("name", [name for name in EXAMPLES if "mesh" not in name])
def test_a_fresh_dtensor_gets_the_mesh_of_the_receiver(name: str, mesh: DeviceMesh) -> None:
    mine = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    received = transfer({"d": EXAMPLES[name](mesh)}, mesh=mine).state["d"]
    assert received.device_mesh is mine


def test_a_fresh_dtensor_on_a_slice_gets_the_same_slice_of_the_mesh_of_the_receiver(mesh: DeviceMesh) -> None:
    mine = init_device_mesh("cpu", (2, 2), mesh_dim_names=("third", "inner"))
    received = transfer({"d": on(mesh["inner"], Shard(0))}, mesh=mine).state["d"]
    assert received.device_mesh == mine["inner"]
    assert received.device_mesh.get_group() == mine.get_group("inner")


def test_a_mesh_of_another_shape_is_a_mismatch_that_shows_both(mesh: DeviceMesh) -> None:
    line = init_device_mesh("cpu", (4,), mesh_dim_names=("line",))
    state = {
        "d": on(mesh["inner"], Shard(0)),
        "e": on(mesh, Shard(0), Shard(1)),
        "replicated": on(mesh, Replicate(), Replicate()),
    }
    with pytest.raises(StateMismatch) as raised:
        transfer(state, mesh=line)
    assert [tuple(mismatch) for mismatch in raised.value.mismatches] == [
        ("d", "mesh", "2 (inner)", "mesh=4 (line)"),
        ("e", "mesh", "2 x 2 (outer, inner)", "mesh=4 (line)"),
        ("replicated", "mesh", "2 x 2 (outer, inner)", "mesh=4 (line)"),
    ]


def as_rank(monkeypatch: pytest.MonkeyPatch, rank: int, state: Any) -> Any:
    """Receive a fresh state as another rank."""
    network = MemoryNetwork()
    send_state(network.link(0), [1], state, SendOptions(10, MAX_METADATA_BYTES))
    monkeypatch.setattr(dist, "get_rank", lambda *_: rank)
    return receive_state(network.link(1), 0, ReceiveOptions(10, MAX_METADATA_BYTES))[0]


@pytest.mark.parametrize(
    ("placements", "rank", "positions"),
    [
        ((Shard(0), Shard(1)), 0, ("(0, 1)", "(0, 0)")),
        ((Shard(0), Shard(1)), 3, ("(0, 1)", "(1, 1)")),
        ((Replicate(), Shard(0)), 0, ("(*, 1)", "(*, 0)")),
        ((Replicate(), Shard(0)), 2, ("(*, 1)", "(*, 0)")),
        ((Partial(), Replicate()), 2, ("(0, *)", "(1, *)")),
        ((_StridedShard(0, split_factor=2), Shard(0)), 3, ("(0, 1)", "(1, 1)")),
        ((Replicate(), Shard(0)), 7, ("(*, 1)", "outside the mesh")),
    ],
)
def test_a_fresh_shard_of_another_position_is_a_mismatch_that_shows_both(
    placements: tuple[Placement, ...],
    rank: int,
    positions: tuple[str, str],
    mesh: DeviceMesh,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(StateMismatch) as raised:
        as_rank(monkeypatch, rank, {"d": on(mesh, *placements), "w": torch.ones(2)})
    (mismatch,) = raised.value.mismatches
    assert mismatch == ("d", "position of the shard in the mesh", *positions)


@pytest.mark.parametrize(
    ("placements", "rank"),
    [
        ((Replicate(), Shard(0)), 3),
        ((Shard(0), Replicate()), 0),
        ((Replicate(), Replicate()), 2),
        ((Replicate(), Replicate()), 7),
    ],
)
def test_a_fresh_dtensor_arrives_at_ranks_that_hold_the_same_shard(
    placements: tuple[Placement, ...], rank: int, mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = on(mesh, *placements)
    received = as_rank(monkeypatch, rank, {"d": original})["d"]
    assert torch.equal(received._local_tensor, original._local_tensor)
    assert received.placements == original.placements


def test_in_place_a_shard_does_not_overwrite_another_shard(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    turned = init_device_mesh("cpu", (2, 2), mesh_dim_names=("inner", "outer"))
    monkeypatch.setattr(turned, "get_coordinate", lambda: [1, 0])
    local = {"d": on(turned, Replicate(), Shard(0), local=torch.zeros(2, 3))}
    with pytest.raises(
        StateMismatch, match=r"position of the shard in the mesh: incoming \(\*, 1\), local \(\*, 0\)"
    ):
        transfer({"d": on(mesh, Replicate(), Shard(0))}, into=local)
    assert not local["d"]._local_tensor.any()
    monkeypatch.setattr(turned, "get_coordinate", lambda: [1, 1])
    transfer({"d": on(mesh, Replicate(), Shard(0))}, into=local)
    assert torch.equal(local["d"]._local_tensor, torch.arange(6.0).view(2, 3))


@pytest.mark.parametrize("own_buffers", [False, True], ids=["direct", "staged"])
@pytest.mark.parametrize("name", EXAMPLES)
def test_in_place_the_local_dtensor_keeps_its_own_mesh(
    name: str, own_buffers: bool, mesh: DeviceMesh
) -> None:
    incoming = EXAMPLES[name](mesh)
    local = DTensor.from_local(
        torch.zeros_like(incoming._local_tensor),
        incoming.device_mesh,
        incoming.placements,
        run_check=False,
        shape=incoming.shape,
        stride=incoming.stride(),
    )
    received = transfer({"d": incoming}, into={"d": local}, own_buffers=own_buffers).state["d"]
    assert received is local
    assert received.device_mesh is incoming.device_mesh
    assert torch.equal(local._local_tensor, incoming._local_tensor)


def test_in_place_placements_shape_mesh_kind_and_dtype_must_match(mesh: DeviceMesh) -> None:
    def larger() -> Any:
        local = torch.zeros(2, 3)
        return DTensor.from_local(
            local, mesh, (Shard(0), Shard(1)), run_check=False, shape=torch.Size((8, 6)), stride=(6, 1)
        )

    incoming = on(mesh, Shard(0), Shard(1))
    local = {
        "placements": on(mesh, Shard(1), Shard(0)),
        "shape": larger(),
        "mesh": on(mesh["inner"], Shard(0)),
        "kind": torch.zeros(2, 3),
        "dtype": on(mesh, Shard(0), Shard(1), local=torch.zeros(2, 3, dtype=torch.float64)),
        "fits": on(mesh, Shard(0), Shard(1), local=torch.full((2, 3), -1.0)),
    }
    with pytest.raises(StateMismatch) as raised:
        transfer(dict.fromkeys(local, incoming), into=local)
    assert list(dict.fromkeys(mismatch.path for mismatch in raised.value.mismatches)) == [
        "placements",
        "shape",
        "mesh",
        "kind",
        "dtype",
    ]
    assert "placements: placements: incoming Shard(0), Shard(1), local Shard(1), Shard(0)" in str(
        raised.value
    )
    assert "shape: shape: incoming [4, 6], local [8, 6]" in str(raised.value)
    assert "mesh: mesh: incoming 2 x 2, local 2" in str(raised.value)
    assert local["fits"].to_local().eq(-1).all()


def test_dtensors_over_one_storage_send_it_once(mesh: DeviceMesh) -> None:
    flat = torch.arange(12.0)
    state = {
        "a": on(mesh, Shard(0), Shard(1), local=flat[:6].view(2, 3)),
        "b": on(mesh, Shard(0), Shard(1), local=flat[6:].view(2, 3)),
        "flat": flat,
    }
    state["again"] = state["a"]
    ferried = transfer(state)
    assert_same(state, ferried.state)
    assert ferried.payload_bytes == 48
    assert ferried.state["again"] is ferried.state["a"]


class CustomPlacement(Placement):
    def __repr__(self) -> str:
        return "CustomPlacement()"


class Subclass(torch.Tensor):
    pass


def test_an_unknown_placement_is_refused_with_its_path_and_advice(mesh: DeviceMesh) -> None:
    odd = on(mesh, Shard(0), Replicate())
    odd._spec.placements = (Shard(0), CustomPlacement())
    message = refusal_at_a_path(odd)
    assert "CustomPlacement()" in message
    assert "redistribute" in message


def test_an_unsendable_local_tensor_is_refused_with_its_path(mesh: DeviceMesh) -> None:
    subclass = on(mesh, Shard(0), Replicate())
    subclass._local_tensor = torch.ones(2, 3).as_subclass(Subclass)
    assert "Subclass" in refusal_at_a_path(subclass)
    meta = on(mesh, Shard(0), Replicate(), local=torch.ones(2, 3, device="meta"))
    assert "meta device" in refusal_at_a_path(meta)


def test_a_process_without_a_group_only_receives_replicated_dtensors(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = on(mesh["inner"], Replicate())
    network = MemoryNetwork()
    for placement in (Replicate(), Shard(0)):
        send_state(
            network.link(0), [1], {"d": on(mesh["inner"], placement)}, SendOptions(10, MAX_METADATA_BYTES)
        )
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    state: Any = receive_state(network.link(1), 0, ReceiveOptions(10, MAX_METADATA_BYTES))[0]
    assert state["d"].device_mesh.get_coordinate() is None
    assert state["d"].device_mesh.mesh_dim_names == ("inner",)
    assert torch.equal(state["d"]._local_tensor, original._local_tensor)
    with pytest.raises(StateMismatch, match=r"incoming \(1\), local outside the mesh"):
        receive_state(network.link(1), 0, ReceiveOptions(10, MAX_METADATA_BYTES))


@pytest.mark.parametrize(
    "changes",
    [
        {"strides": ((0,), (1,))},
        {"sizes": ((2, 2), ()), "strides": ((2,), (1,)), "names": None},
        {"strides": ((2,), (3,))},
        {"ranks": (0, 1, 2, 2**31)},
        {"names": ("outer",)},
        {"device": "cpu:0"},
    ],
    ids=["repeated ranks", "other dimensions", "too few ranks", "a huge rank", "too few names", "an index"],
)
def test_an_impossible_mesh_from_a_peer_is_refused(changes: dict[str, Any], mesh: DeviceMesh) -> None:
    manifest = describe({"d": on(mesh, Shard(0), Shard(1))}).manifest
    (leaf,), specs = manifest.leaves, manifest.tensors
    check_form(DTENSOR, leaf, specs)
    traits = DTensorTraits.read(leaf.traits)
    changed = replace(traits, mesh=replace(traits.mesh, **changes))
    with pytest.raises(BadManifest, match="a malformed dtensor"):
        check_form(DTENSOR, replace(leaf, traits=changed.packed()), specs)
