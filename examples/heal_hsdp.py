"""A rank of an HSDP job, FSDP2 on 2 x 2 ranks, is killed. A new one takes the shards of its twin.

    python examples/heal_hsdp.py

Ranks 0 and 2 have one half of every tensor, ranks 1 and 3 the other half. Rank 3 is killed with SIGKILL. The
survivors keep a copy of their shards, rebuild the group, the mesh and the model, and call `sync`: the new
rank 3 takes its shards from rank 1, moments included. The exit code is 0 only if all end with equal weights.
"""

import multiprocessing
import os
import signal
import sys
import tempfile
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import torchferry

STEPS, KILL_AT, VICTIM = 8, 4, 3
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "torchferry"])


def train(rank: int, folder: str, generation: int, pipe: Connection, kill_at: int | None) -> None:
    step, saved = 0 if generation == 0 else None, None
    while step != STEPS:
        meet, limit = f"file://{folder}/{generation}", timedelta(seconds=10)
        dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=4, timeout=limit)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32))
        fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard")))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        state = {"model": model, "optim": optimizer, "step": step}
        if saved is not None:  # the shards of this rank, from the old mesh to the new one
            torchferry.fetch(saved.address, into=state)
        result = torchferry.sync(state, version=step, timeout=30)
        step = result.state["step"]
        print(f"generation {generation}, rank {rank}: {result.role}, at step {step}", flush=True)
        try:
            while step < STEPS:
                if step == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                dist.barrier()  # if a rank is gone, all ranks notice here, before the groups of the mesh
                batch = torch.randn(16, 32, generator=torch.Generator().manual_seed(4 * step + rank))
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                optimizer.step()
                step += 1
            pipe.send([value.full_tensor().tolist() for value in model.state_dict().values()])
        except RuntimeError:  # a peer is gone, and this step was not made
            saved = torchferry.serve({**state, "step": step}, version=step)
        dist.destroy_process_group()
        if step != STEPS:
            pipe.send(f"rank {rank}: left the group")
            generation = pipe.recv()


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [CONTEXT.Pipe() for _ in range(5)]  # the last one is for the new rank
        tasks = [(rank, folder, 0, pipes[rank][1], KILL_AT if rank == VICTIM else None) for rank in range(4)]
        ranks = [CONTEXT.Process(target=train, args=task, daemon=True) for task in tasks]
        for process in ranks:
            process.start()
        print(*[ours.recv() for ours, _ in pipes[:VICTIM]], sep="\n", flush=True)
        CONTEXT.Process(target=train, args=(VICTIM, folder, 1, pipes[4][1], None), daemon=True).start()
        for ours, _ in pipes[:VICTIM]:
            ours.send(1)
        weights = [ours.recv() for ours, _ in (*pipes[:VICTIM], pipes[4])]
    if any(each != weights[0] for each in weights):
        sys.exit("FAILED: the ranks have different weights")
    print(f"PASSED: rank {VICTIM} was killed at step {KILL_AT}, and all ranks ended with the same weights")
