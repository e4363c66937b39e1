"""What a run ran on, in words for those who read its results."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

from torchferry import __version__


def describe_machine() -> dict[str, str]:
    """The processor, cores, memory, what paces TCP, and the versions that matter. No names, no addresses."""
    return {
        "processor": _after_colon(Path("/proc/cpuinfo"), "model name") or platform.machine(),
        "cores": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
        "memory": _memory(),
        "system": f"{platform.system()} {platform.release().partition('-')[0]}",
        "TCP": _congestion_control(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "torchferry": __version__,
    }


def _congestion_control() -> str:
    """How TCP decides how fast to send. It makes a difference of two between two processes of one machine."""
    try:
        return Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    except OSError:
        return "unknown"


def _memory() -> str:
    total = _after_colon(Path("/proc/meminfo"), "MemTotal")
    return f"{int(total.split()[0]) / 2**20:.0f} GiB" if total else "unknown"


def _after_colon(file: Path, name: str) -> str | None:
    """What a file of /proc says of something; None where there is no such file, or it does not say."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), None)
