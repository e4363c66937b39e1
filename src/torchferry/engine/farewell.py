"""The word that no more will come, in the place of what would have come next."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torchferry.core.codec import Envelope
from torchferry.core.plan import Message
from torchferry.core.protocol import FAREWELL_BYTES, Tags, farewell
from torchferry.core.seals import Seal
from torchferry.engine.window import Steps, Window
from torchferry.links.base import Link


def say_farewell(
    link: Link, peer: int, rest: Sequence[Message | Seal], envelope: Envelope, culprit: int, window: Window
) -> Steps[None]:
    """Tell a receiver, in the place of the next message that is long enough, that no more will come.

    `rest` is what it still expects. What is too short for a word is sent, in the length that is expected
    and with nothing in it, so that the receiver gets as far as the farewell.
    """
    tags = Tags(envelope.origin, envelope.serial)
    word = bytearray(farewell(envelope.nonce, culprit))
    for item in rest:
        heard = isinstance(item, Message) and item.nbytes >= FAREWELL_BYTES
        data = torch.frombuffer(word if heard else bytearray(item.nbytes), dtype=torch.uint8)
        window.add(link.send(data.to(link.device), peer, tags.of(item)), 0, _nothing)
        if heard:
            break
    yield from window.finish()


def _nothing() -> None:
    """What is to be done after it was sent."""
