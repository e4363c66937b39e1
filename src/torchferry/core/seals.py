"""Seals: what follows messages whose digests are not in the frame.

On the wire a seal is a row of 64-bit numbers, little-endian: whether the state has changed under the sender's
hands, then the digest of each chunk.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from msgspec import Struct


class Seal(Struct, frozen=True, gc=False):
    """The digests of the chunks from `first` to `end`; the last also says whether the sender is well."""

    number: int
    first: int
    end: int
    last: bool

    @property
    def nbytes(self) -> int:
        """How long it is on the wire."""
        return 8 * (self.end - self.first + 1)


def encode_seal(digests: Sequence[int], *, changed: bool = False) -> bytes:
    """Put digests into a seal, and whether the state has changed under the sender's hands."""
    return struct.pack(f"<{len(digests) + 1}Q", int(changed), *digests)


def decode_seal(data: bytes) -> tuple[tuple[int, ...], bool]:
    """Take digests out of a seal, and whether the sender says that its state has changed."""
    flag, *digests = struct.unpack(f"<{len(data) // 8}Q", data)
    return tuple(digests), bool(flag)
