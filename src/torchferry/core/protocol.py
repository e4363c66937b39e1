"""What goes over a link in which order, how it is told apart, and how long it may take.

A push is: one int64, the length of the frame; the frame (`codec`); then the plan's messages. Each has a
tag of its own, made of the transfer's serial number and its place in the plan, so that a backend that
honours tags can't hand it to a receive that waits for another, or to another transfer's.

Every byte is checked. Of a small state, the digests of all messages are in the frame. A large one can't
wait for its last byte to be hashed before its first is sent, so its digests follow the messages, in seals:
after every SEAL_MESSAGES messages comes one seal, with their digests and whether all is well.

A sender that has to give up puts a farewell in the place of the next message that is long enough for it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from torchferry.errors import BadManifest

# Far from the small numbers that people pick for their own messages on the same group.
LENGTH_TAG = 0x54460000
FRAME_TAG = LENGTH_TAG + 1
PROBE_TAG = LENGTH_TAG + 2
_FIRST_MESSAGE_TAG = LENGTH_TAG + 16
_TAGS_A_TRANSFER = 1 << 18
_SERIALS = 1 << 10

SEAL_MESSAGES = 16
"""Messages between seals: often enough to find damage early, seldom enough to cost nothing."""

AHEAD_BYTES = 1 << 20
"""States up to this size are hashed before they are sent: it takes 0.1 ms, and saves a message."""

NONCE_BYTES = 16
_FAREWELL = b"torchferry:ended"


class Tags:
    """The tags of one transfer: those of its messages, and from the other end those of its seals."""

    def __init__(self, serial: int) -> None:
        self._first = _FIRST_MESSAGE_TAG + (serial % _SERIALS) * _TAGS_A_TRANSFER

    def message(self, number: int) -> int:
        """Give the tag of the plan's message number `number`."""
        return self._first + number

    def seal(self, number: int) -> int:
        """Give the tag of the plan's seal number `number`."""
        return self._first + _TAGS_A_TRANSFER - 1 - number


MAX_MESSAGES = _TAGS_A_TRANSFER - _TAGS_A_TRANSFER // SEAL_MESSAGES
"""The most messages that a plan may have: more have no tags."""


class Seal(NamedTuple):
    """What follows the messages from `first` to `end`: their digests, and whether the sender is well."""

    number: int
    first: int
    end: int

    @property
    def nbytes(self) -> int:
        """How long it is on the wire."""
        return 8 * (self.end - self.first + 1)


def seals_of(messages: int) -> list[Seal]:
    """List the seals of a plan with so many messages.

    >>> [(seal.first, seal.end) for seal in seals_of(SEAL_MESSAGES + 1)]
    [(0, 16), (16, 17)]
    """
    starts = range(0, messages, SEAL_MESSAGES)
    return [Seal(n, at, min(at + SEAL_MESSAGES, messages)) for n, at in enumerate(starts)]


def encode_seal(digests: Sequence[int], *, changed: bool = False) -> bytes:
    """Put digests into a seal, and whether the state has changed under the sender's hands."""
    return struct.pack(f"<{len(digests) + 1}Q", int(changed), *digests)


def decode_seal(data: bytes) -> tuple[tuple[int, ...], bool]:
    """Take digests out of a seal, and whether the sender says that its state has changed."""
    flag, *digests = struct.unpack(f"<{len(data) // 8}Q", data)
    return tuple(digests), bool(flag)


def farewell(nonce: bytes) -> bytes:
    """Give what a sender that gives up sends in the place of a message."""
    return _FAREWELL + nonce


FAREWELL_BYTES = len(_FAREWELL) + NONCE_BYTES


MAX_METADATA_BYTES = 256 << 20
"""The longest frame that is received by default. A hundred thousand tensors need about 6 MiB."""


def check_length(length: int, most_bytes: int) -> None:
    """Check a frame's length before any memory is set aside for it.

    Raises:
        BadManifest: it can't be the length of a frame.
    """
    if not 0 < length <= most_bytes:
        raise BadManifest(
            f"the peer announces {length} bytes of metadata; from 1 to {most_bytes} are accepted. "
            "Either it is not a torchferry transfer, or max_metadata_bytes is too small for the state"
        )
