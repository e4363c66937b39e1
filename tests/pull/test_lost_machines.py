"""Machines that vanish from the network: packets to them are lost, and no one says so.

Hosts are network namespaces. A host is cut off in the middle of a fetch or a sync.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from benchmarks import hosts

MIB = 1 << 20

START = """
import sys, time
import torch, torchferry
from torchferry.links import sockets
sockets.LOST_S, sockets.SERVER_LOST_S = 2, 4
torch.set_num_threads(1)
arguments = sys.argv[1:]

def say(*what):
    print(*what, flush=True)

def state(nbytes):
    return {"w": torch.arange(nbytes // 8)}

def show(error):
    say(type(error).__name__, str(error).replace("\\n", " "))
"""

SOURCE = """
source = torchferry.serve(state(int(arguments[1])), 1, host=arguments[0])
say(source.address)
sys.stdin.readline()
while any(reader.state == "reading" for reader in source.status().readers):
    time.sleep(0.1)
say(*sorted(reader.state for reader in source.status().readers))
"""

RECEIVER = """
address, nbytes, said = arguments[0], int(arguments[1]), []
local = {"w": torch.zeros(nbytes // 8, dtype=torch.int64)}
def note(event):
    for what, least in ("begins", 1), ("half", nbytes // 2):
        if event.bytes_moved >= least and what not in said:
            said.append(what)
            say(what)
try:
    torchferry.fetch(address, local, reshare=True, timeout=60, on_progress=note)
    say("exact" if torch.equal(local["w"], state(nbytes)["w"]) else "wrong")
except torchferry.FerryError as error:
    show(error)
sys.stdin.readline()
"""

RANK = """
import torch.distributed as dist
from torchferry.links.http_client import HttpConnection
rank, coordinator = int(arguments[0]), arguments[1]
dist.init_process_group("gloo", init_method=f"tcp://{coordinator}:29555", rank=rank, world_size=3)
say("ready")
sys.stdin.readline()
read_head = HttpConnection.read_head
def note_and_read(self):
    HttpConnection.read_head = read_head
    if rank == 2:
        say("waits for an answer")
    return read_head(self)
HttpConnection.read_head = note_and_read
local = {"w": state(MIB)["w"] if rank == 0 else torch.zeros(MIB // 8, dtype=torch.int64)}
try:
    result = torchferry.sync(local, version=5 if rank == 0 else None, timeout=60)
    say("exact" if torch.equal(local["w"], state(MIB)["w"]) else "wrong", *result.failed)
except torchferry.FerryError as error:
    show(error)
sys.stdin.readline()
""".replace("MIB", str(MIB))


@dataclass
class Network:
    """Hosts that can be cut off. `start` runs Python code on one of them."""

    machines: list[hosts.Host]
    stack: contextlib.ExitStack

    def start(self, number: int, code: str, *arguments: object) -> Process:
        child = subprocess.Popen(
            [sys.executable, "-c", START + code, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "eth0"},
            preexec_fn=self.machines[number].enter,
        )
        self.stack.enter_context(child)
        self.stack.callback(child.kill)
        return Process(child)

    def cut_off(self, number: int) -> None:
        """Unplug a host from the switch. Both ends of the cable stay up, and nobody notices."""
        switch = self.machines[number].namespace.rpartition("-")[0] + "-switch"
        _ip("-n", switch, "link", "set", f"port{number}", "nomaster")


@dataclass
class Process:
    """A process on a host, which reads and writes lines."""

    child: subprocess.Popen[str]

    def hear(self) -> str:
        assert self.child.stdout is not None
        return self.child.stdout.readline().strip()

    def go_on(self) -> None:
        assert self.child.stdin is not None
        self.child.stdin.write("\n")
        self.child.stdin.flush()


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


@contextlib.contextmanager
def network(count: int, rate_mbit: int) -> Iterator[Network]:
    try:
        hosts.check_rights()
    except hosts.ClusterError as error:
        pytest.skip(str(error))
    with hosts.cluster(count, rate_mbit=rate_mbit) as machines, contextlib.ExitStack() as stack:
        # Fixed addresses, as behind a router: otherwise the kernel soon says that there is no route.
        links = [_ip("-n", host.namespace, "-br", "link", "show", "eth0").split()[2] for host in machines]
        for host in machines:
            for other, link in zip(machines, links, strict=True):
                if other is not host:
                    entry = (other.address, "lladdr", link, "dev", "eth0", "nud", "permanent")
                    _ip("-n", host.namespace, "neigh", "replace", *entry)
        yield Network(machines, stack)


@pytest.mark.slow
def test_a_fetch_and_its_source_notice_that_the_other_machine_vanished() -> None:
    with network(2, rate_mbit=200) as net:
        source = net.start(0, SOURCE, net.machines[0].address, 256 * MIB)
        receiver = net.start(1, RECEIVER, source.hear(), 256 * MIB)
        assert [receiver.hear(), receiver.hear()] == ["begins", "half"]
        net.cut_off(0)
        began_s = time.monotonic()
        source.go_on()
        error = receiver.hear()
        assert error.startswith("TornAndBroken")
        assert "its machine has not answered for 2 s: it is down, or the network is" in error
        assert source.hear() == "lost"
        assert time.monotonic() - began_s < 12.0


def test_receivers_go_on_when_the_machine_of_one_that_they_depend_on_vanishes() -> None:
    """The first serves the second, and the second the third. The second has a lane to the first only."""
    with network(4, rate_mbit=200) as net:
        source = net.start(0, SOURCE, net.machines[0].address, 64 * MIB)
        address, receivers = source.hear(), []
        for number in (1, 2, 3):
            receivers.append(net.start(number, RECEIVER, address, 64 * MIB))
            assert receivers[-1].hear() == "begins"
        assert receivers[0].hear() == "half"
        net.cut_off(1)
        began_s = time.monotonic()
        for receiver in receivers[1:]:
            assert [receiver.hear(), receiver.hear()] == ["half", "exact"]
        # The whole state takes 2.8 s over one link.
        assert time.monotonic() - began_s < 8.0


@pytest.mark.slow
def test_a_sync_goes_on_without_a_rank_whose_machine_vanished_before_it_was_answered() -> None:
    with network(3, rate_mbit=1000) as net:
        ranks = [net.start(number, RANK, number, net.machines[0].address) for number in range(3)]
        assert [rank.hear() for rank in ranks] == ["ready"] * 3
        ranks[0].go_on()
        ranks[2].go_on()
        assert ranks[2].hear() == "waits for an answer"  # rank 1 has not called yet
        net.cut_off(2)
        ranks[1].go_on()
        began_s = time.monotonic()
        assert ranks[0].hear() == ranks[1].hear() == "exact 2"
        assert time.monotonic() - began_s < 15.0
