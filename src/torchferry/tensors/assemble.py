"""Builds a state from its manifest: decodes the values, creates tensors over memory, builds the containers.

`prepare` makes every check that needs only metadata, before any payload is received.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from types import NoneType
from typing import TypeAlias

from torchferry.core.compare import Comparison, Extra, RuleOf
from torchferry.core.manifest import BUFFER, PICKLED, VALUE, Leaf, Manifest, TensorSpec
from torchferry.core.tree import Path, format_path, merge, occurrences, path_of, rebuild, rebuild_places
from torchferry.errors import FerryError, Mismatch, PickleRefused, StateMismatch
from torchferry.tensors.containers import BuildContainer, container_builder
from torchferry.tensors.describe import Description
from torchferry.tensors.fresh import FreshMemory
from torchferry.tensors.kinds import Kind, Misfit, RebuildContext, check_form, kind_named
from torchferry.tensors.kinds.buffer import value_from_bytes
from torchferry.tensors.kinds.dense import DENSE
from torchferry.tensors.kinds.sparse import check_index_count
from torchferry.tensors.memory import Memory, check_dtype, tensor_over
from torchferry.tensors.values import from_wire, try_build

MemoryOf: TypeAlias = Callable[[int], Memory]
"""Returns the memory of an incoming storage that has no local tensors."""


@dataclass(frozen=True)
class Prepared:
    """A manifest that this process can build, builders of its containers, and its decoded values by leaf."""

    manifest: Manifest
    context: RebuildContext
    builders: list[BuildContainer]
    values: dict[int, object] = field(default_factory=dict)

    def build(self, number: int, children: list[object]) -> object:
        """Build one container."""
        return self.builders[number](children)


def prepare(manifest: Manifest, context: RebuildContext, *, only: Collection[int] | None = None) -> Prepared:
    """Check that this process can build the incoming state, and decode everything that is not payload.

    Raises PeerError, which names the path of what can't be built. With `only`, check only these leaves, and
    no containers. The other leaves are dropped, so they may be of any kind.
    """
    tensors = manifest.tensors
    values: dict[int, object] = {}
    # Most leaves have one tensor, no `fixed`, and an int or None as `traits`. Of those with equal keys, only
    # one is checked.
    checked: set[object] = set()
    number = 0
    try:
        for number in range(len(manifest.leaves)) if only is None else sorted(only):
            leaf = manifest.leaves[number]
            if leaf.kind in (VALUE, PICKLED):
                value = from_wire(leaf.traits)
                values[number] = value if leaf.kind == VALUE else _unpickle(value, context)
                continue
            specs = [tensors[part] for part in leaf.parts]
            key: object = number
            if len(specs) == 1 and leaf.fixed is None and type(leaf.traits) in (int, NoneType):
                key = leaf.kind, leaf.traits, _dtype_key(specs[0])
            if key not in checked:
                for spec in specs:
                    check_dtype(spec)
                check_form(kind_named(leaf.kind), leaf, specs)
                checked.add(key)
    except FerryError as error:
        raise _at(manifest, number, error) from None
    check_index_count(manifest, manifest.leaves if only is None else [manifest.leaves[n] for n in only])
    if only is not None:
        return Prepared(manifest, context, [], values)
    # `FreshMemory.unpack` creates all tensors, also those that no leaf has.
    for spec in {_dtype_key(spec): spec for spec in tensors}.values():
        check_dtype(spec)
    return Prepared(manifest, context, container_builders(manifest), values)


def _dtype_key(spec: TensorSpec) -> object:
    """Return all fields that `check_dtype` reads."""
    return spec.dtype, spec.itemsize, spec.conj, spec.neg


def container_builders(manifest: Manifest) -> list[BuildContainer]:
    """Return a builder for each branch; raises PeerError, with the path of one that can't be built here."""
    builders: list[BuildContainer] = []
    try:
        for branch in manifest.branches:
            builders.append(container_builder(branch))
    except FerryError as error:
        raise _at(manifest, ~len(builders), error) from None
    return builders


def _unpickle(data: object, context: RebuildContext) -> object:
    if context.unpickle is None or not isinstance(data, bytes):
        raise PickleRefused(
            "this leaf is pickled, and loading it could run the sender's code. If you trust the sender, set "
            "allow_pickle=True on this side too"
        )
    return context.unpickle(data)


def _at(manifest: Manifest, child: int, error: FerryError) -> FerryError:
    """Return the error with the path of leaf `child`, or of branch `~child` if `child` is negative."""
    return error.at(format_path(path_of(manifest, child)))


def _build_leaf(prepared: Prepared, number: int, build: Callable[[Kind, Leaf], object]) -> object:
    """Return the decoded value of a leaf, or else build the leaf. Errors name its path."""
    if number in prepared.values:
        return prepared.values[number]
    leaf = prepared.manifest.leaves[number]
    try:
        return try_build(leaf.kind, build, kind_named(leaf.kind), leaf)
    except FerryError as error:
        raise _at(prepared.manifest, number, error) from None


def assemble_fresh(prepared: Prepared, fresh: FreshMemory) -> object:
    """Build the received state from new memory; raises PeerError with the path of an invalid leaf."""
    manifest, tensors = prepared.manifest, fresh.tensors

    def build(kind: Kind, leaf: Leaf) -> object:
        if leaf.kind == BUFFER and (data := fresh.memory(manifest.tensors[leaf.parts[0]].storage).block):
            return value_from_bytes(leaf, data)
        for part in leaf.parts:
            if part not in tensors:
                spec = manifest.tensors[part]
                tensors[part] = tensor_over(fresh.memory(spec.storage), spec)
        return kind.rebuild(leaf, [tensors[part] for part in leaf.parts], prepared.context)

    leaves = [
        # Most leaves are a plain tensor that `unpack` created.
        tensors[leaf.parts[0]]
        if leaf.kind == DENSE.name and leaf.traits is None and leaf.parts[0] in tensors
        else _build_leaf(prepared, number, build)
        for number, leaf in enumerate(manifest.leaves)
    ]
    return rebuild(manifest, leaves, prepared.build)


def choose_result_tree(
    prepared: Prepared, local: Manifest, *, strict: bool, extra: Extra, rules: RuleOf | None = None
) -> Prepared:
    """Choose the tree of a state that is received in place: incoming, local, or both merged.

    `rules` are given if the local state has objects. Raises StateMismatch if a merged container can't be
    built.
    """
    if strict and extra != "drop":
        return prepared
    if extra == "fresh" or rules is not None:

        def varies(path: Path) -> bool:
            return rules is not None and rules(path) == "varies"

        merged = merge(local, prepared.manifest, lambda path: extra == "fresh" or varies(path), varies)
    else:
        merged = local
    try:
        return Prepared(merged, prepared.context, container_builders(merged))
    except FerryError as error:
        # Each side's own container can be built, so the merge is the cause.
        where = error.path or format_path(())
        reason = error.what.removeprefix(f"{where}: ")
        what = f"no container can hold the keys of both sides ({reason})"
        raise StateMismatch([Mismatch(where, what, "additional keys", "only its own keys")]) from None


def misfits(manifest: Manifest, numbers: Iterable[int], context: RebuildContext) -> list[Mismatch]:
    """List the leaves that can't be rebuilt in this process, such as the shard of another position."""
    found: dict[int, Misfit] = {}
    for number in numbers:
        leaf = manifest.leaves[number]
        if leaf.parts and (misfit := kind_named(leaf.kind).misfit(leaf, context)):
            found[number] = misfit
    if not found:
        return []
    return [Mismatch(format_path(path), *found[n]) for path, n in occurrences(manifest) if n in found]


def tied_to_local(manifest: Manifest, comparison: Comparison) -> dict[int, Path]:
    """Map leaves that only the peer has to the path of a local leaf that their tensors are written to.

    Tied weights are such leaves: two keys of a state dict with the same memory.
    """
    if not comparison.fresh:
        return {}

    def identity(number: int) -> object:
        leaf = manifest.leaves[number]
        return leaf.kind, leaf.fixed, leaf.traits, tuple(manifest.tensors[part] for part in leaf.parts)

    paths = {identity(pair.incoming): pair.path for pair in reversed(comparison.pairs)}
    candidates = [number for _, number in comparison.fresh if manifest.leaves[number].parts]
    return {n: paths[identity(n)] for n in candidates if identity(n) in paths}


def assemble_in_place(
    prepared: Prepared,
    local: Description,
    comparison: Comparison,
    tree: Prepared,
    memory_of: MemoryOf,
    place: Callable[[Path, object], object] | None = None,
) -> object:
    """Build the received state around the written local tensors; raises PeerError if a leaf is invalid.

    `prepared` is the incoming state, and `tree` has the containers of the result. `place` is called with each
    path and what was built there, and returns what is put there.
    """
    manifest = prepared.manifest

    def finish(incoming: int, target: int) -> object:
        if manifest.leaves[incoming].kind == BUFFER:
            return _build_leaf(prepared, incoming, build)
        value = local.values[target]
        parts = [local.tensors[part] for part in local.manifest.leaves[target].parts]
        return _build_leaf(prepared, incoming, lambda kind, leaf: kind.finish_in_place(leaf, value, parts))

    def build(kind: Kind, leaf: Leaf) -> object:
        specs = [manifest.tensors[part] for part in leaf.parts]
        if leaf.kind == BUFFER and (data := memory_of(specs[0].storage).block):
            return value_from_bytes(leaf, data)
        parts = [tensor_over(memory_of(spec.storage), spec) for spec in specs]
        return kind.rebuild(leaf, parts, prepared.context)

    if comparison.identical:
        values = [
            # `finish_in_place` does nothing for a dense tensor.
            local.values[number] if leaf.kind == DENSE.name else finish(number, number)
            for number, leaf in enumerate(manifest.leaves)
        ]
        if place is None:
            return rebuild(manifest, values, prepared.build)
        leaves = (values[leaf] for _, leaf in occurrences(manifest))
        return rebuild_places(manifest, leaves, prepared.build, place)
    received = {pair.path: finish(pair.incoming, pair.local) for pair in comparison.pairs}
    built = {number: received[path] for number, path in tied_to_local(manifest, comparison).items()}
    for path, number in comparison.fresh:
        if number not in built:
            built[number] = _build_leaf(prepared, number, build)
        received[path] = built[number]
    found = occurrences(tree.manifest)
    leaves = (received[path] if path in received else local.values[leaf] for path, leaf in found)
    return rebuild_places(tree.manifest, leaves, tree.build, *([] if place is None else [place]))
