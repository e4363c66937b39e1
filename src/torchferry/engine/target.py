"""Where an incoming state goes: into fresh memory, or into the tensors of a local state that it fits."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torchferry.core.codec import EncodedManifest
from torchferry.core.compare import Extra, compare, tensor_pairs
from torchferry.core.destinations import (
    place_in_local_state,
    unwritten_paths,
)
from torchferry.core.manifest import BUFFER
from torchferry.core.plan import Plan
from torchferry.core.tree import format_path
from torchferry.engine.loading import Loading
from torchferry.engine.metadata import prepare
from torchferry.engine.sink import Sink
from torchferry.engine.workspace import Cache
from torchferry.errors import Mismatch, StateMismatch
from torchferry.tensors.assemble import (
    assemble_fresh,
    assemble_in_place,
    choose_result_tree,
    misfits,
    tied_to_local,
)
from torchferry.tensors.describe import Description
from torchferry.tensors.fresh import FreshMemory
from torchferry.tensors.kinds import RebuildContext, properties_of
from torchferry.tensors.memory import (
    check_room,
)


@dataclass(frozen=True)
class Target:
    """Where an incoming state goes: `sink` takes its chunks, then `assemble` returns the state.

    `dropped`, `fresh` and `kept` list the paths that only one side has, as in a Report. `loading` gives the
    objects of a local state what `assemble` built for them.
    """

    sink: Sink
    assemble: Callable[[], object]
    loading: Loading | None = None
    dropped: tuple[str, ...] = ()
    fresh: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()


def target_in_new_memory(
    incoming: EncodedManifest, plan: Plan, context: RebuildContext, cache: Cache
) -> Target:
    """Allocate fresh memory for an incoming state; raises StateMismatch if it has a shard of another rank."""
    prepared = prepare(incoming, context, cache)
    manifest = incoming.manifest
    _raise_if_any(misfits(manifest, range(len(manifest.leaves)), context))
    fresh = FreshMemory(manifest, time.perf_counter)
    # The tensors of a packed chunk are allocated together, when it arrives.
    for piece in [chunk.pieces[0] for chunk in plan.chunks if len(chunk.pieces) == 1]:
        fresh.memory(piece.storage)
    return Target(Sink(manifest, plan, fresh=fresh), lambda: assemble_fresh(prepared, fresh))


def target_in_place(
    incoming: EncodedManifest,
    plan: Plan,
    local: Description,
    context: RebuildContext,
    cache: Cache,
    *,
    strict: bool,
    extra: Extra,
) -> Target:
    """Place every chunk of an incoming state in the local one; raises StateMismatch if it does not fit."""
    manifest = incoming.manifest
    if extra != "drop":
        prepared = prepare(incoming, context, cache)
    loading = Loading(local, manifest) if local.objects else None
    rules = None if loading is None else loading.rules
    comparison = compare(manifest, local.manifest, properties_of, strict=strict, extra=extra, rules=rules)
    mismatches = list(comparison.mismatches)
    if loading is not None:
        mismatches += loading.mismatches(strict=strict, extra=extra)
    received = {leaf for _, leaf in comparison.fresh}
    fresh_leaves = received - tied_to_local(manifest, comparison).keys()
    if extra == "drop":
        _raise_if_any(mismatches, comparison.hints)
        received |= {pair.incoming for pair in comparison.pairs}
        # Dropped leaves may have types that this process does not know.
        prepared = prepare(incoming, context, cache, only=None if comparison.identical else received)
    mismatches += misfits(manifest, sorted(fresh_leaves), context)
    _raise_if_any(mismatches, comparison.hints)
    # Large values are not written into the local state: they arrive in scratch memory.
    values = {pair.incoming for pair in comparison.pairs if manifest.leaves[pair.incoming].kind == BUFFER}
    fresh_tensors = {part for leaf in fresh_leaves | values for part in manifest.leaves[leaf].parts}
    if comparison.identical:
        tree = prepared
        sink = Sink(manifest, plan, local=local, written=range(len(local.tensors)))
    else:
        tree = choose_result_tree(prepared, local.manifest, strict=strict, extra=extra, rules=rules)
        pairs = tensor_pairs(manifest, local.manifest, comparison.pairs)
        sink = Sink(
            manifest,
            plan,
            place_in_local_state(plan.extents, manifest, local.manifest, pairs, fresh_tensors),
            local=local,
            written={pair.local for pair in pairs},
            paired={pair.path for pair in comparison.pairs if pair.incoming not in values},
        )
    # Allocate before anything is written, so that a lack of memory leaves the local state unchanged.
    scratch_tensors = fresh_tensors.union(pair.incoming for pair in sink.destinations.via_scratch)
    scratch_storages = {manifest.tensors[number].storage for number in scratch_tensors}
    check_room(sum(manifest.storages[storage] for storage in scratch_storages), "the fresh tensors")
    for storage in scratch_storages:
        sink.scratch(storage)

    def assemble() -> object:
        sink.copy_from_scratch()
        place = None if loading is None else loading.place
        return assemble_in_place(prepared, local, comparison, tree, sink.scratch, place)

    kept = unwritten_paths(local.manifest, comparison.local_only, sink.written)
    if loading is not None:
        loading.kept = set(kept)
    # Entries of objects that may vary are not listed.
    fresh = {path for path, _ in comparison.fresh}
    plain = [path for path, _ in comparison.incoming_only if rules is None or rules(path) != "varies"]
    return Target(
        sink,
        assemble,
        loading,
        dropped=tuple(format_path(path) for path in plain if path not in fresh),
        fresh=tuple(format_path(path) for path in plain if path in fresh),
        kept=tuple(map(format_path, kept)),
    )


_SHARD_HINT = (
    "a rank only receives the shard of its own position: receive from the rank that holds the same shard, or "
    "send full_tensor()"
)


def _raise_if_any(mismatches: Sequence[Mismatch], hints: Sequence[str] = ()) -> None:
    if mismatches:
        is_other_shard = any(each.what.startswith("position") for each in mismatches)
        raise StateMismatch(mismatches, hints=[*hints, _SHARD_HINT] if is_other_shard else hints)
