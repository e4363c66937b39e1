"""A third replica joins a job that is running on two. Nobody loads a checkpoint, and nobody stops.

    python examples/elastic_join.py

Two ranks train. After some steps a third process wants to join. The two finish their step, and all three form
a new group, in which `sync` gives the third one the model, the optimizer and the step. The exit code is 0
only if all three end with the same weights.
"""

import multiprocessing
import os
import sys
import tempfile
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from torch import nn

import torchferry

JOIN_AT, STEPS_TOGETHER = 10, 20
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "torchferry"])


def train(rank: int, ranks: int, folder: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step, end = 0 if rank == 0 else None, None
    wants_to_join = f"{folder}/a third wants to join"
    if rank == 2:
        open(wants_to_join, "w").close()
    while step is None or step != end:
        meet, limit = f"file://{folder}/group of {ranks}", timedelta(seconds=20)
        dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=ranks, timeout=limit)
        state = {"model": model, "optim": optimizer, "step": step, "end": end}
        result = torchferry.sync(state, version=step, timeout=30)
        step, end = result.state["step"], result.state["end"]
        print(f"{ranks} ranks, rank {rank}: {result.role}, at step {step}", flush=True)
        replica = nn.parallel.DistributedDataParallel(model)  # it belongs to the group, so it is new too
        while step != end:
            optimizer.zero_grad()
            replica(torch.randn(16, 32)).square().mean().backward()
            optimizer.step()
            step += 1
            if step == JOIN_AT and rank == 0:
                pipe.send("start the third")
            # Do all ranks see the new one? They must leave the group after the same step.
            seen = torch.tensor(int(os.path.exists(wants_to_join)))
            dist.all_reduce(seen, op=dist.ReduceOp.MIN)
            if seen and ranks == 2:
                ranks, end = 3, step + STEPS_TOGETHER
                break
        dist.destroy_process_group()
    pipe.send([value.tolist() for value in model.state_dict().values()])


def start(rank: int, ranks: int, folder: str) -> Connection:
    ours, theirs = CONTEXT.Pipe()
    CONTEXT.Process(target=train, args=(rank, ranks, folder, theirs), daemon=True).start()
    return ours


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [start(rank, 2, folder) for rank in range(2)]
        pipes[0].recv()
        weights = [pipe.recv() for pipe in (*pipes, start(2, 3, folder))]
    if any(each != weights[0] for each in weights):
        sys.exit("FAILED: the ranks have different weights")
    print("PASSED: a third rank joined, and all three ended with the same weights")
