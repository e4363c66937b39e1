"""A ring of slots in shared memory, through which one process copies bytes to another on the same machine.

The end that fills slots sends one byte, a signal, over a Unix socket for each slot that it has filled. The
other end sends one for each slot that it has copied. So both ends copy at the same time, and the bytes stay
in the CPU's cache.
"""

import ctypes
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import TypeAlias

from torchferry.links.base import Hasher
from torchferry.links.shared_memory import Mapping, SharedBlock

Wait: TypeAlias = Callable[[int], int]
"""Waits for signals of the other end, at most as many as its argument, and returns how many came."""

SLOTS = 8
MAX_SLOT_BYTES = 512 << 10
"""Larger slots do not fit into the cache of a core, and smaller ones need more signals."""
SLOT = b"\x01"
"""The signal for a slot."""


class Ring:
    """One end of a ring: it `fills` slots, or empties them. It keeps the ring's memory until it is closed."""

    def __init__(self, sock: socket.socket, memory: SharedBlock | Mapping, *, fills: bool) -> None:
        self._sock = sock
        self._memory: SharedBlock | Mapping | None = memory
        self._address = memory.address
        self._next = 0
        self._ready = SLOTS if fills else 0
        self.slot_bytes = memory.nbytes // SLOTS
        self.is_stopped = False

    def fill(self, source: int, nbytes: int, wait: Wait, hasher: Hasher | None = None) -> None:
        """Copy bytes from an address to the next slot."""
        slot = self._next_slot(wait)
        ctypes.memmove(slot, source, nbytes)
        self._signal()
        if hasher is not None:
            # Hash the copy, which is what the other end gets. The original may have changed since.
            hasher.update((ctypes.c_char * nbytes).from_address(slot))

    def empty(self, target: int, nbytes: int, wait: Wait, hasher: Hasher | None = None) -> None:
        """Copy bytes from the next slot to an address."""
        ctypes.memmove(target, self._next_slot(wait), nbytes)
        # The other end may be gone, but the slots that it has filled can still be read.
        with suppress(OSError):
            self._signal()
        if hasher is not None:
            hasher.update((ctypes.c_char * nbytes).from_address(target))

    def flush(self, wait: Wait) -> None:
        """Wait until the other end has copied every slot that was filled."""
        while self._ready < SLOTS:
            self._ready += wait(SLOTS - self._ready)

    def close(self) -> None:
        """Free the memory, even if the frames of an error refer to the ring. No other thread may use it."""
        self.is_stopped = True
        self._memory = None

    def _next_slot(self, wait: Wait) -> int:
        while not self._ready:
            self._ready += wait(SLOTS - self._ready)
        if self.is_stopped:
            raise ConnectionError("this process has closed the ring")
        address = self._address + self._next * self.slot_bytes
        self._next, self._ready = (self._next + 1) % SLOTS, self._ready - 1
        return address

    def _signal(self) -> None:
        # There is always room: at most one byte for each slot is on the way.
        self._sock.send(SLOT, socket.MSG_NOSIGNAL)
