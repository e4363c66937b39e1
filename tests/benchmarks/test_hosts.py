"""The cluster on one machine: it carries bytes at its rate, and it is always removed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks import hosts
from benchmarks.hosts import ClusterError, Host, cluster, namespaces, remove_leftovers
from tests.benchmarks.samples import environment

MIB = 2**20
SLOW_MBIT = 100
# For 4 MiB.
AT_LINE_RATE_S = 4 * MIB * 8 / (SLOW_MBIT * 1e6)
NOBODY = 65534

# Sends `size` bytes to all addresses at once.
SEND = """
import socket, sys, threading
size, *addresses = sys.argv[1:]
peers = [socket.create_connection((address, 7000), timeout=30) for address in addresses]
def send(peer):
    peer.sendall(bytes(int(size)))
    peer.shutdown(socket.SHUT_WR)
    peer.recv(1)
threads = [threading.Thread(target=send, args=(peer,)) for peer in peers]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""
RECEIVE = """
import socket, sys, time
with socket.create_server((sys.argv[1], 7000)) as server:
    print("listening", flush=True)
    peer, _ = server.accept()
    peer.settimeout(30)
    start, received = time.monotonic(), 0
    while some := peer.recv(1 << 20):
        received += len(some)
    print(received, time.monotonic() - start)
"""
GLOO = """
import os, sys, torch, torch.distributed as dist
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"tcp://{sys.argv[2]}:29500", rank=rank, world_size=2)
tensor = torch.full((1000,), float(rank))
dist.send(tensor, 1) if rank == 0 else dist.recv(tensor, 0)
print(tensor.sum().item(), flush=True)
dist.barrier()
os._exit(0)
"""
# Builds a cluster with a process in it, prints its namespaces, and waits for a signal.
BUILDER = """
import signal, subprocess, sys
from benchmarks.hosts import cluster
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))
with cluster(2) as built:
    subprocess.Popen(["ip", "netns", "exec", built[0].namespace, "sleep", "600"])
    print(*(host.namespace for host in built), flush=True)
    signal.pause()
"""


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Check that a test leaves no namespace behind."""
    others = set(namespaces())
    yield
    assert set(namespaces()) <= others


def on(host: Host, *argv: str) -> list[str]:
    """Return the command that runs `argv` on a host."""
    return ["ip", "netns", "exec", host.namespace, *argv]


def start(host: Host, script: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        on(host, sys.executable, "-c", script, *arguments),
        env={**environment(), "GLOO_SOCKET_IFNAME": host.interface},
        stdout=subprocess.PIPE,
        text=True,
    )


@contextlib.contextmanager
def builder() -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """Start a process that builds a cluster; yield it with the namespaces of its hosts."""
    process = subprocess.Popen(
        [sys.executable, "-c", BUILDER], env=environment(), stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        yield process, process.stdout.readline().split()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        remove_leftovers()


def pids_in(namespace: str) -> list[int]:
    listed = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True)
    return [int(pid) for pid in listed.stdout.split()]


def queue_of(host: Host) -> str:
    shown = ["tc", "qdisc", "show", "dev", host.interface]
    return subprocess.run(on(host, *shown), capture_output=True, text=True).stdout


def transfer_s(source: Host, targets: list[Host], size: int) -> float:
    """Measure how long all targets need to receive `size` bytes each from the source."""
    receivers = [start(target, RECEIVE, target.address) for target in targets]
    for receiver in receivers:
        assert receiver.stdout is not None
        assert receiver.stdout.readline() == "listening\n"
    sender = start(source, SEND, str(size), *(target.address for target in targets))
    outputs = [receiver.communicate(timeout=60)[0].split() for receiver in receivers]
    sender.communicate(timeout=10)
    assert [int(received) for received, _ in outputs] == [size] * len(targets)
    return max(float(seconds) for _, seconds in outputs)


def interrupt_once(monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    """Raise SIGINT in the first call of one of the module's functions."""
    original: Callable[..., object] = getattr(hosts, function)

    def interrupted(*arguments: object) -> object:
        monkeypatch.setattr(hosts, function, original)
        signal.raise_signal(signal.SIGINT)
        return original(*arguments)

    monkeypatch.setattr(hosts, function, interrupted)


@pytest.mark.usefixtures("cluster_rights")
class TestACluster:
    def test_carries_bytes_at_its_rate_and_no_faster(self) -> None:
        with cluster(2, rate_mbit=SLOW_MBIT) as built:
            there = transfer_s(built[0], built[1:], 4 * MIB)
            back = transfer_s(built[1], built[:1], 4 * MIB)
        # A busy machine may be slower. The burst, a sixteenth, may make it faster.
        assert 0.85 * AT_LINE_RATE_S < min(there, back) < 5 * AT_LINE_RATE_S

    def test_shares_a_hosts_link_among_its_receivers(self) -> None:
        with cluster(3, rate_mbit=SLOW_MBIT) as built:
            both = transfer_s(built[0], built[1:], 2 * MIB)
        assert both > 0.85 * AT_LINE_RATE_S

    def test_can_limit_what_one_host_sends(self) -> None:
        with cluster(2) as built:
            with built[0].limited(SLOW_MBIT):
                there = transfer_s(built[0], built[1:], 4 * MIB)
                assert f"rate {SLOW_MBIT}Mbit" in queue_of(built[0])
                assert "rate 1Gbit" in queue_of(built[1])
            assert "rate 1Gbit" in queue_of(built[0])
        assert there > 0.85 * AT_LINE_RATE_S

    def test_connects_gloo_ranks(self) -> None:
        with cluster(2) as built:
            ranks = [start(host, GLOO, str(rank), built[0].address) for rank, host in enumerate(built)]
            sums = [rank.communicate(timeout=90)[0].split()[-1] for rank in ranks]
        assert sums == ["0.0", "0.0"]

    def test_can_not_be_reached_from_another_cluster(self) -> None:
        with cluster(1) as one, cluster(1) as other:
            assert one[0].address == other[0].address
            assert one[0].namespace != other[0].namespace
            server = start(one[0], RECEIVE, one[0].address)
            assert server.stdout is not None
            server.stdout.readline()
            refused = subprocess.run(
                on(other[0], sys.executable, "-c", SEND, "1", other[0].address),
                capture_output=True,
                text=True,
            )
            assert "Connection refused" in refused.stderr
        server.communicate(timeout=10)


@pytest.mark.usefixtures("cluster_rights")
class TestAClusterIsRemoved:
    def test_with_its_processes(self) -> None:
        with cluster(2) as built:
            sleeper = subprocess.Popen(on(built[1], "sleep", "600"))
            assert len(namespaces()) >= 3
        assert sleeper.wait(10) == -signal.SIGKILL
        assert not {host.namespace for host in built} & set(namespaces())

    def test_after_an_exception(self) -> None:
        with pytest.raises(ZeroDivisionError), cluster(2) as built:
            _ = 1 / 0
        assert not {host.namespace for host in built} & set(namespaces())

    def test_after_ctrl_c_while_it_is_used(self) -> None:
        with pytest.raises(KeyboardInterrupt), cluster(2):
            signal.raise_signal(signal.SIGINT)

    @pytest.mark.parametrize("step", ["_limit", "_kill_processes"])
    def test_completely_after_ctrl_c_while_it_is_built_or_removed(
        self, step: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        interrupt_once(monkeypatch, step)
        with pytest.raises(KeyboardInterrupt), cluster(2):
            assert step == "_kill_processes"

    def test_after_sigterm(self) -> None:
        with builder() as (process, built):
            assert set(built) <= set(namespaces())
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 143
            assert not set(built) & set(namespaces())

    def test_by_the_next_run_if_its_builder_was_killed(self) -> None:
        with builder() as (process, built):
            process.kill()
            process.wait()
            (sleeper,) = pids_in(built[0])
            assert set(built) <= set(namespaces())
            with cluster(1):
                assert not set(built) & set(namespaces())
            assert not Path(f"/proc/{sleeper}/ns/net").exists()

    def test_but_not_while_its_builder_lives(self) -> None:
        with builder() as (_, built):
            assert remove_leftovers() == []
            assert set(built) <= set(namespaces())


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="only root can drop root's rights")
class TestAClusterIsRefused:
    def test_without_the_rights(self) -> None:
        # Imported before the rights are dropped: the user nobody may not read this checkout.
        script = (
            "import os\nfrom benchmarks import hosts\n"
            f"os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})\n"
            "try:\n    with hosts.cluster(2): print('built')\n"
            "except hosts.ClusterError as refusal: print(refusal)"
        )
        done = subprocess.run(
            [sys.executable, "-c", script], env=environment(), capture_output=True, text=True, timeout=60
        )
        assert "lacks CAP_NET_ADMIN and CAP_SYS_ADMIN: run it as root" in done.stdout
        assert f"uid {NOBODY}" in done.stdout

    @pytest.mark.parametrize("tool", ["ip", "tc"])
    def test_without_its_tools(self, tool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for other in {"ip", "tc"} - {tool}:
            (tmp_path / other).touch(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.setattr(hosts, "_SYSTEM_PATHS", str(tmp_path))
        monkeypatch.setattr(hosts, "_CAPABILITIES", {})
        with (
            pytest.raises(ClusterError, match=f"`{tool}` is not installed.* apt-get install iproute2"),
            cluster(2),
        ):
            pass

    @pytest.mark.usefixtures("cluster_rights")
    def test_by_a_kernel_without_tbf(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        tc = tmp_path / "tc"
        tc.write_text("#!/bin/sh\necho 'Error: Specified qdisc kind is unknown.' >&2\nexit 2\n")
        tc.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        with pytest.raises(ClusterError, match=r"qdisc kind is unknown.*modprobe sch_tbf"), cluster(2):
            pass
