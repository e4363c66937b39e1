"""What torchferry does beside moving bytes: describe, encode, decode, and put the state together again.

All of it happens at the sender, one step after the other, and nothing is sent: what a receiver would do is
done here too, so that the time of it does not depend on two processes at once. The bytes are read out of
memory that was filled before.
"""

from __future__ import annotations

import torch

from torchferry.bench.systems.base import Session, Site, System
from torchferry.bench.works import METADATA
from torchferry.core.codec import Envelope, decode, encode
from torchferry.core.compare import compare
from torchferry.core.plan import Plan, make_plan
from torchferry.tensors.assemble import assemble_fresh, assemble_in_place, prepare
from torchferry.tensors.describe import describe, describe_target
from torchferry.tensors.fresh import Fresh
from torchferry.tensors.kinds import Site as Here


def _open(site: Site) -> Session:
    if not site.sends:
        state = site.case.recipe.build()
        return Session(send=lambda: None, receive=lambda: state)
    source = site.source
    plan = make_plan(describe(source).manifest)
    buffers = [torch.zeros(message.nbytes, dtype=torch.uint8) for message in plan.messages]
    target = describe_target(site.case.recipe.build()) if site.case.in_place else None

    def send() -> None:
        manifest = describe(source).manifest
        arrived = decode(encode(Envelope(manifest, plan.chunk_bytes, pack_bytes=plan.pack_bytes))).manifest
        prepared = prepare(arrived, Here())
        if target is not None:
            assemble_in_place(prepared, target, compare(arrived, target.manifest, strict=True), strict=True)
        else:
            assemble_fresh(prepared, _filled(Fresh(arrived), plan, buffers), Here())

    return Session(send=send, receive=lambda: None, source=source)


def _filled(fresh: Fresh, plan: Plan, buffers: list[torch.Tensor]) -> Fresh:
    for message, buffer in zip(plan.messages, buffers, strict=True):
        fresh.unpack(plan.chunks_of(message), buffer)
    return fresh


SYSTEMS = (System(METADATA, "torchferry's work on metadata", "ferry", _open, wired=False),)
