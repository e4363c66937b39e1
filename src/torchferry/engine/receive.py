"""Receiving a pushed state: the frame, every check, and only then the payload.

Once the frame is decoded, a receiver that rejects the state still receives all messages and drops them, so
that the sender can finish. If the frame can't be decoded, the receiver closes the link, which tells the
sender.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from torchferry.core.codec import EncodedManifest, Frame, decode_refusal, is_frame
from torchferry.core.compare import Extra
from torchferry.core.extents import TooIrregular
from torchferry.core.manifest import Manifest
from torchferry.core.plan import IN_PLACE_WINDOW_BYTES, WINDOW_BYTES, Plan, TooManyMessages
from torchferry.core.push import (
    Machine,
    ReceiverState,
    Route,
    check_length,
)
from torchferry.core.report import Report
from torchferry.core.watch import Limits
from torchferry.engine.digest import first_bytes
from torchferry.engine.lanes import Lane, Runner, Steps, ThreadRunner, Window, run_lanes
from torchferry.engine.payload import PayloadReceiver
from torchferry.engine.progress import Cancellation, Phases, Progress, with_progress
from torchferry.engine.relay import Relay
from torchferry.engine.sink import Sink
from torchferry.engine.target import Target, target_in_new_memory, target_in_place
from torchferry.engine.workspace import Workspace
from torchferry.errors import (
    BadManifest,
    Corrupted,
    FerryError,
    LinkError,
    PeerGaveUp,
    StepMismatch,
    TargetTorn,
    TornAndBroken,
    TornAndLate,
)
from torchferry.links.base import Channel, Link
from torchferry.tensors.describe import Description, describe_target
from torchferry.tensors.kinds import RebuildContext

logger = logging.getLogger(__name__)

_ABORT_S = 0.5
"""How long a receiver that failed tries to send an abort to the next one."""


def _refuse_pickle(frame: bytes) -> Frame:
    raise BadManifest("the peer's metadata is not torchferry's")


@dataclass(frozen=True)
class ReceiveOptions:
    """How to receive a state.

    `members` are the ranks of the group, if known. `local_state` returns the state that is written in place.
    `extra` says what to do with paths that only the peer has; None means "error" if `strict`, else "drop".
    `decode_other` decodes metadata in another encoding. `question` is added to a timeout if the peer was
    never heard of, with its rank in {peer}.
    """

    timeout_s: float
    max_metadata_bytes: int
    step: int | None = None
    rank: int | None = None
    members: range | None = None
    local_state: Callable[[], object] | None = None
    strict: bool = True
    extra: Extra | None = None
    context: RebuildContext = field(default_factory=RebuildContext)
    decode_other: Callable[[bytes], Frame] = _refuse_pickle
    window_bytes: int = WINDOW_BYTES
    in_place_window_bytes: int = IN_PLACE_WINDOW_BYTES
    stall_s: float | None = None
    verify: bool = True
    question: str = ""
    runner: Callable[[], Runner] = ThreadRunner


def receive_state(
    link: Link, peer: int, options: ReceiveOptions, workspace: Workspace | None = None
) -> tuple[object, Report]:
    """Receive a state from a peer, into fresh tensors or into those of the state that `local_state` returns.

    Raises:
        StateMismatch: it does not fit the local state; nothing was overwritten.
        PeerError: what the peer sent can't be used; nothing was overwritten.
        LinkError: the peer could not be reached, or not in time, or bytes were damaged.
        TargetTorn: one of these, after local tensors were written.
        GroupBroken: an earlier transfer failed on this group.
    """
    link.check_usable()
    receive = _Receive(link, peer, options, workspace or Workspace(link.device))
    try:
        return receive.run()
    except BaseException as error:
        explained = receive.explain(error)
        if receive.messages_pending:
            link.mark_broken(explained)
            link.close(peer)
        if explained is error:
            raise
        raise explained from explained.__cause__


def plan_incoming(frame: Frame, encoded: EncodedManifest, workspace: Workspace) -> Plan:
    """Plan the transfer of an incoming state. The sender has the same plan.

    Raises:
        BadManifest: the state can't be planned, or the frame has another number of digests.
    """
    try:
        plan = workspace.plan(encoded, frame.chunk_bytes, frame.pack_bytes)
    except TooIrregular as error:
        raise BadManifest(f"the views overlap too irregularly to list ({error})") from None
    except TooManyMessages as error:
        raise BadManifest(f"the peer announces more than can be received at once: {error}") from None
    if frame.digests is not None and len(frame.digests) != len(plan.chunks):
        raise BadManifest(f"the frame has {len(frame.digests)} digests for {len(plan.chunks)} chunks")
    return plan


class _Receive:
    """One receive, from the description of the local state to the report."""

    def __init__(self, link: Link, peer: int, options: ReceiveOptions, workspace: Workspace) -> None:
        self._link = link
        self._peer = peer
        self._options = options
        self._workspace = workspace
        self._runner = options.runner()
        self._phases = Phases("receive", options.timeout_s, self._runner.now_s)
        self._machine = Machine(ReceiverState.DESCRIBING)
        self._phases.enter(ReceiverState.DESCRIBING.phase)
        self._progress = Progress(peer, contacted=False)
        self._route = Route(peer)
        self._content: tuple[Manifest, Plan] | None = None
        self._sink: Sink | None = None

    @property
    def messages_pending(self) -> bool:
        """Whether messages of this transfer may still arrive."""
        return self._machine.state.messages_pending

    def _enter(self, state: ReceiverState) -> None:
        self._machine.advance(state)
        self._phases.enter(state.phase or self._phases.current)

    def run(self) -> tuple[object, Report]:
        local = self._describe_local()
        data = self._receive_frame()
        frame, encoded = self._decode(data)
        plan = plan_incoming(frame, encoded, self._workspace)
        self._route = self._check_route(frame)
        self._content = frame.manifest, plan
        self._enter(ReceiverState.COMPARING)
        try:
            target = self._compare(frame, encoded, plan, local)
        except Exception as rejection:
            self._drain(frame, plan, rejection)
            raise
        self._sink = target.sink
        self._enter(ReceiverState.RECEIVING)
        try:
            not_forwarded = self._receive_payload(frame, plan, target.sink, verify=self._options.verify)
            self._enter(ReceiverState.CHECKING)
        finally:
            target.sink.increment_versions()
        self._raise_if_damaged(target.sink)
        self._enter(ReceiverState.ASSEMBLING)
        # If this fails, it is not known which tensors are complete.
        target.sink.unmark_whole()
        state = target.assemble()
        self._enter(ReceiverState.DONE)
        return state, self._report(data, frame, plan, target, not_forwarded)

    def _describe_local(self) -> Description | Exception | None:
        """Describe the local state while the sender describes its own; None if tensors are to be fresh.

        An error is raised later, when the sender's messages can be drained.
        """
        if self._options.local_state is None:
            return None
        try:
            local = describe_target(self._options.local_state())
            return self._workspace.with_known_manifest(local)
        except Exception as error:
            return error

    def _receive_frame(self) -> bytes:
        """Receive a frame. A refusal of another step than the requested one is skipped."""
        peer = self._peer
        while True:
            self._enter(ReceiverState.WAITING)
            with self._link.frames(peer, "receive", self._phases.left_s()) as frames:
                self._progress = Progress(peer, contacted=False)
                # stall_timeout does not apply before the first message of the sender.
                length = int(self._receive(frames, 1, torch.int64, stall_s=None).item())
                self._progress = Progress(peer)
                self._enter(ReceiverState.FRAME)
                check_length(length, self._options.max_metadata_bytes)
                buffer = self._receive(frames, length, torch.uint8, stall_s=self._options.stall_s)
            data = first_bytes(buffer, length)
            refusal = decode_refusal(data)
            if refusal is None:
                return data
            if None in (self._options.step, refusal.step) or self._options.step == refusal.step:
                self._enter(ReceiverState.REJECTED)
                raise PeerGaveUp(
                    f"rank {peer} refused to send its state; nothing was received: {refusal.reason}",
                    failed_rank=peer,
                    peer=peer,
                )

    def _receive(
        self, frames: Channel, count: int, dtype: torch.dtype, stall_s: float | None
    ) -> torch.Tensor:
        def steps() -> Steps[torch.Tensor]:
            # Zeros, so that the content does not depend on what the memory held before. The buffer is created
            # in the lane, because the caller may be in inference mode.
            buffer = torch.zeros(count, dtype=dtype, device=self._link.device)
            yield frames.recv(buffer)
            return buffer

        lane = Lane(self._progress, Cancellation(), steps())
        run_lanes(self._link, [lane], Limits(self._phases.deadline_s, stall_s), self._runner)
        return lane.result()

    def _decode(self, data: bytes) -> tuple[Frame, EncodedManifest]:
        if is_frame(data):
            return self._workspace.decode(data)
        frame = self._options.decode_other(data)
        return frame, self._workspace.encode(frame.manifest)

    def _check_route(self, frame: Frame) -> Route:
        """Return where the payload comes from and which receiver it goes to.

        Raises:
            BadManifest: the route has a rank that is not in the group, or has a rank twice.
        """
        route, members = frame.route or Route(self._peer), self._options.members
        others = [rank for rank in (route.upstream, route.next, *route.before) if rank is not None]
        outside = members is not None and any(rank not in members for rank in others)
        repeated = len(set(others)) < len(others) or self._peer in others[1:]
        if outside or repeated or self._options.rank in others:
            raise BadManifest(
                f"the route of the payload is invalid: from rank {route.upstream}, through {route.before}, "
                f"to rank {route.next}"
            )
        return route

    def _compare(
        self, frame: Frame, encoded: EncodedManifest, plan: Plan, local: Description | Exception | None
    ) -> Target:
        options = self._options
        if options.step is not None and frame.step != options.step:
            raise StepMismatch(wanted=options.step, got=frame.step)
        if isinstance(local, Exception):
            raise local
        if local is None:
            return target_in_new_memory(encoded, plan, options.context, self._workspace)
        return target_in_place(
            encoded,
            plan,
            local,
            options.context,
            self._workspace,
            strict=options.strict,
            extra=options.extra or ("error" if options.strict else "drop"),
        )

    def _drain(self, frame: Frame, plan: Plan, rejection: Exception) -> None:
        """Receive all messages and drop them, so that the sender can finish."""
        self._enter(ReceiverState.DRAINING)
        try:
            self._receive_payload(frame, plan, Sink.discarding(frame.manifest, plan), verify=False)
            self._enter(ReceiverState.REJECTED)
        except FerryError as error:
            rejection.add_note(f"while the messages of the rejected state were being dropped: {error}")

    def _receive_payload(self, frame: Frame, plan: Plan, sink: Sink, *, verify: bool) -> str | None:
        """Receive all messages, and forward them if the route asks for it.

        Returns why they were not forwarded, or None.
        """
        upstream, next_rank = self._route.upstream, self._route.next
        window_bytes = self._options.window_bytes
        self._progress = Progress(upstream, plan.payload_bytes)
        cancellation = Cancellation()
        relay: Relay | None = None
        forwarding: Lane[None] | None = None
        if next_rank is not None:
            # Half of the window is for messages that arrive, half for messages that are forwarded.
            window_bytes //= 2
            sizes = [item.nbytes for item in plan.sequence(digest_blocks=frame.digest_blocks)]
            onward = Progress(next_rank, plan.payload_bytes)
            relay = Relay(self._link.channel(next_rank, frame.transfer), sizes, onward, window_bytes)
            stop = relay.stop
            forwarding = Lane(onward, Cancellation(), relay.steps(), lambda _: stop(self._own_rank))
        payload = PayloadReceiver(
            self._link,
            self._link.channel(upstream, frame.transfer),
            frame,
            plan,
            sink,
            self._workspace.staging,
            Window(window_bytes, self._options.in_place_window_bytes),
            self._progress,
            cancellation,
            verify,
            relay,
        )

        def abort_next(error: BaseException) -> None:
            if relay is not None and forwarding is not None:
                forwarding.ends_s = self._runner.now_s() + _ABORT_S
                relay.abort(self._failed_rank(error))

        receiving = Lane(self._progress, cancellation, payload.steps(), abort_next)
        lanes = [receiving] if forwarding is None else [receiving, forwarding]
        limits = Limits(self._phases.deadline_s, self._options.stall_s)
        run_lanes(self._link, lanes, limits, self._runner)
        receiving.result()
        if forwarding is None or forwarding.error is None:
            return None
        # The caller has its state, but a rank of the group is lost.
        error = forwarding.error
        if isinstance(error, FerryError):
            error = self._with_progress(error, forwarding.progress, "forward tensors")
        self._link.mark_broken(error)
        logger.warning("forwarding the state to rank %d failed: %s", next_rank, error)
        return str(error)

    @property
    def _own_rank(self) -> int:
        return self._options.rank or 0

    def _failed_rank(self, error: BaseException) -> int:
        """Return the rank that caused an error of this receive."""
        if isinstance(error, PeerGaveUp) and error.failed_rank is not None:
            return error.failed_rank
        return self._route.upstream if isinstance(error, LinkError) else self._own_rank

    def _raise_if_damaged(self, sink: Sink) -> None:
        if sink.failure is not None:
            raise sink.failure
        if damaged := sink.damaged_paths():
            raise Corrupted(damaged, peer=self._route.upstream)
        if sink.sender_changed:
            raise PeerGaveUp(
                "the sender's state changed during the transfer; the received data is inconsistent",
                peer=self._peer,
            )

    def explain(self, error: BaseException) -> BaseException:
        """Return an error with its context, and with what it did to the local state."""
        self._phases.finish(failed=True)
        if isinstance(error, FerryError):
            error = self._with_progress(error, self._progress, self._phases.current)
            if self._sink is not None:
                error = self._with_suspects(error)
        if self._sink is None or not self._sink.is_local:
            return error
        if isinstance(error, PeerGaveUp):
            self._sink.unmark_whole()
        return self._with_outcome(error, self._sink)

    def _with_outcome(self, error: BaseException, sink: Sink) -> BaseException:
        """Return an error that says what the failed transfer did to the local state."""
        outcome = sink.outcome()
        if not outcome.torn and not outcome.whole:
            unchanged = "; nothing was overwritten"
            return error.with_context(more=unchanged) if isinstance(error, FerryError) else error
        kind = TargetTorn
        if isinstance(error, TimeoutError):
            kind = TornAndLate
        elif isinstance(error, ConnectionError):
            kind = TornAndBroken
        torn = kind(error, whole=outcome.whole, torn=outcome.torn, untouched=outcome.untouched)
        if isinstance(error, Exception):
            torn = torn.with_context(peer=self._progress.peer, phase=self._phases.current)
            torn.__cause__ = error
            return torn
        # KeyboardInterrupt and SystemExit stay what they are.
        error.add_note(torn.what)
        return error

    def _with_progress(self, error: FerryError, progress: Progress, phase: str) -> FerryError:
        timeout_s, question = self._options.timeout_s, self._options.question
        return with_progress(
            error, progress, phase, timeout_s=timeout_s, question=question, content=self._content
        )

    def _with_suspects(self, error: FerryError) -> FerryError:
        """Name the ranks through which the failed rank gets the state: one of them may be the cause."""
        named = error.failed_rank if isinstance(error, PeerGaveUp) else error.peer
        way = [self._route.upstream, *self._route.before]
        way += [self._peer] if self._peer not in way else []
        if named not in way[:-1] or not isinstance(error, (LinkError, PeerGaveUp)):
            return error
        before = ", ".join(f"rank {rank}" for rank in way[way.index(named) + 1 :])
        return error.with_context(
            more=f". Rank {named} gets the state through {before}: if rank {named} is alive, look there"
        )

    def _report(
        self, data: bytes, frame: Frame, plan: Plan, target: Target, not_forwarded: str | None
    ) -> Report:
        report = Report(
            (self._peer,),
            plan.payload_bytes,
            len(data),
            len(plan.messages),
            self._phases.finish(),
            forwarded_to=self._route.next,
            not_forwarded=not_forwarded,
            forwarded_by=None if self._route.upstream == self._peer else self._route.upstream,
            step=frame.step,
            dropped=target.dropped,
            fresh=target.fresh,
            kept=target.kept,
        )
        _warn_of_gaps(report)
        return report


def _warn_of_gaps(report: Report) -> None:
    """Log one WARNING if paths were dropped or kept, or training could go on without them unnoticed."""
    gaps = [
        f"{len(paths)} path{'s' if len(paths) > 1 else ''} {what}: "
        f"{', '.join(paths[:3])}{', …' if len(paths) > 3 else ''}"
        for what, paths in (
            ("dropped, which only the sender has", report.dropped),
            ("left as they were, which only the local state has", report.kept),
        )
        if paths
    ]
    if gaps:
        logger.warning("received from rank %d in place, with gaps: %s", report.peers[0], "; ".join(gaps))
