"""What torchferry does beside moving bytes: describe, encode, decode, and put the state together again.

All of it happens at the sender, one step after the other, and nothing is sent: what a receiver would do is
done here too, so that the time of it does not depend on two processes at once. Fresh, the bytes are taken
out of messages that were packed before; in place, they are where they belong already. What was put together
is compared with the state after every take.
"""

from __future__ import annotations

import torch

from torchferry.bench.portrait import differences, portray
from torchferry.bench.systems.base import Session, Site, System
from torchferry.bench.works import METADATA
from torchferry.core.codec import Envelope, decode, encode, know
from torchferry.core.compare import compare
from torchferry.core.plan import Message, Plan, make_plan
from torchferry.tensors.assemble import assemble_fresh, assemble_in_place, prepare
from torchferry.tensors.describe import Description, describe, describe_target
from torchferry.tensors.fresh import Fresh
from torchferry.tensors.kinds import Site as Here
from torchferry.tensors.memory import gather


def _open(site: Site) -> Session:
    state = site.source if site.sends else site.case.recipe.build()
    if not site.sends:
        return Session(send=lambda: None, receive=lambda: state)
    described = describe(state)
    plan = make_plan(described.manifest)
    buffers = [_packed(described, plan, message) for message in plan.messages]
    target = describe_target(site.case.recipe.build()) if site.case.in_place else None
    built: list[object] = []

    def send() -> None:
        manifest = describe(state).manifest
        frame = encode(Envelope(manifest, plan.chunk_bytes, pack_bytes=plan.pack_bytes))
        if target is None:
            arrived = decode(frame).manifest
            prepared = prepare(arrived, Here())
            fresh = Fresh(arrived)
            for message, buffer in zip(plan.messages, buffers, strict=True):
                fresh.unpack(plan.chunks_of(message), buffer)
            built[:] = [assemble_fresh(prepared, fresh, Here())]
        else:
            arrived = decode(frame, know(target.manifest)).manifest
            prepared = prepare(arrived, Here())
            same = compare(arrived, target.manifest, strict=True)
            built[:] = [assemble_in_place(prepared, target, same, strict=True)]

    def settle() -> None:
        if wrong := differences(portray(state), portray(built.pop())):
            raise AssertionError(f"what was put together is not what was taken apart: {wrong[0]}")

    return Session(send=send, receive=lambda: None, source=state, settle=settle)


def _packed(state: Description, plan: Plan, message: Message) -> torch.Tensor:
    buffer = torch.empty(message.nbytes, dtype=torch.uint8)
    pieces = [chunk.piece for chunk in plan.chunks_of(message)]
    gather([state.memories[piece.storage] for piece in pieces], pieces, buffer)
    return buffer


SYSTEMS = (System(METADATA, "torchferry's work on metadata", "ferry", _open, wired=False, moves=False),)
