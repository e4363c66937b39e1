"""Sending a state: a lane for each peer sends the frame, the messages and the digest blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import torch
from msgspec import structs

from torchferry.core.codec import EncodedManifest, Frame, encode, encode_refusal
from torchferry.core.extents import TooIrregular
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
)
from torchferry.core.push import (
    HASH_FIRST_BYTES,
    DigestBlock,
    Machine,
    Route,
    SenderState,
    chain,
    encode_block,
)
from torchferry.core.report import Report
from torchferry.core.watch import Limits
from torchferry.engine.lanes import Lane, Runner, Steps, ThreadRunner, Window, run_lanes
from torchferry.engine.progress import Cancellation, Phases, Progress, with_progress
from torchferry.engine.source import Source
from torchferry.engine.workspace import Workspace
from torchferry.errors import (
    FerryError,
    LinkBroken,
    LinkError,
    LinkTimeout,
    SendBroken,
    SendFailed,
    SendLate,
    StateChanged,
    Unsendable,
)
from torchferry.links.base import Channel, Link, Pending, to_buffer
from torchferry.tensors.describe import describe

_REFUSAL_S = 0.2
"""How long a sender sleeps after it posted its refusals. A waiting receiver gets its refusal within
milliseconds, but only while the sender lives."""


@dataclass(frozen=True)
class SendOptions:
    """How to send a state. With `relay`, receivers forward it to each other.

    `pickle` encodes leaves that torchferry can't. `question` is added to a timeout if the peer was never
    heard of, with its rank in {peer}.
    """

    timeout_s: float
    max_metadata_bytes: int
    step: int | None = None
    relay: bool = False
    pickle: Callable[[object], bytes] | None = None
    chunk_bytes: int = CHUNK_BYTES
    relay_chunk_bytes: int = RELAY_CHUNK_BYTES
    pack_from: int = PACK_FROM
    window_bytes: int = WINDOW_BYTES
    in_place_window_bytes: int = IN_PLACE_WINDOW_BYTES
    hash_first_bytes: int = HASH_FIRST_BYTES
    stall_s: float | None = None
    verify: bool = True
    question: str = ""
    runner: Callable[[], Runner] = ThreadRunner


def send_state(
    link: Link,
    peers: Sequence[int],
    state: object,
    options: SendOptions,
    workspace: Workspace | None = None,
) -> Report:
    """Send a state to every peer, after a check that all of it can be sent.

    There are no acknowledgements. When this returns, the link has every byte; a receiver may still fail or
    reject them. A slow or dead peer does not delay the others, unless they get the state through it.

    Raises:
        Unsendable: something in the state can't be sent. The peers get a refusal, and nothing of the state.
        StateChanged: the state changed meanwhile; receivers reject inconsistent data.
        LinkError: the only peer could not be reached, or not in time.
        SendFailed: the same for some of several peers.
        GroupBroken: an earlier transfer failed on this group.
    """
    link.check_usable()
    send = _Send(link, peers, options, workspace or Workspace(link.device))
    try:
        return send.run(state)
    except FerryError as error:
        send.phases.finish(failed=True)
        raise error.with_context(phase=send.phases.current) from error.__cause__


class _Send:
    """One send, from the description of the state to the report."""

    def __init__(self, link: Link, peers: Sequence[int], options: SendOptions, workspace: Workspace) -> None:
        self._link = link
        self._peers = peers
        self._options = options
        self._workspace = workspace
        self._runner = options.runner()
        self._machines = {peer: Machine(SenderState.DESCRIBING) for peer in peers}
        self.phases = Phases("send", options.timeout_s, self._runner.now_s)

    def run(self, state: object) -> Report:
        self.phases.enter("describe")
        try:
            source, frame = self._describe(state)
            relayed = self._options.relay and len(self._peers) > 1
            routes = chain(frame.origin, self._peers) if relayed else {}
            frames = self._encode(frame, routes, source)
            if not self.phases.left_s():
                raise LinkTimeout(
                    "describing the state took longer than the timeout, and nothing was sent: "
                    f"0 of {source.plan.payload_bytes:,} bytes done. "
                    f"The timeout was {self._options.timeout_s:g} s",
                    peer=self._peers[0] if len(self._peers) == 1 else None,
                )
        except BaseException as error:
            self._refuse(error)
            raise
        self.phases.enter("send tensors")
        lanes = [self._lane(peer, source, frame, routes, frames[peer]) for peer in self._peers]
        limits = Limits(self.phases.deadline_s, self._options.stall_s)
        try:
            run_lanes(self._link, lanes, limits, self._runner)
        except BaseException as interrupt:
            self._link.mark_broken(interrupt)
            raise
        self._raise_failures(lanes, source, routes)
        if not frame.digest_blocks:
            source.find_changes(read_all=frame.digests is not None)
        if paths := source.changed_paths():
            raise StateChanged(paths)
        return Report(
            tuple(self._peers),
            source.plan.payload_bytes,
            max(map(len, frames.values()), default=0),
            len(source.plan.messages),
            self.phases.finish(),
            step=self._options.step,
        )

    def _describe(self, state: object) -> tuple[Source, Frame]:
        """Describe the state and plan its transfer, so that every problem of the state is found now."""
        options, workspace = self._options, self._workspace
        description = describe(state, pickle=options.pickle)
        encoded = workspace.encode(description.manifest)
        plan = self._plan(encoded)
        source = Source(description, encoded, plan, workspace.staging, self._link.can_access)
        transfer = self._link.new_transfer()
        frame = Frame(
            encoded.manifest,
            plan.chunk_bytes,
            options.step,
            transfer.serial,
            transfer.nonce,
            pack_bytes=plan.pack_bytes,
            origin=transfer.origin,
        )
        if not options.verify:
            return source, frame
        if plan.payload_bytes > options.hash_first_bytes:
            source.take_samples()
            return source, structs.replace(frame, digest_blocks=True)
        source.hash_all()
        return source, structs.replace(frame, digests=tuple(source.digests))

    def _plan(self, encoded: EncodedManifest) -> Plan:
        options = self._options
        try:
            plan = self._workspace.plan(encoded, options.chunk_bytes, pack_from=options.pack_from)
            short = options.relay_chunk_bytes
            relayed = options.relay and len(self._peers) > 1
            if relayed and short < options.chunk_bytes and plan.payload_bytes < short * (MAX_MESSAGES // 2):
                plan = self._workspace.plan(encoded, short, pack_from=options.pack_from)
            return plan
        except TooIrregular as error:
            raise Unsendable(
                f"the state has views that overlap too irregularly to be sent without bytes between them "
                f"({error}): clone() one of them first"
            ) from None
        except TooManyMessages as error:
            raise Unsendable(f"{error}: send the state in parts") from None

    def _encode(self, frame: Frame, routes: Mapping[int, Route], source: Source) -> dict[int, bytes]:
        """Encode the frame of each peer. Without routes they are all the same."""
        data = encode(frame, source.encoded)
        frames = dict.fromkeys(self._peers, data)
        for peer, route in routes.items():
            frames[peer] = encode(structs.replace(frame, route=route), source.encoded)
        nbytes, limit = max(map(len, (data, *frames.values()))), self._options.max_metadata_bytes
        if nbytes > limit:
            raise Unsendable(
                f"the metadata of the state has {nbytes} bytes, more than max_metadata_bytes ({limit}): "
                "set it higher on both sides"
            )
        return frames

    def _refuse(self, error: BaseException) -> None:
        """Post a refusal with the reason to every peer, so that no receiver waits for its timeout.

        This function does not wait for the sends to complete, because a receiver may call much later. If a
        gloo wait times out, gloo closes all connections; if a process exits while a thread waits without a
        timeout, the process aborts. The link keeps the messages until the peer has received a later frame.
        """
        reason = error.what if isinstance(error, FerryError) else f"{type(error).__name__}: {error}"
        data = encode_refusal(reason, self._options.step)
        for peer in self._peers:
            self._machines[peer].advance(SenderState.REFUSED)
            # A peer that is gone needs no refusal, and no failure here may hide `error`.
            with suppress(Exception), self._link.frames(peer, "send", _REFUSAL_S) as frames:
                self._link.keep(peer, _post_frame(frames, data, self._link.device))
        if self._peers:
            self._runner.sleep((), self._runner.now_s() + _REFUSAL_S)

    def _lane(
        self, peer: int, source: Source, frame: Frame, routes: Mapping[int, Route], data: bytes
    ) -> Lane[None]:
        has_payload = peer not in routes or routes[peer].upstream == frame.origin
        progress = Progress(peer, source.plan.payload_bytes if has_payload else 0, contacted=False)
        cancellation = Cancellation()
        # The lanes that send a payload share the windows.
        lanes = 1 if routes else len(self._peers)
        window: Window[_InFlight] = Window(
            max(self._options.window_bytes // lanes, 1),
            max(self._options.in_place_window_bytes // lanes, 2 * frame.chunk_bytes),
        )
        outgoing = _Outgoing(
            self._link, peer, source, frame, window, self._machines[peer], progress, cancellation
        )
        steps = outgoing.steps(data, self.phases.left_s, has_payload=has_payload)
        return Lane(progress, cancellation, steps)

    def _raise_failures(
        self, lanes: Sequence[Lane[None]], source: Source, routes: Mapping[int, Route]
    ) -> None:
        failed: dict[int, BaseException] = {}
        for lane in lanes:
            if isinstance(lane.error, FerryError):
                failed[lane.progress.peer] = with_progress(
                    lane.error,
                    lane.progress,
                    "send tensors",
                    timeout_s=self._options.timeout_s,
                    question=self._options.question,
                    content=(source.encoded.manifest, source.plan),
                )
            elif lane.error is not None:
                failed[lane.progress.peer] = lane.error
        failed = _with_dependents(failed, routes)
        if not failed:
            return
        first = next(iter(failed.values()))
        self._link.mark_broken(first)
        aborted = [peer for peer in self._peers if self._machines[peer].state is SenderState.ABORTED]
        if not aborted and all(lane.error is not None for lane in lanes):
            # No receiver has the state or still has to read an abort, so the connections can be closed. That
            # tells the receivers and ends pending messages.
            for peer in self._peers:
                self._link.close(peer)
        if len(lanes) == 1:
            raise first
        errors = {peer: error for peer, error in failed.items() if isinstance(error, FerryError)}
        if len(errors) < len(failed):
            raise next(error for error in failed.values() if not isinstance(error, FerryError))
        kind = SendFailed
        if any(isinstance(error, TimeoutError) for error in errors.values()):
            kind = SendLate
        elif any(isinstance(error, ConnectionError) for error in errors.values()):
            kind = SendBroken
        raise kind([peer for peer in self._peers if peer not in failed], errors) from first


def _with_dependents(
    failed: dict[int, BaseException], routes: Mapping[int, Route]
) -> dict[int, BaseException]:
    """Add the receivers that would have got the payload through a failed one."""
    found: dict[int, BaseException] = {}
    lost_by: dict[int, int] = {}
    for peer, route in routes.items():
        if peer in failed:
            found[peer], lost_by[peer] = failed[peer], peer
        elif route.upstream in lost_by:
            lost_by[peer] = lost_by[route.upstream]
            what = f"rank {lost_by[peer]}, which was to forward the state, could not be reached"
            found[peer] = LinkBroken(what, peer=peer, phase="send tensors")
    return found or failed


def _post_frame(frames: Channel, data: bytes, device: torch.device) -> list[Pending]:
    """Start to send the length of a frame, and the frame."""
    length = torch.tensor([len(data)], dtype=torch.int64, device=device)
    return [frames.send(length), frames.send(to_buffer(data, device))]


class _InFlight(NamedTuple):
    """A message in flight: a message of the plan with its buffer, or the frame, or neither."""

    message: Message | None = None
    buffer: torch.Tensor | None = None
    is_frame: bool = False


@dataclass(frozen=True)
class _Outgoing:
    """Sends the frame and the payload to one peer."""

    link: Link
    peer: int
    source: Source
    frame: Frame
    window: Window[_InFlight]
    machine: Machine[SenderState]
    progress: Progress
    cancellation: Cancellation

    def steps(self, data: bytes, left_s: Callable[[], float], *, has_payload: bool) -> Steps[None]:
        """Send the frame, and the payload if the peer gets it from this process.

        Raises:
            LinkError: the link failed.
            StateError: memory of the state was freed.
        """
        self.machine.advance(SenderState.SENDING)
        with self.link.frames(self.peer, "send", left_s()) as frames:
            length, frame = _post_frame(frames, data, self.link.device)
        self.window.add(length, 0, _InFlight())
        self.window.add(frame, len(data), _InFlight(is_frame=True))
        if has_payload:
            yield from self._send_payload(self.link.channel(self.peer, self.frame.transfer))
        yield from self._finish()
        self.machine.advance(SenderState.SENT)

    def _send_payload(self, channel: Channel) -> Steps[None]:
        source, window = self.source, self.window
        sequence = source.plan.sequence(digest_blocks=self.frame.digest_blocks)
        posted = 0
        try:
            for item in sequence:
                in_place = isinstance(item, Message) and not source.must_stage(item)
                yield from self._make_room(item, in_place=in_place)
                self.cancellation.raise_if_cancelled()
                buffer = source.read(item) if isinstance(item, Message) else self._block(item)
                pending = channel.send(buffer)
                posted += 1
                sent = _InFlight(item, buffer) if isinstance(item, Message) else _InFlight()
                window.add(pending, item.nbytes, sent, in_place=in_place)
                # A staged copy can't change any more, and is still in the cache.
                if isinstance(item, Message) and not in_place:
                    self._hash(item, buffer)
        except Exception as error:
            # On a failed link, an abort would fail too.
            if self.cancellation.is_set or not isinstance(error, LinkError):
                yield from self._abort(channel, [item.nbytes for item in sequence[posted:]])
            raise

    def _make_room(self, item: Message | DigestBlock, *, in_place: bool) -> Steps[None]:
        """Wait until an item may be sent.

        A digest block waits until its chunks are hashed. The last block waits for all messages: it says
        whether the state changed while any of them was being sent.
        """
        if isinstance(item, Message):
            while not self.window.has_room(item.nbytes, in_place=in_place):
                self._completed((yield from self.window.pop()))
        else:
            while self.window and (item.last or None in self.source.digests[item.first : item.end]):
                self._completed((yield from self.window.pop()))

    def _block(self, block: DigestBlock) -> torch.Tensor:
        digests = [digest for digest in self.source.digests[block.first : block.end] if digest is not None]
        assert len(digests) == block.end - block.first, "a block is sent when all its chunks are hashed"
        changed = block.last and self.source.find_changes()
        return to_buffer(encode_block(block, digests, self.frame.nonce, changed=changed), self.link.device)

    def _abort(self, channel: Channel, expected: Sequence[int]) -> Steps[None]:
        messages = channel.send_abort(self.frame.origin, expected)
        if messages:
            for message in messages:
                self.window.add(message, 0, _InFlight())
            while self.window:
                yield from self.window.pop()
            self.machine.advance(SenderState.ABORTED)

    def _finish(self) -> Steps[None]:
        while self.window:
            self._completed((yield from self.window.pop()))

    def _completed(self, sent: _InFlight) -> None:
        if sent.is_frame:
            self.progress.contacted = True
            self.link.release(self.peer)
        if sent.message is not None and sent.buffer is not None:
            # A message that was sent from the state's own memory is hashed while the link sends the next.
            self._hash(sent.message, sent.buffer)
            self.progress.add(sent.message.nbytes)
            self.source.done_with(sent.message, sent.buffer)

    def _hash(self, message: Message, buffer: torch.Tensor) -> None:
        if self.frame.digest_blocks:
            self.source.hash(message, buffer)
