"""A state made ready for sending: described, planned, its frame encoded, before anything is sent."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from msgspec.structs import replace

from torchferry.core.codec import Envelope, Known, encode
from torchferry.core.extents import TooIntricate
from torchferry.core.plan import (
    CHUNK_BYTES,
    IN_PLACE_WINDOW_BYTES,
    MAX_MESSAGES,
    PACK_FROM,
    RELAY_CHUNK_BYTES,
    WINDOW_BYTES,
    Message,
    Plan,
    TooManyMessages,
    samples_of,
)
from torchferry.core.protocol import AHEAD_BYTES
from torchferry.core.routes import Route, chain
from torchferry.core.seals import NONCE_BYTES
from torchferry.core.torn import paths_of
from torchferry.engine.digest import digest, digests
from torchferry.engine.group import Group
from torchferry.engine.lanes import Runner
from torchferry.engine.recall import Recall
from torchferry.engine.staging import Staging
from torchferry.engine.threads import ThreadRunner
from torchferry.errors import StateError, Unsendable
from torchferry.links.base import Link
from torchferry.tensors.describe import Description, describe
from torchferry.tensors.memory import CPU, gather, peek, run_of


@dataclass(frozen=True)
class Push:
    """How a state is to be sent. With `relay`, receivers forward it to each other.

    `if_unmet` is what to ask if nothing was heard of a peer by the deadline, with its rank in {peer}.
    """

    timeout_s: float
    max_metadata_bytes: int
    step: int | None = None
    rank: int = 0
    relay: bool = False
    pickle: Callable[[object], bytes] | None = None
    chunk_bytes: int = CHUNK_BYTES
    relay_chunk_bytes: int = RELAY_CHUNK_BYTES
    pack_from: int = PACK_FROM
    window_bytes: int = WINDOW_BYTES
    in_place_window_bytes: int = IN_PLACE_WINDOW_BYTES
    ahead_bytes: int = AHEAD_BYTES
    stall_s: float | None = None
    verify: bool = True
    if_unmet: str = ""
    runner: Callable[[], Runner] = ThreadRunner


@dataclass
class Cargo:
    """A state made ready for sending, shared by the lanes to all its receivers.

    `known` is the manifest, packed. `routes` is empty if each of them is sent to. `digests` has one for each
    chunk, once it was read. `changed` has the extents that were found to be changed while they were being
    sent.
    """

    source: Description
    plan: Plan
    envelope: Envelope
    known: Known
    routes: dict[int, Route]
    verify: bool
    window_bytes: int
    in_place_window_bytes: int
    digests: list[int | None]
    samples: list[list[int]] = field(default_factory=list)
    changed: set[int] = field(default_factory=set)

    @property
    def is_hashed_ahead(self) -> bool:
        """Whether all of it was hashed before anything was sent, because there is little of it."""
        return self.envelope.digests is not None

    def frame(self, peer: int) -> bytes:
        """Encode the frame that one peer is sent."""
        return encode(replace(self.envelope, route=self.routes.get(peer)), self.known)

    def sends_to(self, peer: int) -> bool:
        """Say whether a peer gets the payload from here, and not from another receiver."""
        return peer not in self.routes or self.routes[peer].source == self.envelope.origin

    def bytes_due(self, peer: int) -> int:
        """Say how much payload a peer gets from here."""
        return self.plan.payload_bytes if self.sends_to(peer) else 0

    def outgoing(self, link: Link, message: Message, staging: Staging) -> tuple[torch.Tensor, bool]:
        """Give a message's bytes, where they lie if the link can take them there, and whether staged."""
        memories = self.source.memories
        staged = self.stages(link, message)
        if staged:
            buffer = staging.take(message.nbytes)
            pieces = [chunk.piece for chunk in self.plan.chunks_of(message)]
            gather([memories[piece.storage] for piece in pieces], pieces, buffer)
        else:
            piece = self.plan.chunks[message.first].piece
            buffer = run_of(memories[piece.storage], piece)
        return buffer, staged

    def stages(self, link: Link, message: Message) -> bool:
        """Say whether a message must be copied: it is packed, has gaps, or lies where the link can't."""
        piece = self.plan.chunks[message.first].piece
        if message.end - message.first > 1 or piece.repeats:
            return True
        return not link.takes(self.source.memories[piece.storage].device)

    def hash(self, message: Message, buffer: torch.Tensor) -> None:
        """Hash a message's bytes, chunk by chunk, unless that was done."""
        if self.verify and self.digests[message.first] is None:
            found = digests(buffer, [chunk.nbytes for chunk in self.plan.chunks_of(message)])
            self.digests[message.first : message.end] = found

    def take_samples(self) -> None:
        """Remember a few bytes of every message, to find out later whether they were changed."""
        self.samples = [self._sample(message) for message in self.plan.messages]

    def _sample(self, message: Message) -> list[int]:
        """Hash a few bytes at both ends of a message, where they lie; nothing if they are gone."""
        ends = samples_of(self.plan.chunks[message.first].piece, self.plan.chunks[message.end - 1].piece)
        try:
            return [digest(peek(self.source.memories[end.storage], end)) for end in ends]
        except (RuntimeError, StateError):
            return []

    def changed_extents(self) -> set[int]:
        """List the extents that were changed since they were described, or read, as far as that can be told.

        Torch counts what it writes. What goes round its counters (`.data`, an array over the same memory) is
        looked for at both ends of every message. What has no counter at all is read again, all of it; and so
        is a state that is small enough to have been hashed before it was sent.
        """
        tensors = self.source.manifest.tensors
        found: set[int] = set()
        if storages := {tensors[number].storage for number in self.source.changed_tensors()}:
            found.update(n for n, extent in enumerate(self.plan.extents) if extent.storage in storages)
        sampled = zip(self.plan.messages, self.samples, strict=True) if self.samples else ()
        for message, sample in sampled:
            if sample != self._sample(message):
                ends = self.plan.chunks[message.first], self.plan.chunks[message.end - 1]
                found.update(chunk.extent for chunk in ends)
        uncounted = {tensors[number].storage for number in self.source.uncounted}
        for message in self.plan.messages if uncounted or self.is_hashed_ahead else ():
            found |= self._differing(message, None if self.is_hashed_ahead else uncounted)
        return found

    def _differing(self, message: Message, storages: set[int] | None) -> set[int]:
        """List the extents in a message whose bytes, read again, are not those that were hashed.

        It is only read if it has anything of these storages, if there are any given.
        """
        chunks = self.plan.chunks_of(message)
        known = self.digests[message.first : message.end]
        if None in known or (storages is not None and storages.isdisjoint(c.piece.storage for c in chunks)):
            return set()
        pieces = [chunk.piece for chunk in chunks]
        buffer = torch.empty(message.nbytes, dtype=torch.uint8, device=CPU)
        try:
            gather([self.source.memories[piece.storage] for piece in pieces], pieces, buffer)
        except StateError:
            return {chunk.extent for chunk in chunks}
        now = digests(buffer, [chunk.nbytes for chunk in chunks])
        return {chunk.extent for chunk, old, new in zip(chunks, known, now, strict=True) if old != new}

    def has_changed(self) -> bool:
        """Look for changes, and say whether there are any."""
        self.changed |= self.changed_extents()
        return bool(self.changed)

    def changed_paths(self) -> list[str]:
        """Name the leaves that were changed while they were being sent, as far as that can be told."""
        # With seals it was looked for before the last of them, and what is changed later does not matter.
        if not self.envelope.sealed:
            self.has_changed()
        return paths_of(self.source.manifest, self.plan.extents, self.changed) if self.changed else []


def load_cargo(link: Link, peers: Sequence[int], state: object, terms: Push, group: Group) -> Cargo:
    """Describe a state, plan its transfer and encode its frame: all that can be wrong with it.

    Raises:
        Unsendable: something in the state can't travel.
    """
    recall = group.recall("send")
    described = describe(state, pickle=terms.pickle)
    source, known = recall.know(described)
    plan, chunk_bytes, relayed = _plan(source, terms, len(peers), recall)
    group.remember("send", recall)
    lanes = 1 if relayed else max(len(peers), 1)
    ahead = terms.verify and plan.payload_bytes <= terms.ahead_bytes
    cargo = Cargo(
        source,
        plan,
        Envelope(
            source.manifest,
            chunk_bytes,
            terms.step,
            group.next_serial(),
            os.urandom(NONCE_BYTES),
            sealed=terms.verify and not ahead,
            pack_bytes=plan.pack_bytes,
            origin=terms.rank,
        ),
        known,
        chain(terms.rank, peers) if relayed else {},
        terms.verify,
        max(terms.window_bytes // lanes, 1),
        max(terms.in_place_window_bytes // lanes, 2 * chunk_bytes),
        [None] * len(plan.chunks),
    )
    if terms.verify and not ahead:
        cargo.take_samples()
    if ahead:
        staging = group.staging(link.device, pinned=not source.is_all_cpu)
        for message in plan.messages:
            buffer, staged = cargo.outgoing(link, message, staging)
            cargo.hash(message, buffer)
            if staged:
                staging.give_back(buffer)
        group.keep(staging)
        found = tuple(digest for digest in cargo.digests if digest is not None)
        cargo.envelope = replace(cargo.envelope, digests=found)
    return cargo


def check_frame(frame: bytes, terms: Push) -> bytes:
    """Check that a frame may be sent, and give it back.

    Raises:
        Unsendable: it is too long.
    """
    if len(frame) > terms.max_metadata_bytes:
        raise Unsendable(
            f"the state's metadata is {len(frame)} bytes, more than the {terms.max_metadata_bytes} "
            "that are allowed: set max_metadata_bytes higher on both sides"
        )
    return frame


def _plan(source: Description, terms: Push, receivers: int, recall: Recall) -> tuple[Plan, int, bool]:
    """Give the plan, the size of its chunks, and whether receivers forward to each other."""
    try:
        plan = recall.plan(source.manifest, terms.chunk_bytes, pack_from=terms.pack_from)
        relayed = terms.relay and receivers > 1
        short = terms.relay_chunk_bytes
        if relayed and short < terms.chunk_bytes and plan.payload_bytes < short * (MAX_MESSAGES // 2):
            return recall.plan(source.manifest, short, pack_from=terms.pack_from), short, relayed
        return plan, terms.chunk_bytes, relayed
    except TooIntricate as error:
        raise Unsendable(
            f"the state has overlapping views in a pattern too irregular to send without sending "
            f"bytes that are not theirs ({error}): clone() one of them first"
        ) from None
    except TooManyMessages as error:
        raise Unsendable(f"{error}, and more than that is too much at once: send it in parts") from None
