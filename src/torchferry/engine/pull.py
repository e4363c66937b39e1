"""Receiving: the frame, everything that can be checked, and only then the payload.

Once the frame is understood, a receiver that refuses still takes all messages and drops them, so that the
sender is not left waiting for a peer that has already given up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from torchferry.core.codec import Envelope, decode
from torchferry.core.compare import Pair, compare, tensor_pairs
from torchferry.core.extents import TooIntricate
from torchferry.core.landing import Landing, Landings, land_fresh, land_in_place
from torchferry.core.plan import Message, Plan, make_plan
from torchferry.core.protocol import FRAME_TAG, LENGTH_TAG, check_length, message_tag
from torchferry.core.report import Report
from torchferry.engine.phases import Phases
from torchferry.engine.window import Staging, Window
from torchferry.errors import BadManifest, LinkError, StateMismatch, StepMismatch
from torchferry.links.base import Link
from torchferry.tensors.assemble import (
    Prepared,
    allocate,
    assemble_fresh,
    assemble_in_place,
    prepare,
)
from torchferry.tensors.describe import Description, describe_target
from torchferry.tensors.kinds import Site
from torchferry.tensors.landing import Ground


@dataclass(frozen=True)
class Pull:
    """How a state is to be received."""

    timeout_s: float
    max_metadata_bytes: int
    step: int | None = None
    target: Callable[[], object] | None = None
    strict: bool = True
    site: Site = field(default_factory=Site)
    decode: Callable[[bytes], Envelope] = decode


def pull(link: Link, peer: int, terms: Pull) -> tuple[object, Report]:
    """Receive a state from a peer: fresh, or into the tensors of the state that `target` gives.

    Raises:
        StateMismatch: it does not fit the target; nothing was overwritten.
        PeerError: what the peer sent can't be used; nothing was overwritten.
        LinkError: the peer could not be reached, or not in time.
    """
    phases = Phases("receive", terms.timeout_s)
    with phases.phase("receive metadata", peer):
        frame = _receive_frame(link, peer, terms, phases)
        envelope = terms.decode(frame)
        plan = _plan(envelope)
    transfer = _Transfer(link, peer, plan, phases)
    with phases.phase("compare", peer), transfer.drained_on_refusal():
        if terms.step is not None and envelope.step != terms.step:
            raise StepMismatch(wanted=terms.step, got=envelope.step)
        prepared = prepare(envelope.manifest, terms.site)
        receiver = _receiver(prepared, plan, terms)
    with phases.phase("receive tensors", peer):
        transfer.run(receiver.landings, receiver.ground)
    with phases.phase("assemble", peer):
        state = receiver.assemble()
    report = Report((peer,), plan.payload_bytes, len(frame), len(plan.messages), dict(phases.seconds))
    return state, report


def _receive_frame(link: Link, peer: int, terms: Pull, phases: Phases) -> bytes:
    length = torch.zeros(1, dtype=torch.int64, device=link.device)
    link.recv(length, peer, LENGTH_TAG).wait(phases.left_s())
    nbytes = int(length.item())
    check_length(nbytes, terms.max_metadata_bytes)
    # Zeroed, so that what is read never depends on what this memory held before.
    frame = bytearray(nbytes)
    host = torch.frombuffer(frame, dtype=torch.uint8)
    buffer = host if link.takes(host.device) else host.to(link.device)
    link.recv(buffer, peer, FRAME_TAG).wait(phases.left_s())
    if buffer is not host:
        host.copy_(buffer)
    return bytes(frame)


def _plan(envelope: Envelope) -> Plan:
    try:
        return make_plan(envelope.manifest, envelope.chunk_bytes)
    except TooIntricate as error:
        raise BadManifest(f"overlapping views too irregular to list ({error})") from None


@dataclass(frozen=True)
class _Receiver:
    """Where the payload goes, and what to make of it when it is there."""

    landings: Landings
    ground: Ground
    assemble: Callable[[], object]


def _receiver(prepared: Prepared, plan: Plan, terms: Pull) -> _Receiver:
    manifest = prepared.manifest
    if terms.target is None:
        memories = allocate(manifest)
        return _Receiver(
            land_fresh(plan.extents),
            Ground(manifest, memories),
            lambda: assemble_fresh(prepared, memories, terms.site),
        )
    target = describe_target(terms.target())
    pairs, mismatches = compare(manifest, target.manifest, strict=terms.strict)
    if mismatches:
        raise StateMismatch(mismatches)
    landings = land_in_place(
        plan.extents,
        manifest,
        target.manifest,
        tensor_pairs(manifest, target.manifest, pairs),
    )
    ground = Ground(manifest, target.memories, target)
    return _Receiver(landings, ground, lambda: _finish(prepared, target, pairs, landings, ground, terms))


def _finish(
    prepared: Prepared,
    target: Description,
    pairs: Sequence[Pair],
    landings: Landings,
    ground: Ground,
    terms: Pull,
) -> object:
    ground.copy_whole(landings.whole)
    ground.mark_changed()
    return assemble_in_place(prepared, target, pairs, strict=terms.strict)


class _Transfer:
    """The payload's messages, in the plan's order."""

    def __init__(self, link: Link, peer: int, plan: Plan, phases: Phases) -> None:
        self._link = link
        self._peer = peer
        self._plan = plan
        self._phases = phases
        self._staging = Staging(link.device)

    def run(self, landings: Landings, ground: Ground) -> None:
        """Receive every message and put its bytes where they belong."""
        window = Window(self._phases)
        for message in self._plan.messages:
            window.make_room(message.nbytes)
            self._post(message, landings.by_extent[message.extent], ground, window)
        window.finish()

    def _post(self, message: Message, landing: Landing, ground: Ground, window: Window) -> None:
        straight = ground.straight(message, landing, self._link.takes)
        if straight is not None:
            buffer, rest = straight
            window.add(
                [self._link.recv(buffer, self._peer, message_tag(message.number))],
                message.nbytes,
                lambda: ground.put(message, rest, buffer),
            )
            return
        staged = self._staging.take(message.nbytes)

        def done() -> None:
            ground.put(message, landing, staged)
            self._staging.give_back(staged)

        window.add([self._link.recv(staged, self._peer, message_tag(message.number))], message.nbytes, done)

    @contextmanager
    def drained_on_refusal(self) -> Iterator[None]:
        """If what is inside raises, take and drop all messages first, so that the sender finishes."""
        try:
            yield
        except Exception as refusal:
            try:
                self._drain()
            except LinkError as error:
                refusal.add_note(f"while the refused messages were being dropped: {error}")
            raise

    def _drain(self) -> None:
        nowhere = Landings((Landing(),) * len(self._plan.extents))
        self.run(nowhere, Ground.nowhere())
