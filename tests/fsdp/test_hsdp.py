"""HSDP on two replicas of two shards: a rank heals from its twin, and from nobody else.

Ranks 0 and 1 are one replica, 2 and 3 the other; rank 1 is the twin of 3. What rank 0 has is the other half.
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
    """A model in training; `steps` of 0 is what a new worker has: other weights, and no moments."""
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


def heal(rank: int) -> dict[str, Any]:
    """Rank 3 asks rank 0 first, then its twin. All others are healthy; then all take a step together."""
    mesh = mesh_of_two()
    healthy = trained(mesh, steps=2)
    new = trained(mesh, steps=0)
    # Only rank 3 is new: it goes on with what it has received.
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
        found["healed"] = locals_of(model) == locals_of(healthy[0])
    step(model, optimizer, seed=9)
    whole = {name: bytes_of(value.full_tensor()) for name, value in model.state_dict().items()}
    return {**found, "whole": whole, "local": locals_of(model)}


def test_a_new_rank_heals_from_its_twin_and_is_refused_the_other_half(quad: Cluster) -> None:
    answers = quad.run(heal)
    healed = answers[3]
    assert (
        "model.0.weight: position of the shard in the mesh: incoming (*, 0), local (*, 1)" in healed["error"]
    )
    assert healed["untouched"]
    assert healed["healed"]
    assert healed["step"] == 2
    # Bit for bit as the twin that was never lost.
    assert healed["local"] == answers[1]["local"]
    assert all(answer["whole"] == healed["whole"] for answer in answers)


def receive_fresh_elsewhere(rank: int) -> list[str]:
    """Ranks 0 and 1 share a tensor of (64, 64), and rank 2 is not in their mesh."""
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
        return [refusal(here)]
    if rank == 2:
        named = PGTransport(dist.group.WORLD, TIMEOUT_S, "cpu", mesh=line)
        said = [refusal(here), refusal(named)]
        received: Any = here.recv_checkpoint(0)
        return [*said, str(torch.equal(received["d"].full_tensor(), whole))]
    return []


def refusal(transport: PGTransport) -> str:
    with pytest.raises(StateMismatch) as raised:
        transport.recv_checkpoint(0)
    return "; ".join(str(mismatch) for mismatch in raised.value.mismatches)


def test_a_fresh_shard_does_not_pretend_to_be_another_or_all(quad: Cluster) -> None:
    _, (within,), (outside, another_shape, replicated), _ = quad.run(receive_fresh_elsewhere)
    assert within == "d: position of the shard in the mesh: incoming (0), local (1)"
    assert outside == "d: position of the shard in the mesh: incoming (0), local outside the mesh"
    assert another_shape == "d: mesh: incoming 2, local mesh=4"
    assert replicated == "True"
