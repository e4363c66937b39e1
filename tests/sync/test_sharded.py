"""sync of sharded states: each rank takes each shard from a rank that holds the same one."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

import torchferry
from tests.support.cluster import Cluster
from tests.sync.test_sync import TIMEOUT_S, errors_of


def trained(mesh: DeviceMesh, steps: int, rows: int = 7) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a trained model. With `steps` 0, it has other weights and no moments, like a new worker."""
    torch.manual_seed(steps)
    model = nn.Sequential(nn.Linear(6, rows), nn.Linear(rows, 3))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(4, 6)).square().mean().backward()
        optimizer.step()
    return model, optimizer


def heal(rank: int, shape: tuple[int, ...], new: list[int], rows: int = 7) -> dict[str, Any]:
    """The ranks in `new` take the state of the others, which have trained. Return what differs afterwards."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replica", "shard")[-len(shape) :])
    expected_model, expected_optimizer = trained(mesh, 2, rows)
    model, optimizer = trained(mesh, 0, rows) if rank in new else (expected_model, expected_optimizer)
    before = {name: value.to_local().clone() for name, value in model.state_dict().items()}
    state = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    try:
        result = torchferry.sync(state, None if rank in new else 2, timeout=TIMEOUT_S)
    except torchferry.PartsLost as error:
        after = {name: value.to_local() for name, value in model.state_dict().items()}
        assert all(torch.equal(before[name], after[name]) for name in before), "something was written"
        raise error
    optimizer.load_state_dict(result.state["optim"])
    moments = expected_optimizer.state_dict()["state"]
    return {
        "role": result.role,
        "model": all(
            torch.equal(value.to_local(), model.state_dict()[name].to_local())
            for name, value in expected_model.state_dict().items()
        ),
        "optim": all(
            torch.equal(moment["exp_avg_sq"].to_local(), found["exp_avg_sq"].to_local())
            and moment["exp_avg_sq"].shape == found["exp_avg_sq"].shape
            and moment["step"] == found["step"]
            for moment, found in zip(moments.values(), optimizer.state_dict()["state"].values(), strict=True)
        ),
    }


class TestHSDP:
    def test_a_new_rank_takes_the_shards_of_its_twin(self, quad: Cluster) -> None:
        for new in ([3], [0], [1, 2]):
            answers = quad.run(heal, (2, 2), new)
            assert all(answer["model"] and answer["optim"] for answer in answers), answers
            assert [rank for rank, answer in enumerate(answers) if answer["role"] == "receiver"] == new

    def test_shards_that_both_twins_lost_are_listed_on_every_rank(self, quad: Cluster) -> None:
        for error in errors_of(quad, heal, (2, 2), [1, 3]):
            assert isinstance(error, torchferry.PartsLost)
            assert {part.position for part in error.parts} == {"(*, 1)"}
            assert {part.ranks for part in error.parts} == {(1, 3)}
            assert "model.0.weight: the shard at (*, 1), needed by ranks 1, 3" in str(error)


class TestFSDP2:
    def test_the_shards_of_a_lost_rank_are_lost(self, quad: Cluster) -> None:
        for error in errors_of(quad, heal, (4,), [2]):
            assert isinstance(error, torchferry.PartsLost)
            # The moments too, although the new rank has none yet.
            paths = [part.path for part in error.parts]
            assert paths[:4] == ["model.0.weight", "model.0.bias", "model.1.weight", "model.1.bias"]
            assert "optim.state[0].exp_avg" in paths
            assert len(paths) == 12
            assert {(part.position, part.ranks) for part in error.parts} == {("(2)", (2,))}

    def test_shards_without_rows_are_not_lost(self, quad: Cluster) -> None:
        # The second layer has three rows, so rank 3 holds nothing of it.
        for error in errors_of(quad, heal, (4,), [3]):
            assert isinstance(error, torchferry.PartsLost)
            moments = [f"optim.state[{n}].{name}" for n in (0, 1) for name in ("exp_avg", "exp_avg_sq")]
            assert [part.path for part in error.parts] == ["model.0.weight", "model.0.bias", *moments]

    def test_a_rank_that_holds_no_row_at_all_takes_the_rest(self, quad: Cluster) -> None:
        # Both layers have three rows, so rank 3 lacks nothing but the moments, which have no rows there.
        answers = quad.run(heal, (4,), [3], 3)
        assert all(answer["model"] and answer["optim"] for answer in answers), answers
        assert answers[3]["role"] == "receiver"

    def test_nobody_behind_finds_all_shards_equal_to_themselves(self, quad: Cluster) -> None:
        assert all(answer["role"] == "idle" for answer in quad.run(heal, (4,), []))


def two_meshes(rank: int, new: int) -> dict[str, Any]:
    """Dense weights are replicated along other ranks than experts: no rank has all that another one has."""
    line = DeviceMesh("cpu", torch.arange(4))
    dense = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    experts = init_device_mesh("cpu", (2, 2), mesh_dim_names=("expert", "copy"))
    value = 0.0 if rank == new else 1.0
    state = {
        "dense": DTensor.from_local(
            torch.full((8,), value * (1 + rank % 2)), dense, [Replicate(), Shard(0)], run_check=False
        ),
        "experts": [
            DTensor.from_local(
                torch.full((4, 2), value * (5 + rank // 2)), experts, [Shard(0), Replicate()], run_check=False
            )
        ],
        "everywhere": DTensor.from_local(torch.full((3,), value), line, [Replicate()], run_check=False),
        "step": 0 if rank == new else 9,
    }
    result = torchferry.sync(state, None if rank == new else 9, timeout=TIMEOUT_S)
    return {
        "values": [
            state["dense"].to_local()[0].item(),  # type: ignore[attr-defined]
            state["experts"][0].to_local()[0, 0].item(),  # type: ignore[index]
            state["everywhere"].to_local()[0].item(),  # type: ignore[attr-defined]
            result.state["step"],
        ],
        "in place": result.state["experts"][0] is state["experts"][0],  # type: ignore[index]
        "role": result.role,
        "sources": 0 if result.report is None else len(result.report.sources),
    }


def test_leaves_come_from_different_ranks(quad: Cluster) -> None:
    for new in range(4):
        answers = quad.run(two_meshes, new)
        assert [answer["values"] for answer in answers] == [
            [1 + rank % 2, 5 + rank // 2, 1.0, 9] for rank in range(4)
        ]
        assert all(answer["in place"] for answer in answers)
        assert answers[new]["sources"] == 3
        assert [answer["role"] for answer in answers].count("source") == 3


def pipeline(rank: int, new: int) -> list[float]:
    """Ranks 0 and 2 have the first stage, ranks 1 and 3 the second one."""
    stage = rank % 2
    value = 0.0 if rank == new else 1.0 + stage
    state: dict[str, Any] = {f"layers.{stage}.w": torch.full((5,), value), "step": 3}
    result = torchferry.sync(state, None if rank == new else 3, timeout=TIMEOUT_S)
    assert [*result.state] == [f"layers.{stage}.w", "step"]
    return [result.state[f"layers.{stage}.w"][0].item(), state[f"layers.{stage}.w"][0].item()]


def test_a_rank_of_a_pipeline_takes_its_stage(quad: Cluster) -> None:
    for new in range(4):
        assert quad.run(pipeline, new) == [[1.0, 1.0], [2.0, 2.0]] * 2


def meshes_of_their_own(rank: int) -> bool:
    """Two replicas whose meshes do not know each other. Rank 3 is new, and has no moments."""
    meshes = [DeviceMesh("cpu", torch.tensor(ranks)) for ranks in ([0, 1], [2, 3])]
    mesh = meshes[rank // 2]

    def shard(value: float) -> DTensor:
        return DTensor.from_local(torch.full((2, 3), value), mesh, [Shard(0)], run_check=False)

    healthy = {"model": shard(float(rank % 2)), "optim": {"moment": shard(5.0 + rank % 2)}}
    state = {"model": shard(-1.0), "optim": {}} if rank == 3 else healthy
    result = torchferry.sync(state, None if rank == 3 else 1, timeout=TIMEOUT_S)
    moment = result.state["optim"]["moment"]
    assert moment.device_mesh == mesh
    return torch.equal(moment.full_tensor(), torch.tensor([5.0] * 6 + [6.0] * 6).view(4, 3))


def test_moments_come_from_a_replica_with_another_mesh(quad: Cluster) -> None:
    assert all(quad.run(meshes_of_their_own))


def diverge(rank: int, trust: int | None) -> list[float]:
    """Rank 3 differs from its twin, rank 1, and the other twins agree."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    local = torch.full((4,), 9.0 if rank == 3 else float(rank % 2))
    state = {"w": DTensor.from_local(local, mesh, [Replicate(), Shard(0)], run_check=False)}
    torchferry.sync(state, 1, trust=trust, timeout=TIMEOUT_S)
    return state["w"].to_local().tolist()


def test_twins_that_differ_are_named_by_position_and_rank(quad: Cluster) -> None:
    for error in errors_of(quad, diverge, None):
        assert isinstance(error, torchferry.ReplicasDiffer)
        assert error.differences == (torchferry.Difference("w", "(*, 1)", ((1,), (3,))),)
    assert quad.run(diverge, 1) == [[0.0] * 4, [1.0] * 4] * 2
    assert quad.run(diverge, 3) == [[0.0] * 4, [9.0] * 4] * 2
    for error in errors_of(quad, diverge, 0):
        assert "trust=0 does not help" in str(error)
