"""torchft's Manager with torchferry's transports: a real lighthouse, and a replica group that is killed."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import TCPStore
from torchft.coordination import LighthouseServer
from torchft.manager import Manager
from torchft.optim import OptimizerWrapper
from torchft.process_group import ProcessGroupGloo

from tests.support.children import Child, child
from torchferry.torchft import PGTransport, Transport

ROOT = Path(__file__).parents[2]
KILL_AT, STEPS = 4, 12
TIMEOUT = timedelta(seconds=20)

pytestmark = pytest.mark.slow


class Replica:
    """A replica group of one process. BatchNorm changes its buffers in every forward pass."""

    def __init__(self, group: int, kind: str, lighthouse: str) -> None:
        self.model = nn.Sequential(
            nn.Linear(8, 600), nn.BatchNorm1d(600), nn.Linear(600, 600), nn.Linear(600, 8)
        )
        self.adam = torch.optim.Adam(self.model.parameters())
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        pg = ProcessGroupGloo(timeout=TIMEOUT)
        in_place: dict[str, Any] = (
            {"state_dict": lambda: {"user": {"default": self.state()}}} if "in place" in kind else {}
        )
        transport: Any = (
            PGTransport(pg, TIMEOUT, "cpu", **in_place) if "PG" in kind else Transport(TIMEOUT, **in_place)
        )
        self.manager = Manager(
            pg=pg,
            state_dict=self.state,
            load_state_dict=self.load,
            min_replica_size=2,
            # A receive in place on the quorum thread must not write under a forward pass.
            use_async_quorum=not in_place,
            replica_id=f"group_{group}",
            rank=0,
            world_size=1,
            store_addr="127.0.0.1",
            store_port=self.store.port,
            lighthouse_addr=lighthouse,
            checkpoint_transport=transport,
            timeout=TIMEOUT,
        )
        self.transport = transport

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optim": self.adam.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.adam.load_state_dict(state["optim"])

    def digest(self) -> str:
        """Return a digest of the weights and the moments."""
        found = hashlib.sha256()
        for parameter in self.model.parameters():
            for tensor in (parameter, self.adam.state[parameter]["exp_avg"]):
                found.update(tensor.detach().numpy().tobytes())
        return found.hexdigest()


def train(pipe: Connection, group: int, kill_at: int, kind: str, lighthouse: str) -> None:
    """Train STEPS steps; tell the weights, and whether a state came from a peer."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    replica = Replica(group, kind, lighthouse)
    manager = replica.manager
    optimizer = OptimizerWrapper(manager, replica.adam)
    while manager.current_step() < STEPS:
        optimizer.zero_grad()
        replica.model(torch.randn(16, 8)).square().mean().backward()
        # Not torchft's DistributedDataParallel: in 0.2.0, it raises if a peer dies meanwhile.
        for work in [manager.allreduce(parameter.grad) for parameter in replica.model.parameters()]:
            work.wait()
        optimizer.step()
        if manager.current_step() == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
    pipe.send((replica.digest(), replica.transport.last_report is not None))
    pipe.recv()
    manager.shutdown()


@pytest.fixture
def lighthouse() -> Iterator[str]:
    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, heartbeat_timeout_ms=1000)
    yield server.address()
    server.shutdown()


@pytest.mark.usefixtures("_fork_server")
@pytest.mark.parametrize("kind", ["Transport", "Transport, in place", "PGTransport", "PGTransport, in place"])
def test_a_killed_replica_group_is_healed_and_the_weights_are_equal(kind: str, lighthouse: str) -> None:
    with ExitStack() as stack:

        def start(group: int, kill_at: int = -1) -> Child:
            return stack.enter_context(child(train, group, kill_at, kind, lighthouse))

        survivor, victim = start(0), start(1, KILL_AT)
        assert victim.wait() == -signal.SIGKILL
        replacement = start(1)
        digest, was_healed = replacement.receive()
        assert was_healed
        assert survivor.receive()[0] == digest
        for each in (survivor, replacement):
            each.send("stop")
            assert each.wait() == 0


@pytest.mark.skipif(find_spec("parameterized") is None, reason="torchft's tests need parameterized")
@pytest.mark.parametrize("transport", ["Transport", "PGTransport"])
def test_torchfts_own_tests_of_recovery_pass(transport: str) -> None:
    environment = {**os.environ, "TRANSPORT": transport, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    options = [
        "-c",
        os.devnull,
        "-p",
        "no:cacheprovider",
        "-p",
        "tests.torchft.substitution",
        "-q",
        "-k",
        "recovery",
    ]
    command = [sys.executable, "-m", "pytest", *options, "--pyargs", "torchft.manager_integ_test"]
    found = subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, timeout=200)
    assert found.returncode == 0, found.stdout
    assert "failed" not in found.stdout
    assert "checkpoints were received with torchferry" in found.stdout
