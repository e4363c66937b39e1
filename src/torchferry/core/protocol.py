"""What goes over a link in which order, and how long it may take.

A push is: one int64, the length of the frame; the frame (`codec`); then the plan's messages. Each has a
tag of its own, so that a backend that honours tags can't hand one to a receive that waits for another.
"""

from __future__ import annotations

from torchferry.errors import BadManifest, LinkTimeout

# Far from the small numbers that people pick for their own messages on the same group.
LENGTH_TAG = 0x54460000
FRAME_TAG = LENGTH_TAG + 1
FIRST_MESSAGE_TAG = LENGTH_TAG + 16

MAX_METADATA_BYTES = 256 << 20
"""The longest frame that is received by default. A hundred thousand tensors need about 6 MiB."""


def message_tag(index: int) -> int:
    """Give the tag of the plan's message number `index`."""
    return FIRST_MESSAGE_TAG + index


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


class Deadline:
    """One point in time that every wait of a transfer obeys. The clock comes in as an argument."""

    def __init__(self, now_s: float, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._end_s = now_s + timeout_s

    def left_s(self, now_s: float) -> float:
        """Say how much time is left.

        Raises:
            LinkTimeout: none is.
        """
        left = self._end_s - now_s
        if left <= 0:
            raise LinkTimeout(f"the transfer did not finish within its {self.timeout_s:g} s")
        return left
