"""Compares the incoming state with the local state and lists every mismatch, before anything is written."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Literal, NamedTuple, TypeAlias

from msgspec import msgpack
from msgspec.structs import replace

from torchferry.core.extents import Budget, TooIrregular, are_disjoint, footprint, overlaps_itself, union
from torchferry.core.hash_flooding import is_hash_flood
from torchferry.core.manifest import BUFFER, OPAQUE, PICKLED, VALUE, Leaf, Manifest, TensorSpec
from torchferry.core.text import show_difference, show_name
from torchferry.core.tree import Occurrence, Path, format_path, occurrences
from torchferry.errors import BadManifest, Mismatch

_VALUE_KINDS = frozenset({VALUE, OPAQUE, PICKLED, BUFFER})

Extra: TypeAlias = Literal["error", "fresh", "drop"]
"""What to do with paths that only the peer has."""

PropertiesOf: TypeAlias = Callable[[Leaf, Sequence[TensorSpec]], Mapping[str, str]]
"""Returns the properties of a leaf that are compared, as text by name: dtype, shape and more."""

Rule: TypeAlias = Literal["varies", "fixed", "required"]
"""How the object at or above a path treats differences at the path.

- "varies": the object takes whatever the peer has at this path, or nothing. What fits is written in place.
- "fixed": the path must fit, and is never fresh: the object has no place for entries that only the peer has.
- "required": both sides must have the path, whatever `strict` and `extra` say.
"""

RuleOf: TypeAlias = Callable[[Path], Rule | None]
"""Returns the rule of a path, None if no object holds it."""


class Pair(NamedTuple):
    """A path that both states have, and the numbers of its leaf, or of one of its tensors, in each."""

    path: Path
    incoming: int
    local: int


class Comparison(NamedTuple):
    """The paths that both states have, the paths that only one has, the mismatches, and hints at their cause.

    If `identical`, leaf n of one state is paired with leaf n of the other, and so are their tensors and
    storages. Then pairs are not listed. `fresh` has the paths of `incoming_only` that are received into fresh
    memory. One of them may also be a local path, whose value does not fit and is replaced.
    """

    pairs: Sequence[Pair]
    mismatches: Sequence[Mismatch]
    identical: bool = False
    incoming_only: Sequence[Occurrence] = ()
    local_only: Sequence[Occurrence] = ()
    hints: Sequence[str] = ()
    fresh: Sequence[Occurrence] = ()


def compare(
    incoming: Manifest,
    local: Manifest,
    properties_of: PropertiesOf,
    *,
    strict: bool,
    extra: Extra,
    rules: RuleOf | None = None,
) -> Comparison:
    """Pair the leaves of two states by path, and list all mismatches.

    With `strict`, a path that only the local state has is a mismatch. With `extra="error"`, a path that only
    the incoming state has is a mismatch. Every unpaired path is a mismatch if the states share no path, or if
    both have tensors but share no path of a tensor. With `extra="fresh"`, a tensor may take the place of a
    plain value. `rules` are given if the local state has objects.
    Raises BadManifest if incoming paths are a hash flood.
    """
    if _are_identical(incoming, local):
        return Comparison((), (), identical=True)
    rule_of: RuleOf = rules or (lambda path: None)
    states = _States(incoming, local, properties_of, rule_of, extra, strict)
    theirs, ours = occurrences(incoming), dict(occurrences(local))
    candidates = [Pair(path, leaf, ours[path]) for path, leaf in theirs if path in ours]
    replaced, unfit = _find_unfit(states, candidates)
    pairs = [pair for pair in candidates if pair.path not in replaced]
    incoming_only = [(path, leaf) for path, leaf in theirs if path not in ours or path in replaced]
    # In all other cases, incoming paths are only looked up in dicts of local paths, not put into dicts.
    if (rules is not None or extra == "fresh") and is_hash_flood([path for path, _ in incoming_only]):
        raise BadManifest("the paths of the incoming state were chosen to collide in a hash table")
    common = {pair.path for pair in candidates}
    local_only = [each for each in ours.items() if each[0] not in common and rule_of(each[0]) != "varies"]
    taken = {"varies", None} if extra == "fresh" else {"varies"}
    fresh = [each for each in incoming_only if each[0] in replaced or rule_of(each[0]) in taken]
    unexpected = [each for each in incoming_only if each[0] not in replaced and rule_of(each[0]) != "varies"]
    mismatches = _find_unpaired(states, pairs, unexpected, local_only) + unfit
    hints: list[str] = []
    if mismatches:
        hints = wrapper_hints(*([each[0] for each in some] for some in (incoming_only, local_only, pairs)))
        # An entry that only the peer's module has can't be fresh.
        if extra == "error" and not hints and any(rule_of(path) is None for path, _ in unexpected):
            hints = [_EXTRA_HINT]
    return Comparison(pairs, mismatches, False, incoming_only, local_only, hints, fresh)


class _States(NamedTuple):
    """The two states that are compared, and how."""

    incoming: Manifest
    local: Manifest
    properties_of: PropertiesOf
    rule_of: RuleOf
    extra: Extra
    strict: bool

    def describe(self, side: Manifest, number: int) -> str:
        """Describe a leaf of one side in a few words."""
        leaf = side.leaves[number]
        if leaf.kind == OPAQUE:
            return str(leaf.fixed or leaf.traits)
        if leaf.kind == PICKLED:
            return "a pickled object with tensors in it" if leaf.fixed else "a pickled object"
        if not leaf.parts:
            return f"a {show_name(leaf.kind)}"
        properties = self.properties_of(leaf, _specs(side, leaf))
        return show_name(f"{leaf.kind} {properties['dtype']}{properties['shape']}")


def _find_unfit(states: _States, candidates: Sequence[Pair]) -> tuple[set[Path], list[Mismatch]]:
    """Compare the leaves at common paths; return the paths whose local leaf is replaced, and mismatches."""
    rule_of = states.rule_of
    replaced: set[Path] = set()
    mismatches: list[Mismatch] = []
    fitting: list[Pair] = []
    for pair in candidates:
        differences = list(_compare_leaves(states, pair))
        theirs, ours = states.incoming.leaves[pair.incoming], states.local.leaves[pair.local]
        has_no_place = bool(theirs.parts) and ours.kind in _VALUE_KINDS and ours.fixed is None
        rule = rule_of(pair.path)
        if not differences:
            fitting.append(pair)
        elif rule == "varies" or (has_no_place and rule is None and states.extra == "fresh"):
            replaced.add(pair.path)
        else:
            mismatches += [Mismatch(format_path(pair.path), *difference) for difference in differences]
    while True:
        conflicts = list(_find_conflicts(states.incoming, states.local, fitting))
        varying = {path for _, *paths in conflicts for path in paths if rule_of(path) == "varies"}
        if not varying:
            return replaced, mismatches + [mismatch for mismatch, *_ in conflicts]
        replaced |= varying
        fitting = [pair for pair in fitting if pair.path not in varying]


def _find_unpaired(
    states: _States, pairs: Sequence[Pair], unexpected: Sequence[Occurrence], local_only: Sequence[Occurrence]
) -> list[Mismatch]:
    """List the paths that only one side has, and should not."""
    rule_of, extra = states.rule_of, states.extra
    shared = [pair for pair in pairs if rule_of(pair.path) != "varies"]
    nothing_in_common = _have_nothing_in_common(states, shared, unexpected, local_only)
    mismatches: list[Mismatch] = []
    for path, leaf in unexpected:
        rule = rule_of(path)
        is_accepted = (extra == "fresh" and rule is None) or (extra == "drop" and rule != "required")
        if nothing_in_common or not is_accepted:
            described = states.describe(states.incoming, leaf)
            mismatches.append(Mismatch(format_path(path), "no such path here", described, "nothing"))
    for path, leaf in local_only:
        if states.strict or nothing_in_common or rule_of(path) == "required":
            described = states.describe(states.local, leaf)
            mismatches.append(Mismatch(format_path(path), "the peer has no such path", "nothing", described))
    if extra == "fresh" and not states.strict:
        mismatches += _compare_containers(dict(unexpected), dict(local_only))
    return mismatches


_EXTRA_HINT = (
    'extra="fresh" receives paths that only the peer has as fresh tensors (the moments of an optimizer that '
    'has not stepped here, for example), extra="drop" leaves them out'
)


def _are_identical(incoming: Manifest, local: Manifest) -> bool:
    """Return whether two states differ only in values and traits: the usual case, which needs no paths."""
    return incoming is local or (
        incoming.root == local.root
        and incoming.branches == local.branches
        and incoming.tensors == local.tensors
        and incoming.storages == local.storages
        and _match_in_order(incoming.leaves, local.leaves)
    )


def _match_in_order(theirs: Sequence[Leaf], ours: Sequence[Leaf]) -> bool:
    """Return whether leaf n of one state can be written to leaf n of the other, for all n."""
    if theirs == ours:  # one comparison in C
        return not any(leaf.kind in _VALUE_KINDS for leaf in ours if leaf.fixed is not None)
    return len(theirs) == len(ours) and all(
        their.parts == our.parts
        and their.fixed == our.fixed
        and (their.fixed is None or their.kind not in _VALUE_KINDS)
        and (their.kind == our.kind or (their.kind in _VALUE_KINDS and our.kind in _VALUE_KINDS))
        for their, our in zip(theirs, ours, strict=True)
    )


def _have_nothing_in_common(
    states: _States,
    pairs: Sequence[Pair],
    incoming_only: Sequence[Occurrence],
    local_only: Sequence[Occurrence],
) -> bool:
    """Return whether the states have no path in common, or no path of a tensor although both have tensors."""
    theirs, ours = states.incoming.leaves, states.local.leaves
    if not pairs:
        return bool(local_only) or (states.extra == "drop" and bool(incoming_only))
    if any(theirs[pair.incoming].parts or ours[pair.local].parts for pair in pairs):
        return False
    unpaired = ((theirs, incoming_only), (ours, local_only))
    return all(any(leaves[leaf].parts for _, leaf in some) for leaves, some in unpaired)


def _compare_containers(theirs: Mapping[Path, int], ours: Mapping[Path, int]) -> Iterator[Mismatch]:
    """Find paths with a value in one state and a container in the other. A merged tree cannot hold both."""
    container, value = "a container", "a value"
    for inner, outer, sides in ((theirs, ours, (container, value)), (ours, theirs, (value, container))):
        found = {path[:depth] for path in inner for depth in range(len(path)) if path[:depth] in outer}
        for path in filter(found.__contains__, outer):
            yield Mismatch(format_path(path), "one side has a container, the other a value", *sides)


def tensor_pairs(incoming: Manifest, local: Manifest, pairs: Iterable[Pair]) -> list[Pair]:
    """List the tensors of paired leaves that fit."""
    found: list[Pair] = []
    for path, theirs, ours in pairs:
        parts = zip(incoming.leaves[theirs].parts, local.leaves[ours].parts, strict=False)
        found += [Pair(path, *numbers) for numbers in parts]
    return found


def can_copy_as_block(incoming: TensorSpec, local: TensorSpec) -> bool:
    """Return whether the bytes of one tensor can be copied to the other as a block."""
    if (incoming.itemsize, incoming.conj, incoming.neg) != (local.itemsize, local.conj, local.neg):
        return False
    dims = zip(incoming.shape, incoming.stride, local.stride, strict=True)
    return all(theirs == ours or count <= 1 for count, theirs, ours in dims)


def _specs(manifest: Manifest, leaf: Leaf) -> list[TensorSpec]:
    return [manifest.tensors[part] for part in leaf.parts]


def _compare_leaves(states: _States, pair: Pair) -> Iterator[tuple[str, str, str]]:
    """Find what differs, with the incoming and the local value."""
    incoming, local, properties_of = states.incoming, states.local, states.properties_of
    theirs, ours = incoming.leaves[pair.incoming], local.leaves[pair.local]
    are_values = theirs.kind in _VALUE_KINDS and ours.kind in _VALUE_KINDS
    if are_values and theirs.fixed is None and ours.fixed is None:
        return
    if are_values or theirs.kind != ours.kind:
        described = states.describe(incoming, pair.incoming), states.describe(local, pair.local)
        yield "can't be written in place" if are_values else "kind", *described
        return
    their_specs, our_specs = _specs(incoming, theirs), _specs(local, ours)
    fits = theirs.fixed == ours.fixed and len(their_specs) == len(our_specs)
    specs = list(zip(their_specs, our_specs, strict=False))
    if not fits or any(a.dtype != b.dtype or a.shape != b.shape for a, b in specs):
        ones, twos = properties_of(theirs, their_specs), properties_of(ours, our_specs)
        found = [(name, ones.get(name, "none"), twos.get(name, "none")) for name in {**ones, **twos}]
        differing = [(name, one, two) for name, one, two in found if one != two]
        # Properties are text for messages. Whether the leaves fit was decided by `fixed`.
        for name, one, two in differing or [("metadata", str(theirs.fixed), str(ours.fixed))]:
            yield name, *show_difference(one, two)
        return
    for a, b in specs:
        if not can_copy_as_block(a, b) and overlaps_itself(_without_common_expansion(a, b)):
            what = "items of the local tensor share memory that items of the incoming tensor do not share"
            yield what, f"strides {list(a.stride)}", f"strides {list(b.stride)}"


def _without_common_expansion(incoming: TensorSpec, local: TensorSpec) -> TensorSpec:
    """Remove the dimensions that are expanded on both sides."""
    kept = [d for d, count in enumerate(local.shape) if incoming.stride[d] or local.stride[d] or count == 0]
    shape, stride = (tuple(sizes[d] for d in kept) for sizes in (local.shape, local.stride))
    return replace(local, shape=shape, stride=stride)


def _find_conflicts(
    incoming: Manifest, local: Manifest, pairs: Sequence[Pair]
) -> Iterator[tuple[Mismatch, *tuple[Path, ...]]]:
    """Find local bytes that would receive two different values. Yields mismatches with the paths involved."""
    by_storage: defaultdict[int, defaultdict[bytes, list[Pair]]] = defaultdict(lambda: defaultdict(list))
    for pair in tensor_pairs(incoming, local, pairs):
        theirs, ours = incoming.tensors[pair.incoming], local.tensors[pair.local]
        by_storage[ours.storage][_write_key(theirs, ours)].append(pair)
    for groups in by_storage.values():
        if len(groups) > 1:
            yield from _find_conflicts_between(list(groups.values()), local)


def _find_conflicts_between(
    groups: Sequence[Sequence[Pair]], local: Manifest
) -> Iterator[tuple[Mismatch, *tuple[Path, ...]]]:
    """Find pairs of different groups that share local bytes. Pairs of one group write the same values."""
    try:
        used = {pair.local: footprint(local.tensors[pair.local]) for group in groups for pair in group}
        unions = [union([extent for pair in group for extent in used[pair.local]]) for group in groups]
        if are_disjoint([extent for extents in unions for extent in extents]):
            return
        earlier: list[Pair] = []
        budget = Budget()
        for group in groups:
            for pair in group:
                for other in earlier:
                    budget.spend(1)
                    if not are_disjoint(used[pair.local] + used[other.local], budget):
                        what = (
                            f"shares local memory with {format_path(other.path)}, but the incoming tensors "
                            "do not share memory like this; clone() one of them"
                        )
                        found = Mismatch(format_path(pair.path), what, "other memory", "shared memory")
                        yield found, pair.path, other.path
                        break
            earlier += group
    except TooIrregular as error:
        what = "the local views overlap too irregularly to compare; clone() some of them"
        found = Mismatch(format_path(groups[0][0].path), what, "separate values", str(error))
        yield found, *(pair.path for group in groups for pair in group)


def _write_key(incoming: TensorSpec, local: TensorSpec) -> bytes:
    """Return a key such that tensors of equal keys write equal values to the local bytes that they share.

    If the layouts are equal, the key is the incoming storage and the difference of the offsets. Otherwise it
    also has the sorted strides of both sides: tied weights may be transposes of each other. Keys are encoded
    because Python hashes bytes with a secret: a peer can't choose keys that collide.
    """
    if can_copy_as_block(incoming, local):
        return msgpack.encode((incoming.storage, local.offset - incoming.offset))
    dims = zip(incoming.stride, local.stride, incoming.shape, strict=True)
    steps = sorted(dim for dim in dims if dim[2] != 1)
    bits = (incoming.conj, incoming.neg, local.conj, local.neg)
    # Items whose bits differ are converted, and how depends on the dtype.
    dtype = incoming.dtype if bits[:2] != bits[2:] else None
    key = incoming.storage, incoming.offset, incoming.itemsize, bits, dtype, local.offset, steps
    return msgpack.encode(key)


_MAX_WRAPPER_WORDS = 3
"""DistributedDataParallel around a compiled module is two words: `module._orig_mod.`"""
_MAX_PREFIXES = 8
_MAX_KEY_CHARACTERS = 4096
_MAX_WORDS = 64


def wrapper_hints(
    incoming_only: Iterable[Path], local_only: Iterable[Path], common: Iterable[Path] = ()
) -> list[str]:
    """Return a hint if one side's unmatched paths have a prefix that those of the other side lack.

    Then only one side's model is wrapped, for example by DistributedDataParallel.

    >>> wrapper_hints([("module.w",), ("module.b",)], [("w",), ("b",)])
    ['all incoming paths begin with `module.`: wrapped on one side only?']
    >>> wrapper_hints([("model", "w"), ("step",)], [("model", "_orig_mod.w")])
    ['all local paths in `model` begin with `_orig_mod.`: wrapped on one side only?']
    """
    incoming, local, both = (list(map(_words, paths)) for paths in (incoming_only, local_only, common))
    for side, wrapped, bare in (("incoming", incoming, set(local)), ("local", local, set(incoming))):
        candidates = dict.fromkeys(
            (path[:start], path[start:end])
            for path in wrapped
            for start in range(len(path) - 1)
            for end in range(start + 1, min(start + _MAX_WRAPPER_WORDS, len(path) - 1) + 1)
            if path[:start] + path[end:] in bare
        )
        for parent, prefix in islice(candidates, _MAX_PREFIXES):
            below = [path[len(parent) :] for path in wrapped if path[: len(parent)] == parent]
            if all(path[: len(prefix)] == prefix for path in below):
                where = f" in `{show_name('.'.join(parent))}`" if parent else ""
                every = "all other" if any(path[: len(parent)] == parent for path in both) else "all"
                shown = show_name(".".join((*prefix, "")))
                return [f"{every} {side} paths{where} begin with `{shown}`: wrapped on one side only?"]
    return []


def _words(path: Path) -> tuple[str, ...]:
    return tuple(word for key in path for word in str(key)[:_MAX_KEY_CHARACTERS].split("."))[:_MAX_WORDS]
