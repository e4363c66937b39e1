"""What a transfer costs this process, as the kernel counts it: bytes taken in by TCP, and memory at its peak.

Read from the kernel and not from the systems themselves, so that all are measured alike, and none by its own
word.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
from pathlib import Path

# Where linux/tcp.h has tcpi_bytes_received in struct tcp_info.
_RECEIVED_AT = 128
_INFO_BYTES = 256
_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
# What clear_refs takes for "the peak so far is now".
_RESET_PEAK = "5"


def received_bytes() -> dict[int, int] | None:
    """The bytes that each open TCP socket of this process has received, by inode; None if unknown."""
    if not hasattr(socket, "TCP_INFO"):
        return None
    received = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                received[status.st_ino] = _received_by(int(name))
        except (OSError, struct.error):
            continue  # closed meanwhile, or not TCP
    return received


def received_between(before: dict[int, int] | None, after: dict[int, int] | None) -> int | None:
    """What came in between two readings.

    >>> received_between({1: 100, 2: 5}, {1: 150, 3: 7})
    57
    """
    if before is None or after is None:
        return None
    return sum(count - before.get(inode, 0) for inode, count in after.items())


def reset_peak() -> int | None:
    """Begin to watch the memory; returns what is in use now. None if the kernel does not let us."""
    try:
        _CLEAR.write_text(_RESET_PEAK)
        return _status_bytes("VmRSS")
    except OSError:
        return None


def peak_since(start_bytes: int | None) -> int | None:
    """By how much the memory in use has grown, at its peak, since `reset_peak` gave `start_bytes`."""
    if start_bytes is None:
        return None
    return max(_status_bytes("VmHWM") - start_bytes, 0)


def _received_by(descriptor: int) -> int:
    with socket.socket(fileno=os.dup(descriptor)) as one:
        if one.family not in (socket.AF_INET, socket.AF_INET6):
            raise OSError("not a socket of the network")
        info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    return int(struct.unpack_from("=Q", info, _RECEIVED_AT)[0])


def _status_bytes(name: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{_STATUS} does not say {name}")
