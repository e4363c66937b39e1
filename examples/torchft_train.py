"""Two replica groups train with torchft. One is killed, and its replacement heals from the other by address.

    RUST_LOG=error python examples/torchft_train.py

Needs `pip install 'torchferry[torchft]'`. The lighthouse and two groups of one process each run on this machine.
"""

import multiprocessing
import os
import sys
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
from torch import nn
from torch.distributed import TCPStore
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from torchft.coordination import LighthouseServer

from torchferry.torchft import Transport

KILL_AT, STEPS = 5, 20
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "torchft"])


def train(group: int, tell: Connection) -> None:
    model = nn.Sequential(nn.Linear(64, 1024), nn.Tanh(), nn.BatchNorm1d(1024), nn.Linear(1024, 64))
    adam = torch.optim.Adam(model.parameters())
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as torchrun does
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    transport = Transport(timedelta(seconds=30))  # listens where the lighthouse can be reached
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=10)),
        state_dict=lambda: {"model": model.state_dict(), "optim": adam.state_dict()},
        load_state_dict=lambda got: (model.load_state_dict(got["model"]), adam.load_state_dict(got["optim"])),
        min_replica_size=1,
        replica_id=f"group_{group}",
        checkpoint_transport=transport,
    )
    replicated, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, adam)
    # Both groups count the same participants, so both leave the loop after the same step.
    while manager.current_step() < STEPS or manager.num_participants() < 2:
        optimizer.zero_grad()
        inputs = torch.randn(32, 64)
        nn.functional.mse_loss(replicated(inputs), inputs.roll(1, dims=1)).backward()
        optimizer.step()
        if group == 1:  # nobody reads what the survivor tells, before its end
            tell.send((manager.current_step(), str(transport.last_report or "")))
    tell.send([parameter.detach().tolist() for parameter in model.parameters()])
    manager.shutdown()


def start(group: int) -> tuple[multiprocessing.process.BaseProcess, Connection]:
    ours, theirs = CONTEXT.Pipe(duplex=False)
    (process := CONTEXT.Process(target=train, args=(group, theirs), daemon=True)).start()
    return process, ours


def main() -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, heartbeat_timeout_ms=1000)
    os.environ["TORCHFT_LIGHTHOUSE"] = lighthouse.address()
    (victim, of_victim), (_, of_survivor) = start(1), start(0)
    while of_victim.recv()[0] < KILL_AT:
        pass
    victim.kill()
    print(f"group 1 was killed after step {KILL_AT}, and is started again", flush=True)
    _, of_replacement = start(1)
    report = next(report for _, report in iter(of_replacement.recv, None) if report)
    print("its replacement was healed:", report, flush=True)
    while isinstance(weights := of_replacement.recv(), tuple):
        pass
    if weights != of_survivor.recv():
        sys.exit("FAILED: the weights differ")
    print("PASSED: both groups have equal weights")


if __name__ == "__main__":
    main()
