"""Receiving a pushed state: the frame, every check, and only then the payload.

If the frame can't be decoded, or its plan or route is invalid, the receiver closes the link, which tells the
sender. If it rejects the state after that, and the sender waits for an answer, the answer says so. Otherwise
it receives all messages and drops them, so that the sender can finish.
"""

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch
from torch.distributed.device_mesh import DeviceMesh
from xxhash import xxh3_64

from torchferry.compat import decode_pickled, load_leaf
from torchferry.core.codec import EncodedManifest, Frame, decode_refusal, is_frame
from torchferry.core.compare import Extra
from torchferry.core.machine import Machine
from torchferry.core.outcome import ChunkState
from torchferry.core.plan import Chunk, Plan
from torchferry.core.push import (
    ABORT_BYTES,
    Answer,
    DigestBlock,
    ReceiverState,
    Route,
    check_length,
    decode_block,
    encode_answer,
    payload_order,
)
from torchferry.core.report import Report
from torchferry.engine.metadata import decode, encode, plan_incoming
from torchferry.engine.push.lanes import Cancellation, Lane, Progress, Steps
from torchferry.engine.push.relay import Relay
from torchferry.engine.push.transfer import InFlight, Transfer, TransferOptions, Window
from torchferry.engine.sink import Sink, with_outcome
from torchferry.engine.source import first_bytes
from torchferry.engine.target import Target, target_in_new_memory, target_in_place
from torchferry.engine.workspace import Staging, Workspace
from torchferry.errors import (
    BadManifest,
    Corrupted,
    FerryError,
    LinkError,
    PeerGaveUp,
    StepMismatch,
)
from torchferry.links.base import Channel, Link, to_buffer
from torchferry.links.memory_channel import AnyChannel, MemoryChannel, take_offer
from torchferry.tensors.describe import Description, describe_target
from torchferry.tensors.kinds import RebuildContext

logger = logging.getLogger(__name__)

_ABORT_S = 0.5
"""How long a receiver that failed tries to send an abort to the next one."""


@dataclass(frozen=True)
class ReceiveOptions(TransferOptions):
    """How to receive a state.

    `local_state` returns the state that is written in place. `extra` says what to do with paths that only the
    peer has; None means "error" if `strict`, else "drop".
    """

    local_state: Callable[[], object] | None = None
    strict: bool = True
    extra: Extra | None = None
    mesh: DeviceMesh | None = None


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
    return _Receive(link, peer, options, workspace or Workspace(link.device)).run()


class _Receive(Transfer[ReceiveOptions]):
    """One receive, from the description of the local state to the report."""

    def __init__(self, link: Link, peer: int, options: ReceiveOptions, workspace: Workspace) -> None:
        super().__init__("receive", link, options, workspace)
        self._peer = peer
        self._machine = Machine(ReceiverState.DESCRIBING)
        self._enter_phase(ReceiverState.DESCRIBING.phase)
        self._progress = Progress(peer, contacted=False)
        self._route = Route(peer)
        self._sink: Sink | None = None
        self._not_forwarded: str | None = None
        self._cleanup = ExitStack()

    def _enter(self, state: ReceiverState) -> None:
        self._machine.advance(state)
        self._enter_phase(state.phase or self._phase)

    def run(self) -> tuple[object, Report]:
        try:
            # It closes the channel through memory. Nothing is written afterwards.
            with self._cleanup:
                return self._run()
        except BaseException as error:
            explained = self._explain(error)
            if self._machine.state.messages_pending:
                self._link.mark_broken(explained)
                self._link.close(self._peer)
            if explained is error:
                raise
            raise explained from explained.__cause__

    def _run(self) -> tuple[object, Report]:
        # The sender describes its state at the same time.
        local, cache = self._describe_local(), self._workspace.cache
        data = self._receive_frame()
        if is_frame(data):
            frame, encoded = decode(data, cache)
        else:
            frame = decode_pickled(data, allow_pickle=self._options.allow_pickle)
            encoded = encode(frame.manifest, cache)
        plan = plan_incoming(encoded, cache, frame.chunk_bytes, frame.pack_bytes, frame.digests)
        self._route = self._check_route(frame)
        self._content = frame.manifest, plan
        channel: AnyChannel = self._link.channel(self._route.upstream, frame.transfer)
        self._enter(ReceiverState.COMPARING)
        try:
            target = self._compare(frame, encoded, plan, local)
        except Exception as rejection:
            self._reject(frame, Sink(frame.manifest, plan), channel, rejection)
            raise
        if frame.offer:
            channel = self._answer_offer(frame) or channel
        state = self._receive_into(target, frame, channel)
        _warn_of_unmatched(self._peer, target)
        return state, Report(
            (self._peer,),
            plan.payload_bytes,
            len(data),
            len(plan.chunks),
            self._finish_phase(),
            forwarded_to=self._route.next,
            not_forwarded=self._not_forwarded,
            forwarded_by=None if self._route.upstream == self._peer else self._route.upstream,
            step=frame.step,
            via="memory" if channel.copies else "group",
            dropped=target.dropped,
            fresh=target.fresh,
            kept=target.kept,
        )

    def _receive_into(self, target: Target, frame: Frame, channel: AnyChannel) -> object:
        """Receive all messages, check that they can be used, and return the state."""
        self._sink = sink = target.sink
        self._enter(ReceiverState.RECEIVING)
        try:
            payload = self._receive_payload(frame, sink, channel, verify=self._options.verify)
            self._enter(ReceiverState.CHECKING)
        finally:
            sink.increment_versions()
        payload.raise_if_unusable(self._peer)
        self._enter(ReceiverState.ASSEMBLING)
        # If this fails, it is not known which tensors are complete.
        sink.unmark_whole()
        state = target.assemble()
        self._enter(ReceiverState.DONE)
        return state

    def _describe_local(self) -> Description | Exception | None:
        """Describe the local state, if there is one.

        An error is returned. `_compare` raises it, when the sender's messages can be drained.
        """
        if self._options.local_state is None:
            return None
        try:
            local = describe_target(self._options.local_state())
            # If the peer sends an equal manifest, it will be the same object, which is quick to compare.
            return replace(local, manifest=encode(local.manifest, self._workspace.cache).manifest)
        except Exception as error:
            return error

    def _receive_frame(self) -> bytes:
        """Receive a frame. A refusal for a step that was not requested is skipped."""
        wanted, peer = self._options.step, self._peer
        while True:
            self._enter(ReceiverState.WAITING)
            self._progress = Progress(peer, contacted=False)
            with self._link.frames(peer, "receive", self._left_s()) as frames:
                cancellation = Cancellation()
                steps = self._frame_steps(frames, cancellation)
                data = self._run_lane(Lane(self._progress, cancellation, steps))
            refusal = decode_refusal(data)
            if refusal is None:
                return data
            if wanted is None or refusal.step in (None, wanted):
                self._enter(ReceiverState.REJECTED)
                raise PeerGaveUp(
                    f"rank {peer} refused to send its state; nothing was received: {refusal.reason}",
                    failed_rank=peer,
                    peer=peer,
                )

    def _frame_steps(self, frames: Channel, cancellation: Cancellation) -> Steps[bytes]:
        # Zeros, so that the content does not depend on what the memory held before. Buffers are created in
        # the lane, because the caller may be in inference mode.
        length = torch.zeros(1, dtype=torch.int64, device=self._link.device)
        # stall_timeout does not apply before the first message of the sender.
        self._progress.idle = True
        yield frames.recv(length)
        cancellation.raise_if_cancelled()
        self._progress.idle, self._progress.contacted = False, True
        self._enter(ReceiverState.FRAME)
        nbytes = int(length.item())
        check_length(nbytes, self._options.max_metadata_bytes)
        buffer = torch.zeros(nbytes, dtype=torch.uint8, device=self._link.device)
        yield frames.recv(buffer)
        return first_bytes(buffer, nbytes)

    def _check_route(self, frame: Frame) -> Route:
        """Return the route of the payload; raises BadManifest if a rank is repeated or not in the group."""
        route, size = frame.route or Route(self._peer), self._link.size
        others = [rank for rank in (route.upstream, route.next, *route.before) if rank is not None]
        outside = size is not None and max(others) >= size
        repeated = len(set(others)) < len(others) or self._peer in others[1:]
        if outside or repeated or self._link.rank in others:
            raise BadManifest(
                f"the route of the payload is invalid: upstream rank {route.upstream}, ranks before it "
                f"{list(route.before)}, next rank {route.next}. Each must be another rank of the group"
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
        context = RebuildContext(options.mesh, load_leaf if options.allow_pickle else None)
        cache = self._workspace.cache
        if local is None:
            return target_in_new_memory(encoded, plan, context, cache)
        extra = options.extra or ("error" if options.strict else "drop")
        return target_in_place(encoded, plan, local, context, cache, strict=options.strict, extra=extra)

    def _answer_offer(self, frame: Frame) -> MemoryChannel | None:
        """Answer a sender that offers memory, and return the channel through it if both ends have one."""
        self._enter(ReceiverState.ANSWERING)
        channel, rank = None, self._link.rank
        if self._options.same_host and self._link.shares_memory and rank is not None:
            try:
                channel = take_offer(
                    frame.offer, frame.nonce, sender=self._peer, receiver=rank, timeout_s=self._left_s()
                )
                self._cleanup.callback(channel.close)
            except (OSError, AttributeError) as error:
                logger.debug("receive: the offer of memory is declined: %s", error)
        self._answer(frame, Answer.DECLINED if channel is None else Answer.TAKEN, channel)
        return channel if channel is not None and channel.is_open else None

    def _answer(self, frame: Frame, answer: Answer, channel: MemoryChannel | None = None) -> None:
        """Send the answer. If the offer was taken, receive the memory, unless the sender has none."""

        def steps() -> Steps[None]:
            data = to_buffer(encode_answer(frame.nonce, answer), self._link.device)
            yield self._link.answers(self._peer, frame.transfer).send(data)
            if channel is not None:
                yield channel.receive_ring()

        cancellation = Cancellation() if channel is None else Cancellation(end_waits=channel.stop)
        self._run_lane(Lane(self._progress, cancellation, steps()))

    def _reject(self, frame: Frame, sink: Sink, channel: AnyChannel, rejection: Exception) -> None:
        """Let the sender finish: tell it, or receive all messages and drop them."""
        self._enter(ReceiverState.ANSWERING if frame.offer else ReceiverState.DRAINING)
        progress = self._progress
        try:
            if frame.offer:
                self._answer(frame, Answer.REJECTED)
            else:
                self._receive_payload(frame, sink, channel, verify=False)
            self._enter(ReceiverState.REJECTED)
        except FerryError as error:
            doing = "sender was being told" if frame.offer else "messages of the state were being dropped"
            rejection.add_note(f"while the {doing}: {error}")
        finally:
            # The error must name the sender, whose state is rejected, and not the rank that forwards it.
            self._progress = progress

    def _receive_payload(self, frame: Frame, sink: Sink, channel: AnyChannel, *, verify: bool) -> "_Payload":
        """Receive all messages, and forward them if the route asks for it."""
        payload_bytes, window_bytes = sink.plan.payload_bytes, self._options.window_bytes
        self._progress = progress = Progress(self._route.upstream, payload_bytes)
        relay: Relay | None = None
        if self._route.next is not None:
            # Half of the window is for messages that arrive, half for messages that are forwarded.
            window_bytes //= 2
            relay = Relay(
                self._link.channel(self._route.next, frame.transfer),
                [item.nbytes for item in payload_order(sink.plan, digest_blocks=frame.digest_blocks)],
                Progress(self._route.next, payload_bytes),
                window_bytes,
                self._workspace.staging,
            )
        cancellation = Cancellation(end_waits=channel.stop)
        sink.before_write = cancellation.raise_if_cancelled
        payload = _Payload(self._link, channel, frame, sink, self._workspace.staging, progress, verify, relay)
        steps = payload.steps(window_bytes, self._options.in_place_window_bytes)
        receiving = Lane(progress, cancellation, steps)
        lanes = [receiving] if relay is None else [receiving, self._forwarding(relay, receiving)]
        self._run_lanes(lanes)
        receiving.result()
        # `result` has raised any error of the receiving lane, so an error here is of the forwarding lane.
        if lanes[-1].error is not None:
            self._note_not_forwarded(lanes[-1].error, lanes[-1].progress)
        return payload

    def _forwarding(self, relay: Relay, receiving: Lane[None]) -> Lane[None]:
        """Return the lane that forwards messages.

        If receiving fails, the relay sends an abort to the next receiver. If forwarding fails, it stops.
        """
        forwarding = Lane(
            relay.progress, Cancellation(), relay.steps(), lambda _: relay.stop(self._link.rank or 0)
        )

        def abort_next(error: BaseException) -> None:
            forwarding.ends_s = self._runner.now_s() + _ABORT_S
            relay.abort(self._failed_rank(error))

        receiving.on_failure = abort_next
        return forwarding

    def _failed_rank(self, error: BaseException) -> int:
        """Return the rank that caused an error of this receive."""
        if isinstance(error, PeerGaveUp) and error.failed_rank is not None:
            return error.failed_rank
        return self._route.upstream if isinstance(error, LinkError) else self._link.rank or 0

    def _note_not_forwarded(self, error: BaseException, progress: Progress) -> None:
        """Mark the group as broken, and log and note why. Raise nothing: the receive itself succeeded."""
        error = self._with_progress(error, progress, "forward tensors")
        self._link.mark_broken(error)
        logger.warning("forwarding the state to rank %d failed: %s", progress.peer, error)
        self._not_forwarded = str(error)

    def _explain(self, error: BaseException) -> BaseException:
        """Return an error with its context, and with what it did to the local state."""
        self._finish_phase("failed")
        sink, phase = self._sink, self._phase
        error = self._with_progress(error, self._progress, phase)
        if sink is not None and isinstance(error, (LinkError, PeerGaveUp)):
            error = error.with_context(more=self._upstream_hint(error))
        if sink is None or sink.local is None:
            return error
        if isinstance(error, PeerGaveUp):
            sink.unmark_whole()
        return with_outcome(error, sink, peer=self._progress.peer, phase=phase)

    def _upstream_hint(self, error: LinkError | PeerGaveUp) -> str:
        """Name the ranks through which the failed rank gets the state: one of them may be the cause."""
        failed = error.failed_rank if isinstance(error, PeerGaveUp) else error.peer
        ranks = [self._route.upstream, *self._route.before]
        ranks += [self._peer] if self._peer not in ranks else []
        if failed not in ranks[:-1]:
            return ""
        before = ", ".join(f"rank {rank}" for rank in ranks[ranks.index(failed) + 1 :])
        return f". Rank {failed} gets the state through {before}: if rank {failed} is alive, check them"


@dataclass(eq=False)
class _Payload:
    """The messages and digest blocks of one transfer: each is received, checked, written and forwarded."""

    link: Link
    channel: AnyChannel
    frame: Frame
    sink: Sink
    staging: Staging
    progress: Progress
    verify: bool
    relay: Relay | None
    state_changed: bool = False

    def __post_init__(self) -> None:
        self.verify &= self.frame.digest_blocks or self.frame.digests is not None
        if self.verify and self.frame.digests is not None:
            self.sink.expect(0, self.frame.digests)

    def steps(self, window_bytes: int, in_place_window_bytes: int) -> Steps[None]:
        """Receive everything. Damage is recorded, not raised, so that the sender can finish."""
        window = Window(self._arrived, window_bytes, in_place_window_bytes, self.channel.copies)
        for item in payload_order(self.sink.plan, digest_blocks=self.frame.digest_blocks):
            place = self.sink.direct_place(item, self.link.can_access) if isinstance(item, Chunk) else None
            yield from window.make_room(item.nbytes, in_place=place is not None)
            if self.relay is not None and isinstance(item, Chunk) and place is None:
                # This lane waits for the next receiver now, not for its peer.
                self.progress.idle = True
                yield from self.relay.wait_for_room(item.nbytes)
                self.progress.idle = False
            self.sink.before_write()
            if isinstance(item, DigestBlock):
                buffer = torch.zeros(item.nbytes, dtype=torch.uint8, device=self.link.device)
            elif place is None:
                buffer = self.staging.take(item.nbytes, pinned=self.sink.pinned)
            else:
                buffer = self.sink.open(item, place)
            hasher = xxh3_64() if self.channel.copies and self.verify and isinstance(item, Chunk) else None
            try:
                pending = self.channel.recv(buffer, hasher)
            except LinkError:
                if isinstance(item, Chunk) and place is not None:
                    self.sink.mark(item.number, item.number + 1, ChunkState.UNTOUCHED)
                raise
            window.add(InFlight(buffer, item, place is not None, hasher), pending)
        yield from window.complete_all()

    def _arrived(self, message: InFlight) -> None:
        self.channel.raise_if_aborted(first_bytes(message.buffer, ABORT_BYTES))
        if isinstance(message.item, Chunk):
            self._chunk_arrived(message.item, message.buffer, message.hasher)
        elif isinstance(message.item, DigestBlock):
            self._block_arrived(message.item, message.buffer)
        if self.relay is not None:
            self.relay.offer(message)
        elif message.staged:
            self.staging.give_back(message.buffer)

    def _chunk_arrived(self, chunk: Chunk, buffer: torch.Tensor, hasher: xxh3_64 | None) -> None:
        self.progress.add(chunk.nbytes)
        if self.verify:
            self.sink.add_digest(chunk, buffer, hasher)
        self.sink.write(chunk, buffer)
        # A chunk is whole when it is written, not when it has arrived.
        if self.verify:
            self.sink.verify()
        else:
            self.sink.mark_whole(chunk)

    def _block_arrived(self, block: DigestBlock, buffer: torch.Tensor) -> None:
        nonce, digests, changed = decode_block(block, first_bytes(buffer, block.nbytes))
        if nonce != self.frame.nonce:
            # The block is damaged, or belongs to another transfer.
            self.sink.mark(block.first, block.end, ChunkState.DAMAGED)
            return
        self.state_changed |= changed
        if self.verify:
            self.sink.expect(block.first, digests)
            self.sink.verify()

    def raise_if_unusable(self, sender: int) -> None:
        """Raise the error of a payload that arrived but can't be used."""
        if self.sink.failure is not None:
            raise self.sink.failure
        if damaged := self.sink.damaged_paths():
            raise Corrupted(damaged, peer=self.progress.peer)
        if self.state_changed:
            raise PeerGaveUp(
                "the sender's state changed during the transfer; the received data is inconsistent",
                peer=sender,
            )


def _warn_of_unmatched(peer: int, target: Target) -> None:
    """Log one WARNING about dropped and kept paths, so that an incomplete state is noticed."""
    unmatched = {
        "dropped, which only the sender has": target.dropped,
        "not changed, which only the local state has": target.kept,
    }
    found = [
        f"{len(paths)} path{'s' * (len(paths) > 1)} {what}: {', '.join([*paths[:3], '…'][: len(paths)])}"
        for what, paths in unmatched.items()
        if paths
    ]
    if found:
        logger.warning("received in place from rank %d, with unmatched paths: %s", peer, "; ".join(found))
