"""Compares the incoming state with the local state and lists every mismatch, before anything is written.

Both states are manifests, so comparing them is pure. The result lists the paths that both states have, and
the mismatches, each with its path and the values of both sides.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

from msgspec.structs import replace

from torchferry.core.extents import Extent, TooIntricate, footprint, overlaps_itself, union
from torchferry.core.grids import one_map
from torchferry.core.manifest import OPAQUE, PICKLED, VALUE, Leaf, Manifest, TensorSpec
from torchferry.core.prefixes import wrapper_hint
from torchferry.core.showing import show_difference, show_name
from torchferry.core.tree import Occurrence, Path, format_path, occurrences
from torchferry.errors import Mismatch

_VALUES = frozenset({VALUE, OPAQUE, PICKLED})

Extra: TypeAlias = Literal["error", "fresh", "drop"]
"""What to do with paths that only the peer has."""

Look: TypeAlias = Callable[[Leaf, Sequence[TensorSpec]], Mapping[str, str]]
"""Returns the properties of a leaf that are compared, as text by name: dtype, shape and more."""


class Pair(NamedTuple):
    """A place that both states have, and the leaves that stand there."""

    path: Path
    incoming: int
    local: int


class TensorPair(NamedTuple):
    """A tensor that arrives and the local tensor that takes it."""

    path: Path
    incoming: int
    local: int


class Comparison(NamedTuple):
    """`pairs` lists the paths that both states have. With any mismatch, nothing may be written.

    `incoming_only` and `local_only` list the paths that only one state has. `hints` say what may cause the
    mismatches. `twins` means that the manifests are alike: leaf n of one belongs to leaf n of the other, and
    tensor n to tensor n, with the same storages and offsets. Pairs are not listed then.
    """

    pairs: tuple[Pair, ...]
    mismatches: tuple[Mismatch, ...]
    twins: bool = False
    incoming_only: tuple[Occurrence, ...] = ()
    local_only: tuple[Occurrence, ...] = ()
    hints: tuple[str, ...] = ()


def compare(incoming: Manifest, local: Manifest, look: Look, *, strict: bool, extra: Extra) -> Comparison:
    """Pair the leaves of two states by path, and list all mismatches.

    A path that only the local state has is a mismatch if `strict`; a path that only the incoming state has is
    one if `extra` is "error". If the states have no path in common, or both have tensors and share none, all
    paths are mismatches.
    """
    if _are_twins(incoming, local):
        return Comparison((), (), twins=True)
    local_leaves = dict(occurrences(local))
    pairs: list[Pair] = []
    incoming_only: list[Occurrence] = []
    for path, leaf in occurrences(incoming):
        if path in local_leaves:
            pairs.append(Pair(path, leaf, local_leaves.pop(path)))
        else:
            incoming_only.append(Occurrence(path, leaf))
    local_only = [Occurrence(path, leaf) for path, leaf in local_leaves.items()]
    mismatches: list[Mismatch] = []
    nothing_matches = _share_nothing(incoming, local, pairs, extra)
    if extra == "error" or nothing_matches:
        mismatches += [
            Mismatch(format_path(path), "no such path here", describe(incoming, leaf, look), "nothing")
            for path, leaf in incoming_only
        ]
    if strict or nothing_matches:
        mismatches += [
            Mismatch(format_path(path), "the peer has no such path", "nothing", describe(local, leaf, look))
            for path, leaf in local_only
        ]
    if extra == "fresh" and not strict:
        mismatches += _collisions(incoming_only, local_only)
    fitting: list[Pair] = []
    for pair in pairs:
        differences = list(_differences(incoming, local, pair, look))
        mismatches.extend(differences)
        if not differences:
            fitting.append(pair)
    mismatches.extend(_conflicts(incoming, local, fitting))
    hints: list[str] = []
    if mismatches:
        hints += wrapper_hint(
            *([each.path for each in places] for places in (incoming_only, local_only, pairs))
        )
        if incoming_only and extra == "error" and not hints:
            hints.append(_EXTRA_HINT)
    return Comparison(
        tuple(pairs), tuple(mismatches), False, tuple(incoming_only), tuple(local_only), tuple(hints)
    )


_EXTRA_HINT = (
    'extra="fresh" receives paths that only the peer has as fresh tensors (the moments of an optimizer that '
    'has not stepped here, for example), extra="drop" leaves them out'
)


def _share_nothing(incoming: Manifest, local: Manifest, pairs: Sequence[Pair], extra: Extra) -> bool:
    """Return whether the states have no path in common, or no path of a tensor if both have tensors."""
    if not pairs:
        return bool(local.leaves) or (extra == "drop" and bool(incoming.leaves))
    both_have_tensors = any(leaf.parts for leaf in incoming.leaves) and any(
        leaf.parts for leaf in local.leaves
    )
    return both_have_tensors and not any(
        incoming.leaves[pair.incoming].parts or local.leaves[pair.local].parts for pair in pairs
    )


def _collisions(incoming_only: Sequence[Occurrence], local_only: Sequence[Occurrence]) -> Iterator[Mismatch]:
    """Find paths at which one state has a value and the other a container: one tree can't hold both."""
    theirs, ours = ({path for path, _ in only} for only in (incoming_only, local_only))
    for inner, outer, sides in ((theirs, ours, _CONTAINER_INCOMING), (ours, theirs, _CONTAINER_LOCAL)):
        found = dict.fromkeys(
            path[:depth] for path in inner for depth in range(len(path)) if path[:depth] in outer
        )
        for path in found:
            yield Mismatch(format_path(path), "one side has a container, the other a value", *sides)


_CONTAINER_INCOMING = ("a container", "a value")
_CONTAINER_LOCAL = ("a value", "a container")


def _are_twins(incoming: Manifest, local: Manifest) -> bool:
    """Say whether two states differ in nothing but values and what is not compared.

    So it is in nearly every transfer, and to find out takes a hundredth of the time that comparing does.
    """
    if incoming is local:
        # What arrived was recognised.
        return True
    return (
        incoming.root == local.root
        and incoming.branches == local.branches
        and incoming.tensors == local.tensors
        and incoming.storages == local.storages
        and len(incoming.leaves) == len(local.leaves)
        and all(
            theirs.parts == ours.parts
            and theirs.fixed == ours.fixed
            and (theirs.kind == ours.kind or (theirs.kind in _VALUES and ours.kind in _VALUES))
            for theirs, ours in zip(incoming.leaves, local.leaves, strict=True)
        )
    )


def tensor_pairs(incoming: Manifest, local: Manifest, pairs: tuple[Pair, ...]) -> list[TensorPair]:
    """List the tensors behind pairs that fit."""
    return [
        TensorPair(pair.path, theirs, ours)
        for pair in pairs
        for theirs, ours in zip(
            incoming.leaves[pair.incoming].parts, local.leaves[pair.local].parts, strict=False
        )
    ]


def same_layout(incoming: TensorSpec, local: TensorSpec) -> bool:
    """Say whether the bytes of one can be the bytes of the other, moved as a block."""
    return (
        incoming.itemsize == local.itemsize
        and incoming.conj == local.conj
        and incoming.neg == local.neg
        and all(
            theirs == ours or n <= 1
            for n, theirs, ours in zip(incoming.shape, incoming.stride, local.stride, strict=True)
        )
    )


def describe(manifest: Manifest, number: int, look: Look) -> str:
    """Describe a leaf in a few words."""
    leaf = manifest.leaves[number]
    if leaf.kind == OPAQUE:
        return str(leaf.fixed or leaf.traits)
    if leaf.kind == PICKLED:
        return "a pickled object with tensors in it" if leaf.fixed else "a pickled object"
    if not leaf.parts:
        return f"a {show_name(leaf.kind)}"
    seen = look(leaf, _specs(manifest, leaf))
    text = f"{show_name(leaf.kind)} {seen['dtype']}{seen['shape']}"
    return show_difference(text, text)[0]


def _specs(manifest: Manifest, leaf: Leaf) -> list[TensorSpec]:
    return [manifest.tensors[part] for part in leaf.parts]


def _differences(incoming: Manifest, local: Manifest, pair: Pair, look: Look) -> Iterator[Mismatch]:
    theirs, ours = incoming.leaves[pair.incoming], local.leaves[pair.local]
    path = format_path(pair.path)
    if theirs.kind in _VALUES and ours.kind in _VALUES:
        if theirs.fixed is not None or ours.fixed is not None:
            yield Mismatch(
                path,
                "can't be written in place",
                describe(incoming, pair.incoming, look),
                describe(local, pair.local, look),
            )
        return
    if theirs.kind != ours.kind:
        yield Mismatch(
            path, "kind", describe(incoming, pair.incoming, look), describe(local, pair.local, look)
        )
        return
    specs = list(zip(_specs(incoming, theirs), _specs(local, ours), strict=False))
    if (
        theirs.fixed != ours.fixed
        or len(theirs.parts) != len(ours.parts)
        or any(a.dtype != b.dtype or a.shape != b.shape for a, b in specs)
    ):
        yield from _unlike(path, look(theirs, _specs(incoming, theirs)), look(ours, _specs(local, ours)))
        return
    for a, b in specs:
        if not same_layout(a, b) and overlaps_itself(_without_common_expansion(a, b)):
            yield Mismatch(
                path,
                "the local tensor's items share memory, the incoming ones do not in the same way",
                f"strides {list(a.stride)}",
                f"strides {list(b.stride)}",
            )


def _unlike(path: str, theirs: Mapping[str, str], ours: Mapping[str, str]) -> Iterator[Mismatch]:
    """List the properties in which two leaves of one kind differ."""
    for name in {**theirs, **ours}:
        one, two = theirs.get(name, "none"), ours.get(name, "none")
        if one != two:
            yield Mismatch(path, name, *show_difference(one, two))


def _without_common_expansion(incoming: TensorSpec, local: TensorSpec) -> TensorSpec:
    """Leave out the dimensions along which both sides have one and the same item all the way."""
    kept = [d for d, n in enumerate(local.shape) if incoming.stride[d] or local.stride[d] or n == 0]
    return replace(
        local, shape=tuple(local.shape[d] for d in kept), stride=tuple(local.stride[d] for d in kept)
    )


def _conflicts(incoming: Manifest, local: Manifest, pairs: list[Pair]) -> Iterator[Mismatch]:
    """Find local bytes that two different incoming values would be written to."""
    by_storage: defaultdict[int, list[TensorPair]] = defaultdict(list)
    for pair in tensor_pairs(incoming, local, tuple(pairs)):
        by_storage[local.tensors[pair.local].storage].append(pair)
    for sharing in by_storage.values():
        distinct = {_mapping(incoming, local, pair): pair for pair in reversed(sharing)}
        if len(distinct) > 1:
            yield from _conflicts_among(incoming, local, list(reversed(distinct.values())))


def _conflicts_among(incoming: Manifest, local: Manifest, pairs: list[TensorPair]) -> Iterator[Mismatch]:
    try:
        used = [footprint(local.tensors[pair.local]) for pair in pairs]
        if _disjoint(used):
            return
        for index, pair in enumerate(pairs):
            for earlier in range(index):
                other = pairs[earlier]
                if not _agree(incoming, local, pair, other) and not _disjoint([used[index], used[earlier]]):
                    yield Mismatch(
                        format_path(pair.path),
                        f"shares local memory with {format_path(other.path)}, and two values can't "
                        "be kept in one place",
                        "two values",
                        "one storage",
                    )
    except TooIntricate as error:
        yield Mismatch(
            format_path(pairs[0].path),
            "the local views overlap too irregularly to compare",
            "separate values",
            str(error),
        )


def _disjoint(footprints: list[list[Extent]]) -> bool:
    extents = [extent for each in footprints for extent in each]
    return sum(e.nbytes for e in union(extents)) == sum(e.nbytes for e in extents) and len(
        set(extents)
    ) == len(extents)


def _agree(incoming: Manifest, local: Manifest, one: TensorPair, two: TensorPair) -> bool:
    """Say whether a byte that both pairs write is the same incoming byte to both."""
    a, b = incoming.tensors[one.incoming], incoming.tensors[two.incoming]
    x, y = local.tensors[one.local], local.tensors[two.local]
    if a.storage != b.storage:
        return False
    if same_layout(a, x) and same_layout(b, y):
        return x.offset - a.offset == y.offset - b.offset
    same_bits = (a.conj, a.neg, x.conj, x.neg) == (b.conj, b.neg, y.conj, y.neg)
    return same_bits and (a.dtype == b.dtype or (a.conj, a.neg) == (x.conj, x.neg)) and one_map(a, x, b, y)


def _mapping(incoming: Manifest, local: Manifest, pair: TensorPair) -> object:
    """Say which incoming address goes to which local one, whatever the order of the dimensions.

    Tied weights of which one is a transpose of the other have the same mapping.
    """
    a, b = incoming.tensors[pair.incoming], local.tensors[pair.local]
    steps = sorted(
        (theirs, ours, n) for n, theirs, ours in zip(a.shape, a.stride, b.stride, strict=True) if n != 1
    )
    bits = (a.conj, a.neg, b.conj, b.neg)
    # Bits that differ are put right by arithmetic, and then it matters what kind of numbers they are.
    means = a.dtype if bits[:2] != bits[2:] else None
    return (a.storage, a.offset, a.itemsize, bits, means, b.offset, tuple(steps))
