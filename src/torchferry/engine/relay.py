"""Forwarding: a receiver passes what arrives on to the next one, piece by piece, out of the same memory.

It is a lane of its own, beside the one that receives: a next receiver that is slow or dead must not keep
this one from its state. The receiving lane offers pieces as they arrive, and the forwarding lane waits for
them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch

from torchferry.core.codec import Envelope
from torchferry.core.plan import Plan
from torchferry.core.protocol import Tags
from torchferry.engine.farewell import say_farewell
from torchferry.engine.meter import Meter
from torchferry.engine.window import Steps, Window
from torchferry.errors import LinkTimeout, PeerGaveUp
from torchferry.links.base import Link


class _Offer(NamedTuple):
    buffer: torch.Tensor
    staged: bool


class Relay:
    """What has arrived here and has to go on to `meter.peer`."""

    def __init__(self, link: Link, envelope: Envelope, plan: Plan, meter: Meter, window_bytes: int) -> None:
        self._link = link
        self._envelope = envelope
        self._sequence = plan.sequence(sealed=envelope.sealed)
        self._meter = meter
        self._window_bytes = window_bytes
        self._changed = threading.Condition()
        self._offers: deque[_Offer] = deque()
        self._used: deque[torch.Tensor] = deque()
        self._held_bytes = 0
        self._culprit: int | None = None
        self._over = False

    def offer(self, buffer: torch.Tensor, *, staged: bool) -> None:
        """Hand over the next piece. Its memory must stay as it is; staged memory comes back by `used`."""
        with self._changed:
            if self._over and staged:
                self._used.append(buffer)
            elif not self._over:
                self._held_bytes += buffer.nbytes if staged else 0
                self._offers.append(_Offer(buffer, staged))
            self._changed.notify_all()

    def room(self, nbytes: int) -> Steps[None]:
        """Wait until so much more may be staged: what is not forwarded yet has to be kept."""
        yield _Until(self, lambda: self._over or self._held_bytes + nbytes <= max(self._window_bytes, nbytes))

    def used(self) -> list[torch.Tensor]:
        """Take back the staged memory that has been forwarded."""
        with self._changed:
            taken = list(self._used)
            self._used.clear()
        return taken

    def fail(self, culprit: int) -> None:
        """Say that no more will arrive here, and whose fault it is."""
        with self._changed:
            if self._culprit is None:
                self._culprit = culprit
            self._changed.notify_all()

    def end(self, culprit: int) -> None:
        """Say that nothing is forwarded any more, and whose doing that is, so that nobody waits for it."""
        with self._changed:
            self._over = True
            if self._culprit is None:
                self._culprit = culprit
            self._used.extend(offer.buffer for offer in self._offers if offer.staged)
            self._offers.clear()
            self._changed.notify_all()

    def steps(self) -> Steps[None]:
        """Forward every piece as it arrives; if no more does, say so.

        Raises:
            LinkError: the next receiver can't be reached, or not in time.
        """
        meter = self._meter
        window = Window(self._window_bytes)
        tags = Tags(self._envelope.origin, self._envelope.serial)
        for place, item in enumerate(self._sequence):
            # What is staged is kept until it was waited for, and there may be no room for more until then.
            while window and not self._offers and self._culprit is None:
                yield from window.finish_oldest()
            meter.idle = True
            yield _Until(self, lambda: bool(self._offers) or self._culprit is not None)
            meter.idle = False
            if self._offers:
                yield from window.make_room(item.nbytes)
            with self._changed:
                # Perhaps there was one, and while room was made for it all of this was given up.
                offer = self._offers.popleft() if self._offers else None
            if offer is None:
                yield from self._give_up(place, window)
                return
            pending = self._link.send(offer.buffer, meter.peer, tags.of(item))
            window.add(pending, item.nbytes, self._sent(offer))
        yield from window.finish()

    def _give_up(self, place: int, window: Window) -> Steps[None]:
        culprit = self._culprit
        assert culprit is not None, "nobody gives up for no reason"
        rest, peer = self._sequence[place:], self._meter.peer
        self._meter.told = yield from say_farewell(self._link, peer, rest, self._envelope, culprit, window)
        raise PeerGaveUp("there is no more to forward", culprit=culprit, peer=self._meter.peer)

    def _sent(self, offer: _Offer) -> Callable[[], None]:
        def done() -> None:
            self._meter.bytes_done += offer.buffer.nbytes
            self._meter.done += 1
            if offer.staged:
                with self._changed:
                    self._held_bytes -= offer.buffer.nbytes
                    self._used.append(offer.buffer)
                    self._changed.notify_all()

        return done


class _Until:
    """Something to wait for that is no message: until a relay is in some condition."""

    error = None

    def __init__(self, relay: Relay, holds: Callable[[], bool]) -> None:
        self._relay = relay
        self._holds = holds

    @property
    def over(self) -> bool:
        """Whether it holds: what the simulation asks instead of waiting."""
        return self._holds()

    def wait(self, timeout_s: float) -> None:
        """Wait for it.

        Raises:
            LinkTimeout: it took longer than `timeout_s`.
        """
        changed = self._relay._changed
        with changed:
            if not changed.wait_for(self._holds, min(timeout_s, threading.TIMEOUT_MAX)):
                raise LinkTimeout("nothing was forwarded in time")
