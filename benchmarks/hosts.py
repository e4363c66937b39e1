"""A cluster on one machine: network namespaces as hosts, with links of a given rate between them.

Each host is a namespace with one interface. All hosts are connected to one bridge, in a namespace of its own,
so that the machine's own network does not change. `tbf` queues limit the rate at both ends of each link.

- A namespace is named `tf<pid>-<start time>-<number>-<what>`, after the process that built it. Two runs
  never use the same names, and the next run finds and removes what a killed process left.
- Removing a namespace kills its processes and removes its interfaces and queues.
- Signals are deferred while a cluster is built or removed.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

log = logging.getLogger(__name__)

GIGABIT = 1000

# tbf passes this much at once, 2 ms at 1 Gbit/s. With less, late timers reduce the rate; with more, short
# messages are not limited.
_BURST_BYTES = 256 * 1024
# How long a packet may wait in a full queue: as in a switch with some MB of memory.
_QUEUE_MS = 50
_EXIT_TIMEOUT_S = 10.0
_NAME = re.compile(r"tf(\d+)-(\d+)-\d+-(?:switch|h\d+)")
_numbers = itertools.count()
# Where `ip netns` keeps namespaces.
_NAMESPACES = Path("/run/netns")
# From linux/sched.h.
_CLONE_NEWNET = 0x40000000
# Bits from linux/capability.h.
_CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}
# ip and tc are in these folders, which a user's PATH may lack.
_SYSTEM_PATHS = "/usr/sbin:/sbin"
_DEFERRED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class ClusterError(Exception):
    """A cluster can't be built or removed. The message says why, and what to do."""


@dataclass(frozen=True)
class Host:
    """One host of a cluster."""

    namespace: str
    address: str
    interface: str = "eth0"
    rate_mbit: int = GIGABIT

    def enter(self) -> None:
        """Move the calling thread, and all threads and processes that it starts later, to this host.

        Raises:
            OSError: the namespace does not exist, or this process lacks the rights.
        """
        libc = ctypes.CDLL(None, use_errno=True)
        with (_NAMESPACES / self.namespace).open() as namespace:
            # os.setns needs Python 3.12.
            if libc.setns(namespace.fileno(), _CLONE_NEWNET):
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number), self.namespace)

    @contextlib.contextmanager
    def limited(self, rate_mbit: int) -> Iterator[None]:
        """Limit what this host sends to `rate_mbit` Mbit/s, until the block ends. What it receives is as fast
        as before.

        Raises:
            ClusterError: the limit can't be set.
        """
        _limit(self.namespace, self.interface, rate_mbit)
        try:
            yield
        finally:
            _limit(self.namespace, self.interface, self.rate_mbit)


@contextlib.contextmanager
def cluster(count: int, *, rate_mbit: int = GIGABIT) -> Iterator[list[Host]]:
    """Build `count` hosts with links of `rate_mbit` Mbit/s; kill their processes and remove them at the end.

    Raises:
        ClusterError: rights, tools or kernel features are missing.
    """
    assert 0 < count <= 200, "the hosts share one /24"
    check_rights()
    remove_leftovers()
    prefix = f"tf{os.getpid()}-{_start_time(os.getpid())}-{next(_numbers)}"
    log.debug("building %s: %d hosts, %d Mbit/s", prefix, count, rate_mbit)
    try:
        with _signals_deferred():
            hosts = _build(prefix, count, rate_mbit)
        yield hosts
    finally:
        with _signals_deferred():
            _remove([name for name in namespaces() if name.startswith(f"{prefix}-")])
        log.debug("removed %s", prefix)


def check_rights() -> None:
    """Check that this process has the rights and the tools to build a cluster.

    Raises:
        ClusterError: rights or tools are missing.
    """
    if sys.platform != "linux":
        raise ClusterError("a cluster needs the network namespaces of Linux")
    status = Path("/proc/self/status").read_text()
    found = re.search(r"^CapEff:\s*([0-9a-f]+)$", status, re.MULTILINE)
    held = int(found[1], 16) if found else 0
    if missing := [name for name, bit in _CAPABILITIES.items() if not held >> bit & 1]:
        raise ClusterError(
            f"network namespaces need {' and '.join(_CAPABILITIES)}; this process (uid {os.geteuid()}) lacks "
            f"{' and '.join(missing)}: run it as root (sudo), in a container with --privileged"
        )
    for name in ("ip", "tc"):
        _tool(name)


def remove_leftovers() -> list[str]:
    """Remove the namespaces whose builder has died, and return their names.

    Raises:
        ClusterError: a namespace can't be removed.
    """
    with _signals_deferred():
        abandoned = [name for name in namespaces() if _is_abandoned(name)]
        _remove(abandoned)
    if abandoned:
        log.warning("removed namespaces that a killed run had left: %s", ", ".join(abandoned))
    return abandoned


def namespaces() -> list[str]:
    """List the existing namespaces of all runs."""
    try:
        found = sorted(entry.name for entry in _NAMESPACES.iterdir())
    except FileNotFoundError:
        return []
    return [name for name in found if _NAME.fullmatch(name)]


def _build(prefix: str, count: int, rate_mbit: int) -> list[Host]:
    switch = f"{prefix}-switch"
    _run("ip", "netns", "add", switch)
    _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
    _run("ip", "-n", switch, "link", "set", "bridge", "up")
    hosts = [
        Host(f"{prefix}-h{number}", f"10.0.0.{number + 1}", rate_mbit=rate_mbit) for number in range(count)
    ]
    for number, host in enumerate(hosts):
        port = f"port{number}"
        _run("ip", "netns", "add", host.namespace)
        cable = ("type", "veth", "peer", "name", port, "netns", switch)
        _run("ip", "link", "add", host.interface, "netns", host.namespace, *cable)
        # Without an IPv6 address, gloo has only one address to choose.
        _run("ip", "-n", host.namespace, "link", "set", host.interface, "addrgenmode", "none")
        _run("ip", "-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", host.interface)
        _run("ip", "-n", switch, "link", "set", port, "master", "bridge", "addrgenmode", "none")
        _limit(host.namespace, host.interface, rate_mbit)
        _limit(switch, port, rate_mbit)
        _run("ip", "-n", host.namespace, "link", "set", "lo", "up")
        _run("ip", "-n", host.namespace, "link", "set", host.interface, "up")
        _run("ip", "-n", switch, "link", "set", port, "up")
    return hosts


def _limit(namespace: str, interface: str, rate_mbit: int) -> None:
    shape = ("rate", f"{rate_mbit}mbit", "burst", str(_BURST_BYTES), "latency", f"{_QUEUE_MS}ms")
    try:
        _run("tc", "-n", namespace, "qdisc", "replace", "dev", interface, "root", "tbf", *shape)
    except ClusterError as refusal:
        raise ClusterError(f"{refusal}. If the kernel has no tbf queue, try `modprobe sch_tbf`") from None


def _remove(names: Iterable[str]) -> None:
    """Kill the processes of these namespaces and remove them. A failure does not stop the others' removal."""
    failures = {}
    for name in names:
        try:
            _kill_processes(name)
            _run("ip", "netns", "del", name)
        except ClusterError as failure:
            failures[name] = failure
    # Another run may have removed the same leftovers meanwhile.
    if remaining := failures.keys() & set(namespaces()):
        raise ClusterError("; ".join(str(failures[name]) for name in sorted(remaining)))


def _kill_processes(namespace: str) -> None:
    """Kill the processes of a namespace until there are none: a process may start another meanwhile."""
    deadline = time.monotonic() + _EXIT_TIMEOUT_S
    while time.monotonic() < deadline:
        listed = subprocess.run(
            [_tool("ip"), "netns", "pids", namespace], capture_output=True, text=True, process_group=0
        )
        if not (pids := [int(pid) for pid in listed.stdout.split()]):
            return
        if os.getpid() in pids:
            raise ClusterError(f"can't remove {namespace}: this process runs in it")
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    log.warning("processes in %s survived SIGKILL for %.0f s: %s", namespace, _EXIT_TIMEOUT_S, pids)


def _is_abandoned(name: str) -> bool:
    match = _NAME.fullmatch(name)
    assert match is not None, "namespaces() returns only matching names"
    pid, start = map(int, match.groups())
    return _start_time(pid) != start


def _start_time(pid: int) -> int | None:
    """Return when a process started, in ticks since boot; None if it has died."""
    try:
        # The program's name, in parentheses, may contain spaces and parentheses.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])


def _tool(name: str) -> str:
    path = shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:{_SYSTEM_PATHS}")
    if path is None:
        raise ClusterError(f"`{name}` is not installed: install iproute2 (Debian: apt-get install iproute2)")
    return path


def _run(tool: str, *arguments: str) -> None:
    # In its own process group, so that Ctrl-C in a terminal does not interrupt it.
    done = subprocess.run([_tool(tool), *arguments], capture_output=True, text=True, process_group=0)
    if done.returncode:
        reason = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise ClusterError(f"`{tool} {' '.join(arguments)}` failed: {reason}")


@contextlib.contextmanager
def _signals_deferred() -> Iterator[None]:
    """Defer SIGINT, SIGTERM and SIGHUP to the end of the block. Only the main thread receives signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []

    def record(number: int, frame: FrameType | None) -> None:
        received.append(number)

    before = {number: signal.signal(number, record) for number in _DEFERRED}
    try:
        yield
    finally:
        for number, handler in before.items():
            # None is a handler that was not set by Python and can't be restored.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        for arrived in dict.fromkeys(received):
            signal.raise_signal(arrived)
