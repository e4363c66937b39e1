"""HSDP on two replicas of two shards: a rank can receive from its counterpart only.

Ranks 0 and 1 are one replica, 2 and 3 the other. Ranks 1 and 3 have the same shard, rank 0 has the other one.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.support.cluster import Cluster
from tests.support.equality import bytes_of
from torchferry import PGTransport, StateMismatch

TIMEOUT_S = 30


def mesh_of_two() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))


def trained(mesh: DeviceMesh, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a trained model. With `steps` 0, it has other weights and no moments, like a new worker."""
    torch.manual_seed(steps)
    model = nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 3))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for seed in range(steps):
        step(model, optimizer, seed)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    optimizer.zero_grad()
    model(torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))).square().mean().backward()
    optimizer.step()


def locals_of(model: nn.Module) -> dict[str, bytes]:
    return {name: bytes_of(value.to_local()) for name, value in model.state_dict().items()}


def receive_from_both_replicas(rank: int) -> dict[str, Any]:
    """Rank 3 is new: it receives from rank 0, which fails, and then from rank 1. Then all ranks step."""
    mesh = mesh_of_two()
    healthy = trained(mesh, steps=2)
    new = trained(mesh, steps=0)
    model, optimizer = new if rank == 3 else healthy
    state = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    found: dict[str, Any] = {}
    if rank in (0, 1):
        PGTransport(dist.group.WORLD, TIMEOUT_S, "cpu").send_checkpoint([3], state, step=2)
    if rank == 3:
        transport = PGTransport(dist.group.WORLD, TIMEOUT_S, "cpu", lambda: state, extra="fresh")
        before = locals_of(model)
        with pytest.raises(StateMismatch) as raised:
            transport.recv_checkpoint(0)
        found["error"] = str(raised.value)
        found["untouched"] = locals_of(model) == before
        received: Any = transport.recv_checkpoint(1)
        optimizer.load_state_dict(received["optim"])
        found["step"] = transport.last_report.step  # type: ignore[union-attr]
        found["equal"] = locals_of(model) == locals_of(healthy[0])
    step(model, optimizer, seed=9)
    whole = {name: bytes_of(value.full_tensor()) for name, value in model.state_dict().items()}
    return {**found, "whole": whole, "local": locals_of(model)}


def test_a_new_rank_receives_from_its_counterpart_and_rejects_the_other_shard(quad: Cluster) -> None:
    answers = quad.run(receive_from_both_replicas)
    new_rank = answers[3]
    assert (
        "model.0.weight: position of the shard in the mesh: incoming (*, 0), local (*, 1)"
        in new_rank["error"]
    )
    assert new_rank["untouched"]
    assert new_rank["equal"]
    assert new_rank["step"] == 2
    # Bit for bit equal to its counterpart.
    assert new_rank["local"] == answers[1]["local"]
    assert all(answer["whole"] == new_rank["whole"] for answer in answers)


def receive_fresh_elsewhere(rank: int) -> list[str]:
    """Ranks 0 and 1 have the shards of a tensor. Rank 2 is not in their mesh."""
    mesh = DeviceMesh("cpu", torch.tensor([0, 1]))
    line = DeviceMesh("cpu", torch.tensor([0, 1, 2, 3]))
    whole = torch.arange(64.0 * 64).view(64, 64)
    here = PGTransport(dist.group.WORLD, TIMEOUT_S, "cpu")
    if rank == 0:
        state = {"d": DTensor.from_local(whole[:32], mesh, [Shard(0)])}
        replicated = {"d": DTensor.from_local(whole, mesh, [Replicate()], run_check=False)}
        for receiver in (1, 2, 2):
            here.send_checkpoint([receiver], state)
        here.send_checkpoint([2], replicated)
        return []
    if rank == 1:
        return [mismatches(here)]
    if rank == 2:
        named = PGTransport(dist.group.WORLD, TIMEOUT_S, "cpu", mesh=line)
        errors = [mismatches(here), mismatches(named)]
        received: Any = here.recv_checkpoint(0)
        return [*errors, str(torch.equal(received["d"].full_tensor(), whole))]
    return []


def mismatches(transport: PGTransport) -> str:
    with pytest.raises(StateMismatch) as raised:
        transport.recv_checkpoint(0)
    return "; ".join(str(mismatch) for mismatch in raised.value.mismatches)


def test_a_fresh_shard_for_another_position_in_the_mesh_is_a_mismatch(quad: Cluster) -> None:
    _, (within,), (outside, another_shape, replicated), _ = quad.run(receive_fresh_elsewhere)
    assert within == "d: position of the shard in the mesh: incoming (0), local (1)"
    assert outside == "d: position of the shard in the mesh: incoming (0), local outside the mesh"
    assert another_shape == "d: mesh: incoming 2, local mesh=4"
    assert replicated == "True"
