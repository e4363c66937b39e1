"""Where the payload goes, and what became of it: new memory, or a local state that is written in place."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from torchferry.core.codec import Envelope
from torchferry.core.compare import compare, tensor_pairs
from torchferry.core.landing import LAND_ALIKE, Landing, Landings, land_in_place
from torchferry.core.manifest import Manifest
from torchferry.core.plan import Plan
from torchferry.core.torn import Truth, truth
from torchferry.core.tree import Path
from torchferry.engine.meter import Meter
from torchferry.errors import FerryError, PeerGaveUp, StateMismatch, TargetTorn, TornAndBroken, TornAndLate
from torchferry.tensors.assemble import allocate, assemble_fresh, assemble_in_place, prepare
from torchferry.tensors.describe import Description, describe_target
from torchferry.tensors.kinds import Site
from torchferry.tensors.landing import Ground


class Target:
    """The local state that is to be written, described; or what went wrong, raised when it is asked for.

    A failure here is a refusal like any other: the sender's messages are taken first.
    """

    def __init__(self, target: Callable[[], object] | None) -> None:
        self._description: Description | None = None
        self._error: Exception | None = None
        if target is None:
            return
        try:
            self._description = describe_target(target())
        except Exception as error:
            self._error = error

    def description(self) -> Description | None:
        """Give the local state described; None if what arrives is to be fresh."""
        if self._error is not None:
            raise self._error
        return self._description


@dataclass(frozen=True)
class Destination:
    """Where the payload goes, and what to make of it when it is there."""

    landings: Landings
    ground: Ground
    assemble: Callable[[], object]
    in_place: bool
    kept: Collection[Path] | None = None

    def fate(self, envelope: Envelope, plan: Plan, meter: Meter, error: BaseException) -> Truth:
        """Say what a failure did to the local state."""
        # What the sender disowns is no better for having arrived whole.
        verified = set() if isinstance(error, PeerGaveUp) else meter.verified
        return truth(
            envelope.manifest,
            plan,
            posted=len(plan.chunks) if meter.phase == "assemble" else meter.posted,
            verified=verified,
            scratched={pair.incoming for pair in self.landings.whole},
            kept=self.kept,
        )


def destination(
    manifest: Manifest, plan: Plan, target: Description | None, site: Site, *, strict: bool
) -> Destination:
    """Find out where the payload goes: into new memory, or into the local state, if it fits.

    Raises:
        StateMismatch: it does not.
        PeerError: what arrives can't be built here.
    """
    if target is None:
        prepared = prepare(manifest, site)
        fresh = allocate(manifest)
        return Destination(
            LAND_ALIKE,
            Ground(manifest, fresh.memories),
            lambda: assemble_fresh(prepared, fresh, site),
            in_place=False,
        )
    if strict:
        prepared = prepare(manifest, site)
    comparison = compare(manifest, target.manifest, strict=strict)
    if comparison.mismatches:
        raise StateMismatch(comparison.mismatches)
    if not strict:
        # What is dropped may be of a kind that is not known here.
        matched = None if comparison.twins else {pair.incoming for pair in comparison.pairs}
        prepared = prepare(manifest, site, only=matched)
    if comparison.twins:
        landings = LAND_ALIKE
        written: Collection[int] = range(len(target.tensors))
    else:
        tensors = tensor_pairs(manifest, target.manifest, comparison.pairs)
        landings = land_in_place(plan.extents, manifest, target.manifest, tensors)
        written = {pair.local for pair in tensors}
    ground = Ground(manifest, target.memories, target, written)

    def assemble() -> object:
        ground.copy_whole(landings.whole)
        return assemble_in_place(prepared, target, comparison, strict=strict)

    kept = None if comparison.twins else {pair.path for pair in comparison.pairs}
    return Destination(landings, ground, assemble, in_place=True, kept=kept)


def say_torn(error: BaseException, fate: Truth) -> None:
    """Say what a failure did to the local state.

    Raises:
        TargetTorn: some of it was written. What only ends the program gets that as a note, and is left to it.
    """
    if not fate.torn and not fate.whole:
        if isinstance(error, FerryError):
            error.what += "; nothing was overwritten"
        return
    kind = TargetTorn
    if isinstance(error, TimeoutError):
        kind = TornAndLate
    elif isinstance(error, ConnectionError):
        kind = TornAndBroken
    torn = kind(error, whole=fate.whole, torn=fate.torn, untouched=fate.untouched)
    if isinstance(error, Exception):
        raise torn from error
    error.add_note(torn.what)


def nowhere(plan: Plan) -> Destination:
    """Give a destination for messages that are dropped."""
    landings = Landings((Landing(),) * len(plan.extents))
    return Destination(landings, Ground.nowhere(), lambda: None, in_place=False)
