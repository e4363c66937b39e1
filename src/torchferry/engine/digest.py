"""XXH3 digests of byte buffers. xxhash releases the GIL while it hashes."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import torch
from xxhash import xxh3_64_intdigest as digest

from torchferry.tensors.memory import check_held

__all__ = ["digest", "digests", "first_bytes"]


def digests(buffer: torch.Tensor, sizes: Iterable[int]) -> list[int]:
    """Return the digests of consecutive pieces of a flat buffer, given their sizes.

    Raises:
        StateError: the memory was freed.
    """
    host = buffer.cpu()
    view = _view(host, host.nbytes)
    found: list[int] = []
    start = 0
    for size in sizes:
        found.append(digest(view[start : start + size]))
        start += size
    return found


def first_bytes(buffer: torch.Tensor, nbytes: int) -> bytes:
    """Return the first bytes of a flat buffer, or all of them if it is shorter.

    Raises:
        StateError: the memory was freed.
    """
    host = buffer if buffer.is_cpu else buffer[:nbytes].cpu()
    return bytes(_view(host, min(nbytes, host.nbytes)))


def _view(host: torch.Tensor, nbytes: int) -> memoryview:
    """View the first bytes of a CPU buffer. The caller must keep the buffer alive."""
    check_held(host.untyped_storage(), int(host.storage_offset()) * host.itemsize + host.nbytes)
    return memoryview((ctypes.c_char * nbytes).from_address(host.data_ptr()) if nbytes else b"")
