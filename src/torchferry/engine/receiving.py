"""Receiving: the frame, everything that can be checked, and only then the payload.

Once the frame is understood, a receiver that refuses still takes all messages and drops them, so that the
sender is not left waiting for a peer that has already given up. If it can't even understand the frame, it
breaks the link off: that, too, tells the sender.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from torchferry.core.codec import Envelope, Known, decode, decode_refusal, is_frame
from torchferry.core.compare import Extra
from torchferry.core.extents import TooIntricate
from torchferry.core.plan import IN_PLACE_WINDOW_BYTES, WINDOW_BYTES, Plan, TooManyMessages
from torchferry.core.protocol import FRAME_TAG, LENGTH_TAG, check_length
from torchferry.core.report import WAIT, Report
from torchferry.core.routes import Route
from torchferry.core.torn import paths_of
from torchferry.core.watch import Rules
from torchferry.engine.destination import Destination, Target, destination, nowhere, say_torn
from torchferry.engine.digest import head
from torchferry.engine.group import Group
from torchferry.engine.lanes import Lane, Runner, run_lanes
from torchferry.engine.meter import Meter, ask_after_unmet, note_progress
from torchferry.engine.payload import Arrival, Payload
from torchferry.engine.phases import Phases
from torchferry.engine.recall import MOST_FRAME_BYTES
from torchferry.engine.relay import Relay
from torchferry.engine.threads import ThreadRunner
from torchferry.engine.window import Steps, T
from torchferry.errors import (
    BadManifest,
    Corrupted,
    FerryError,
    LinkError,
    PeerGaveUp,
    StepMismatch,
)
from torchferry.links.base import Link
from torchferry.tensors.kinds import RebuildContext

logger = logging.getLogger(__name__)

_LAST_WORD_S = 0.5
"""How long a receiver that has failed tries to tell the next one."""


@dataclass(frozen=True)
class Pull:
    """How a state is to be received. `members` are the ranks that there are, if that is known.

    `extra` says what to do with paths that only the peer has; None means "error" if `strict`, else "drop".
    `if_unmet` is what to ask if nothing was heard of the peer by the deadline, with its rank in {peer}.
    """

    timeout_s: float
    max_metadata_bytes: int
    step: int | None = None
    rank: int | None = None
    members: range | None = None
    target: Callable[[], object] | None = None
    strict: bool = True
    extra: Extra | None = None
    site: RebuildContext = field(default_factory=RebuildContext)
    decode: Callable[[bytes, Known | None], Envelope] = decode
    window_bytes: int = WINDOW_BYTES
    in_place_window_bytes: int = IN_PLACE_WINDOW_BYTES
    stall_s: float | None = None
    verify: bool = True
    if_unmet: str = ""
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
    """One receive. `at_rest` says that nothing of it is on its way, or not any more, whatever went wrong."""

    def __init__(self, link: Link, peer: int, terms: Pull, group: Group) -> None:
        self.at_rest = True
        self._link = link
        self._peer = peer
        self._terms = terms
        self._group = group
        self._runner = terms.runner()
        self._phases = Phases("receive", terms.timeout_s, self._runner.now_s)
        self._route = Route(peer)

    def run(self) -> tuple[object, Report]:
        phases, peer = self._phases, self._peer
        # Before the frame is there, for the sender is describing its state at the same time.
        with phases.phase("describe", peer):
            recall = self._group.recall("receive")
            target = Target(self._terms.target, self._terms.site, recall)
        frame = self._receive_header()
        with phases.phase("receive metadata", peer):
            envelope = self._terms.decode(frame, target.known)
            plan = _plan(envelope, target)
            self._route = _route(envelope, peer, self._terms)
        with phases.phase("compare", peer), self._drained_on_refusal(envelope, plan):
            if self._terms.step is not None and envelope.step != self._terms.step:
                raise StepMismatch(wanted=self._terms.step, got=envelope.step)
            terms = self._terms
            extra = terms.extra or ("error" if terms.strict else "drop")
            receiver = destination(envelope.manifest, plan, target, strict=terms.strict, extra=extra)
            if is_frame(frame) and len(frame) <= MOST_FRAME_BYTES and recall.is_worth_keeping:
                target.know(envelope.manifest)
                self._group.remember("receive", recall)
        with phases.phase("receive tensors", self._route.source):
            not_forwarded = self._receive_payload(envelope, plan, receiver)
        self.at_rest = True
        with phases.phase("assemble", peer):
            state = self._assemble(envelope, plan, receiver)
        report = Report(
            (peer,),
            plan.payload_bytes,
            len(frame),
            len(plan.messages),
            dict(phases.seconds),
            self._route.next,
            not_forwarded,
            None if self._route.source == peer else self._route.source,
            envelope.step,
            receiver.dropped,
            receiver.fresh,
            receiver.kept,
        )
        _warn_of_gaps(report)
        return state, report

    def _receive_header(self) -> bytes:
        """Receive a frame. A refusal of another step than the one asked for is an old one, and is skipped."""
        phases, peer = self._phases, self._peer
        while True:
            with ExitStack() as header:
                with phases.phase(WAIT, peer):
                    header.enter_context(self._group.header("receive", peer, phases.left_s))
                    self.at_rest = False
                    length = self._receive_length()
                with phases.phase("receive metadata", peer):
                    frame = self._receive_frame(length)
                    refusal = decode_refusal(frame)
                    if refusal is None:
                        return frame
                    self.at_rest = True
                    if None in (self._terms.step, refusal.step) or self._terms.step == refusal.step:
                        raise PeerGaveUp(
                            f"rank {peer} refused to send its state; nothing was received: {refusal.reason}",
                            culprit=peer,
                            peer=peer,
                        )

    def _assemble(self, envelope: Envelope, plan: Plan, receiver: Destination) -> object:
        try:
            return receiver.assemble()
        except BaseException as error:
            if receiver.in_place:
                # How far it got is not known, so nothing is called whole.
                say_torn(error, receiver.fate(envelope, plan, Meter(self._peer, "assemble"), error))
            raise

    def _receive_length(self) -> int:
        """Wait for the sender's first message. `stall_timeout` does not apply until it arrives."""
        meter = Meter(self._peer, WAIT, met=False)
        lane = Lane(meter, length_steps(self._link, self._peer))
        run_lanes(self._link, [lane], Rules(self._phases.deadline_s, None), self._runner)
        if lane.error is not None:
            ask_after_unmet(lane.error, meter, self._terms.if_unmet)
        return _outcome(lane)

    def _receive_frame(self, nbytes: int) -> bytes:
        check_length(nbytes, self._terms.max_metadata_bytes)
        lane = Lane(Meter(self._peer, "receive metadata"), frame_steps(self._link, self._peer, nbytes))
        self._run([lane])
        return _outcome(lane)

    def _receive_payload(self, envelope: Envelope, plan: Plan, receiver: Destination) -> str | None:
        """Receive, and forward if that was asked for; say why the latter failed, if it did."""
        meter = self._meter("receive tensors", plan)
        try:
            arrival, not_forwarded = self._take(envelope, plan, receiver, meter)
            self.at_rest = True
            self._judge(arrival, envelope, plan)
        except BaseException as error:
            if isinstance(error, FerryError):
                note_progress(error, meter, envelope.manifest, plan)
                self._name_those_before(error)
            if receiver.in_place:
                say_torn(error, receiver.fate(envelope, plan, meter, error))
            raise
        finally:
            receiver.ground.mark_changed()
        return not_forwarded

    def _name_those_before(self, error: FerryError) -> None:
        """Add to an error who else may be at fault: who waits in vain may be taken for one who is gone."""
        named = error.culprit if isinstance(error, PeerGaveUp) else error.peer
        way = [self._route.source, *self._route.before]
        way += [self._peer] if self._peer not in way else []
        if named in way[:-1] and isinstance(error, (LinkError, PeerGaveUp)):
            before = ", ".join(f"rank {rank}" for rank in way[way.index(named) + 1 :])
            error.what += f". Rank {named} has the state through {before}: if it is alive, look there"

    def _meter(self, phase: str, plan: Plan) -> Meter:
        return Meter(self._route.source, phase, plan.payload_bytes)

    def _take(
        self, envelope: Envelope, plan: Plan, receiver: Destination, meter: Meter
    ) -> tuple[Arrival, str | None]:
        """Take all messages, and pass them on to the next receiver if there is one."""
        window_bytes = self._terms.window_bytes
        relay: Relay | None = None
        forwarding: Lane[None] | None = None
        if self._route.next is not None:
            # One half for what is on its way here, and one for what is on its way on.
            window_bytes //= 2
            onward = Meter(self._route.next, "forward tensors", plan.payload_bytes)
            relay = Relay(self._link, envelope, plan, onward, window_bytes)
            forwarding = Lane(onward, relay.steps(), on_failure=self._ending(relay))
        staging = self._group.staging(self._link.device, pinned=not receiver.ground.is_all_cpu)
        payload = Payload(
            self._link,
            envelope,
            plan,
            receiver.landings,
            receiver.ground,
            meter,
            staging,
            self._terms.verify,
            relay,
        )
        steps = payload.steps(window_bytes, self._terms.in_place_window_bytes)
        if relay is None or forwarding is None:
            lane = Lane(meter, steps)
            self._run([lane])
            arrival = _outcome(lane)
            self._group.keep(staging)
            return arrival, None
        lane = Lane(meter, steps, on_failure=self._telling(relay, forwarding))
        self._run([lane, forwarding])
        arrival = _outcome(lane)
        if forwarding.error is None:
            for buffer in relay.used():
                staging.give_back(buffer)
            self._group.keep(staging)
            return arrival, None
        if isinstance(forwarding.error, FerryError):
            note_progress(forwarding.error, onward, envelope.manifest, plan)
        # This process has its state, which is all that its caller asked for. But a member of the group is
        # lost.
        self._group.mark_broken(forwarding.error)
        logger.warning("the state arrived, but was not forwarded: %s", forwarding.error)
        return arrival, str(forwarding.error)

    def _telling(self, relay: Relay, forwarding: Lane[None]) -> Callable[[BaseException], None]:
        """If nothing more arrives here, let the next receiver know, for as long as that may take."""

        def tell(error: BaseException) -> None:
            culprit = self._own_rank
            if isinstance(error, PeerGaveUp) and error.culprit is not None:
                culprit = error.culprit
            elif isinstance(error, LinkError):
                culprit = self._route.source
            forwarding.ends_s = self._runner.now_s() + _LAST_WORD_S
            relay.fail(culprit)

        return tell

    def _ending(self, relay: Relay) -> Callable[[BaseException], None]:
        """If the next receiver is lost, nobody waits for it; and if it comes back, it is told."""
        return lambda _: relay.end(self._own_rank)

    @property
    def _own_rank(self) -> int:
        return self._terms.rank or 0

    def _judge(self, arrival: Arrival, envelope: Envelope, plan: Plan) -> None:
        if arrival.refusal is not None:
            raise arrival.refusal
        if arrival.damaged:
            extents = {plan.chunks[number].extent for number in arrival.damaged}
            raise Corrupted(paths_of(envelope.manifest, plan.extents, extents), peer=self._route.source)
        if arrival.changed:
            raise PeerGaveUp(
                "the sender's state was changed while it was being sent, so what arrived is no state that "
                "ever was",
                peer=self._peer,
            )

    def _run(self, lanes: Sequence[Lane[Any]]) -> None:
        run_lanes(self._link, lanes, Rules(self._phases.deadline_s, self._terms.stall_s), self._runner)

    @contextmanager
    def _drained_on_refusal(self, envelope: Envelope, plan: Plan) -> Iterator[None]:
        """If what is inside raises, take and drop all messages first, so that the sender finishes."""
        try:
            yield
        except Exception as refusal:
            try:
                self._take(envelope, plan, nowhere(plan), self._meter("compare", plan))
                self.at_rest = True
            except FerryError as error:
                refusal.add_note(f"while the refused messages were being dropped: {error}")
            raise


def _outcome(lane: Lane[T]) -> T:
    if lane.error is not None:
        raise lane.error
    return lane.value  # type: ignore[return-value]


def _route(envelope: Envelope, peer: int, terms: Pull) -> Route:
    """Find out where the payload comes from and whom it goes to.

    Raises:
        BadManifest: a way that can't be.
    """
    route = envelope.route or Route(peer)
    others = [rank for rank in (route.source, route.next, *route.before) if rank is not None]
    known = all(rank in terms.members for rank in others) if terms.members is not None else True
    if not known or terms.rank in others or len(set(others)) < len(others) or peer in others[1:]:
        raise BadManifest(
            f"the payload is to come from rank {route.source} and go to rank {route.next}, which can't be"
        )
    return route


def length_steps(link: Link, peer: int) -> Steps[int]:
    """Receive the length of a frame."""
    length = torch.zeros(1, dtype=torch.int64, device=link.device)
    yield link.recv(length, peer, LENGTH_TAG)
    return int(length.item())


def frame_steps(link: Link, peer: int, nbytes: int) -> Steps[bytes]:
    """Receive a frame of a length that was checked."""
    # Zeroed, so that what is read never depends on what this memory held before.
    buffer = torch.zeros(nbytes, dtype=torch.uint8, device=link.device)
    yield link.recv(buffer, peer, FRAME_TAG)
    return head(buffer, nbytes)


_PATHS_SHOWN = 3


def _warn_of_gaps(report: Report) -> None:
    """Log one WARNING if paths were dropped or kept: training could go on without them unnoticed."""
    said = [
        f"{len(paths)} path{'s' if len(paths) > 1 else ''} {what}: "
        f"{', '.join(paths[:_PATHS_SHOWN])}{', …' if len(paths) > _PATHS_SHOWN else ''}"
        for what, paths in (
            ("dropped, which only the sender has", report.dropped),
            ("left as they were, which only the local state has", report.kept),
        )
        if paths
    ]
    if said:
        logger.warning("received from rank %d in place, but not all: %s", report.peers[0], "; ".join(said))


def _plan(envelope: Envelope, target: Target) -> Plan:
    try:
        plan = target.plan(envelope)
    except TooIntricate as error:
        raise BadManifest(f"overlapping views too irregular to list ({error})") from None
    except TooManyMessages as error:
        raise BadManifest(f"the peer announces more than can be received at once: {error}") from None
    if envelope.digests is not None and len(envelope.digests) != len(plan.chunks):
        raise BadManifest(f"{len(envelope.digests)} digests for {len(plan.chunks)} chunks")
    return plan
