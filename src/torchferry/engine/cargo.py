"""A state made ready for sending: described, planned, its frame encoded, before anything is sent."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from torchferry.core.codec import Envelope, encode
from torchferry.core.extents import TooIntricate
from torchferry.core.plan import CHUNK_BYTES, WINDOW_BYTES, Message, Plan, TooManyMessages, make_plan
from torchferry.core.protocol import AHEAD_BYTES, NONCE_BYTES
from torchferry.core.torn import paths_of
from torchferry.engine.digest import digest
from torchferry.engine.group import Group
from torchferry.engine.lanes import Runner
from torchferry.engine.threads import ThreadRunner
from torchferry.engine.window import Staging
from torchferry.errors import Unsendable
from torchferry.links.base import Link
from torchferry.tensors.describe import Description, describe
from torchferry.tensors.memory import load, run_of


@dataclass(frozen=True)
class Push:
    """How a state is to be sent."""

    timeout_s: float
    max_metadata_bytes: int
    step: int | None = None
    pickle: Callable[[object], bytes] | None = None
    chunk_bytes: int = CHUNK_BYTES
    window_bytes: int = WINDOW_BYTES
    ahead_bytes: int = AHEAD_BYTES
    stall_s: float | None = None
    verify: bool = True
    runner: Callable[[], Runner] = ThreadRunner


@dataclass
class Cargo:
    """A state made ready for sending, shared by the lanes to all its receivers."""

    source: Description
    plan: Plan
    envelope: Envelope
    frame: bytes
    verify: bool
    window_bytes: int
    digests: list[int | None]

    def outgoing(self, link: Link, message: Message, staging: Staging) -> tuple[torch.Tensor, bool]:
        """Give a message's bytes, where they lie if the link can take them there, and whether staged."""
        memory = self.source.memories[message.piece.storage]
        staged = bool(message.piece.repeats) or not link.takes(memory.device)
        if staged:
            buffer = staging.take(message.nbytes)
            load(memory, message.piece, buffer)
        else:
            buffer = run_of(memory, message.piece)
        if self.verify and self.digests[message.number] is None:
            self.digests[message.number] = digest(buffer)
        return buffer, staged

    def has_changed(self) -> bool:
        """Say whether torch has written to the state since it was described."""
        return bool(self.source.changed_tensors())

    def changed_paths(self) -> list[str]:
        """Name the leaves that were changed since the state was described, as far as torch tells."""
        changed = self.source.changed_tensors()
        if not changed:
            return []
        extents = {
            number
            for number, extent in enumerate(self.plan.extents)
            if extent.storage in {self.source.manifest.tensors[n].storage for n in changed}
        }
        return paths_of(self.source.manifest, self.plan.extents, extents)


def load_cargo(link: Link, state: object, terms: Push, group: Group, lanes: int) -> Cargo:
    """Describe a state, plan its transfer and encode its frame: all that can be wrong with it.

    Raises:
        Unsendable: something in the state can't travel.
    """
    source = describe(state, pickle=terms.pickle)
    plan = _plan(source, terms)
    cargo = Cargo(
        source,
        plan,
        Envelope(source.manifest, terms.chunk_bytes, terms.step),
        b"",
        terms.verify,
        max(terms.window_bytes // max(lanes, 1), 1),
        [None] * len(plan.messages),
    )
    ahead = terms.verify and plan.payload_bytes <= terms.ahead_bytes
    if ahead:
        staging = Staging(link.device)
        for message in plan.messages:
            buffer, staged = cargo.outgoing(link, message, staging)
            if staged:
                staging.give_back(buffer)
    cargo.envelope = Envelope(
        source.manifest,
        terms.chunk_bytes,
        terms.step,
        group.next_serial(),
        os.urandom(NONCE_BYTES),
        tuple(d for d in cargo.digests if d is not None) if ahead else None,
        terms.verify and not ahead,
    )
    cargo.frame = encode(cargo.envelope)
    if len(cargo.frame) > terms.max_metadata_bytes:
        raise Unsendable(
            f"the state's metadata is {len(cargo.frame)} bytes, more than the {terms.max_metadata_bytes} "
            "that are allowed: set max_metadata_bytes higher on both sides"
        )
    return cargo


def _plan(source: Description, terms: Push) -> Plan:
    try:
        return make_plan(source.manifest, terms.chunk_bytes)
    except TooIntricate as error:
        raise Unsendable(
            f"the state has overlapping views in a pattern too irregular to send without sending "
            f"bytes that are not theirs ({error}): clone() one of them first"
        ) from None
    except TooManyMessages as error:
        raise Unsendable(f"{error}, and more can't be told apart: send it in parts") from None
