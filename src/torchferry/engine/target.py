"""Where an incoming state goes: into fresh memory, or into the local state if it fits."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from torchferry.core.codec import EncodedManifest
from torchferry.core.compare import Extra, compare, tensor_pairs
from torchferry.core.placement import SAME_LAYOUT, place_in_local_state
from torchferry.core.plan import Plan
from torchferry.core.tree import format_path
from torchferry.engine.sink import Sink
from torchferry.engine.workspace import Workspace
from torchferry.errors import Mismatch, StateMismatch
from torchferry.tensors.assemble import (
    assemble_fresh,
    assemble_in_place,
    choose_result_tree,
    misfits,
    prepare,
    tied_to_local,
)
from torchferry.tensors.describe import Description
from torchferry.tensors.fresh import FreshMemory
from torchferry.tensors.kinds import RebuildContext, properties_of

_SHARD_HINT = (
    "a rank only receives the shard of its own position: receive from the rank that holds the same shard, or "
    "send full_tensor()"
)


@dataclass(frozen=True)
class Target:
    """Where an incoming state goes: `sink` takes its chunks, then `assemble` returns the state.

    `dropped`, `fresh` and `kept` list the paths that only one side has, as in a Report.
    """

    sink: Sink
    assemble: Callable[[], object]
    dropped: tuple[str, ...] = ()
    fresh: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()


def target_in_new_memory(
    incoming: EncodedManifest, plan: Plan, context: RebuildContext, workspace: Workspace
) -> Target:
    """Allocate fresh memory for an incoming state.

    Raises:
        StateMismatch: it has a shard of another position than this rank's.
        PeerError: this process can't build the state.
        StateError: there is not enough memory.
    """
    prepared = workspace.prepare(incoming, context)
    manifest = incoming.manifest
    if mismatches := misfits(manifest, range(len(manifest.leaves)), context):
        raise StateMismatch(mismatches, hints=_shard_hints(mismatches))
    fresh = FreshMemory(manifest, time.perf_counter)
    sink = Sink(manifest, plan, fresh=fresh)
    # Packed tensors are allocated when they arrive, many at once.
    sink.allocate(plan.unpacked_storages())
    return Target(sink, lambda: assemble_fresh(prepared, fresh))


def target_in_place(
    incoming: EncodedManifest,
    plan: Plan,
    local: Description,
    context: RebuildContext,
    workspace: Workspace,
    *,
    strict: bool,
    extra: Extra,
) -> Target:
    """Compare an incoming state with the local one, and place every chunk.

    Raises:
        StateMismatch: the states do not fit.
        PeerError: this process can't build the state.
        StateError: there is not enough memory for what has no local tensor.
    """
    manifest = incoming.manifest
    if extra != "drop":
        prepared = workspace.prepare(incoming, context)
    comparison = compare(manifest, local.manifest, properties_of, strict=strict, extra=extra)
    mismatches = list(comparison.mismatches)
    fresh_leaves: set[int] = set()
    if extra == "fresh":
        fresh_leaves = {leaf for _, leaf in comparison.incoming_only}
        fresh_leaves -= tied_to_local(manifest, comparison).keys()
        mismatches += misfits(manifest, sorted(fresh_leaves), context)
    if mismatches:
        raise StateMismatch(mismatches, hints=[*comparison.hints, *_shard_hints(mismatches)])
    if extra == "drop":
        # Dropped leaves may have types that this process does not know.
        paired_leaves = None if comparison.identical else {pair.incoming for pair in comparison.pairs}
        prepared = prepare(manifest, context, only=paired_leaves)
    tree = prepared
    placements = SAME_LAYOUT
    written: Collection[int] = range(len(local.tensors))
    fresh_tensors = {part for leaf in fresh_leaves for part in manifest.leaves[leaf].parts}
    if not comparison.identical:
        tree = choose_result_tree(prepared, local.manifest, strict=strict, extra=extra)
        pairs = tensor_pairs(manifest, local.manifest, comparison.pairs)
        placements = place_in_local_state(plan.extents, manifest, local.manifest, pairs, fresh_tensors)
        written = {pair.local for pair in pairs}
    sink = Sink(
        manifest,
        plan,
        placements,
        local=local,
        written=written,
        paired=None if comparison.identical else {pair.path for pair in comparison.pairs},
    )
    # Before anything is written, so that a lack of memory leaves the local state unchanged.
    sink.allocate({manifest.tensors[number].storage for number in fresh_tensors})

    def assemble() -> object:
        sink.copy_from_scratch()
        return assemble_in_place(prepared, local, comparison, tree, sink.scratch)

    incoming_only = tuple(format_path(path) for path, _ in comparison.incoming_only)
    return Target(
        sink,
        assemble,
        dropped=incoming_only if extra == "drop" else (),
        fresh=incoming_only if extra == "fresh" else (),
        kept=tuple(format_path(path) for path, _ in comparison.local_only),
    )


def _shard_hints(mismatches: Sequence[Mismatch]) -> list[str]:
    return [_SHARD_HINT] if any(each.what.startswith("position") for each in mismatches) else []
