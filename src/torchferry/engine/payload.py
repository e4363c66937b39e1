"""The payload's messages: received, checked against their digests, and put where they belong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from torchferry.core.codec import Envelope
from torchferry.core.landing import Landing, Landings
from torchferry.core.plan import Message, Plan
from torchferry.core.protocol import (
    FAREWELL_BYTES,
    SEAL_MESSAGES,
    Seal,
    Tags,
    decode_seal,
    farewell,
    seals_of,
)
from torchferry.engine.digest import digest
from torchferry.engine.meter import Meter
from torchferry.engine.window import Staging, Steps, Window
from torchferry.errors import PeerGaveUp
from torchferry.links.base import Link
from torchferry.tensors.landing import Ground


@dataclass
class Arrival:
    """What was found when all had arrived."""

    damaged: list[int] = field(default_factory=list)
    changed: bool = False


@dataclass(frozen=True)
class Payload:
    """The receiving half of one transfer's payload."""

    link: Link
    peer: int
    envelope: Envelope
    plan: Plan
    landings: Landings
    ground: Ground
    meter: Meter
    verify: bool = True

    def steps(self, clock: Callable[[], float], window_bytes: int) -> Steps[Arrival]:
        """Receive every message and put its bytes where they belong; damage is noted, not raised.

        Raises:
            PeerGaveUp: the sender said farewell.
            LinkError: the link failed.
        """
        return _Receiving(self).steps(Window(self.meter, clock, window_bytes))


class _Receiving:
    """The payload while it comes in."""

    def __init__(self, payload: Payload) -> None:
        self._payload = payload
        self._link = payload.link
        self._meter = payload.meter
        self._envelope = payload.envelope
        self._tags = Tags(payload.envelope.serial)
        self._staging = Staging(payload.link.device)
        self._digests: dict[int, int] = {}
        self._arrival = Arrival()
        word = bytearray(farewell(self._envelope.nonce))
        self._farewell = torch.frombuffer(word, dtype=torch.uint8).to(self._link.device)

    def steps(self, window: Window) -> Steps[Arrival]:
        messages = self._payload.plan.messages
        seals = iter(seals_of(len(messages)) if self._envelope.sealed else ())
        for message in messages:
            yield from window.make_room(message.nbytes)
            self._post(message, window)
            last = message.number + 1 == len(messages)
            if self._envelope.sealed and (last or (message.number + 1) % SEAL_MESSAGES == 0):
                self._post_seal(next(seals), window)
        yield from window.finish()
        return self._arrival

    def _post(self, message: Message, window: Window) -> None:
        landing = self._payload.landings.by_extent[message.extent]
        straight = self._payload.ground.straight(message, landing, self._link.takes)
        staged = straight is None
        buffer, rest = straight or (self._staging.take(message.nbytes), landing)
        pending = self._link.recv(buffer, self._payload.peer, self._tags.message(message.number))
        if straight is not None:
            self._meter.posted = message.number + 1

        def done() -> None:
            self._arrived(message, buffer, rest)
            if staged:
                self._staging.give_back(buffer)

        window.add(pending, message.nbytes, done)

    def _arrived(self, message: Message, buffer: torch.Tensor, rest: Landing) -> None:
        if self._envelope.nonce and torch.equal(buffer[:FAREWELL_BYTES], self._farewell):
            raise PeerGaveUp(
                "the sender gave up half-way, because of an error on its side", peer=self._payload.peer
            )
        self._meter.bytes_done += message.nbytes
        self._meter.done += 1
        if not self._payload.verify or not (self._envelope.sealed or self._envelope.digests is not None):
            self._meter.verified.add(message.number)
        elif self._envelope.digests is not None:
            self._compare(message.number, digest(buffer), self._envelope.digests[message.number])
        else:
            self._digests[message.number] = digest(buffer)
        if rest.direct or rest.spread:
            self._meter.posted = max(self._meter.posted, message.number + 1)
            self._payload.ground.put(message, rest, buffer)

    def _post_seal(self, seal: Seal, window: Window) -> None:
        buffer = torch.zeros(seal.nbytes, dtype=torch.uint8, device=self._link.device)
        pending = self._link.recv(buffer, self._payload.peer, self._tags.seal(seal.number))

        def done() -> None:
            digests, changed = decode_seal(bytes(buffer.cpu().tolist()))
            self._arrival.changed = self._arrival.changed or changed
            if self._payload.verify:
                for number, expected in zip(range(seal.first, seal.end), digests, strict=True):
                    self._compare(number, self._digests.pop(number), expected)

        window.add(pending, seal.nbytes, done)

    def _compare(self, number: int, found: int, expected: int) -> None:
        if found == expected:
            self._meter.verified.add(number)
        else:
            self._arrival.damaged.append(number)
