"""The word that no more will come, in the place of what would have come next."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torchferry.core.codec import Envelope
from torchferry.core.plan import Message
from torchferry.core.protocol import FAREWELL_BYTES, Tags, farewell
from torchferry.core.seals import Seal, encode_farewell
from torchferry.engine.window import Steps, Window
from torchferry.links.base import Link


def say_farewell(
    link: Link, peer: int, rest: Sequence[Message | Seal], envelope: Envelope, culprit: int, window: Window
) -> Steps[bool]:
    """Tell a receiver, in the place of what it expects next, that no more will come; say whether it was told.

    `rest` is what it still expects. What is too short for the word is sent, in the length that is expected
    and with nothing in it, so that the receiver gets as far as the word; but not if there is no place for
    it at all, for then that would pass for the state.
    """
    place = next((place for place, item in enumerate(rest) if _has_room(item)), None)
    if place is None or not link.sends_short:
        return False
    tags = Tags(envelope.origin, envelope.serial)
    for item in rest[:place]:
        window.add(link.send(_bytes(bytes(item.nbytes), link), peer, tags.of(item)), 0)
    last = rest[place]
    nonce = envelope.nonce
    word = encode_farewell(last, nonce, culprit) if isinstance(last, Seal) else farewell(nonce, culprit)
    window.add(link.send(_bytes(word, link), peer, tags.of(last)), 0)
    yield from window.finish()
    return True


def _has_room(item: Message | Seal) -> bool:
    return isinstance(item, Seal) or item.nbytes >= FAREWELL_BYTES


def _bytes(data: bytes, link: Link) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(link.device)
