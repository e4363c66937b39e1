"""Sending: the frame first, then the plan's messages and their seals, to every peer in a lane of its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from torchferry.core.codec import Envelope, encode
from torchferry.core.extents import TooIntricate
from torchferry.core.plan import CHUNK_BYTES, WINDOW_BYTES, Message, Plan, make_plan
from torchferry.core.protocol import (
    AHEAD_BYTES,
    FAREWELL_BYTES,
    FRAME_TAG,
    LENGTH_TAG,
    MAX_MESSAGES,
    NONCE_BYTES,
    SEAL_MESSAGES,
    Tags,
    encode_seal,
    farewell,
    seals_of,
)
from torchferry.core.report import Report
from torchferry.core.torn import paths_of
from torchferry.core.watch import Rules
from torchferry.engine.digest import digest
from torchferry.engine.group import Group
from torchferry.engine.lanes import Lane, Runner, run_lanes
from torchferry.engine.meter import Meter
from torchferry.engine.phases import Phases
from torchferry.engine.threads import ThreadRunner
from torchferry.engine.window import Staging, Steps, Window
from torchferry.errors import FerryError, LinkError, SendFailed, StateChanged, Unsendable
from torchferry.links.base import Link
from torchferry.tensors.describe import Description, describe
from torchferry.tensors.memory import load, run_of


@dataclass(frozen=True)
class Push:
    """How a state is to be sent."""

    timeout_s: float
    max_metadata_bytes: int
    step: int | None = None
    pickle: Callable[[object], bytes] | None = None
    chunk_bytes: int = CHUNK_BYTES
    window_bytes: int = WINDOW_BYTES
    ahead_bytes: int = AHEAD_BYTES
    stall_s: float | None = None
    verify: bool = True
    runner: Callable[[], Runner] = ThreadRunner


def push(link: Link, peers: Sequence[int], state: object, terms: Push, group: Group | None = None) -> Report:
    """Send a state to every peer. Nothing is sent before all of it is known to be sendable.

    Returns once the link has taken every byte, which does not say that the peers have them. A peer that is
    slow or dead holds up nobody but itself.

    Raises:
        Unsendable: something in the state can't travel; nothing was sent.
        StateChanged: the state was changed meanwhile; the receivers know.
        LinkError: the only peer could not be reached, or not in time.
        SendFailed: the same for some or all of several peers.
        GroupBroken: an earlier transfer failed on this group.
    """
    group = group or Group()
    group.check()
    runner = terms.runner()
    phases = Phases("send", terms.timeout_s, runner.now_s)
    with phases.phase("describe"):
        cargo = _load_cargo(link, state, terms, group, len(peers))
    with phases.phase("send tensors"):
        lanes = []
        for peer in peers:
            meter = Meter(peer, "send", runner.now_s(), cargo.plan.payload_bytes)
            steps = send_steps(link, peer, cargo, meter, group, phases.left_s, runner.now_s)
            lanes.append(Lane(meter, steps))
        try:
            run_lanes(link, lanes, Rules(phases.deadline_s, terms.stall_s), runner)
        except BaseException as interrupt:
            group.mark_broken(interrupt)
            raise
        _raise_failures(link, lanes, cargo, group)
    return Report(
        tuple(peers),
        cargo.plan.payload_bytes,
        len(cargo.frame),
        len(cargo.plan.messages),
        dict(phases.seconds),
    )


@dataclass
class Cargo:
    """A state made ready for sending, shared by the lanes to all its receivers."""

    source: Description
    plan: Plan
    envelope: Envelope
    frame: bytes
    verify: bool
    window_bytes: int
    digests: list[int | None]

    def outgoing(self, link: Link, message: Message, staging: Staging) -> tuple[torch.Tensor, bool]:
        """Give a message's bytes, where they lie if the link can take them there, and whether staged."""
        memory = self.source.memories[message.piece.storage]
        staged = bool(message.piece.repeats) or not link.takes(memory.device)
        if staged:
            buffer = staging.take(message.nbytes)
            load(memory, message.piece, buffer)
        else:
            buffer = run_of(memory, message.piece)
        if self.verify and self.digests[message.number] is None:
            self.digests[message.number] = digest(buffer)
        return buffer, staged

    def has_changed(self) -> bool:
        """Say whether torch has written to the state since it was described."""
        return bool(self.source.changed_tensors())

    def changed_paths(self) -> list[str]:
        """Name the leaves that were changed since the state was described, as far as torch tells."""
        changed = self.source.changed_tensors()
        if not changed:
            return []
        extents = {
            number
            for number, extent in enumerate(self.plan.extents)
            if extent.storage in {self.source.manifest.tensors[n].storage for n in changed}
        }
        return paths_of(self.source.manifest, self.plan.extents, extents)


def _load_cargo(link: Link, state: object, terms: Push, group: Group, lanes: int) -> Cargo:
    source = describe(state, pickle=terms.pickle)
    plan = _plan(source, terms)
    cargo = Cargo(
        source,
        plan,
        Envelope(source.manifest, terms.chunk_bytes, terms.step),
        b"",
        terms.verify,
        max(terms.window_bytes // max(lanes, 1), 1),
        [None] * len(plan.messages),
    )
    ahead = terms.verify and plan.payload_bytes <= terms.ahead_bytes
    if ahead:
        staging = Staging(link.device)
        for message in plan.messages:
            buffer, staged = cargo.outgoing(link, message, staging)
            if staged:
                staging.give_back(buffer)
    cargo.envelope = Envelope(
        source.manifest,
        terms.chunk_bytes,
        terms.step,
        group.next_serial(),
        os.urandom(NONCE_BYTES),
        tuple(d for d in cargo.digests if d is not None) if ahead else None,
        terms.verify and not ahead,
    )
    cargo.frame = encode(cargo.envelope)
    if len(cargo.frame) > terms.max_metadata_bytes:
        raise Unsendable(
            f"the state's metadata is {len(cargo.frame)} bytes, more than the {terms.max_metadata_bytes} "
            "that are allowed: set max_metadata_bytes higher on both sides"
        )
    return cargo


def _plan(source: Description, terms: Push) -> Plan:
    try:
        plan = make_plan(source.manifest, terms.chunk_bytes)
    except TooIntricate as error:
        raise Unsendable(
            f"the state has overlapping views in a pattern too irregular to send without sending "
            f"bytes that are not theirs ({error}): clone() one of them first"
        ) from None
    if len(plan.messages) > MAX_MESSAGES:
        raise Unsendable(
            f"the state needs {len(plan.messages)} messages, more than the {MAX_MESSAGES} that can be told "
            "apart: send it in parts"
        )
    return plan


def send_steps(
    link: Link,
    peer: int,
    cargo: Cargo,
    meter: Meter,
    group: Group,
    left_s: Callable[[], float],
    clock: Callable[[], float],
) -> Steps[None]:
    """Send everything to one peer."""
    window = Window(meter, clock, cargo.window_bytes)
    tags = Tags(cargo.envelope.serial)
    length = torch.tensor([len(cargo.frame)], dtype=torch.int64, device=link.device)
    frame = torch.frombuffer(bytearray(cargo.frame), dtype=torch.uint8).to(link.device)
    with group.header("send", peer, left_s):
        window.add(link.send(length, peer, LENGTH_TAG), 0, _nothing)
        window.add(link.send(frame, peer, FRAME_TAG), len(cargo.frame), _nothing)
    staging = Staging(link.device)
    seals = iter(seals_of(len(cargo.plan.messages)) if cargo.envelope.sealed else ())
    for message in cargo.plan.messages:
        yield from window.make_room(message.nbytes)
        try:
            buffer, staged = cargo.outgoing(link, message, staging)
        except Exception:
            if link.sends_short:
                yield from _say_farewell(link, peer, cargo, message, tags, window)
            raise
        pending = link.send(buffer, peer, tags.message(message.number))
        window.add(pending, message.nbytes, _sent(meter, message, staging, buffer if staged else None))
        last = message.number + 1 == len(cargo.plan.messages)
        if cargo.envelope.sealed and (last or (message.number + 1) % SEAL_MESSAGES == 0):
            seal = next(seals)
            if last:
                yield from window.finish()
            digests = cargo.digests[seal.first : seal.end]
            data = encode_seal([d for d in digests if d is not None], changed=last and cargo.has_changed())
            buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(link.device)
            window.add(link.send(buffer, peer, tags.seal(seal.number)), seal.nbytes, _nothing)
    yield from window.finish()


def _sent(
    meter: Meter, message: Message, staging: Staging, staged: torch.Tensor | None
) -> Callable[[], None]:
    def done() -> None:
        meter.bytes_done += message.nbytes
        meter.done += 1
        if staged is not None:
            staging.give_back(staged)

    return done


def _say_farewell(
    link: Link, peer: int, cargo: Cargo, message: Message, tags: Tags, window: Window
) -> Steps[None]:
    """Tell the receiver, in the place of the next message that is long enough, that no more will come."""
    word = torch.frombuffer(bytearray(farewell(cargo.envelope.nonce)), dtype=torch.uint8).to(link.device)
    for following in cargo.plan.messages[message.number :]:
        if following.nbytes >= FAREWELL_BYTES:
            window.add(link.send(word, peer, tags.message(following.number)), 0, _nothing)
            yield from window.finish()
            return
        filler = torch.zeros(following.nbytes, dtype=torch.uint8, device=link.device)
        window.add(link.send(filler, peer, tags.message(following.number)), 0, _nothing)
    yield from window.finish()


def _raise_failures(link: Link, lanes: Sequence[Lane[None]], cargo: Cargo, group: Group) -> None:
    failed = {lane.meter.peer: _annotated(lane, cargo) for lane in lanes if lane.error is not None}
    if failed:
        first = next(iter(failed.values()))
        group.mark_broken(first)
        if all(isinstance(lane.error, LinkError) for lane in lanes):
            # Nobody is still reading, so the connections can go, and with them whatever hangs on them.
            for lane in lanes:
                link.break_off(lane.meter.peer)
        if len(lanes) == 1:
            raise first
        errors = {peer: error for peer, error in failed.items() if isinstance(error, FerryError)}
        if len(errors) < len(failed):
            raise next(error for error in failed.values() if not isinstance(error, FerryError))
        delivered = [lane.meter.peer for lane in lanes if lane.error is None]
        raise SendFailed(delivered, errors) from first
    if changed := cargo.changed_paths():
        raise StateChanged(changed)


def _annotated(lane: Lane[None], cargo: Cargo) -> BaseException:
    """Add to an error how far its lane had got."""
    error = lane.error
    assert error is not None, "only lanes that failed are annotated"
    if isinstance(error, LinkError):
        error.peer = lane.meter.peer
        error.phase = error.phase or "send tensors"
        messages = cargo.plan.messages
        if messages:
            at = messages[min(lane.meter.done, len(messages) - 1)]
            named = paths_of(cargo.source.manifest, cargo.plan.extents, {at.extent})
            error.path = named[0] if named else None
        error.what = f"{error.what}; {lane.meter}, last at {error.path}"
    return error


def _nothing() -> None:
    """What is to be done after a message that needs nothing."""
