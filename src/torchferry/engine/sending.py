"""Sending: the frame first, then the plan's messages and their seals, to every peer in a lane of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

import torch

from torchferry.core.codec import encode_refusal
from torchferry.core.plan import Message
from torchferry.core.protocol import FRAME_TAG, LENGTH_TAG, Tags
from torchferry.core.report import Report
from torchferry.core.seals import Seal, encode_seal
from torchferry.core.watch import Rules
from torchferry.engine.cargo import Cargo, Push, check_frame, load_cargo
from torchferry.engine.farewell import say_farewell
from torchferry.engine.group import Group
from torchferry.engine.lanes import Lane, Runner, run_lanes
from torchferry.engine.meter import Meter, ask_after_unmet, note_progress
from torchferry.engine.phases import Phases
from torchferry.engine.staging import Staging
from torchferry.engine.window import Steps, Window
from torchferry.errors import (
    FerryError,
    LinkBroken,
    LinkTimeout,
    SendBroken,
    SendFailed,
    SendLate,
    StateChanged,
)
from torchferry.links.base import Link, Pending


def push(link: Link, peers: Sequence[int], state: object, terms: Push, group: Group | None = None) -> Report:
    """Send a state to every peer. Nothing of it is sent before all of it is known to be sendable.

    Returns once the link has taken every byte, which does not say that the peers have them. A peer that is
    slow or dead holds up nobody but itself, unless the others get the state through it.

    Raises:
        Unsendable: something in the state can't be sent. The peers get a refusal, and nothing of the state.
        StateChanged: the state was changed meanwhile; no receiver accepts a mixture.
        LinkError: the only peer could not be reached, or not in time.
        SendFailed: the same for some or all of several peers.
        GroupBroken: an earlier transfer failed on this group.
    """
    group = group or Group()
    group.check()
    runner = terms.runner()
    phases = Phases("send", terms.timeout_s, runner.now_s)
    try:
        with phases.phase("describe"):
            cargo = load_cargo(link, peers, state, terms, group)
            frames = {peer: check_frame(cargo.frame(peer), terms) for peer in peers}
            if not phases.left_s():
                raise LinkTimeout(
                    "describing the state took all the time there was, and nothing was sent: "
                    f"0 of {cargo.plan.payload_bytes:,} bytes done",
                    peer=peers[0] if len(peers) == 1 else None,
                )
    except BaseException as error:
        _refuse(link, peers, error, group, terms.step, runner)
        raise
    with phases.phase("send tensors"):
        lanes = []
        for peer in peers:
            meter = Meter(peer, "send tensors", cargo.bytes_due(peer), met=False)
            steps = send_steps(link, peer, cargo, frames[peer], meter, group, phases.left_s)
            lanes.append(Lane(meter, steps))
        try:
            run_lanes(link, lanes, Rules(phases.deadline_s, terms.stall_s), runner)
        except BaseException as interrupt:
            group.mark_broken(interrupt)
            raise
        _raise_failures(link, lanes, cargo, group, terms.if_unmet)
    return Report(
        tuple(peers),
        cargo.plan.payload_bytes,
        max(map(len, frames.values()), default=0),
        len(cargo.plan.messages),
        dict(phases.seconds),
        step=terms.step,
    )


def send_steps(
    link: Link,
    peer: int,
    cargo: Cargo,
    data: bytes,
    meter: Meter,
    group: Group,
    left_s: Callable[[], float],
) -> Steps[None]:
    """Send the frame to one peer, and the payload if it gets that from here."""
    window = Window(cargo.window_bytes, cargo.in_place_window_bytes)
    with group.header("send", peer, left_s):
        length, frame = _post_header(link, peer, data)
        refusals = group.held(peer)

    def taken() -> None:
        meter.meet()
        refusals.clear()

    window.add(length, 0)
    window.add(frame, len(data), taken)
    staging = group.staging(link.device, pinned=not cargo.source.is_all_cpu)
    if cargo.sends_to(peer):
        yield from _payload_steps(link, peer, cargo, meter, window, staging)
    yield from window.finish()
    group.keep(staging)


def _post_header(link: Link, peer: int, data: bytes) -> tuple[Pending, Pending]:
    """Post the length of a frame, and the frame."""
    length = torch.tensor([len(data)], dtype=torch.int64, device=link.device)
    frame = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(link.device)
    return link.send(length, peer, LENGTH_TAG), link.send(frame, peer, FRAME_TAG)


_REFUSAL_S = 0.2
"""How long a sender sleeps after it posted its refusals. A receiver that is waiting takes its refusal within
milliseconds, but only while the sender lives."""


def _refuse(
    link: Link, peers: Sequence[int], error: BaseException, group: Group, step: int | None, runner: Runner
) -> None:
    """Post a refusal with the reason to every peer, so that no receiver waits for its timeout.

    This function does not wait for the sends to complete, because a receiver may call much later. If a gloo
    wait times out, gloo closes all connections; if a process exits while a thread waits without a timeout,
    the process aborts. The group keeps the pending sends until the peer has received a later frame. Messages
    arrive in order, so the peer has received the refusal by then.
    """
    reason = error.what if isinstance(error, FerryError) else f"{type(error).__name__}: {error}"
    data = encode_refusal(reason, step)
    for peer in peers:
        # A peer that is gone needs no refusal, and whatever goes wrong here must not hide `error`.
        with suppress(Exception), group.header("send", peer, lambda: _REFUSAL_S):
            group.hold(peer, _post_header(link, peer, data))
    if peers:
        runner.sleep((), runner.now_s() + _REFUSAL_S)


def _payload_steps(
    link: Link, peer: int, cargo: Cargo, meter: Meter, window: Window, staging: Staging
) -> Steps[None]:
    tags = Tags(cargo.envelope.origin, cargo.envelope.serial)
    sequence = cargo.plan.sequence(sealed=cargo.envelope.sealed)
    for place, item in enumerate(sequence):
        if isinstance(item, Seal):
            # What it says is known when its messages were sent; of the last one, when all were.
            while window and (item.last or None in cargo.digests[item.first : item.end]):
                yield from window.finish_oldest()
        else:
            yield from window.make_room(item.nbytes, in_place=not cargo.stages(link, item))
        try:
            meter.go_on_if_wanted()
            if isinstance(item, Seal):
                buffer, staged = _seal(cargo, item).to(link.device), False
            else:
                buffer, staged = cargo.outgoing(link, item, staging)
        except Exception:
            envelope, rest = cargo.envelope, sequence[place:]
            meter.told = yield from say_farewell(link, peer, rest, envelope, envelope.origin, window)
            raise
        pending = link.send(buffer, peer, tags.of(item))
        if isinstance(item, Seal):
            window.add(pending, item.nbytes)
            continue
        if staged:
            # A copy, which nobody changes, and which is still in the cache.
            cargo.hash(item, buffer)
        done = _sent(cargo, meter, item, buffer, staging if staged else None)
        window.add(pending, item.nbytes, done, in_place=not staged)


def _seal(cargo: Cargo, seal: Seal) -> torch.Tensor:
    digests = [digest for digest in cargo.digests[seal.first : seal.end] if digest is not None]
    data = encode_seal(digests, cargo.envelope.nonce, changed=seal.last and cargo.has_changed())
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _sent(
    cargo: Cargo, meter: Meter, message: Message, buffer: torch.Tensor, staging: Staging | None
) -> Callable[[], None]:
    def done() -> None:
        # What lies in the state itself not before: the link is busy with the next meanwhile.
        cargo.hash(message, buffer)
        meter.bytes_done += message.nbytes
        meter.done += 1
        if staging is not None:
            staging.give_back(buffer)

    return done


def _raise_failures(
    link: Link, lanes: Sequence[Lane[None]], cargo: Cargo, group: Group, if_unmet: str
) -> None:
    for lane in lanes:
        if isinstance(lane.error, FerryError):
            note_progress(lane.error, lane.meter, cargo.source.manifest, cargo.plan)
            ask_after_unmet(lane.error, lane.meter, if_unmet)
    failed = _behind({lane.meter.peer: lane.error for lane in lanes if lane.error is not None}, cargo)
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
        delivered = [lane.meter.peer for lane in lanes if lane.meter.peer not in failed]
        kind = SendFailed
        if any(isinstance(error, TimeoutError) for error in errors.values()):
            kind = SendLate
        elif any(isinstance(error, ConnectionError) for error in errors.values()):
            kind = SendBroken
        raise kind(delivered, errors) from first
    if changed := cargo.changed_paths():
        raise StateChanged(changed)


def _behind(failed: dict[int, BaseException], cargo: Cargo) -> dict[int, BaseException]:
    """Add those who would have got the payload through one that failed."""
    found: dict[int, BaseException] = {}
    lost_by: dict[int, int] = {}
    for peer, route in cargo.routes.items():
        if peer in failed:
            found[peer], lost_by[peer] = failed[peer], peer
        elif route.source in lost_by:
            lost_by[peer] = lost_by[route.source]
            what = f"rank {lost_by[peer]}, through which it was to get the state, could not be reached"
            found[peer] = LinkBroken(what, peer=peer, phase="send tensors")
    return found or failed
