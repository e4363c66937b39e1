"""torchferry's work besides moving bytes: describe, encode, decode and rebuild a state.

All steps run on the sender, those of a receiver too, so that the time does not depend on two processes.
Nothing is sent. A fresh receiver copies the bytes from messages packed beforehand. An in-place receiver has
the right bytes already, and has described its target beforehand, as a real receiver does while it waits. With
`Case.cached`, both sides keep what an earlier transfer left; otherwise they start with nothing. The rebuilt
state is checked after every round.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from benchmarks.states import differing_paths, digest_leaves
from benchmarks.systems.session import Session, Setup, System
from benchmarks.workloads import METADATA
from torchferry.core.codec import Envelope, decode, encode
from torchferry.core.plan import Message, Plan, make_plan
from torchferry.engine.destination import Target, destination
from torchferry.engine.recall import Recall
from torchferry.tensors.describe import Description, describe
from torchferry.tensors.kinds import Site
from torchferry.tensors.memory import gather


class _Prepared(NamedTuple):
    """What exists before a round: the caches of both sides, and the receiver's described target."""

    sender: Recall
    receiver: Recall
    target: Target


def _open(setup: Setup) -> Session:
    state = setup.source if setup.sends else setup.case.state.build()
    if not setup.sends:
        return Session(send=lambda: None, receive=lambda: state)
    described = describe(state)
    plan = make_plan(described.manifest)
    buffers = [_packed(described, plan, message) for message in plan.messages]
    local = setup.case.state.build() if setup.case.in_place else None
    prepared = _prepare(local, Recall(), Recall())
    rebuilt: list[object] = []

    def send() -> None:
        source, known = prepared.sender.know(describe(state, traces=prepared.sender.traces))
        sizes = prepared.sender.plan(source.manifest).sizes
        envelope = Envelope(source.manifest, sizes[0], pack_bytes=sizes[1])
        arrived = decode(encode(envelope, known), prepared.target.known)
        landed = destination(
            arrived.manifest, prepared.target.plan(arrived), prepared.target, strict=True, extra="error"
        )
        if not landed.in_place:
            for message, buffer in zip(plan.messages, buffers, strict=True):
                landed.ground.put_alike(plan.chunks_of(message), buffer)
        rebuilt[:] = [landed.assemble()]
        prepared.target.know(arrived.manifest)

    def settle() -> None:
        nonlocal prepared
        caches = (prepared.sender, prepared.receiver) if setup.case.cached else (Recall(), Recall())
        prepared = _prepare(local, *caches)
        if wrong := differing_paths(digest_leaves(state), digest_leaves(rebuilt.pop())):
            raise AssertionError(f"the rebuilt state differs from the described state at {wrong[0]}")

    return Session(send=send, receive=lambda: None, source=state, settle=settle)


def _prepare(local: object, sender: Recall, receiver: Recall) -> _Prepared:
    place: Callable[[], object] | None = None if local is None else lambda: local
    return _Prepared(sender, receiver, Target(place, Site(), receiver))


def _packed(state: Description, plan: Plan, message: Message) -> torch.Tensor:
    buffer = torch.empty(message.nbytes, dtype=torch.uint8)
    pieces = [chunk.piece for chunk in plan.chunks_of(message)]
    gather([state.memories[piece.storage] for piece in pieces], pieces, buffer)
    return buffer


SYSTEMS = (System(METADATA, "torchferry's metadata", "torchferry", _open, wired=False, moves=False),)
