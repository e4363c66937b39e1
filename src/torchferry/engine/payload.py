"""The payload of one transfer: messages and digest blocks are received, checked, written and forwarded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from torchferry.core.codec import Frame
from torchferry.core.plan import Message, Plan
from torchferry.core.push import ABORT_BYTES, DigestBlock, decode_block
from torchferry.engine.digest import first_bytes
from torchferry.engine.lanes import Steps, Window
from torchferry.engine.progress import Cancellation, Progress
from torchferry.engine.relay import Relay
from torchferry.engine.sink import Sink
from torchferry.engine.workspace import Staging
from torchferry.links.base import Channel, Link


class _Arriving(NamedTuple):
    item: Message | DigestBlock
    buffer: torch.Tensor
    staged: bool


@dataclass(frozen=True)
class PayloadReceiver:
    """Receives messages from a channel and hands them to a sink, and to a relay if there is one."""

    link: Link
    channel: Channel
    frame: Frame
    plan: Plan
    sink: Sink
    staging: Staging
    window: Window[_Arriving]
    progress: Progress
    cancellation: Cancellation
    verify: bool = True
    relay: Relay | None = None

    @property
    def _has_digests(self) -> bool:
        return self.verify and (self.frame.digest_blocks or self.frame.digests is not None)

    def steps(self) -> Steps[None]:
        """Receive everything. Damage is recorded in the sink, not raised, so that the sender can finish.

        Raises:
            PeerGaveUp: the peer aborted the transfer.
            LinkError: the link failed.
            StateError: the local state could not be written.
        """
        for item in self.plan.sequence(digest_blocks=self.frame.digest_blocks):
            yield from self._post(item)
        while self.window:
            self._arrived((yield from self.window.pop()))

    def _post(self, item: Message | DigestBlock) -> Steps[None]:
        place = self.sink.direct_place(item, self.link.can_access) if isinstance(item, Message) else None
        in_place = place is not None
        while not self.window.has_room(item.nbytes, in_place=in_place):
            self._arrived((yield from self.window.pop()))
        staged = isinstance(item, Message) and place is None
        if isinstance(item, DigestBlock):
            buffer = torch.zeros(item.nbytes, dtype=torch.uint8, device=self.link.device)
        elif place is not None:
            self.cancellation.raise_if_cancelled()
            buffer = self.sink.open(item, place)
        else:
            if self.relay is not None:
                yield from self._wait_for_relay(self.relay, item.nbytes)
            self.cancellation.raise_if_cancelled()
            buffer = self.staging.take(item.nbytes, pinned=self.sink.pinned)
        pending = self.channel.recv(buffer)
        if isinstance(item, Message) and in_place:
            self.sink.mark_written(item)
        self.window.add(pending, item.nbytes, _Arriving(item, buffer, staged), in_place=in_place)

    def _wait_for_relay(self, relay: Relay, nbytes: int) -> Steps[None]:
        # This lane waits for the next receiver now, not for its peer.
        self.progress.idle = True
        yield from relay.wait_for_room(nbytes)
        self.progress.idle = False
        for buffer in relay.take_used():
            self.staging.give_back(buffer)

    def _arrived(self, arriving: _Arriving) -> None:
        item, buffer, staged = arriving
        self.channel.raise_if_aborted(first_bytes(buffer, ABORT_BYTES))
        if isinstance(item, Message):
            self._message_arrived(item, buffer)
        else:
            self._block_arrived(item, buffer)
        if self.relay is not None:
            self.relay.offer(buffer, staged=staged)
        elif staged:
            self.staging.give_back(buffer)

    def _message_arrived(self, message: Message, buffer: torch.Tensor) -> None:
        self.progress.add(message.nbytes)
        if self._has_digests:
            self.sink.add_digests(message, buffer)
        self.sink.write(message, buffer, self.cancellation.raise_if_cancelled)
        # A chunk is whole when it is written, not when it has arrived.
        if not self._has_digests:
            self.sink.accept(message)
        elif self.frame.digests is not None:
            self.sink.verify(message.first, self.frame.digests[message.first : message.end])

    def _block_arrived(self, block: DigestBlock, buffer: torch.Tensor) -> None:
        nonce, digests, changed = decode_block(block, first_bytes(buffer, block.nbytes))
        if nonce != self.frame.nonce:
            # The block is damaged, or belongs to another transfer.
            self.sink.mark_damaged(block.first, block.end)
            return
        self.sink.sender_changed |= changed
        if self._has_digests:
            self.sink.verify(block.first, digests)
