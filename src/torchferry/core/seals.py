"""Seals: what follows messages whose digests are not in the frame.

On the wire a seal is the transfer's nonce, so that another's is never taken for it, and a row of 64-bit
numbers, little-endian: how the sender is, then the digest of each chunk. It is well, or its state has changed
under its hands, or it has given up; then the number says whose fault that is.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from msgspec import Struct

NONCE_BYTES = 16
"""How long the word is by which a transfer knows its own."""


class Seal(Struct, frozen=True, gc=False):
    """The digests of the chunks from `first` to `end`; the last also says whether the sender is well."""

    number: int
    first: int
    end: int
    last: bool

    @property
    def nbytes(self) -> int:
        """How long it is on the wire."""
        return NONCE_BYTES + 8 * (self.end - self.first + 1)


_WELL = 0
_CHANGED = 1
_GAVE_UP = 2


class Opened(NamedTuple):
    """What a seal says, and the nonce of the transfer that it belongs to."""

    nonce: bytes
    digests: tuple[int, ...]
    changed: bool
    culprit: int | None


def encode_seal(digests: Sequence[int], nonce: bytes, *, changed: bool = False) -> bytes:
    """Put digests into a seal, and whether the state has changed under the sender's hands."""
    return nonce + struct.pack(f"<{len(digests) + 1}Q", _CHANGED if changed else _WELL, *digests)


def encode_farewell(seal: Seal, nonce: bytes, culprit: int) -> bytes:
    """Say in the place of a seal that no more will come, and whose fault that is."""
    return (nonce + struct.pack("<Q", _GAVE_UP + culprit)).ljust(seal.nbytes, b"\0")


def decode_seal(data: bytes) -> Opened:
    """Take a seal apart."""
    nonce, row = data[:NONCE_BYTES], data[NONCE_BYTES:]
    flag, *digests = struct.unpack(f"<{len(row) // 8}Q", row)
    return Opened(nonce, tuple(digests), flag == _CHANGED, flag - _GAVE_UP if flag >= _GAVE_UP else None)
