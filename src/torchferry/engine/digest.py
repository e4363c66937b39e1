"""XXH3 of bytes where they lie, and the first few of them.

All of it releases the interpreter lock while it hashes anything but tiny pieces. A buffer on an accelerator
is copied to the host for it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import torch
from xxhash import xxh3_64_intdigest

from torchferry.tensors.memory import check_held


def digest(data: bytes | memoryview) -> int:
    """Hash some bytes."""
    return xxh3_64_intdigest(data)


def digests(buffer: torch.Tensor, sizes: Iterable[int]) -> list[int]:
    """Hash the pieces of a flat buffer, of the given sizes, that follow one another.

    Raises:
        StateError: its memory is gone.
    """
    host = buffer.cpu()
    whole = _view(host, host.nbytes)
    found: list[int] = []
    start = 0
    for size in sizes:
        found.append(digest(whole[start : start + size]))
        start += size
    return found


def head(buffer: torch.Tensor, nbytes: int) -> bytes:
    """Give the first bytes of a flat buffer, or all if there are fewer.

    Raises:
        StateError: its memory is gone.
    """
    # On the CPU without a slice, which would take torch longer than all the rest.
    host = buffer if buffer.is_cpu else buffer[:nbytes].cpu()
    return bytes(_view(host, min(nbytes, host.nbytes)))


def _view(host: torch.Tensor, nbytes: int) -> memoryview:
    """See the first bytes of a buffer's memory, which lives only as long as the buffer does."""
    end = int(host.storage_offset()) * host.itemsize + host.nbytes
    check_held(host.untyped_storage(), end)
    if not nbytes:
        return memoryview(b"")
    return memoryview((ctypes.c_char * nbytes).from_address(host.data_ptr()))
