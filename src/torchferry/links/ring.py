"""A ring of slots in shared memory, through which one process copies bytes to another on the same machine.

The end that fills slots sends one byte, a signal, over a Unix socket for each slot that it has filled. The
other end sends one for each slot that it has copied. So both ends copy at the same time, and the bytes stay
in the CPU's cache.
"""

import ctypes
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TypeAlias

from torchferry.links.base import Hasher
from torchferry.links.shared_memory import Mapping, SharedBlock, map_received, populate, sealed_bytes

Wait: TypeAlias = Callable[[int], int]
"""Waits for signals of the other end, at most as many as its argument, and returns how many came."""

Find: TypeAlias = Callable[[], int]
"""Returns the address of the bytes to copy. It is called before each slot, and may raise."""

SLOTS = 8
MAX_SLOT_BYTES = 512 << 10
"""Larger slots do not fit into the cache of a core, and smaller ones need more signals."""
SLOT = b"\x01"
"""The signal for a slot."""


class Ring:
    """One end of a ring. It fills slots if it has created their memory, which it keeps until it is closed."""

    def __init__(self, sock: socket.socket, memory: SharedBlock | Mapping, wait: Wait) -> None:
        self.slot_bytes = memory.nbytes // SLOTS
        self.is_stopped = False
        self._sock, self._wait = sock, wait
        self._memory: SharedBlock | Mapping | None = memory
        self._address = memory.address
        self._next = 0
        self._ready = SLOTS if isinstance(memory, SharedBlock) else 0

    @property
    def descriptor(self) -> int:
        """The descriptor of memory that this end has created."""
        assert isinstance(self._memory, SharedBlock), "only one end creates the memory"
        return self._memory.descriptor

    def fill(self, find: Find, nbytes: int, hasher: Hasher | None = None) -> None:
        """Copy bytes to the next slots."""
        for slot, start, count in self._slots(nbytes):
            ctypes.memmove(slot, find() + start, count)
            self._signal()
            if hasher is not None:
                # Hash the copy, which is what the other end gets. The original may have changed since.
                hasher.update((ctypes.c_char * count).from_address(slot))

    def empty(self, find: Find, nbytes: int, hasher: Hasher | None = None) -> None:
        """Copy bytes from the next slots. It must be as many as the other end has filled in one call."""
        for slot, start, count in self._slots(nbytes):
            target = find() + start
            ctypes.memmove(target, slot, count)
            # The other end may be gone, but the slots that it has filled can still be read.
            with suppress(OSError):
                self._signal()
            if hasher is not None:
                hasher.update((ctypes.c_char * count).from_address(target))

    def flush(self) -> None:
        """Wait until the other end has copied every slot that was filled."""
        while self._ready < SLOTS:
            self._ready += self._wait(SLOTS - self._ready)

    def close(self) -> None:
        """Free the memory, even if the frames of an error refer to the ring. No other thread may use it."""
        self.is_stopped = True
        self._memory = None

    def _slots(self, nbytes: int) -> Iterator[tuple[int, int, int]]:
        """Yield the address of each slot for these bytes, the first of its bytes, and how many they are."""
        for start in range(0, nbytes, self.slot_bytes):
            while not self._ready:
                self._ready += self._wait(SLOTS - self._ready)
            if self.is_stopped:
                raise ConnectionError("this process has closed the ring")
            slot = self._address + self._next * self.slot_bytes
            self._next, self._ready = (self._next + 1) % SLOTS, self._ready - 1
            yield slot, start, min(nbytes - start, self.slot_bytes)

    def _signal(self) -> None:
        # There is always room: at most one byte for each slot is on the way.
        self._sock.send(SLOT, socket.MSG_NOSIGNAL)


def address_of(view: memoryview) -> Find:
    """Return what finds the bytes of a view, which the caller keeps alive."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(view))
    return lambda: address


def create_ring(sock: socket.socket, nbytes: int, wait: Wait) -> Ring:
    """Create a ring whose slots this end fills; raises OSError if there is no memory for it."""
    memory = SharedBlock(nbytes)
    populate(memory.address, nbytes, writable=True)
    return Ring(sock, memory, wait)


def map_ring(sock: socket.socket, descriptor: int, wait: Wait) -> Ring:
    """Map the ring that the other end fills; raises OSError if that fails, or it is not sealed."""
    # All of it is allocated when it is mapped.
    if not SLOTS <= (nbytes := sealed_bytes(descriptor)) <= SLOTS * MAX_SLOT_BYTES:
        raise OSError(f"the peer's ring has {nbytes} bytes")
    memory = map_received(descriptor)
    populate(memory.address, nbytes, writable=False)
    return Ring(sock, memory, wait)
