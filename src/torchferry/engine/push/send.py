"""Sending a state: a lane for each peer sends the frame, the chunks and the digest blocks.

A large payload goes through memory to the peers on this machine, if they take the offer in the frame.
"""

import logging
import os
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import partial

import torch
from msgspec import structs
from xxhash import xxh3_64

from torchferry.compat import dump_leaf
from torchferry.core.codec import EncodedManifest, Frame, encode, encode_refusal
from torchferry.core.machine import Machine
from torchferry.core.plan import CHUNK_BYTES, PACK_FROM, RELAY_CHUNK_BYTES, Chunk, Plan
from torchferry.core.push import (
    ANSWER_BYTES,
    HASH_FIRST_BYTES,
    OFFER_FROM_BYTES,
    TOKEN_BYTES,
    Answer,
    DigestBlock,
    SenderState,
    chain,
    decode_answer,
    encode_block,
    payload_order,
)
from torchferry.core.report import Report
from torchferry.engine import metadata
from torchferry.engine.push.lanes import Cancellation, Lane, Progress, Steps
from torchferry.engine.push.transfer import InFlight, Transfer, TransferOptions, Window
from torchferry.engine.source import NOT_HASHED, ChunkSource, first_bytes
from torchferry.engine.workspace import Workspace
from torchferry.errors import (
    FerryError,
    LinkBroken,
    LinkError,
    LinkTimeout,
    StateChanged,
    Unsendable,
    send_failed,
    what_of,
)
from torchferry.links.base import Channel, Link, Pending, to_buffer
from torchferry.links.memory_channel import AnyChannel, MemoryOffer, ring_bytes
from torchferry.tensors.describe import describe

logger = logging.getLogger(__name__)

_REFUSAL_S = 0.2
"""The timeout to post a refusal, and how long the sender then sleeps: it must live until they arrive."""


@dataclass(frozen=True)
class SendOptions(TransferOptions):
    """How to send a state.

    With `relay`, receivers forward it. A payload of at most `hash_first_bytes` is hashed before it is sent.
    With `same_host`, memory is offered for a payload of at least `offer_from_bytes`. Tensors of up to
    `copy_up_to` bytes are copied first.
    """

    relay: bool = False
    chunk_bytes: int = CHUNK_BYTES
    pack_from: int = PACK_FROM
    hash_first_bytes: int = HASH_FIRST_BYTES
    offer_from_bytes: int = OFFER_FROM_BYTES
    copy_up_to: int = 0


def send_state(
    link: Link, peers: Sequence[int], state: object, options: SendOptions, workspace: Workspace | None = None
) -> Report:
    """Send a state to every peer, after a check that all of it can be sent.

    There are no acknowledgements. When this returns, the link has every byte; a receiver may still fail or
    reject them. A slow or dead peer does not delay the others, unless they get the state through it.

    Raises:
        Unsendable: something in the state can't be sent. The peers get a refusal, and nothing of the state.
        StateChanged: the state changed meanwhile; receivers reject inconsistent data.
        LinkError: there is one peer, and the send to it failed or timed out.
        SendFailed: there are several peers, and the send to at least one failed or timed out.
        GroupBroken: an earlier transfer failed on this group.
    """
    link.check_usable()
    return _Send(link, peers, options, workspace or Workspace(link.device)).run(state)


class _Send(Transfer[SendOptions]):
    """One send, from the description of the state to the report."""

    _source: ChunkSource
    _frame: Frame

    def __init__(self, link: Link, peers: Sequence[int], options: SendOptions, workspace: Workspace) -> None:
        super().__init__("send", link, options, workspace)
        self._peers = peers
        self._transfer_id = link.new_transfer()
        # The routes of the payload, if receivers forward it.
        self._routes = chain(self._transfer_id.origin, peers) if options.relay and len(peers) > 1 else {}
        self._machines = {peer: Machine(SenderState.DESCRIBING) for peer in peers}
        self._offers: dict[int, MemoryOffer] = {}
        self._by_memory: set[int] = set()  # the receivers that took the offer
        self._cleanup = ExitStack()  # closes what was offered and taken

    def run(self, state: object) -> Report:
        try:
            with self._cleanup:
                return self._run(state)
        except FerryError as error:
            self._finish_phase("failed")
            raise error.with_context(phase=self._phase) from error.__cause__

    def _run(self, state: object) -> Report:
        self._enter_phase("describe")
        try:
            # Whatever can't be sent is found here, before anything is sent.
            description = describe(state, pickle=dump_leaf if self._options.allow_pickle else None)
            if self._options.copy_up_to:
                description = description.with_copies(self._options.copy_up_to)
            encoded = metadata.encode(description.manifest, self._workspace.cache)
            plan = self._plan(encoded)
            self._content = encoded.manifest, plan
            self._source = ChunkSource(description, plan, self._workspace.staging, self._link.can_access)
            self._frame = self._make_frame()
            frames = self._encode(encoded)
            if not self._left_s():
                raise LinkTimeout(
                    "describing the state took longer than the timeout, and nothing was sent: "
                    f"0 of {plan.payload_bytes:,} bytes done. The timeout was {self._options.timeout_s:g} s",
                    peer=self._peers[0] if len(self._peers) == 1 else None,
                )
        except BaseException as error:
            self._refuse(error)
            raise
        self._enter_phase("send tensors")
        lanes = [self._lane(peer, frames[peer]) for peer in self._peers]
        try:
            self._run_lanes(lanes)
        except BaseException as interrupt:
            self._link.mark_broken(interrupt)
            raise
        self._raise_failures(lanes)
        if not self._frame.digest_blocks:
            self._source.find_changes()
        if paths := self._source.changed_paths():
            raise StateChanged(paths)
        return Report(
            tuple(self._peers),
            plan.payload_bytes,
            max(map(len, frames.values()), default=0),
            len(plan.chunks),
            self._finish_phase(),
            step=self._options.step,
            via=self._via(),
        )

    def _via(self) -> str:
        sent = {peer for peer in self._peers if self._machines[peer].state is SenderState.SENT}
        ways = {"memory": sent & self._by_memory, "group": sent - self._by_memory}
        return " and ".join(way for way, peers in ways.items() if peers)

    def _plan(self, encoded: EncodedManifest) -> Plan:
        chunk_bytes, pack_from = self._options.chunk_bytes, self._options.pack_from
        sizes = [RELAY_CHUNK_BYTES] if self._routes and chunk_bytes > RELAY_CHUNK_BYTES else []
        return metadata.plan_outgoing(encoded, self._workspace.cache, [*sizes, chunk_bytes], pack_from)

    def _make_frame(self) -> Frame:
        """Make the frame. A small state is hashed now; samples of a large one show whether it changed."""
        source, plan, verify = self._source, self._source.plan, self._options.verify
        digest_blocks = verify and plan.payload_bytes > self._options.hash_first_bytes
        if digest_blocks:
            source.take_samples()
        elif verify:
            source.hash_all()
        return Frame(
            source.description.manifest,
            plan.chunk_bytes,
            self._options.step,
            self._transfer_id.serial,
            self._transfer_id.nonce,
            digests=tuple(source.digests) if verify and not digest_blocks else None,
            digest_blocks=digest_blocks,
            pack_bytes=plan.pack_bytes,
            origin=self._transfer_id.origin,
            offer=self._offer_memory(),
        )

    def _offer_memory(self) -> bytes:
        """Listen for receivers on this machine, and return the token of the offer; empty if there is none."""
        is_large = self._source.plan.payload_bytes >= self._options.offer_from_bytes
        if not (self._options.same_host and is_large and self._link.shares_memory and not self._routes):
            return b""
        token = os.urandom(TOKEN_BYTES)
        try:
            for peer in self._peers:
                self._offers[peer] = self._cleanup.enter_context(closing(MemoryOffer(token, peer)))
        except (OSError, AttributeError) as error:
            logger.debug("send: no memory is offered: %s", error)
            return b""
        return token

    def _encode(self, encoded: EncodedManifest) -> dict[int, bytes]:
        """Encode the frame of each peer. Without routes they are all the same."""
        data = encode(self._frame, encoded)
        frames = dict.fromkeys(self._peers, data)
        for peer, route in self._routes.items():
            frames[peer] = encode(structs.replace(self._frame, route=route), encoded)
        nbytes, limit = max(map(len, (data, *frames.values()))), self._options.max_metadata_bytes
        if nbytes > limit:
            raise Unsendable(
                f"the metadata of the state has {nbytes} bytes, more than max_metadata_bytes ({limit}): "
                "set it higher on both sides"
            )
        return frames

    def _refuse(self, error: BaseException) -> None:
        """Post a refusal with the reason to every peer, so that no receiver waits for its timeout.

        This function does not wait for the sends to complete, because a receiver may start much later. If a
        gloo wait times out, gloo closes all connections; if a process exits while a thread waits without a
        timeout, the process aborts. The link keeps the messages until the peer has received a later frame.
        """
        refusal = to_buffer(encode_refusal(what_of(error), self._options.step), self._link.device)
        for peer in self._peers:
            self._machines[peer].advance(SenderState.REFUSED)
            # A peer that is gone needs no refusal, and no failure here may hide `error`.
            with suppress(Exception), self._link.frames(peer, "send", _REFUSAL_S) as frames:
                self._link.keep(peer, _post_frame(frames, refusal))
        if self._peers:
            self._runner.sleep((), self._runner.now_s() + _REFUSAL_S)

    def _lane(self, peer: int, data: bytes) -> Lane[None]:
        has_payload = peer not in self._routes or self._routes[peer].upstream == self._frame.origin
        payload_bytes = self._source.plan.payload_bytes if has_payload else 0
        progress = Progress(peer, payload_bytes, contacted=False)
        # The lanes that send a payload divide the window bytes equally.
        payload_lanes = 1 if self._routes else len(self._peers)
        window = Window(
            partial(self._completed, progress),
            max(self._options.window_bytes // payload_lanes, 1),
            max(self._options.in_place_window_bytes // payload_lanes, 2 * self._frame.chunk_bytes),
        )
        cancellation = Cancellation()
        return Lane(progress, cancellation, self._steps(progress, cancellation, window, data, has_payload))

    def _steps(
        self, progress: Progress, cancellation: Cancellation, window: Window, data: bytes, has_payload: bool
    ) -> Steps[None]:
        """Send the frame, and the payload if the peer gets it from this process."""
        machine, peer = self._machines[progress.peer], progress.peer
        machine.advance(SenderState.OFFERING if self._frame.offer else SenderState.SENDING)
        buffer = to_buffer(data, self._link.device)
        with self._link.frames(peer, "send", self._left_s()) as frames:
            window.add(InFlight(buffer), *_post_frame(frames, buffer))
        channel: AnyChannel | None = self._link.channel(peer, self._transfer_id)
        if self._frame.offer:
            yield from window.complete_all()
            channel = yield from self._open_channel(peer, cancellation)
            machine.advance(SenderState.REJECTED if channel is None else SenderState.SENDING)
        if channel is None:
            return
        if has_payload:
            window.one_at_a_time = channel.copies
            yield from self._send_payload(progress, cancellation, window, channel)
        yield from window.complete_all()
        yield from channel.flush()
        machine.advance(SenderState.SENT)

    def _open_channel(self, peer: int, cancellation: Cancellation) -> Steps[AnyChannel | None]:
        """Wait for the answer to the offer, and open a channel; None if the receiver rejects the state."""
        buffer = to_buffer(bytes(ANSWER_BYTES), self._link.device)
        yield self._link.answers(peer, self._transfer_id).recv(buffer)
        answer = decode_answer(first_bytes(buffer, ANSWER_BYTES), self._frame.nonce)
        if answer is Answer.REJECTED:
            return None
        if answer is Answer.TAKEN:
            memory = self._offers[peer].accept(self._frame.nonce)
            self._cleanup.callback(memory.close)
            cancellation.end_waits = memory.stop
            cancellation.raise_if_cancelled()
            yield memory.send_ring(ring_bytes(self._source.plan.payload_bytes, len(self._peers)))
            if memory.is_open:
                self._by_memory.add(peer)
                return memory
        return self._link.channel(peer, self._transfer_id)

    def _send_payload(
        self, progress: Progress, cancellation: Cancellation, window: Window, channel: AnyChannel
    ) -> Steps[None]:
        items = payload_order(self._source.plan, digest_blocks=self._frame.digest_blocks)
        posted = 0
        try:
            for item in items:
                message = yield from self._read(item, window, is_hashed=channel.copies)
                cancellation.raise_if_cancelled()
                window.add(message, channel.send(message.buffer, message.hasher))
                posted += 1
                # Hash a staged copy now: it can't change any more, and is still in the CPU's cache.
                if message.staged and message.hasher is None:
                    self._hash(message)
        except Exception as error:
            # On a failed link, an abort would fail too.
            if cancellation.is_set or not isinstance(error, LinkError):
                expected = [item.nbytes for item in items[posted:]]
                if abort := channel.send_abort(self._frame.origin, expected):
                    while window:
                        yield from window.pop()
                    yield from abort
                    self._machines[progress.peer].advance(SenderState.ABORTED)
            raise

    def _read(self, item: Chunk | DigestBlock, window: Window, *, is_hashed: bool) -> Steps[InFlight]:
        """Wait until an item may be sent, and read it. With `is_hashed`, the channel hashes a new chunk.

        A digest block waits until its chunks are hashed. The last block waits for all messages: it says
        whether the state changed while any of them was being sent.
        """
        source = self._source
        if isinstance(item, Chunk):
            in_place = not source.must_stage(item)
            yield from window.make_room(item.nbytes, in_place=in_place)
            is_new = self._frame.digest_blocks and source.digests[item.number] == NOT_HASHED
            return InFlight(source.read(item), item, in_place, xxh3_64() if is_hashed and is_new else None)
        while window and (item.is_last or NOT_HASHED in source.digests[item.first : item.end]):
            yield from window.complete_oldest()
        changed = item.is_last and source.find_changes()
        digests = source.digests[item.first : item.end]
        block = encode_block(item, digests, self._frame.nonce, changed=changed)
        return InFlight(to_buffer(block, self._link.device), item)

    def _completed(self, progress: Progress, sent: InFlight) -> None:
        if sent.item is None:  # the frame
            progress.contacted = True
            self._link.release(progress.peer)
        elif isinstance(sent.item, Chunk):
            # A chunk sent in place is hashed now, while the link sends the next. A staged one already is.
            self._hash(sent)
            progress.add(sent.item.nbytes)
            self._source.release(sent.item, sent.buffer)

    def _hash(self, message: InFlight) -> None:
        if isinstance(message.item, Chunk) and self._frame.digest_blocks:
            self._source.hash(message.item, message.buffer, message.hasher)

    def _raise_failures(self, lanes: Sequence[Lane[None]]) -> None:
        failed = self._with_dependents(
            {
                lane.progress.peer: self._with_progress(lane.error, lane.progress, "send tensors")
                for lane in lanes
                if lane.error is not None
            }
        )
        if not failed:
            return
        first = next(iter(failed.values()))
        self._link.mark_broken(first)
        is_aborted = any(machine.state is SenderState.ABORTED for machine in self._machines.values())
        if not is_aborted and all(lane.error is not None for lane in lanes):
            # Every lane failed, and no receiver still has to read an abort. Closing the connections raises an
            # error on the receivers and ends pending messages.
            for peer in self._peers:
                self._link.close(peer)
        errors = {peer: error for peer, error in failed.items() if isinstance(error, FerryError)}
        if len(errors) < len(failed):
            raise next(error for error in failed.values() if not isinstance(error, FerryError))
        if len(lanes) == 1:
            raise first
        raise send_failed([peer for peer in self._peers if peer not in failed], errors) from first

    def _with_dependents(self, failed: dict[int, BaseException]) -> dict[int, BaseException]:
        """Add the receivers that would have got the payload through a failed one."""
        found: dict[int, BaseException] = {}
        lost_by: dict[int, int] = {}
        for peer, route in self._routes.items():
            if peer in failed:
                found[peer], lost_by[peer] = failed[peer], peer
            elif route.upstream in lost_by:
                lost_by[peer] = lost_by[route.upstream]
                what = f"sending to rank {lost_by[peer]}, which was to forward the state, failed"
                found[peer] = LinkBroken(what, peer=peer, phase="send tensors")
        return found or failed


def _post_frame(frames: Channel, frame: torch.Tensor) -> list[Pending]:
    """Start to send the length of a frame, and the frame."""
    length = torch.tensor([frame.nbytes], dtype=torch.int64, device=frame.device)
    return [frames.send(length), frames.send(frame)]
