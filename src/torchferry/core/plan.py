"""The ordered messages of a transfer, derived from the manifest by one pure function.

Source and target call `make_plan` with the same manifest and the same chunk size, and get the same
messages in the same order; so nothing about the plan is sent.
"""

from __future__ import annotations

from typing import NamedTuple

from torchferry.core.extents import Extent, extents_of, split
from torchferry.core.manifest import Manifest
from torchferry.core.protocol import MAX_MESSAGES

CHUNK_BYTES = 8 << 20
"""Larger extents are cut into chunks of this size. Gloo moves 1 to 8 MiB messages faster than larger
ones, and a chunk is what staging has to hold, so it bounds memory too."""

MAX_CHUNK_BYTES = 1 << 30
"""The largest chunk that a peer may ask for: staging has to hold one."""

WINDOW_BYTES = 32 << 20
"""How much may be under way at once: enough to keep the link busy while the oldest is waited for."""


class TooManyMessages(ValueError):
    """A state that needs more messages than there are tags for."""


class Message(NamedTuple):
    """What the link carries at once: one chunk, a piece of one extent.

    `position` is where the piece starts in the extent's bytes, gaps not counted.
    """

    number: int
    extent: int
    piece: Extent
    position: int
    nbytes: int


class Plan(NamedTuple):
    """All messages of a transfer, in the order in which both ends take them."""

    extents: tuple[Extent, ...]
    messages: tuple[Message, ...]
    payload_bytes: int


def make_plan(manifest: Manifest, chunk_bytes: int = CHUNK_BYTES) -> Plan:
    """Plan the transfer of a state: each extent is one message, or several if it is large.

    Raises:
        TooIntricate: views overlap in a pattern too irregular to list.
        TooManyMessages: more than can be told apart.
    """
    extents = extents_of(manifest.tensors)
    # At least so many: known at once, where listing what a hostile manifest asks for takes seconds.
    _check_count(sum(-(-extent.nbytes // chunk_bytes) for extent in extents), chunk_bytes)
    messages: list[Message] = []
    for number, extent in enumerate(extents):
        position = 0
        for piece in split(extent, chunk_bytes):
            nbytes = piece.nbytes
            _check_count(len(messages) + 1, chunk_bytes)
            messages.append(Message(len(messages), number, piece, position, nbytes))
            position += nbytes
    return Plan(tuple(extents), tuple(messages), sum(message.nbytes for message in messages))


def _check_count(messages: int, chunk_bytes: int) -> None:
    if messages > MAX_MESSAGES:
        raise TooManyMessages(f"a state that needs more than {MAX_MESSAGES} messages of {chunk_bytes} bytes")
