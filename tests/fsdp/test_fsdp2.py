"""FSDP2 on two sets of ranks: ranks 0 to 3 train, and ranks 4 to 7 receive their state.

Each set has its own mesh. The tests compare the bits of the whole parameters and of every rank's shards,
after the transfer and after one more step on both sets.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import ShardedTensor, ShardMetadata, init_from_local_shards
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import torchferry
from tests.support.cluster import Cluster
from tests.support.equality import bytes_of
from torchferry import PGTransport

SET = 4  # ranks in a set
Trainer = tuple[nn.Module, torch.optim.Optimizer]
Bits = dict[str, bytes]


class Block(nn.Module):
    """Layers whose sizes are not multiples of four, so that some shards are padded and some are empty."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6, bias=False)
        self.scale = nn.Parameter(torch.rand(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(self.up(self.norm(x)).relu()) * self.scale.sum()
        return y + x


def meshes(layout: list[Any], names: tuple[str, ...]) -> list[DeviceMesh]:
    """Return one mesh for each set. All ranks create both."""
    first = torch.tensor(layout)
    return [DeviceMesh("cpu", first + SET * number, mesh_dim_names=names) for number in (0, 1)]


def trainer(mesh: DeviceMesh, seed: int) -> Trainer:
    torch.manual_seed(seed)
    model = nn.Sequential(Block(), Block())
    data_mesh = mesh
    if mesh.ndim == 2:
        data_mesh = mesh["data"]
        for block in model:
            parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    for block in model:
        fully_shard(block, mesh=data_mesh)
    fully_shard(model, mesh=data_mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    batch = torch.randn(5, 6, generator=torch.Generator().manual_seed(seed))
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def bits(model: nn.Module, optimizer: torch.optim.Optimizer) -> Bits:
    """Return the whole parameters, this rank's shards, and its shards of the optimizer's state."""
    found: Bits = {}
    for name, value in model.state_dict().items():
        assert isinstance(value, DTensor)
        found[f"whole.{name}"] = bytes_of(value.full_tensor())
        found[f"shard.{name}"] = bytes_of(value.to_local())
    for number, slots in optimizer.state_dict()["state"].items():
        for slot, value in slots.items():
            local = value.to_local() if isinstance(value, DTensor) else value
            found[f"optimizer.{number}.{slot}"] = bytes_of(local)
    return found


def transfer_and_step(
    rank: int, layout: list[Any], names: tuple[str, ...], in_place: bool
) -> tuple[Bits, Bits, Bits]:
    """Return the bits before the transfer, after it, and after one more step."""
    own = rank // SET
    mesh = meshes(layout, names)[own]
    data_rank = mesh.get_local_rank(0)
    model, optimizer = trainer(mesh, seed=own)
    step(model, optimizer, seed=100 * own + data_rank)
    before = bits(model, optimizer)
    if own == 0:
        PGTransport(dist.group.WORLD, 30, "cpu").send_checkpoint([rank + SET], state_of(model, optimizer))
    elif in_place:
        here = state_of(model, optimizer)
        transport = PGTransport(dist.group.WORLD, 30, "cpu", lambda: here)
        received: Any = transport.recv_checkpoint(rank - SET)
        assert all(received["model"][name] is value for name, value in here["model"].items())
        assert received["optimizer"]["param_groups"] == here["optimizer"]["param_groups"]
    else:
        transport = PGTransport(dist.group.WORLD, 30, "cpu", mesh=mesh)
        received = transport.recv_checkpoint(rank - SET)
        for value in received["model"].values():
            assert value.device_mesh in (mesh, mesh[names[0]])
        model.load_state_dict(received["model"])
        optimizer.load_state_dict(received["optimizer"])
    after = bits(model, optimizer)
    step(model, optimizer, seed=7 + data_rank)
    return before, after, bits(model, optimizer)


def fetch_and_step(rank: int, layout: list[Any], names: tuple[str, ...], steps: int) -> tuple[Bits, Bits]:
    """Fetch objects from the twin in the other set; return the bits afterwards, and after one more step."""
    own = rank // SET
    mesh = meshes(layout, names)[own]
    data_rank = mesh.get_local_rank(0)
    model, optimizer = trainer(mesh, seed=own)
    state = {"model": model, "optimizer": optimizer, "step": own}
    for seed in range(1 if own == 0 else steps):
        step(model, optimizer, seed=100 * own + data_rank + seed)
    source = torchferry.serve(state, version=1) if own == 0 else None
    addresses: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(addresses, None if source is None else source.address)
    if own == 1:
        parameters = list(model.parameters())
        got = torchferry.fetch(addresses[rank - SET], into=state, mesh=mesh, timeout=60).state
        assert got["model"] is model
        assert got["step"] == 0
        assert all(mine is still for mine, still in zip(parameters, model.parameters(), strict=True))
    dist.barrier()
    if source is not None:
        source.close()
    after = bits(model, optimizer)
    step(model, optimizer, seed=7 + data_rank)
    return after, bits(model, optimizer)


LAYOUTS: dict[str, tuple[list[Any], tuple[str, ...]]] = {
    "sharded": ([0, 1, 2, 3], ("data",)),
    "sharded in both dimensions": ([[0, 1], [2, 3]], ("data", "tensor")),
}


@pytest.mark.slow
@pytest.mark.parametrize("in_place", [False, True], ids=["fresh", "in place"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_both_sets_of_ranks_are_bit_identical_after_the_transfer_and_after_a_step(
    name: str, in_place: bool, octet: Cluster
) -> None:
    layout, names = LAYOUTS[name]
    answers = octet.run(transfer_and_step, layout, names, in_place)
    for (before, after, later), (other_before, other_after, other_later) in zip(
        answers[:SET], answers[SET:], strict=True
    ):
        assert any(before[key] != other_before[key] for key in before if key.startswith("whole."))
        assert any(before[key] != other_before[key] for key in before if key.startswith("optimizer."))
        assert after == other_after == before
        assert later == other_later
        assert any(later[key] != after[key] for key in after if key.startswith("whole."))


@pytest.mark.slow
@pytest.mark.parametrize("steps", [0, 2], ids=["never stepped", "stepped"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_objects_of_twins_are_bit_identical_after_a_fetch_and_after_a_step(
    name: str, steps: int, octet: Cluster
) -> None:
    layout, names = LAYOUTS[name]
    answers = octet.run(fetch_and_step, layout, names, steps)
    for served, fetched in zip(answers[:SET], answers[SET:], strict=True):
        assert served == fetched


def sharded(rank: int, fill: float) -> ShardedTensor:
    """Return a tensor with two shards per rank, of four rows and of one row."""
    shards = [
        LocalShard(
            torch.arange(rows * 3.0).view(rows, 3) * fill,
            ShardMetadata([start, 0], [rows, 3], placement=f"rank:{rank}/cpu"),
        )
        for start, rows in ((5 * rank, 4), (5 * rank + 4, 1))
    ]
    return init_from_local_shards(shards, 5 * dist.get_world_size(), 3)


def transfer_shards(rank: int) -> tuple[bool, bool, list[Any], str, list[Any]]:
    """Ranks 0 and 1 send their shards to ranks 2 and 3: fresh, then in place."""
    # All ranks create the tensor together, so that each has the metadata of all shards.
    mine = sharded(rank, fill=1.0)
    if rank < 2:
        sender = PGTransport(dist.group.WORLD, 20, "cpu")
        sender.send_checkpoint([rank + 2], {"s": mine, "rest": rank})
        sender.send_checkpoint([rank + 2], {"s": mine})
        return True, True, [], "", []
    fresh: Any = PGTransport(dist.group.WORLD, 20, "cpu").recv_checkpoint(rank - 2)
    target = fresh["s"]
    tensors = [shard.tensor for shard in target.local_shards()]
    for tensor in tensors:
        tensor.fill_(-1)
    transport = PGTransport(dist.group.WORLD, 20, "cpu", lambda: {"s": target})
    received: Any = transport.recv_checkpoint(rank - 2)
    same_tensors = all(
        shard.tensor is tensor for shard, tensor in zip(received["s"].local_shards(), tensors, strict=True)
    )
    placement = str(target.local_shards()[0].metadata.placement)
    offsets = [shard.metadata.shard_offsets for shard in target.local_shards()]
    return received["s"] is target, same_tensors, [t.tolist() for t in tensors], placement, offsets


def test_a_sharded_tensor_is_received_fresh_and_then_in_place_with_all_its_shards(quad: Cluster) -> None:
    for rank, (same, same_tensors, values, placement, offsets) in enumerate(quad.run(transfer_shards)):
        assert same
        assert same_tensors
        if rank >= 2:
            assert values == [torch.arange(12.0).view(4, 3).tolist(), [[0.0, 1.0, 2.0]]]
            assert placement == f"rank:{rank}/cpu"
            assert offsets == [[5 * (rank - 2), 0], [5 * (rank - 2) + 4, 0]]
