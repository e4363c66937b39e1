"""Where the payload goes, and what became of it: new memory, or a local state that is written in place."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass

from torchferry.core.codec import Envelope, Known, know
from torchferry.core.compare import Extra, compare, tensor_pairs
from torchferry.core.landing import LAND_ALIKE, Landing, Landings, land_in_place
from torchferry.core.manifest import Manifest
from torchferry.core.plan import Plan
from torchferry.core.torn import Truth, truth
from torchferry.core.tree import Path, format_path
from torchferry.engine.meter import Meter
from torchferry.engine.recall import Recall
from torchferry.errors import (
    FerryError,
    Mismatch,
    PeerGaveUp,
    StateMismatch,
    TargetTorn,
    TornAndBroken,
    TornAndLate,
)
from torchferry.tensors.assemble import (
    Prepared,
    Shape,
    assemble_fresh,
    assemble_in_place,
    misfits,
    prepare,
    shape_in_place,
    written_alike,
)
from torchferry.tensors.describe import Description, describe_target
from torchferry.tensors.fresh import Fresh, Layout
from torchferry.tensors.kinds import RebuildContext, properties_of
from torchferry.tensors.landing import Ground
from torchferry.tensors.pages import HugePages


class Target:
    """The local state that is to be written, described; or what went wrong, raised when it is asked for.

    A failure here is a refusal like any other: the sender's messages are taken first.

    The sender is describing its own at the same time, and nearly always they turn out to be described alike.
    So what follows from that is worked out beforehand. What arrives fresh is compared with what arrived last.
    """

    def __init__(self, target: Callable[[], object] | None, site: RebuildContext, recall: Recall) -> None:
        self.site = site
        self.known: Known | None = recall.arrived if target is None else None
        self._recall = recall
        self._description: Description | None = None
        self._error: Exception | None = None
        self._plan: Plan | None = None
        self._prepared: Prepared | None = None
        if target is None:
            return
        try:
            self._description = describe_target(target(), traces=recall.traces)
        except Exception as error:
            self._error = error
        else:
            # What goes wrong here goes wrong again where it matters, if it does matter.
            with suppress(Exception):
                self._work_ahead(self._description)

    def _work_ahead(self, described: Description) -> None:
        self._description, self.known = self._recall.know(described)
        manifest = self._description.manifest
        self._plan = self._recall.plan(manifest)
        self._prepared = self._recall.prepare(manifest, self.site)

    def prepare(self, manifest: Manifest) -> Prepared:
        """Check that what arrives can be built here, and decode all that is not payload.

        Raises:
            PeerError: it can't.
        """
        if self._knows(manifest) and self._prepared is not None:
            return self._prepared
        return self._recall.prepare(manifest, self.site)

    def plan(self, envelope: Envelope) -> Plan:
        """Give the plan of what arrives.

        Raises:
            TooIntricate: views overlap in a pattern too irregular to list.
            TooManyMessages: more than may be listed.
        """
        sizes = envelope.chunk_bytes, envelope.pack_bytes
        if self._knows(envelope.manifest) and self._plan and self._plan.sizes == sizes:
            return self._plan
        return self._recall.plan(envelope.manifest, envelope.chunk_bytes, envelope.pack_bytes)

    def layout(self, manifest: Manifest) -> Layout:
        """Give what memory it takes that arrives fresh."""
        return self._recall.layout(manifest)

    def know(self, manifest: Manifest) -> None:
        """Know what arrived again the next time, unless a local state says what is to be expected."""
        if self._description is None and self._error is None and not self._knows(manifest):
            self._recall.arrived = know(manifest)

    def _knows(self, manifest: Manifest) -> bool:
        return self.known is not None and manifest is self.known.manifest

    def description(self) -> Description | None:
        """Give the local state described; None if what arrives is to be fresh."""
        if self._error is not None:
            raise self._error
        return self._description


@dataclass(frozen=True)
class Destination:
    """Where the payload goes, and what to make of it when it is there.

    `paired` lists the paths that both states have, None if those are all. `dropped`, `fresh` and `kept` list
    the paths that only one has, as in a Report.
    """

    landings: Landings
    ground: Ground
    assemble: Callable[[], object]
    in_place: bool
    paired: Collection[Path] | None = None
    dropped: tuple[str, ...] = ()
    fresh: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()

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
            paired=self.paired,
        )


def destination(manifest: Manifest, plan: Plan, target: Target, *, strict: bool, extra: Extra) -> Destination:
    """Decide where the payload goes: into new memory, or into the local state if it fits.

    Raises:
        StateMismatch: it does not.
        PeerError: what arrives can't be built here.
        StateError: there is not enough memory.
    """
    local = target.description()
    if local is None:
        return _in_new_memory(manifest, plan, target)
    return _in_place(manifest, plan, target, local, strict=strict, extra=extra)


def _in_new_memory(manifest: Manifest, plan: Plan, target: Target) -> Destination:
    prepared = target.prepare(manifest)
    if unfit := misfits(manifest, range(len(manifest.leaves)), target.site):
        raise StateMismatch(unfit, hints=_shard_hints(unfit))
    fresh = Fresh(target.layout(manifest), HugePages(time.perf_counter))
    # What goes straight where it belongs. The rest is made when it is there.
    fresh.set_aside(plan.unpacked_storages())
    return Destination(
        LAND_ALIKE,
        Ground(manifest, fresh),
        lambda: assemble_fresh(prepared, fresh, target.site),
        in_place=False,
    )


def _shard_hints(mismatches: Sequence[Mismatch]) -> list[str]:
    """Say what to do about shards of another position."""
    if not any(mismatch.what.startswith("position") for mismatch in mismatches):
        return []
    return [_SHARD_HINT]


_SHARD_HINT = (
    "a rank only receives the shard of its own position: receive from the rank that holds the same shard, or "
    "send full_tensor()"
)


def _in_place(
    manifest: Manifest, plan: Plan, target: Target, local: Description, *, strict: bool, extra: Extra
) -> Destination:
    site = target.site
    if extra != "drop":
        prepared = target.prepare(manifest)
    comparison = compare(manifest, local.manifest, properties_of, strict=strict, extra=extra)
    mismatches = list(comparison.mismatches)
    fresh: set[int] = set()
    if extra == "fresh":
        fresh = {leaf for _, leaf in comparison.incoming_only}.difference(written_alike(manifest, comparison))
        mismatches += misfits(manifest, sorted(fresh), site)
    if mismatches:
        raise StateMismatch(mismatches, hints=[*comparison.hints, *_shard_hints(mismatches)])
    if extra == "drop":
        # What is dropped may be of a kind that is not known here.
        matched = None if comparison.twins else {pair.incoming for pair in comparison.pairs}
        prepared = prepare(manifest, site, only=matched)
    shape = Shape(manifest, [])
    if comparison.twins:
        landings = LAND_ALIKE
        written: Collection[int] = range(len(local.tensors))
    else:
        shape = shape_in_place(prepared, local.manifest, strict=strict, extra=extra)
        tensors = tensor_pairs(manifest, local.manifest, comparison.pairs)
        alone = {part for leaf in fresh for part in manifest.leaves[leaf].parts}
        landings = land_in_place(plan.extents, manifest, local.manifest, tensors, alone)
        written = {pair.local for pair in tensors}
    ground = Ground(manifest, None, local, written)
    # Allocate before anything is written, so that a lack of memory leaves the local state as it was.
    ground.set_aside(
        {manifest.tensors[part].storage for leaf in fresh for part in manifest.leaves[leaf].parts}
    )

    def assemble() -> object:
        ground.copy_whole(landings.whole)
        return assemble_in_place(prepared, local, comparison, shape, site, ground.scratch)

    extras = tuple(format_path(path) for path, _ in comparison.incoming_only)
    return Destination(
        landings,
        ground,
        assemble,
        in_place=True,
        paired=None if comparison.twins else {pair.path for pair in comparison.pairs},
        dropped=extras if extra == "drop" else (),
        fresh=extras if extra == "fresh" else (),
        kept=tuple(format_path(path) for path, _ in comparison.local_only),
    )


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
