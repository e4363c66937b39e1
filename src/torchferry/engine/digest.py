"""XXH3 of bytes where they lie."""

from __future__ import annotations

import ctypes

import torch
from xxhash import xxh3_64_intdigest


def digest(buffer: torch.Tensor) -> int:
    """Hash a flat buffer. Releases the interpreter lock for all but tiny ones.

    A buffer on an accelerator is copied to the host for it.
    """
    host = buffer if buffer.device.type == "cpu" else buffer.cpu()
    nbytes = host.nbytes
    if nbytes == 0:
        return xxh3_64_intdigest(b"")
    return xxh3_64_intdigest((ctypes.c_char * nbytes).from_address(host.data_ptr()))
