"""Manifest to state: decode the values first, then make tensors over memory and put the tree together.

`prepare` checks all that the metadata can be checked for, before any byte of payload is taken. Afterwards
only what the payload says can be wrong: sparse indices that point nowhere.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, ParamSpec, TypeVar

from torchferry.core.compare import Comparison, Extra
from torchferry.core.manifest import PICKLED, VALUE, Leaf, Manifest, TensorSpec
from torchferry.core.showing import MOST_CHARACTERS
from torchferry.core.tree import Path, format_path, merge, occurrences, path_of, rebuild, rebuild_places
from torchferry.errors import BadManifest, FerryError, Mismatch, PickleRefused, StateMismatch
from torchferry.tensors.containers import Container
from torchferry.tensors.describe import Description
from torchferry.tensors.fresh import Fresh
from torchferry.tensors.kinds import Misfit, RebuildContext, check_form, kind_named
from torchferry.tensors.kinds.dense import DENSE
from torchferry.tensors.memory import Memory, check_dtype, tensor_over
from torchferry.tensors.values import from_wire

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Prepared:
    """A manifest that can be built here: its containers, and its leaves without tensors, already decoded."""

    manifest: Manifest
    containers: list[Container]
    values: dict[int, object]


def prepare(manifest: Manifest, site: RebuildContext, *, only: Collection[int] | None = None) -> Prepared:
    """Check that this process can build what arrives, and decode all that is not payload.

    With `only`, of these leaves: the others are dropped, and the tree is not theirs, so that it does not
    matter whether they could be built.

    Raises:
        PeerError: a type, dtype, kind or value that can't be built here; names its path.
    """
    tensors = manifest.tensors
    # A plain tensor is its dtype and a number, and of those that are alike one is looked at.
    looks = [(spec.dtype, spec.itemsize, spec.conj, spec.neg) for spec in tensors]
    values: dict[int, object] = {}
    sound: set[object] = set()
    for number, leaf in enumerate(manifest.leaves):
        if only is None and leaf.kind == DENSE.name and leaf.traits is leaf.fixed is None:
            # Whether its dtype is known is found out of all at once.
            if len(leaf.parts) == 1:
                continue
        elif only is not None and number not in only:
            continue
        alike: object = None
        if leaf.fixed is None and len(leaf.parts) == 1 and (leaf.traits is None or type(leaf.traits) is int):
            alike = (leaf.kind, leaf.traits, looks[leaf.parts[0]])
            if alike in sound:
                continue
        try:
            if leaf.kind == VALUE:
                values[number] = from_wire(leaf.traits)
            elif leaf.kind == PICKLED:
                values[number] = _unpickle(from_wire(leaf.traits), site)
            else:
                _check_leaf(leaf, [tensors[part] for part in leaf.parts])
                sound.add(alike)
        except FerryError as error:
            raise _at(path_of(manifest, number), error) from None
    if only is not None:
        return Prepared(manifest, [], values)
    for number in dict(zip(reversed(looks), reversed(range(len(looks))), strict=True)).values():
        try:
            check_dtype(tensors[number])
        except FerryError as error:
            owner = next((n for n, leaf in enumerate(manifest.leaves) if number in leaf.parts), None)
            # Those of no leaf are made, too.
            raise error if owner is None else _at(path_of(manifest, owner), error) from None
    return Prepared(manifest, _containers(manifest), values)


def _containers(manifest: Manifest) -> list[Container]:
    found: list[Container] = []
    for branch in manifest.branches:
        try:
            found.append(Container(branch))
        except FerryError as error:
            raise _at(path_of(manifest, ~len(found)), error) from None
    return found


def _check_leaf(leaf: Leaf, specs: Sequence[TensorSpec]) -> None:
    for spec in specs:
        check_dtype(spec)
    check_form(kind_named(leaf.kind), leaf, specs)


def _at(path: Path, error: FerryError) -> FerryError:
    error.path = format_path(path)
    error.what = f"{error.path}: {error.what}"
    return error


def _unpickle(data: object, site: RebuildContext) -> object:
    if site.unpickle is None or not isinstance(data, bytes):
        raise PickleRefused(
            "this leaf is pickled, and loading it could run the sender's code. Where the sender is "
            "trusted, set allow_pickle=True on this side too"
        )
    return site.unpickle(data)


def assemble_fresh(prepared: Prepared, fresh: Fresh, site: RebuildContext) -> object:
    """Build the state that arrived, in memory of its own.

    Raises:
        PeerError: a leaf can't be built out of what arrived; names its path.
    """
    manifest, made = prepared.manifest, fresh.tensors
    tensors = [
        made[number] if number in made else _made("tensor", tensor_over, fresh.memory(spec.storage), spec)
        for number, spec in enumerate(manifest.tensors)
    ]
    built: list[object] = []
    for number, leaf in enumerate(manifest.leaves):
        if leaf.kind == DENSE.name and leaf.traits is None:
            # As nearly all are: a plain tensor, and there is nothing else to it.
            built.append(tensors[leaf.parts[0]])
            continue
        if number in prepared.values:
            built.append(prepared.values[number])
            continue
        parts = [tensors[part] for part in leaf.parts]
        try:
            built.append(_made(leaf.kind, kind_named(leaf.kind).rebuild, leaf, parts, site))
        except FerryError as error:
            raise _at(path_of(manifest, number), error) from None
    return rebuild(manifest, built, _builder(prepared.containers))


def _builder(containers: Sequence[Container]) -> Callable[[int, list[object]], object]:
    return lambda index, children: containers[index].build(children)


def _made(what: str, make: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Make something out of what arrived. Whatever torch thinks of it, it is the peer that sent it."""
    try:
        return make(*args, **kwargs)
    except FerryError:
        raise
    except Exception as error:
        said = str(error)[:MOST_CHARACTERS]
        raise BadManifest(f"a {what} that can't be put together: {said}") from None


class Shape(NamedTuple):
    """The tree of the received state, and its containers, ready to be built."""

    manifest: Manifest
    containers: list[Container]


def shape_in_place(prepared: Prepared, local: Manifest, *, strict: bool, extra: Extra) -> Shape:
    """Choose the tree of a state that is received in place.

    The incoming tree if it has all paths, the local tree if nothing is added to it, and else both merged.

    Raises:
        StateMismatch: a merged container can't be built.
    """
    if extra == "drop" or (extra == "error" and not strict):
        return Shape(local, _containers(local))
    if strict:
        return Shape(prepared.manifest, prepared.containers)
    merged = merge(local, prepared.manifest)
    try:
        return Shape(merged, _containers(merged))
    except FerryError as error:
        # Both sides' containers are sound; only together they are not.
        where = error.path or format_path(())
        said = error.what.removeprefix(f"{where}: ")
        mismatch = Mismatch(
            where, f"no container for what both sides have ({said})", "more keys", "fewer keys"
        )
        raise StateMismatch([mismatch]) from None


def misfits(manifest: Manifest, numbers: Iterable[int], site: RebuildContext) -> list[Mismatch]:
    """List the leaves that can't be rebuilt in this process, such as the shard of another position."""
    found: dict[int, Misfit] = {}
    for number in numbers:
        leaf = manifest.leaves[number]
        if leaf.kind != DENSE.name and leaf.parts:
            misfit = kind_named(leaf.kind).misfit(leaf, site)
            if misfit is not None:
                found[number] = misfit
    if not found:
        return []
    return [
        Mismatch(format_path(path), *found[number])
        for path, number in occurrences(manifest)
        if number in found
    ]


def written_alike(manifest: Manifest, comparison: Comparison) -> dict[int, Path]:
    """Find leaves that only the peer has, but whose tensors were written to a local leaf at another path.

    Tied weights are such: two keys of a state dict, one memory. They arrive as the local leaf.
    """
    paths = {_form(manifest, pair.incoming): pair.path for pair in reversed(comparison.pairs)}
    found: dict[int, Path] = {}
    for _, number in comparison.incoming_only:
        if manifest.leaves[number].parts and (path := paths.get(_form(manifest, number))) is not None:
            found[number] = path
    return found


def _form(manifest: Manifest, number: int) -> object:
    leaf = manifest.leaves[number]
    return leaf.kind, leaf.fixed, leaf.traits, tuple(manifest.tensors[part] for part in leaf.parts)


def assemble_in_place(
    prepared: Prepared,
    target: Description,
    comparison: Comparison,
    shape: Shape,
    site: RebuildContext,
    memory_of: Callable[[int], Memory],
) -> object:
    """Build the state that arrived around the local tensors that took its bytes.

    Leaves that have arrived replace the local ones. `memory_of` returns the memory of an incoming storage,
    for leaves that have no local tensor.

    Raises:
        PeerError: what was written can't be what it is said to be; names its path.
    """
    if comparison.twins:
        values = list(target.values)
        for number, leaf in enumerate(prepared.manifest.leaves):
            # A plain tensor is the local one, and has nothing to be finished.
            if leaf.kind != DENSE.name:
                values[number] = _arrived(prepared, target, number, number)
        return rebuild(prepared.manifest, values, _builder(prepared.containers))
    arrived = {pair.path: _arrived(prepared, target, pair.incoming, pair.local) for pair in comparison.pairs}
    wanted = {path for path, _ in occurrences(shape.manifest)}
    incoming_only = [each for each in comparison.incoming_only if each.path in wanted]
    if incoming_only:
        alike = written_alike(prepared.manifest, comparison)
        built = {number: arrived[path] for number, path in alike.items()}
        for path, number in incoming_only:
            if number not in built:
                built[number] = _built_fresh(prepared, number, site, memory_of)
            arrived[path] = built[number]
    placed = (
        arrived[path] if path in arrived else target.values[leaf]
        for path, leaf in occurrences(shape.manifest)
    )
    return rebuild_places(shape.manifest, placed, _builder(shape.containers))


def _built_fresh(
    prepared: Prepared, number: int, site: RebuildContext, memory_of: Callable[[int], Memory]
) -> object:
    if number in prepared.values:
        return prepared.values[number]
    manifest = prepared.manifest
    leaf = manifest.leaves[number]
    specs = [manifest.tensors[part] for part in leaf.parts]
    try:
        parts = [_made("tensor", tensor_over, memory_of(spec.storage), spec) for spec in specs]
        return _made(leaf.kind, kind_named(leaf.kind).rebuild, leaf, parts, site)
    except FerryError as error:
        raise _at(path_of(manifest, number), error) from None


def _arrived(prepared: Prepared, target: Description, incoming: int, local: int) -> object:
    if incoming in prepared.values:
        return prepared.values[incoming]
    leaf = prepared.manifest.leaves[incoming]
    try:
        return _made(leaf.kind, kind_named(leaf.kind).finish_in_place, leaf, target.values[local])
    except FerryError as error:
        raise _at(path_of(prepared.manifest, incoming), error) from None
