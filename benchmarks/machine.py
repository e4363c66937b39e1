"""What the kernel reports: the machine, the bytes that TCP received, and the peak of a process's memory.

Bytes and memory come from the kernel, not from the measured systems, so that all systems are measured alike.
"""

from __future__ import annotations

import os
import platform
import socket
import stat
import struct
from pathlib import Path

import torch

from torchferry import __version__

# The offset of tcpi_bytes_received in struct tcp_info (linux/tcp.h).
_BYTES_RECEIVED_OFFSET = 128
_TCP_INFO_BYTES = 256
# Written to clear_refs, it sets VmHWM to the current VmRSS.
_RESET_PEAK = "5"


def describe_machine() -> dict[str, str]:
    """Describe processor, cores, memory, TCP and versions. The result has no host names or addresses."""
    memory = _field(Path("/proc/meminfo"), "MemTotal")
    try:
        # Congestion control changes the rate between two local processes by a factor of two.
        tcp = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    except OSError:
        tcp = "unknown"
    return {
        "processor": _field(Path("/proc/cpuinfo"), "model name") or platform.machine(),
        "cores": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
        "memory": f"{int(memory.split()[0]) / 2**20:.0f} GiB" if memory else "unknown",
        "system": f"{platform.system()} {platform.release().partition('-')[0]}",
        "TCP": tcp,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "torchferry": __version__,
    }


def received_bytes() -> dict[int, int] | None:
    """Return the bytes that each open TCP socket of this process has received, by inode; None if unknown."""
    if not hasattr(socket, "TCP_INFO"):
        return None
    received = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                received[status.st_ino] = _received_by(int(name))
        except (OSError, struct.error):
            continue  # The descriptor was closed meanwhile, or is not a TCP socket.
    return received


def received_between(before: dict[int, int] | None, after: dict[int, int] | None) -> int | None:
    """Return the bytes received between two calls of `received_bytes`.

    >>> received_between({1: 100, 2: 5}, {1: 150, 3: 7})
    57
    """
    if before is None or after is None:
        return None
    return sum(count - before.get(inode, 0) for inode, count in after.items())


def reset_peak() -> int | None:
    """Reset the peak of this process's memory; return the current use, None if the kernel refuses."""
    try:
        Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
        return _status_bytes("VmRSS")
    except OSError:
        return None


def peak_since(start_bytes: int | None) -> int | None:
    """Return the peak growth of this process's memory since `reset_peak` returned `start_bytes`."""
    return None if start_bytes is None else max(_status_bytes("VmHWM") - start_bytes, 0)


def _received_by(descriptor: int) -> int:
    with socket.socket(fileno=os.dup(descriptor)) as one:
        if one.family not in (socket.AF_INET, socket.AF_INET6):
            raise OSError("not a TCP socket")
        info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    return int(struct.unpack_from("=Q", info, _BYTES_RECEIVED_OFFSET)[0])


def _status_bytes(name: str) -> int:
    value = _field(Path("/proc/self/status"), name)
    if value is None:
        raise OSError(f"/proc/self/status has no {name}")
    return int(value.split()[0]) * 1024


def _field(file: Path, name: str) -> str | None:
    """Return the value of a `name: value` line; None without the file or the line."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), None)
