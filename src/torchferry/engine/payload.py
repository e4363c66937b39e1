"""The payload's messages: received, checked against their digests, put where they belong, and passed on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from torchferry.core.codec import Envelope
from torchferry.core.placement import Placement, Placements
from torchferry.core.plan import Message, Plan
from torchferry.core.protocol import FAREWELL_BYTES, Tags, culprit_in
from torchferry.core.seals import Seal, decode_seal
from torchferry.engine.digest import digests, head
from torchferry.engine.meter import Meter
from torchferry.engine.relay import Relay
from torchferry.engine.staging import Staging
from torchferry.engine.window import Steps, Window
from torchferry.errors import PeerGaveUp, StateError
from torchferry.links.base import Link
from torchferry.tensors.landing import Ground


@dataclass
class Arrival:
    """What was found when all had arrived: damaged chunks, and whether the sender disowns all of it.

    `refusal` is why nothing of it was kept, if there was no room for it.
    """

    damaged: list[int] = field(default_factory=list)
    changed: bool = False
    refusal: StateError | None = None


@dataclass(frozen=True)
class Payload:
    """The receiving half of one transfer's payload, which comes from `meter.peer`."""

    link: Link
    envelope: Envelope
    plan: Plan
    landings: Placements
    ground: Ground
    meter: Meter
    staging: Staging
    verify: bool = True
    relay: Relay | None = None

    def steps(self, window_bytes: int, in_place_window_bytes: int) -> Steps[Arrival]:
        """Receive every message and put its bytes where they belong; damage is noted, not raised.

        Raises:
            PeerGaveUp: the sender, or who was to forward, said farewell.
            LinkError: the link failed.
            StateError: the local state could not be written.
        """
        return _Receiving(self).steps(Window(window_bytes, in_place_window_bytes))


class _Receiving:
    """The payload while it comes in."""

    def __init__(self, payload: Payload) -> None:
        envelope = payload.envelope
        self._payload = payload
        self._link = payload.link
        self._plan = payload.plan
        self._meter = payload.meter
        self._relay = payload.relay
        self._nonce = envelope.nonce
        self._sealed = envelope.sealed
        self._known = envelope.digests
        self._checks = payload.verify and (envelope.sealed or envelope.digests is not None)
        self._tags = Tags(envelope.origin, envelope.serial)
        self._staging = payload.staging
        self._found: list[int] = []
        self._arrival = Arrival()

    def steps(self, window: Window) -> Steps[Arrival]:
        for item in self._plan.sequence(sealed=self._sealed):
            if isinstance(item, Seal):
                yield from window.make_room(item.nbytes)
                self._post_seal(item, window)
            else:
                yield from self._post(item, window)
        yield from window.finish()
        return self._arrival

    def _post(self, message: Message, window: Window) -> Steps[None]:
        straight = self._straight(message)
        staged = straight is None
        yield from window.make_room(message.nbytes, in_place=not staged)
        if straight is None:
            yield from self._room(message.nbytes)
            buffer, rest = self._staging.take(message.nbytes), None
        else:
            buffer, rest = straight
        self._meter.go_on_if_wanted()
        pending = self._link.recv(buffer, self._meter.peer, self._tags.of(message))
        if not staged:
            self._meter.posted = message.end

        def done() -> None:
            self._arrived(message, buffer, rest)
            self._hand_on(buffer, staged=staged)

        window.add(pending, message.nbytes, done, in_place=not staged)

    def _straight(self, message: Message) -> tuple[torch.Tensor, Placement] | None:
        """Give the memory that a message can be received into as it is, and what is left to do after that."""
        if message.end - message.first > 1:
            return None
        chunk = self._plan.chunks[message.first]
        landing = self._payload.landings.of(chunk)
        return self._payload.ground.straight(chunk, landing, self._link.takes)

    def _room(self, nbytes: int) -> Steps[None]:
        if self._relay is not None:
            # It is the next receiver that keeps this one waiting, and not the peer.
            self._meter.idle = True
            yield from self._relay.room(nbytes)
            self._meter.idle = False
            for buffer in self._relay.used():
                self._staging.give_back(buffer)

    def _arrived(self, message: Message, buffer: torch.Tensor, rest: Placement | None) -> None:
        self._go_on_unless(culprit_in(head(buffer, FAREWELL_BYTES), self._nonce))
        self._meter.bytes_done += message.nbytes
        self._meter.done += 1
        if self._checks:
            self._found += digests(buffer, [chunk.nbytes for chunk in self._plan.chunks_of(message)])
        if self._arrival.refusal is None:
            try:
                self._put(message, buffer, rest)
            except StateError as error:
                if self._payload.ground.is_local:
                    # Whatever has arrived, it is not where it belongs.
                    raise
                # There is no room for it, but the sender is still left to finish.
                self._arrival.refusal = error
        # Not before: what has arrived is not whole until it is where it belongs.
        if not self._checks:
            self._meter.verified.update(range(message.first, message.end))
        elif self._known is not None:
            self._compare(message.first, self._known[message.first : message.end])

    def _put(self, message: Message, buffer: torch.Tensor, rest: Placement | None) -> None:
        """Put a message where it belongs, or what is `rest` of it if it was received there."""
        chunks = self._plan.chunks_of(message)
        landings, ground = self._payload.landings, self._payload.ground
        if rest is not None:
            if rest.direct or rest.itemwise:
                ground.put(chunks, [rest], buffer, self._meter.go_on_if_wanted)
            return
        if not landings.same_layout:
            where = [landings.of(chunk) for chunk in chunks]
            if any(landing.direct or landing.itemwise for landing in where):
                self._meter.posted = max(self._meter.posted, message.end)
                ground.put(chunks, where, buffer, self._meter.go_on_if_wanted)
            return
        self._meter.posted = max(self._meter.posted, message.end)
        ground.put_alike(chunks, buffer, self._meter.go_on_if_wanted)

    def _go_on_unless(self, culprit: int | None) -> None:
        """Stop if somebody gave up."""
        if culprit is None:
            return
        whose = "its" if culprit == self._meter.peer else f"rank {culprit}'s"
        raise PeerGaveUp(
            f"rank {self._meter.peer} gave up half-way, because of an error on {whose} side",
            culprit=culprit,
            peer=self._meter.peer,
        )

    def _hand_on(self, buffer: torch.Tensor, *, staged: bool) -> None:
        if self._relay is not None:
            self._relay.offer(buffer, staged=staged)
        elif staged:
            self._staging.give_back(buffer)

    def _post_seal(self, seal: Seal, window: Window) -> None:
        buffer = torch.zeros(seal.nbytes, dtype=torch.uint8, device=self._link.device)
        pending = self._link.recv(buffer, self._meter.peer, self._tags.of(seal))

        def done() -> None:
            opened = decode_seal(head(buffer, seal.nbytes))
            if opened.nonce != self._nonce:
                # Another transfer's, or damaged: whatever it says, it does not say it of these chunks.
                self._arrival.damaged += range(seal.first, seal.end)
            else:
                self._go_on_unless(opened.culprit)
                self._arrival.changed = self._arrival.changed or opened.changed
                if self._checks:
                    self._compare(seal.first, opened.digests)
            self._hand_on(buffer, staged=False)

        window.add(pending, seal.nbytes, done)

    def _compare(self, first: int, expected: Sequence[int]) -> None:
        """Compare the digests of chunks, from the first given, with what they should be."""
        found = self._found[first : first + len(expected)]
        if found == list(expected):
            self._meter.verified.update(range(first, first + len(expected)))
            return
        for number, (ours, theirs) in enumerate(zip(found, expected, strict=True), first):
            if ours == theirs:
                self._meter.verified.add(number)
            else:
                self._arrival.damaged.append(number)
