"""What goes over a link in which order, how it is told apart, and how long it may take.

A push is: one int64, the length of the frame; the frame (`codec`); then the plan's messages. Each has a tag
made of who sends the state, of the transfer's serial number there and of its place in the plan, so that a
backend that honours tags can't hand it to a receive that waits for another, or to another transfer's.

Every byte is checked. Of a small state, the digests of all chunks are in the frame. A large one can't wait
for its last byte to be hashed before its first is sent, so its digests follow the messages, in seals: after
every few messages (`plan.SEAL_MESSAGES`) comes one seal, with the digests of their chunks and whether all
is well.

Who has to give up, sender or relay, puts a farewell in the place of the next message that is long enough,
or of the next seal.
"""

from __future__ import annotations

import struct

from torchferry.core.plan import Message
from torchferry.core.seals import NONCE_BYTES, Seal
from torchferry.errors import BadManifest

# Far from the small numbers that people pick for their own messages on the same group.
LENGTH_TAG = 0x54460000
FRAME_TAG = LENGTH_TAG + 1
PROBE_TAG = LENGTH_TAG + 2
_FIRST_MESSAGE_TAG = LENGTH_TAG + 16

# 29 bits are left for the rest of a tag. Messages with the same tag are taken in order, and there are never
# so many under way that this would be needed.
_NUMBERS = 1 << 11
_SERIALS = 1 << 9
_ORIGINS = 1 << 8

AHEAD_BYTES = 1 << 20
"""States up to this size are hashed before they are sent: it takes 0.1 ms, and saves a message."""

_FAREWELL = b"torchferry:ended"


class Tags:
    """The tags of one transfer.

    `origin` is the rank that sends the state. Where receivers forward, others' messages may meet on the way.
    """

    def __init__(self, origin: int, serial: int) -> None:
        slot = (origin % _ORIGINS) * _SERIALS + serial % _SERIALS
        self._first = _FIRST_MESSAGE_TAG + slot * 2 * _NUMBERS

    def of(self, item: Message | Seal) -> int:
        """Give the tag of one of the plan's messages or seals."""
        kind = _NUMBERS if isinstance(item, Seal) else 0
        return self._first + kind + item.number % _NUMBERS


def farewell(nonce: bytes, culprit: int) -> bytes:
    """Give what stands in the place of a message that will not come, and whose fault that is.

    >>> culprit_in(farewell(bytes(NONCE_BYTES), 3) + b"more", bytes(NONCE_BYTES))
    3
    """
    return _FAREWELL + nonce + struct.pack("<Q", culprit)


FAREWELL_BYTES = len(_FAREWELL) + NONCE_BYTES + 8


def culprit_in(head: bytes, nonce: bytes) -> int | None:
    """Look for a farewell at the start of a message: the rank that is to blame, None if there is none."""
    if not nonce or len(head) < FAREWELL_BYTES or not head.startswith(_FAREWELL + nonce):
        return None
    (culprit,) = struct.unpack_from("<Q", head, FAREWELL_BYTES - 8)
    return int(culprit)


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
