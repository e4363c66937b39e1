"""How far a transfer with one peer has got. Written by whoever moves bytes, read by whoever watches."""

from __future__ import annotations

from dataclasses import dataclass, field

from torchferry.core.manifest import Manifest
from torchferry.core.plan import Plan
from torchferry.core.torn import paths_of
from torchferry.errors import Corrupted, FerryError, LinkError, PeerGaveUp


@dataclass
class Meter:
    """Bytes done of bytes due with one peer, the message that is next, and since when it is waited for.

    `posted` counts the chunks, from the first, whose memory may have been written to; `verified` has the
    numbers of those that arrived and were found right. `met` says that the metadata has passed between the
    two. `told` says that the peer was sent a farewell, and needs no other sign that no more will come. `idle`
    says that there is nothing to do with the peer until somebody else has moved. `waits_s` is since when the
    peer is waited for, None while there is something to do here. `given_up` says that nobody wants this any
    more, and nothing may be written any more.
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
    error.what = f"{error.what}; {meter}, last at {error.path}"
    if not meter.met:
        error.what += " (not even the metadata was taken)"
