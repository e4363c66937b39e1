"""A process that is in no process group takes the newest state of a running job, by its address.

    python examples/join_from_outside.py

Two ranks train over gloo, and publish every step. This process is not a rank: it gets their addresses, and
nothing else. It fetches the model twice while the ranks train, from the rank that is ahead or from both, and
checks that its copy has exactly the loss that the ranks measured. The process group is not rebuilt.
"""

import multiprocessing
import os
import sys
import tempfile
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from torch import nn

import torchferry

RANKS, STEPS = 2, 30
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "torchferry"])


def new_model(seed: int) -> nn.Module:
    torch.set_num_threads(1)  # equal sums, bit for bit, in every process
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 64))


def loss_of(model: nn.Module, seed: int) -> torch.Tensor:
    inputs = torch.randn(256, 64, generator=torch.Generator().manual_seed(seed))
    return nn.functional.mse_loss(model(inputs), inputs.roll(1, dims=1))


def train(rank: int, folder: str, announce: Connection) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    model = new_model(seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torchferry.Source() as source:
        announce.send(source.address)  # or put it in a store, a file, an environment variable
        for step in range(1, STEPS + 1):
            optimizer.zero_grad()
            loss_of(model, step * RANKS + rank).backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
            source.publish({"model": model.state_dict(), "loss": loss_of(model, 0).item()}, version=step)
        if rank == 0:
            source.wait(STEPS, receivers=1)  # until the outsider has confirmed the last step
    dist.destroy_process_group()


def main() -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    model = new_model(seed=1)
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = CONTEXT.Pipe()
        ranks = [CONTEXT.Process(target=train, args=(i, folder, theirs), daemon=True) for i in range(RANKS)]
        for rank in ranks:
            rank.start()
        addresses = [ours.recv() for _ in ranks]
        for wanted in (STEPS // 3, STEPS):
            state = {"model": model.state_dict(), "loss": None}
            got = torchferry.fetch(addresses, into=state, newer_than=wanted - 1, timeout=30)
            measured, own = got.state["loss"], loss_of(model, 0).item()
            print(f"step {got.version}: the loss is {measured:.6f} at the ranks, {own:.6f} here", flush=True)
            if own != measured:
                sys.exit("FAILED: the fetched model is not that of the ranks")
        for rank in ranks:
            rank.join()
    if any(rank.exitcode for rank in ranks):
        sys.exit("FAILED: a rank ended with an error")
    print(f"PASSED: both copies are exact, and {RANKS} ranks trained {STEPS} steps in one process group")


if __name__ == "__main__":
    main()
