"""Two replica groups train with torchft. One is killed, and its replacement heals from the other by address.

    RUST_LOG=error python examples/torchft_train.py

Needs `pip install 'torchferry[torchft]'`. Everything runs on this machine, each group in one process.
"""

import multiprocessing
import os
import signal
import sys
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
from torch import nn
from torch.distributed import TCPStore
from torchft import Manager, Optimizer, ProcessGroupGloo
from torchft.coordination import LighthouseServer

from torchferry.torchft import Transport

KILL_AT, STEPS = 5, 20
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "torchft"])


def train(group: int, kill_at: int, tell: Connection) -> None:
    model = nn.Sequential(nn.Linear(64, 1024), nn.Tanh(), nn.BatchNorm1d(1024), nn.Linear(1024, 64))
    adam = torch.optim.Adam(model.parameters())
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # torchrun does this, and
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    transport = Transport(timedelta(seconds=30))  # listens where the lighthouse can be reached
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=10)),
        state_dict=lambda: {"model": model.state_dict(), "optim": adam.state_dict()},
        load_state_dict=lambda got: (model.load_state_dict(got["model"]), adam.load_state_dict(got["optim"])),
        min_replica_size=2,  # with 1, the survivor would train on alone
        replica_id=f"group_{group}",
        checkpoint_transport=transport,
    )
    optimizer = Optimizer(manager, adam)
    while manager.current_step() < STEPS:
        optimizer.zero_grad()
        inputs = torch.randn(32, 64)
        nn.functional.mse_loss(model(inputs), inputs.roll(1, dims=1)).backward()
        # Not torchft's DistributedDataParallel: in 0.2.0, it raises if a peer dies meanwhile.
        for work in [manager.allreduce(parameter.grad) for parameter in model.parameters()]:
            work.wait()
        optimizer.step()
        if manager.current_step() == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
    weights = [parameter.detach().tolist() for parameter in model.parameters()]
    tell.send((weights, str(transport.last_report)))
    manager.shutdown()


def start(group: int, kill_at: int = -1) -> tuple[multiprocessing.process.BaseProcess, Connection]:
    ours, theirs = CONTEXT.Pipe(duplex=False)
    (process := CONTEXT.Process(target=train, args=(group, kill_at, theirs), daemon=True)).start()
    return process, ours


def main() -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, heartbeat_timeout_ms=1000)
    os.environ["TORCHFT_LIGHTHOUSE"] = lighthouse.address()
    (_, survivor), (victim, _) = start(0), start(1, KILL_AT)
    victim.join()
    print(f"group 1 was killed after step {KILL_AT}, and is started again", flush=True)
    _, replacement = start(1)
    (weights, _), (replaced, report) = survivor.recv(), replacement.recv()
    print("its replacement was healed:", report)
    if weights != replaced:
        sys.exit("FAILED: the weights differ")
    print(f"PASSED: both groups have equal weights after step {STEPS}")


if __name__ == "__main__":
    main()
