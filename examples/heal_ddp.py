"""A worker of a DDP job is killed. Its replacement catches up with `sync`, and nobody loses a step.

    python examples/heal_ddp.py

Two ranks train with AdamW. One is killed with SIGKILL in the middle. The survivor leaves the broken group,
and forms a new one with a new process: new group, `sync`, new DDP wrapper. The exit code is 0 only if both
ranks end with the bits of a second run, in which nobody is killed.
"""

import multiprocessing
import os
import signal
import sys
import tempfile
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import torchferry

STEPS, KILL_AT = 12, 6
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "torchferry"])


def train(rank: int, folder: str, generation: int, pipe: Connection, kill_at: int | None) -> None:
    torch.set_num_threads(1)  # equal sums, bit for bit, in every process
    torch.manual_seed(rank + generation)
    model = nn.Sequential(nn.Linear(32, 64), nn.Dropout(0.1), nn.Linear(64, 32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step = 0 if (rank, generation) == (0, 0) else None  # in the beginning, only rank 0 has a version
    while step != STEPS:
        meet = f"file://{folder}/{generation}"
        dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=2)
        state = {"model": model, "optim": optimizer, "rng": torchferry.RNG(), "step": step}
        result = torchferry.sync(state, version=step, timeout=30)
        step = result.state["step"]
        print(f"generation {generation}, rank {rank}: {result.role}, at step {step}", flush=True)
        replica = nn.parallel.DistributedDataParallel(model)  # it belongs to the group, so it is new too
        try:
            while step < STEPS:
                if step == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                torch.manual_seed(2 * step + rank)  # this rank's batch, and its dropout
                optimizer.zero_grad()
                replica(torch.randn(16, 32)).square().mean().backward()
                optimizer.step()
                step += 1
        except RuntimeError:  # the peer is gone, and this step was not made
            generation = pipe.recv()
        dist.destroy_process_group()
    pipe.send([value.tolist() for value in model.state_dict().values()])


def start(rank: int, folder: str, generation: int, kill_at: int | None = None) -> tuple[Connection, Any]:
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=train, args=(rank, folder, generation, theirs, kill_at), daemon=True)
    process.start()
    return ours, process


def run(kill_at: int | None) -> list[object]:
    with tempfile.TemporaryDirectory() as folder:
        (survivor, _), (pipe, victim) = start(0, folder, 0), start(1, folder, 0, kill_at)
        if kill_at is not None:
            victim.join()
            pipe, _ = start(1, folder, 1)
            survivor.send(1)
        return [survivor.recv(), pipe.recv()]


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    healed, undisturbed = run(KILL_AT), run(None)
    if any(weights != undisturbed[0] for weights in healed + undisturbed):
        sys.exit("FAILED: these are not the weights of an undisturbed run")
    print("PASSED: a rank was killed, and both ranks have the weights of an undisturbed run, bit for bit")
