"""What torchferry does beside moving bytes: describe, encode, decode, and put the state together again.

All of it happens at the sender, one step after the other, and nothing is sent: what a receiver would do is
done here too, so that the time of it does not depend on two processes at once. Fresh, the bytes are taken
out of messages that were packed before; in place, they are where they belong already, and that place was
described before, as a receiver does while it waits. What was put together is compared with the state after
every take. The first time nothing is known of the state; again, what an earlier transfer leaves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from benchmarks.portrait import differences, portray
from benchmarks.systems.base import Session, Site, System
from benchmarks.works import METADATA
from torchferry.core.codec import Envelope, decode, encode
from torchferry.core.plan import Message, Plan, make_plan
from torchferry.engine.destination import Target, destination
from torchferry.engine.recall import Recall
from torchferry.tensors.describe import Description, describe
from torchferry.tensors.kinds import Site as Here
from torchferry.tensors.memory import gather


class _Ready(NamedTuple):
    """What there is before a take: what the sender knows, and the place of the receiver."""

    sender: Recall
    receiver: Recall
    target: Target


def _open(site: Site) -> Session:
    state = site.source if site.sends else site.case.recipe.build()
    if not site.sends:
        return Session(send=lambda: None, receive=lambda: state)
    described = describe(state)
    plan = make_plan(described.manifest)
    buffers = [_packed(described, plan, message) for message in plan.messages]
    local = site.case.recipe.build() if site.case.in_place else None
    ready = _get_ready(local, Recall(), Recall())
    built: list[object] = []

    def send() -> None:
        source, known = ready.sender.know(describe(state, traces=ready.sender.traces))
        sizes = ready.sender.plan(source.manifest).sizes
        envelope = Envelope(source.manifest, sizes[0], pack_bytes=sizes[1])
        arrived = decode(encode(envelope, known), ready.target.known)
        landed = destination(
            arrived.manifest, ready.target.plan(arrived), ready.target, strict=True, extra="error"
        )
        if not landed.in_place:
            for message, buffer in zip(plan.messages, buffers, strict=True):
                landed.ground.put_alike(plan.chunks_of(message), buffer)
        built[:] = [landed.assemble()]
        ready.target.know(arrived.manifest)

    def settle() -> None:
        nonlocal ready
        recalls = (ready.sender, ready.receiver) if site.case.again else (Recall(), Recall())
        ready = _get_ready(local, *recalls)
        if wrong := differences(portray(state), portray(built.pop())):
            raise AssertionError(f"what was put together is not what was taken apart: {wrong[0]}")

    return Session(send=send, receive=lambda: None, source=state, settle=settle)


def _get_ready(local: object, sender: Recall, receiver: Recall) -> _Ready:
    place: Callable[[], object] | None = None if local is None else lambda: local
    return _Ready(sender, receiver, Target(place, Here(), receiver))


def _packed(state: Description, plan: Plan, message: Message) -> torch.Tensor:
    buffer = torch.empty(message.nbytes, dtype=torch.uint8)
    pieces = [chunk.piece for chunk in plan.chunks_of(message)]
    gather([state.memories[piece.storage] for piece in pieces], pieces, buffer)
    return buffer


SYSTEMS = (System(METADATA, "torchferry's work on metadata", "ferry", _open, wired=False, moves=False),)
