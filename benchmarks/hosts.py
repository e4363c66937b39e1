"""A cluster on one machine: hosts with a network of their own, and links of a given rate between them.

Each host is a network namespace with one interface, and all are plugged into one switch: a bridge, in a
namespace of its own, so that nothing of this machine's own network is touched. The rate is kept by `tbf` at
both ends of each cable.

Rules it lives by:

- What is built is found again by its name alone: `tf<pid>-<start>-<number>-<what>`, with the process that
  built it and when that process started. So two runs never meet, and what a run left that was killed with
  SIGKILL is known to be nobody's, and is removed at the next start.
- To remove a namespace is to remove all that is in it: interfaces, queues, and the processes too.
- No signal is acted upon in the middle of building or removing, but right after it.
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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

log = logging.getLogger(__name__)

GIGABIT = 1000
INTERFACE = "eth0"

# What tbf lets through at once: some 2 ms at 1 Gbit/s. With less, a timer that comes late costs rate; with
# more, a short message is not limited at all.
_BURST_BYTES = 256 * 1024
# How long a packet may wait in a queue that is full: as in a switch with some megabytes of memory.
_QUEUE_MS = 50
_MOST_HOSTS = 200
_REAP_S = 10.0
_NAME = re.compile(r"tf(\d+)-(\d+)-\d+-(?:switch|h\d+)")
_numbers = itertools.count()
# Where ip keeps them.
_NAMESPACES = Path("/run/netns")
# From linux/sched.h.
_CLONE_NEWNET = 0x40000000
# From linux/capability.h: to configure networks, and to make namespaces.
_CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}
# Not on everybody's path, and ip and tc are in there.
_SYSTEM_PATHS = "/usr/sbin:/sbin"
_DEFERRED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class ClusterRefused(Exception):
    """This machine does not let a cluster be built. Says why, and what to do; nothing is left behind."""


@dataclass(frozen=True)
class Host:
    """One host of a cluster: a namespace with an address."""

    namespace: str
    address: str
    interface: str = INTERFACE

    def command(self, argv: Sequence[str]) -> list[str]:
        """The command that runs `argv` on this host. It replaces itself, so the process is `argv`'s own."""
        return [_tool("ip"), "netns", "exec", self.namespace, *argv]

    def enter(self) -> None:
        """Move the calling thread onto this host, and with it every thread and process that it starts.

        Raises:
            OSError: there is no such host any more, or no right to enter it.
        """
        libc = ctypes.CDLL(None, use_errno=True)
        with (_NAMESPACES / self.namespace).open() as namespace:
            # os.setns is only in Python 3.12.
            if libc.setns(namespace.fileno(), _CLONE_NEWNET):
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number), self.namespace)


@contextlib.contextmanager
def cluster(count: int, *, rate_mbit: int = GIGABIT) -> Iterator[list[Host]]:
    """Build `count` hosts whose links carry `rate_mbit` Mbit/s each way, and remove them in the end.

    Every process that still runs on one of them is killed then. A cluster that an earlier process left,
    which was killed before it could remove it, is removed first.

    Raises:
        ClusterRefused: rights, tools or the kernel do not allow it.
    """
    assert 0 < count <= _MOST_HOSTS, "they share one /24"
    check_rights()
    remove_leftovers()
    run = f"tf{os.getpid()}-{_start_of(os.getpid())}-{next(_numbers)}"
    log.debug("building %s: %d hosts, %d Mbit/s", run, count, rate_mbit)
    try:
        with _undisturbed():
            hosts = _build(run, count, rate_mbit)
        yield hosts
    finally:
        with _undisturbed():
            _remove([name for name in namespaces() if name.startswith(f"{run}-")])
        log.debug("removed %s", run)


def check_rights() -> None:
    """Make sure, without changing anything, that a cluster can be built as far as that can be known.

    Raises:
        ClusterRefused: it can't.
    """
    if sys.platform != "linux":
        raise ClusterRefused("a cluster on one machine needs Linux and its network namespaces")
    held = _effective_capabilities()
    if missing := [name for name, bit in _CAPABILITIES.items() if not held >> bit & 1]:
        raise ClusterRefused(
            f"to build network namespaces takes {' and '.join(_CAPABILITIES)}, and this process (uid "
            f"{os.geteuid()}) lacks {' and '.join(missing)}: run it as root (sudo), and if that is in a "
            "container, in one that was started with --privileged"
        )
    for name in ("ip", "tc"):
        _tool(name)


def remove_leftovers() -> list[str]:
    """Remove what runs have built that are no more, and return the names of those namespaces.

    Raises:
        ClusterRefused: they can't be removed.
    """
    with _undisturbed():
        abandoned = [name for name in namespaces() if _is_abandoned(name)]
        _remove(abandoned)
    if abandoned:
        log.warning("removed what a run that was killed had left: %s", ", ".join(abandoned))
    return abandoned


def namespaces() -> list[str]:
    """List the namespaces that exist and that some run has built, this one or another."""
    try:
        found = sorted(entry.name for entry in _NAMESPACES.iterdir())
    except FileNotFoundError:
        return []
    return [name for name in found if _NAME.fullmatch(name)]


def _build(run: str, count: int, rate_mbit: int) -> list[Host]:
    switch = f"{run}-switch"
    _run("ip", "netns", "add", switch)
    _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
    _run("ip", "-n", switch, "link", "set", "bridge", "up")
    hosts = [Host(f"{run}-h{number}", f"10.0.0.{number + 1}") for number in range(count)]
    for number, host in enumerate(hosts):
        port = f"port{number}"
        _run("ip", "netns", "add", host.namespace)
        cable = ("type", "veth", "peer", "name", port, "netns", switch)
        _run("ip", "link", "add", host.interface, "netns", host.namespace, *cable)
        # Without an IPv6 address of its own, there is but one address that gloo can choose.
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
        _run("tc", "-n", namespace, "qdisc", "add", "dev", interface, "root", "tbf", *shape)
    except ClusterRefused as refusal:
        raise ClusterRefused(
            f"{refusal}. If the kernel lacks the queue that limits a rate, `modprobe sch_tbf` may load it"
        ) from None


def _remove(names: Iterable[str]) -> None:
    """Kill what runs in these namespaces, and remove them: every one that can be, if one of them can't."""
    failures = {}
    for name in names:
        try:
            _kill_all_in(name)
            _run("ip", "netns", "del", name)
        except ClusterRefused as failure:
            failures[name] = failure
    # Another run may have been removing the same leftovers, and then all is well.
    remaining = failures.keys() & set(namespaces())
    if remaining:
        raise ClusterRefused("; ".join(str(failures[name]) for name in sorted(remaining)))


def _kill_all_in(namespace: str) -> None:
    """SIGKILL every process of a namespace, until there is none: one may be starting another."""
    deadline = time.monotonic() + _REAP_S
    while time.monotonic() < deadline:
        # Zombies are in no namespace, so nobody is seen that is merely not waited for.
        listed = subprocess.run(
            [_tool("ip"), "netns", "pids", namespace], capture_output=True, text=True, process_group=0
        )
        if not (pids := [int(pid) for pid in listed.stdout.split()]):
            return
        if os.getpid() in pids:
            raise ClusterRefused(
                f"{namespace} is to be removed, and this process itself runs in it: leave it"
            )
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    log.warning("processes in %s live on after SIGKILL: %s", namespace, pids)


def _is_abandoned(name: str) -> bool:
    built_by = _NAME.fullmatch(name)
    assert built_by is not None, "it is one of namespaces()"
    pid, start = map(int, built_by.groups())
    return _start_of(pid) != start


def _start_of(pid: int) -> int | None:
    """When a living process was started, in ticks since boot: with its pid, a name that never comes back."""
    try:
        # The program's name, in parentheses, may hold anything; what follows it is regular.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])


def _effective_capabilities() -> int:
    status = Path("/proc/self/status").read_text()
    found = re.search(r"^CapEff:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return int(found[1], 16) if found else 0


def _tool(name: str) -> str:
    path = shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:{_SYSTEM_PATHS}")
    if path is None:
        raise ClusterRefused(
            f"there is no `{name}` on this machine: install iproute2 (on Debian, apt-get install iproute2)"
        )
    return path


def _run(tool: str, *arguments: str) -> None:
    # In a group of its own: Ctrl-C in a terminal goes to all of the foreground, and would cut it short.
    done = subprocess.run([_tool(tool), *arguments], capture_output=True, text=True, process_group=0)
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise ClusterRefused(f"`{tool} {' '.join(arguments)}` failed: {said}")


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Put off Ctrl-C and its kin to the end of the block. Other threads than the main one never see them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        arrived.append(number)

    before = {number: signal.signal(number, note) for number in _DEFERRED}
    try:
        yield
    finally:
        for number, handler in before.items():
            # None is a handler that is not Python's, and that Python can't put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        for arrival in dict.fromkeys(arrived):
            signal.raise_signal(arrival)
