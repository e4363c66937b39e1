"""Sending: the frame first, then the plan's messages, to every peer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from torchferry.core.codec import Envelope, encode
from torchferry.core.extents import TooIntricate
from torchferry.core.plan import CHUNK_BYTES, Message, Plan, make_plan
from torchferry.core.protocol import FRAME_TAG, LENGTH_TAG, message_tag
from torchferry.core.report import Report
from torchferry.engine.phases import Phases
from torchferry.engine.window import Staging, Window
from torchferry.errors import Unsendable
from torchferry.links.base import Link
from torchferry.tensors.describe import Description, describe
from torchferry.tensors.memory import Memory, load, run_of


@dataclass(frozen=True)
class Push:
    """How a state is to be sent."""

    timeout_s: float
    max_metadata_bytes: int
    step: int | None = None
    pickle: Callable[[object], bytes] | None = None
    chunk_bytes: int = CHUNK_BYTES


def push(link: Link, peers: Sequence[int], state: object, terms: Push) -> Report:
    """Send a state to every peer. Nothing is sent before all of it is known to be sendable.

    Returns once the link has taken every byte, which does not say that the peers have them.

    Raises:
        Unsendable: something in the state can't travel; nothing was sent.
        LinkError: a peer could not be reached, or not in time.
    """
    phases = Phases("send", terms.timeout_s)
    with phases.phase("describe"):
        source = describe(state, pickle=terms.pickle)
        plan = _plan(source, terms)
        frame = encode(Envelope(source.manifest, terms.chunk_bytes, terms.step))
        if len(frame) > terms.max_metadata_bytes:
            raise Unsendable(
                f"the state's metadata is {len(frame)} bytes, more than the {terms.max_metadata_bytes} "
                "that are allowed: set max_metadata_bytes higher on both sides"
            )
    window = Window(phases)
    with phases.phase("send metadata"):
        _post_frame(link, peers, frame, window)
    with phases.phase("send tensors"):
        _post_messages(link, peers, source.memories, plan, window)
        window.finish()
    return Report(tuple(peers), plan.payload_bytes, len(frame), len(plan.messages), dict(phases.seconds))


def _plan(source: Description, terms: Push) -> Plan:
    try:
        return make_plan(source.manifest, terms.chunk_bytes)
    except TooIntricate as error:
        raise Unsendable(
            f"the state has overlapping views in a pattern too irregular to send without sending "
            f"bytes that are not theirs ({error}): clone() one of them first"
        ) from None


def _post_frame(link: Link, peers: Sequence[int], frame: bytes, window: Window) -> None:
    length = torch.tensor([len(frame)], dtype=torch.int64, device=link.device)
    data = torch.frombuffer(bytearray(frame), dtype=torch.uint8).to(link.device)
    for peer in peers:
        pending = [link.send(length, peer, LENGTH_TAG), link.send(data, peer, FRAME_TAG)]
        window.add(pending, len(frame), _nothing)


def _post_messages(
    link: Link, peers: Sequence[int], memories: Sequence[Memory], plan: Plan, window: Window
) -> None:
    staging = Staging(link.device)
    for message in plan.messages:
        window.make_room(message.nbytes)
        buffer, done = _outgoing(link, memories[message.piece.storage], message, staging)
        pending = [link.send(buffer, peer, message_tag(message.number)) for peer in peers]
        window.add(pending, message.nbytes, done)


def _outgoing(
    link: Link, memory: Memory, message: Message, staging: Staging
) -> tuple[torch.Tensor, Callable[[], None]]:
    """Give a message's bytes where they lie if the link can take them there, or staged."""
    if not message.piece.repeats and link.takes(memory.device):
        return run_of(memory, message.piece), _nothing
    buffer = staging.take(message.nbytes)
    load(memory, message.piece, buffer)
    return buffer, lambda: staging.give_back(buffer)


def _nothing() -> None:
    """What is to be done after a message that needs nothing."""
