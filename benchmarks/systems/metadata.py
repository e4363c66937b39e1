"""torchferry's work besides moving bytes: describe, encode, decode and rebuild a state.

All steps run on the sender, those of a receiver too, so that the time does not depend on two processes.
Nothing is sent. A fresh receiver copies the bytes from messages packed beforehand. An in-place receiver has
the right bytes already, and has described its target beforehand, as a real receiver does while it waits. With
`Case.cached`, both sides keep what an earlier transfer left; otherwise they start with nothing. The rebuilt
state is checked after every round.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from benchmarks.states import differing_paths, digest_leaves
from benchmarks.systems.session import Session, Setup, System
from benchmarks.workloads import METADATA
from torchferry.core.codec import Frame, encode
from torchferry.core.plan import Chunk, make_plan
from torchferry.engine import metadata
from torchferry.engine.sink import target_in_new_memory, target_in_place
from torchferry.engine.workspace import Cache
from torchferry.tensors.describe import Description, describe, describe_target
from torchferry.tensors.kinds import RebuildContext
from torchferry.tensors.memory import gather


def _open(setup: Setup) -> Session:
    state = setup.source if setup.sends else setup.case.state.build()
    if not setup.sends:
        return Session(send=lambda: None, receive=lambda: state)
    described = describe(state)
    plan = make_plan(described.manifest)
    buffers = [_packed(described, chunk) for chunk in plan.chunks]
    context = RebuildContext()
    sender, receiver = Cache(), Cache()
    local: Description | None = None
    local_state = setup.case.state.build() if setup.case.in_place else None
    rebuilt: list[object] = []

    def describe_local() -> None:
        nonlocal local
        if local_state is not None:
            local = describe_target(local_state)
            local = replace(local, manifest=metadata.encode(local.manifest, receiver).manifest)

    def send() -> None:
        encoded = metadata.encode(describe(state).manifest, sender)
        sent = metadata.plan(encoded, sender)
        data = encode(Frame(encoded.manifest, sent.chunk_bytes, pack_bytes=sent.pack_bytes), encoded)
        frame, incoming = metadata.decode(data, receiver)
        sizes = frame.chunk_bytes, frame.pack_bytes
        planned = metadata.plan_incoming(incoming, receiver, *sizes, frame.digests)
        if local is None:
            target = target_in_new_memory(incoming, planned, context, receiver)
            for chunk, buffer in zip(plan.chunks, buffers, strict=True):
                target.sink.write(chunk, buffer)
        else:
            target = target_in_place(incoming, planned, local, context, receiver, strict=True, extra="error")
        rebuilt[:] = [target.assemble()]

    def settle() -> None:
        nonlocal sender, receiver
        if not setup.case.cached:
            sender, receiver = Cache(), Cache()
        describe_local()
        if wrong := differing_paths(digest_leaves(state), digest_leaves(rebuilt.pop())):
            raise AssertionError(f"the rebuilt state differs from the described state at {wrong[0]}")

    describe_local()
    return Session(send=send, receive=lambda: None, source=state, settle=settle)


def _packed(state: Description, chunk: Chunk) -> torch.Tensor:
    buffer = torch.empty(chunk.nbytes, dtype=torch.uint8)
    gather([state.memories[piece.storage] for piece in chunk.pieces], chunk.pieces, buffer)
    return buffer


SYSTEMS = (System(METADATA, "torchferry's metadata", "torchferry", _open, wired=False, moves=False),)
