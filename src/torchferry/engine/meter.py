"""How far a transfer with one peer has got. Written by whoever moves bytes, read by whoever watches."""

from __future__ import annotations

from dataclasses import dataclass, field

from torchferry.core.manifest import Manifest
from torchferry.core.plan import Plan
from torchferry.core.torn import paths_of
from torchferry.errors import Corrupted, FerryError, LinkError, LinkTimeout, PeerGaveUp


@dataclass
class Meter:
    """Bytes done of bytes due with one peer, the message that is next, and since when it is waited for.

    `posted` counts the chunks, from the first, whose memory may have been written to; `verified` has the
    numbers of those that arrived and were found right. `met` says that the peer was heard of. `told` says
    that it was sent a farewell, and needs no other sign that no more will come. `idle` says that there is
    nothing to do with it until somebody else has moved. `waits_s` is since when it is waited for, None while
    there is something to do here. `given_up` says that nobody wants this any more, and nothing may be written
    any more.
    """

    peer: int
    phase: str
    bytes_due: int = 0
    bytes_done: int = 0
    posted: int = 0
    done: int = 0
    verified: set[int] = field(default_factory=set)
    met: bool = True
    told: bool = False
    idle: bool = False
    waits_s: float | None = None
    given_up: bool = False

    def meet(self) -> None:
        """Note that the peer was heard of."""
        self.met = True

    def go_on_if_wanted(self) -> None:
        """Stop if the caller was told that this is over: it may be changing the state, or reading it.

        Raises:
            LinkTimeout: it was. Nobody sees this one: it only ends the lane.
        """
        if self.given_up:
            raise LinkTimeout("the transfer was given up", peer=self.peer)

    def __str__(self) -> str:
        return f"{self.bytes_done:,} of {self.bytes_due:,} bytes done"


def note_progress(error: FerryError, meter: Meter, manifest: Manifest, plan: Plan) -> None:
    """Add to an error with whom and in which phase it was; if no more came, how far it had got."""
    error.peer = meter.peer
    error.phase = error.phase or meter.phase
    if not isinstance(error, (LinkError, PeerGaveUp)) or isinstance(error, Corrupted):
        return
    if plan.messages:
        at = plan.messages[min(meter.done, len(plan.messages) - 1)]
        named = paths_of(manifest, plan.extents, {plan.chunks[at.first].extent})
        error.path = named[0] if named else None
    error.what += f"; {meter}"
    if error.path is not None:
        error.what += f", last at {error.path}"
    if not meter.met:
        error.what += " (not even the metadata was taken)"


def ask_after_unmet(error: BaseException, meter: Meter, question: str) -> None:
    """Add a question to a timeout if nothing at all was heard of the peer: perhaps it is not even there."""
    if question and isinstance(error, LinkTimeout) and not meter.met:
        error.what += f". {question.format(peer=meter.peer)}"
