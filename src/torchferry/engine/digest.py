"""XXH3 of bytes where they lie, and the first few of them.

All of it releases the interpreter lock while it hashes anything but tiny pieces. A buffer on an accelerator
is copied to the host for it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import torch
from xxhash import xxh3_64_intdigest


def digests(buffer: torch.Tensor, sizes: Iterable[int]) -> list[int]:
    """Hash the pieces of a flat buffer, of the given sizes, that follow one another."""
    host = buffer.cpu()
    whole = _view(host)
    found: list[int] = []
    start = 0
    for size in sizes:
        found.append(xxh3_64_intdigest(whole[start : start + size]))
        start += size
    return found


def head(buffer: torch.Tensor, nbytes: int) -> bytes:
    """Give the first bytes of a flat buffer, or all if there are fewer."""
    if buffer.is_cpu:
        # A slice would take torch longer than all the rest.
        nbytes = min(nbytes, buffer.nbytes)
        return ctypes.string_at(buffer.data_ptr(), nbytes) if nbytes else b""
    return bytes(_view(buffer[:nbytes].cpu()))


def _view(host: torch.Tensor) -> memoryview:
    """See a buffer's memory, which lives only as long as the buffer does."""
    if not host.nbytes:
        return memoryview(b"")
    return memoryview((ctypes.c_char * host.nbytes).from_address(host.data_ptr()))
