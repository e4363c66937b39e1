"""Sending: the frame first, then the plan's messages and their seals, to every peer in a lane of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from torchferry.core.plan import Message
from torchferry.core.protocol import (
    FAREWELL_BYTES,
    FRAME_TAG,
    LENGTH_TAG,
    SEAL_MESSAGES,
    Tags,
    encode_seal,
    farewell,
    seals_of,
)
from torchferry.core.report import Report
from torchferry.core.watch import Rules
from torchferry.engine.cargo import Cargo, Push, load_cargo
from torchferry.engine.group import Group
from torchferry.engine.lanes import Lane, run_lanes
from torchferry.engine.meter import Meter, note_progress
from torchferry.engine.phases import Phases
from torchferry.engine.window import Staging, Steps, Window
from torchferry.errors import FerryError, SendBroken, SendFailed, SendLate, StateChanged
from torchferry.links.base import Link


def push(link: Link, peers: Sequence[int], state: object, terms: Push, group: Group | None = None) -> Report:
    """Send a state to every peer. Nothing is sent before all of it is known to be sendable.

    Returns once the link has taken every byte, which does not say that the peers have them. A peer that is
    slow or dead holds up nobody but itself.

    Raises:
        Unsendable: something in the state can't travel; nothing was sent.
        StateChanged: the state was changed meanwhile; no receiver accepts a mixture.
        LinkError: the only peer could not be reached, or not in time.
        SendFailed: the same for some or all of several peers.
        GroupBroken: an earlier transfer failed on this group.
    """
    group = group or Group()
    group.check()
    runner = terms.runner()
    phases = Phases("send", terms.timeout_s, runner.now_s)
    with phases.phase("describe"):
        cargo = load_cargo(link, state, terms, group, len(peers))
    with phases.phase("send tensors"):
        lanes = []
        for peer in peers:
            meter = Meter(peer, "send tensors", runner.now_s(), cargo.plan.payload_bytes)
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
                meter.told = True
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
        _fill_up(link, peer, following.nbytes, tags.message(following.number), window)
        if cargo.envelope.sealed and (following.number + 1) % SEAL_MESSAGES == 0:
            seal = following.number // SEAL_MESSAGES
            _fill_up(link, peer, 8 * (SEAL_MESSAGES + 1), tags.seal(seal), window)
    yield from window.finish()


def _fill_up(link: Link, peer: int, nbytes: int, tag: int, window: Window) -> None:
    """Send nothing, in the length that is expected, so that the receiver gets as far as the farewell."""
    window.add(link.send(torch.zeros(nbytes, dtype=torch.uint8, device=link.device), peer, tag), 0, _nothing)


def _raise_failures(link: Link, lanes: Sequence[Lane[None]], cargo: Cargo, group: Group) -> None:
    failed = {lane.meter.peer: lane.error for lane in lanes if lane.error is not None}
    for lane in lanes:
        if isinstance(lane.error, FerryError):
            note_progress(lane.error, lane.meter, cargo.source.manifest, cargo.plan)
    if failed:
        first = next(iter(failed.values()))
        group.mark_broken(first)
        if all(lane.error is not None and not lane.meter.told for lane in lanes):
            # Nobody has all of it or a farewell to read, so the connections can go, and with them whatever
            # hangs on them; that tells the receivers, whatever went wrong here.
            for lane in lanes:
                link.break_off(lane.meter.peer)
        if len(lanes) == 1:
            raise first
        errors = {peer: error for peer, error in failed.items() if isinstance(error, FerryError)}
        if len(errors) < len(failed):
            raise next(error for error in failed.values() if not isinstance(error, FerryError))
        delivered = [lane.meter.peer for lane in lanes if lane.error is None]
        kind = SendFailed
        if any(isinstance(error, TimeoutError) for error in errors.values()):
            kind = SendLate
        elif any(isinstance(error, ConnectionError) for error in errors.values()):
            kind = SendBroken
        raise kind(delivered, errors) from first
    if changed := cargo.changed_paths():
        raise StateChanged(changed)


def _nothing() -> None:
    """What is to be done after a message that needs nothing."""
