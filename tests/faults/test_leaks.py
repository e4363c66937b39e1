"""Transfers leave no threads, sockets, descriptors or memory behind, however they end."""

from __future__ import annotations

import ctypes
import gc
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.faults.jobs import CallbackError, new_group, unique_name, wait_for_lanes
from tests.faults.promise import promises
from tests.support.cluster import Cluster
from tests.support.sizes import QUICK
from torchferry import PGTransport
from torchferry.core.push import OFFER_FROM_BYTES
from torchferry.errors import (
    BadManifest,
    LinkBroken,
    LinkTimeout,
    StateMismatch,
    StepMismatch,
)
from torchferry.links.process_group import ProcessGroupLink

EVERYTHING = os.environ.get("FAULTS") == "all"
TRANSFERS = 200 if QUICK else 1000
FAILURES = 200 if EVERYTHING else 60
BROKEN_GROUPS = 200 if EVERYTHING else 40
GROUPS_WARM = 60 if EVERYTHING else 40
"""Groups created and broken before the first measurement. glibc adds arenas for gloo's threads until it
reaches its limit: 5 to 20 MB in total, 3.6 MB with gloo alone."""

STATE_BYTES = 256 << 10

ALLOWED_BYTES = {"allocated": 2 * STATE_BYTES, "rss": 4 << 20}
"""The allowed growth. Allocated memory may grow by the payload of two transfers after a thousand: torch 2.13
leaks 120 bytes per thread that has waited for gloo (its registry of works), with two threads per transfer,
and rank 0's store keeps 150 bytes per group. Resident memory also includes free memory that malloc keeps, and
pages that a freed block shares with a used one: about 4 kB per broken group."""


class Allocations(ctypes.Structure):
    """The result of glibc's mallinfo2."""

    _fields_ = (
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd")),
        *((name, ctypes.c_size_t) for name in ("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")),
    )


LIBC = ctypes.CDLL(None)

pytestmark = pytest.mark.skipif(not hasattr(LIBC, "mallinfo2"), reason="needs mallinfo2 of glibc 2.33")


class Resources:
    """The threads, descriptors, sockets and memory of this process.

    Memory is measured twice: the allocated bytes, and the resident bytes after malloc_trim. Free memory that
    malloc keeps varies by a few MB, so it is not counted as a leak.
    """

    def __init__(self) -> None:
        gc.collect()
        LIBC.malloc_trim(0)
        LIBC.mallinfo2.restype = Allocations
        info = LIBC.mallinfo2()
        self.allocated = info.uordblks + info.hblkhd
        self.threads = len(os.listdir("/proc/self/task"))
        links = []
        for fd in os.listdir("/proc/self/fd"):
            try:
                links.append(os.readlink(f"/proc/self/fd/{fd}"))
            except FileNotFoundError:
                # The descriptor of the listing itself is already closed.
                continue
        self.descriptors = len(links)
        self.sockets = sum(link.startswith("socket:") for link in links)
        self.rss = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def growth_since(self, before: Resources) -> dict[str, int]:
        """Return what grew beyond ALLOWED_BYTES, by name."""
        grown = {
            name: getattr(self, name) - getattr(before, name)
            for name in ("threads", "descriptors", "sockets", "allocated", "rss")
        }
        return {name: growth for name, growth in grown.items() if growth > ALLOWED_BYTES.get(name, 0)}


def lasting_growth_since(before: Resources, patience_s: float = 5.0) -> dict[str, int]:
    """Return the growth that is still there after `patience_s`."""
    limit_s = time.monotonic() + patience_s
    while (growth := Resources().growth_since(before)) and time.monotonic() < limit_s:
        time.sleep(0.05)
    return growth


MEMORY_BYTES = OFFER_FROM_BYTES
"""The size of a state that goes through memory."""


def state_of(fill: float, *, wrong: bool = False, nbytes: int = STATE_BYTES) -> dict[str, Any]:
    names = ["weight", "momentum", "other" if wrong else "variance", "bias"]
    return {name: torch.full((nbytes // 16,), fill) for name in names}


class Side:
    """One side of many transfers on one group."""

    def __init__(self, rank: int, name: str, nbytes: int) -> None:
        self.rank = rank
        self._group = new_group(rank, (0, 1), name)
        self._nbytes = nbytes
        self._target: dict[str, Any] = state_of(0.0, nbytes=nbytes)
        self._raises = False
        self._transport = PGTransport(self._group, 10.0, "cpu", self._local_state)

    def _local_state(self) -> dict[str, Any]:
        if self._raises:
            raise CallbackError("a callback failed")
        return self._target

    def transfer(self) -> None:
        if self.rank == 0:
            self._transport.send_checkpoint([1], state_of(1.0, nbytes=self._nbytes), step=1)
        else:
            self._transport.recv_checkpoint(0)

    def reject(self, number: int) -> None:
        """Reject the state for one of three reasons; the sender finishes."""
        if self.rank == 0:
            state = state_of(1.0, wrong=number % 3 == 0, nbytes=self._nbytes)
            self._transport.send_checkpoint([1], state, step=1)
            return
        self._raises = number % 3 == 1
        with pytest.raises((StateMismatch, CallbackError, StepMismatch)):
            self._transport.recv_checkpoint(0, step=7 if number % 3 == 2 else None)
        self._raises = False


def leak_on_purpose(rank: int) -> set[str]:
    """Leak one resource of each kind, and return the names of those that were detected."""
    before = Resources()
    kept = [torch.ones(8 << 20, dtype=torch.uint8), *socket.socketpair()]
    ended = threading.Event()
    threading.Thread(target=ended.wait, daemon=True).start()
    detected = set(lasting_growth_since(before, patience_s=0.1))
    ended.set()
    for end in kept[1:]:
        end.close()  # type: ignore[attr-defined]
    return detected


@promises(
    "self-test: one resource of each kind is leaked on purpose",
    "the leak checks of the next rows detect each",
)
def test_the_measurements_detect_leaks(trio: Cluster) -> None:
    detected = trio.run_each([(leak_on_purpose, ()), None, None])[0]
    assert detected == {"threads", "descriptors", "sockets", "allocated", "rss"}


def repeat(rank: int, name: str, action: str, times: int, nbytes: int) -> dict[str, int]:
    """Run an action many times, and return the growth."""
    side = Side(rank, name, nbytes)
    run: Callable[[int], None] = side.reject if action == "reject" else lambda _: side.transfer()
    for number in range(60):
        run(number)
    before = Resources()
    for number in range(times):
        run(number)
    return lasting_growth_since(before)


BY_GROUP_AND_MEMORY = pytest.mark.parametrize(
    "nbytes", [STATE_BYTES, MEMORY_BYTES], ids=["by_group", "by_memory"]
)


@promises("1,000 transfers", "threads, sockets, descriptors and memory do not grow")
@BY_GROUP_AND_MEMORY
def test_many_transfers_leak_nothing(nbytes: int, trio: Cluster) -> None:
    job = (repeat, (unique_name(), "transfer", TRANSFERS, nbytes))
    assert trio.run_each([job, job, None]) == [{}, {}, None]


@promises(
    "200 transfers that the receiver rejects: mismatch, wrong step, its `state_dict` function raises",
    "threads, sockets, descriptors and memory do not grow, on both sides",
)
@BY_GROUP_AND_MEMORY
def test_rejected_transfers_leak_nothing(nbytes: int, trio: Cluster) -> None:
    job = (repeat, (unique_name(), "reject", FAILURES, nbytes))
    assert trio.run_each([job, job, None]) == [{}, {}, None]


def break_a_group(rank: int, name: str, failure: str) -> None:
    """Create a group and break it with a failing transfer; keep no reference to either."""
    group = new_group(rank, (0, 1), name)
    timeout_s = 0.1 if failure == "late" and rank == 0 else 10.0
    transport = PGTransport(group, timeout_s, "cpu", lambda: state_of(0.0))
    if failure == "garbage" and rank == 0:
        send = ProcessGroupLink.send

        def send_zeros(link: ProcessGroupLink, buffer: torch.Tensor, peer: int, tag: int) -> Any:
            damaged = torch.zeros_like(buffer) if buffer.dtype is torch.uint8 else buffer
            return send(link, damaged, peer, tag)

        ProcessGroupLink.send = send_zeros  # type: ignore[method-assign, assignment]
        try:
            with pytest.raises(LinkBroken):
                transport.send_checkpoint([1], state_of(1.0))
        finally:
            ProcessGroupLink.send = send  # type: ignore[method-assign]
    elif failure == "garbage":
        with pytest.raises(BadManifest):
            transport.recv_checkpoint(0)
    elif rank == 0:
        # Both ranks wait for the other to send; the deadline of this rank passes first.
        with pytest.raises(LinkTimeout):
            transport.recv_checkpoint(1)
    else:
        with pytest.raises(LinkBroken):
            transport.recv_checkpoint(0)


def break_many_groups(rank: int, name: str, times: int) -> dict[str, int]:
    """Break many groups, and return the growth."""
    for number in range(GROUPS_WARM):
        break_a_group(rank, f"{name}/warm/{number}", "late" if number % 2 else "garbage")
    assert wait_for_lanes(5.0) is not None
    before = Resources()
    for number in range(times):
        break_a_group(rank, f"{name}/{number}", "late" if number % 2 else "garbage")
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("torchferry")] == []
    return lasting_growth_since(before)


@promises(
    "200 transfers that break their group: bad metadata, a passed deadline",
    "threads, sockets, descriptors and memory do not grow once the group is deleted",
)
@pytest.mark.slow
def test_broken_groups_leak_nothing(trio: Cluster) -> None:
    job = (break_many_groups, (unique_name(), BROKEN_GROUPS))
    assert trio.run_each([job, job, None], timeout_s=180) == [{}, {}, None]
