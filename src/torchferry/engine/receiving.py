"""Receiving: the frame, everything that can be checked, and only then the payload.

Once the frame is understood, a receiver that refuses still takes all messages and drops them, so that the
sender is not left waiting for a peer that has already given up. If it can't even understand the frame, it
breaks the link off: that, too, tells the sender.
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
from torchferry.core.manifest import Manifest
from torchferry.core.plan import WINDOW_BYTES, Plan, TooManyMessages, make_plan
from torchferry.core.protocol import FRAME_TAG, LENGTH_TAG, check_length
from torchferry.core.report import Report
from torchferry.core.torn import Truth, paths_of, truth
from torchferry.core.watch import Rules
from torchferry.engine.group import Group
from torchferry.engine.lanes import Lane, Runner, run_lanes
from torchferry.engine.meter import Meter, note_progress
from torchferry.engine.payload import Arrival, Payload
from torchferry.engine.phases import Phases
from torchferry.engine.threads import ThreadRunner
from torchferry.engine.window import Steps, T
from torchferry.errors import (
    BadManifest,
    Corrupted,
    FerryError,
    PeerGaveUp,
    StateMismatch,
    StepMismatch,
    TargetTorn,
    TornAndBroken,
    TornAndLate,
)
from torchferry.links.base import Link
from torchferry.tensors.assemble import Prepared, allocate, assemble_fresh, assemble_in_place, prepare
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
    window_bytes: int = WINDOW_BYTES
    stall_s: float | None = None
    verify: bool = True
    runner: Callable[[], Runner] = ThreadRunner


def pull(link: Link, peer: int, terms: Pull, group: Group | None = None) -> tuple[object, Report]:
    """Receive a state from a peer: fresh, or into the tensors of the state that `target` gives.

    Raises:
        StateMismatch: it does not fit the target; nothing was overwritten.
        PeerError: what the peer sent can't be used; nothing was overwritten.
        LinkError: the peer could not be reached, or not in time, or bytes were damaged.
        TargetTorn: one of these, after local tensors were written.
        GroupBroken: an earlier transfer failed on this group.
    """
    group = group or Group()
    group.check()
    transfer = _Transfer(link, peer, terms, group)
    try:
        return transfer.run()
    except BaseException as error:
        if not transfer.at_rest:
            group.mark_broken(error)
            link.break_off(peer)
        raise


class _Transfer:
    """One receive. `at_rest` says that nothing of it is still on its way, whatever went wrong."""

    def __init__(self, link: Link, peer: int, terms: Pull, group: Group) -> None:
        self.at_rest = False
        self._link = link
        self._peer = peer
        self._terms = terms
        self._group = group
        self._runner = terms.runner()
        self._phases = Phases("receive", terms.timeout_s, self._runner.now_s)

    def run(self) -> tuple[object, Report]:
        phases, peer = self._phases, self._peer
        with phases.phase("receive metadata", peer):
            frame = self._receive_frame()
            envelope = self._terms.decode(frame)
            plan = _plan(envelope)
        with phases.phase("compare", peer), self._drained_on_refusal(envelope, plan):
            if self._terms.step is not None and envelope.step != self._terms.step:
                raise StepMismatch(wanted=self._terms.step, got=envelope.step)
            receiver = _receiver(envelope.manifest, plan, self._terms)
        with phases.phase("receive tensors", peer):
            self._receive_payload(envelope, plan, receiver)
        self.at_rest = True
        with phases.phase("assemble", peer):
            state = self._assemble(envelope, plan, receiver)
        report = Report((peer,), plan.payload_bytes, len(frame), len(plan.messages), dict(phases.seconds))
        return state, report

    def _assemble(self, envelope: Envelope, plan: Plan, receiver: _Receiver) -> object:
        try:
            return receiver.assemble()
        except BaseException as error:
            if receiver.in_place:
                # How far it got is not known, so nothing is called whole.
                _say_torn(error, receiver.fate(envelope, plan, Meter(self._peer, "assemble", 0.0), error))
            raise

    def _receive_frame(self) -> bytes:
        meter = Meter(self._peer, "receive metadata", self._runner.now_s())
        with self._group.header("receive", self._peer, self._phases.left_s):
            return self._run(meter, frame_steps(self._link, self._peer, self._terms.max_metadata_bytes))

    def _receive_payload(self, envelope: Envelope, plan: Plan, receiver: _Receiver) -> None:
        meter = Meter(self._peer, "receive tensors", self._runner.now_s(), plan.payload_bytes)
        try:
            arrival = self._run(meter, self._payload_steps(envelope, plan, receiver, meter))
            self.at_rest = True
            self._judge(arrival, envelope, plan)
        except BaseException as error:
            if isinstance(error, FerryError):
                note_progress(error, meter, envelope.manifest, plan)
            if receiver.in_place:
                _say_torn(error, receiver.fate(envelope, plan, meter, error))
            raise
        finally:
            receiver.ground.mark_changed()

    def _payload_steps(
        self, envelope: Envelope, plan: Plan, receiver: _Receiver, meter: Meter
    ) -> Steps[Arrival]:
        payload = Payload(
            self._link,
            self._peer,
            envelope,
            plan,
            receiver.landings,
            receiver.ground,
            meter,
            self._terms.verify,
        )
        return payload.steps(self._runner.now_s, self._terms.window_bytes)

    def _judge(self, arrival: Arrival, envelope: Envelope, plan: Plan) -> None:
        if arrival.damaged:
            extents = {plan.messages[number].extent for number in arrival.damaged}
            raise Corrupted(paths_of(envelope.manifest, plan.extents, extents), peer=self._peer)
        if arrival.changed:
            raise PeerGaveUp(
                "the sender's state was changed while it was being sent, so what arrived is no state that "
                "ever was",
                peer=self._peer,
            )

    def _run(self, meter: Meter, steps: Steps[T]) -> T:
        lane = Lane(meter, steps)
        run_lanes(self._link, [lane], Rules(self._phases.deadline_s, self._terms.stall_s), self._runner)
        if lane.error is not None:
            raise lane.error
        return lane.value  # type: ignore[return-value]

    @contextmanager
    def _drained_on_refusal(self, envelope: Envelope, plan: Plan) -> Iterator[None]:
        """If what is inside raises, take and drop all messages first, so that the sender finishes."""
        try:
            yield
        except Exception as refusal:
            nowhere = _Receiver(
                Landings((Landing(),) * len(plan.extents)), Ground.nowhere(), lambda: None, False
            )
            meter = Meter(self._peer, "compare", self._runner.now_s(), plan.payload_bytes)
            try:
                self._run(meter, self._payload_steps(envelope, plan, nowhere, meter))
                self.at_rest = True
            except FerryError as error:
                refusal.add_note(f"while the refused messages were being dropped: {error}")
            raise


def frame_steps(link: Link, peer: int, max_bytes: int) -> Steps[bytes]:
    """Receive a length, check it, and receive the frame."""
    length = torch.zeros(1, dtype=torch.int64, device=link.device)
    yield link.recv(length, peer, LENGTH_TAG)
    nbytes = int(length.item())
    check_length(nbytes, max_bytes)
    # Zeroed, so that what is read never depends on what this memory held before.
    frame = bytearray(nbytes)
    host = torch.frombuffer(frame, dtype=torch.uint8)
    buffer = host if link.takes(host.device) else host.to(link.device)
    yield link.recv(buffer, peer, FRAME_TAG)
    if buffer is not host:
        host.copy_(buffer)
    return bytes(frame)


def _plan(envelope: Envelope) -> Plan:
    try:
        plan = make_plan(envelope.manifest, envelope.chunk_bytes)
    except TooIntricate as error:
        raise BadManifest(f"overlapping views too irregular to list ({error})") from None
    except TooManyMessages as error:
        raise BadManifest(f"the peer announces more than can be received at once: {error}") from None
    if envelope.digests is not None and len(envelope.digests) != len(plan.messages):
        raise BadManifest(f"{len(envelope.digests)} digests for {len(plan.messages)} messages")
    return plan


@dataclass(frozen=True)
class _Receiver:
    """Where the payload goes, and what to make of it when it is there."""

    landings: Landings
    ground: Ground
    assemble: Callable[[], object]
    in_place: bool
    pairs: Sequence[Pair] = ()

    def fate(self, envelope: Envelope, plan: Plan, meter: Meter, error: BaseException) -> Truth:
        """Say what a failure did to the local state."""
        # What the sender disowns is no better for having arrived whole.
        verified = set() if isinstance(error, PeerGaveUp) else meter.verified
        return truth(
            envelope.manifest,
            plan,
            posted=len(plan.messages) if meter.phase == "assemble" else meter.posted,
            verified=verified,
            scratched={pair.incoming for pair in self.landings.whole},
            kept={pair.path for pair in self.pairs},
        )


def _receiver(manifest: Manifest, plan: Plan, terms: Pull) -> _Receiver:
    if terms.target is None:
        prepared = prepare(manifest, terms.site)
        memories = allocate(manifest)
        return _Receiver(
            land_fresh(plan.extents),
            Ground(manifest, memories),
            lambda: assemble_fresh(prepared, memories, terms.site),
            in_place=False,
        )
    if terms.strict:
        prepared = prepare(manifest, terms.site)
    target = describe_target(terms.target())
    pairs, mismatches = compare(manifest, target.manifest, strict=terms.strict)
    if mismatches:
        raise StateMismatch(mismatches)
    if not terms.strict:
        prepared = prepare(manifest, terms.site, only={pair.incoming for pair in pairs})
    tensors = tensor_pairs(manifest, target.manifest, pairs)
    landings = land_in_place(plan.extents, manifest, target.manifest, tensors)
    ground = Ground(manifest, target.memories, target, {pair.local for pair in tensors})
    return _Receiver(
        landings,
        ground,
        lambda: _finish(prepared, target, pairs, landings, ground, terms),
        in_place=True,
        pairs=pairs,
    )


def _finish(
    prepared: Prepared,
    target: Description,
    pairs: Sequence[Pair],
    landings: Landings,
    ground: Ground,
    terms: Pull,
) -> object:
    ground.copy_whole(landings.whole)
    return assemble_in_place(prepared, target, pairs, strict=terms.strict)


def _say_torn(error: BaseException, fate: Truth) -> None:
    """Say what a failure did to the local state.

    Raises:
        TargetTorn: some of it was written. What only ends the program gets that as a note, and is left to it.
    """
    if not fate.torn and not fate.whole:
        if isinstance(error, FerryError):
            error.what += "; nothing was overwritten"
        return
    kind = TargetTorn
    if isinstance(error, TimeoutError):
        kind = TornAndLate
    elif isinstance(error, ConnectionError):
        kind = TornAndBroken
    torn = kind(error, whole=fate.whole, torn=fate.torn, untouched=fate.untouched)
    if isinstance(error, Exception):
        raise torn from error
    error.add_note(torn.what)
