"""Who takes which leaves from whom in a sync, decided from the tables of all ranks.

Leaves of two ranks are replicas if they have the same path and, if they are sharded, the same position.
Each rank that is behind receives a leaf from all ranks that have the version and a replica of the leaf.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from torchferry.core.compare import wrapper_hints
from torchferry.core.manifest import Leaf, Manifest
from torchferry.core.tree import Path, format_path, occurrences
from torchferry.errors import Difference, LostPart, PartsLost, ReplicasDiffer, show_ranks


class Part(NamedTuple):
    """Which part of a sharded tensor a leaf holds: `layout` is how the tensor is split, as encoded data."""

    layout: bytes
    position: str


Key = tuple[Path, Part | None]
"""What makes two leaves replicas of each other."""

PartOf = Callable[[Leaf, int | None], Part | None]
"""Returns the part of a tensor that a leaf holds, or, given a global rank, the part that this rank holds."""


class Table(NamedTuple):
    """What one rank has. `digests` are by leaf; a rank that is behind has none.

    `per_rank` lists paths that are not compared. `optional` lists paths below which a rank that is behind
    may have tensors that no other rank has: its optimizer may have more moments.
    """

    global_rank: int
    manifest: Manifest
    digests: Sequence[bytes] = ()
    per_rank: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()


class Bundle(NamedTuple):
    """Leaves that the same ranks receive from the same ranks. `numbers` are their occurrences on each rank.

    The numbers of a receiver are occurrences in the tree that `Assignment` gives it.
    """

    sources: tuple[int, ...]
    receivers: tuple[int, ...]
    numbers: dict[int, list[int]]


class Assignment(NamedTuple):
    """All bundles. `trees` maps each receiver to the rank whose tree it gets, maybe its own."""

    bundles: Sequence[Bundle]
    trees: Mapping[int, int]


def assign(
    sources: Mapping[int, Table], receivers: Mapping[int, Table], trust: int | None, part_of: PartOf
) -> Assignment:
    """Decide which ranks take which leaves from which sources.

    Raises ReplicasDiffer if sources differ, and `trust` does not decide between them, and PartsLost if no
    source has a part that a receiver needs.
    """
    found: dict[Key, dict[bytes, list[int]]] = {}
    numbers: dict[int, dict[Key, int]] = {}
    for rank, table in sorted(sources.items()):
        numbers[rank] = {}
        for number, (path, leaf) in enumerate(occurrences(table.manifest)):
            key = path, part_of(table.manifest.leaves[leaf], None)
            numbers[rank][key] = number
            found.setdefault(key, {}).setdefault(table.digests[leaf], []).append(rank)
    per_rank = {path for table in (*sources.values(), *receivers.values()) for path in table.per_rank}
    source_ranks, receiver_ranks = _agree(found, per_rank, trust)
    trees = {rank: rank for ranks in receiver_ranks.values() for rank in ranks}
    wanted = _Wanted(found, sources, numbers, part_of)
    for rank, table in sorted(receivers.items()):
        trees[rank], numbers[rank] = wanted.by(rank, table)
        for key in numbers[rank]:
            receiver_ranks[key].append(rank)
    wanted.raise_if_lost()
    bundles: dict[tuple[tuple[int, ...], tuple[int, ...]], Bundle] = {}
    for key, ranks in receiver_ranks.items():
        # A rank that takes values from the trusted rank serves only leaves that no other rank has.
        serving = [rank for rank in source_ranks[key] if rank not in trees] or source_ranks[key]
        kind = tuple(serving), tuple(ranks)
        bundle = bundles.setdefault(kind, Bundle(*kind, {rank: [] for rank in (*serving, *ranks)}))
        for rank in (*serving, *ranks):
            bundle.numbers[rank].append(numbers[rank][key])
    return Assignment(list(bundles.values()), trees)


def _agree(
    found: Mapping[Key, Mapping[bytes, Sequence[int]]], per_rank: Collection[str], trust: int | None
) -> tuple[dict[Key, list[int]], defaultdict[Key, list[int]]]:
    """Return which ranks hold each part, and which ranks that have the version take it from `trust`."""
    source_ranks: dict[Key, list[int]] = {}
    receiver_ranks: defaultdict[Key, list[int]] = defaultdict(list)
    differences: list[Difference] = []
    for key, by_digest in found.items():
        groups = list(by_digest.values())
        if is_named(key[0], per_rank):
            source_ranks[key] = [min(map(min, groups))]
            continue
        chosen = next((group for group in groups if len(groups) == 1 or trust in group), None)
        if chosen is None:
            position = key[1].position if key[1] is not None else ""
            differences.append(Difference(format_path(key[0]), position, tuple(map(tuple, groups))))
            continue
        source_ranks[key] = list(chosen)
        if len(groups) > 1:
            receiver_ranks[key] += sorted(rank for group in groups if group is not chosen for rank in group)
    if differences:
        advice = "pass trust=RANK to take that rank's values, or list paths that may differ in per_rank="
        if trust is not None:
            advice = f"trust={trust} does not help: rank {trust} does not hold these parts"
        raise ReplicasDiffer(differences, advice)
    return source_ranks, receiver_ranks


class _Wanted:
    """Finds what each receiver takes, and collects what is lost."""

    def __init__(
        self,
        found: Mapping[Key, object],
        sources: Mapping[int, Table],
        numbers: Mapping[int, Mapping[Key, int]],
        part_of: PartOf,
    ) -> None:
        self._sources, self._part_of = sources, part_of
        self._parts: defaultdict[Path, list[Part | None]] = defaultdict(list)
        for path, part in found:
            self._parts[path].append(part)
        self._paths = {rank: {path for path, _ in numbers[rank]} for rank in sources}
        self._lost: defaultdict[tuple[Path, str], list[int]] = defaultdict(list)
        self._own: set[Path] = set()

    def by(self, rank: int, table: Table) -> tuple[int, dict[Key, int]]:
        """Return whose tree a receiver gets, and the number in that tree of each part that it takes."""
        own = dict(occurrences(table.manifest))
        leaves = table.manifest.leaves
        parts = {path: self._part_of(leaves[leaf], None) for path, leaf in own.items()}
        required = {
            path for path, leaf in own.items() if leaves[leaf].parts and not is_named(path, table.optional)
        }
        self._own |= required
        tree = next((each for each, paths in self._paths.items() if required <= paths), rank)
        model = self._sources.get(tree, table).manifest
        positions = {part.layout: part for part in parts.values() if part is not None}
        # A tensor may have fewer rows than ranks. Then some ranks hold nothing of it, and lose nothing.
        empty = {
            part
            for path, leaf in own.items()
            if (part := parts[path]) is not None and _is_empty(leaves[leaf], table.manifest)
        }
        numbers: dict[Key, int] = {}
        for number, (path, leaf) in enumerate(occurrences(model)):
            part = parts.get(path) or self._part_of(model.leaves[leaf], table.global_rank)
            if path not in parts and part is not None:
                # The moments of an optimizer are split as its parameters are, also on a mesh of other ranks.
                part = positions.get(part.layout, part)
            can_build = path in parts or len(model.leaves[leaf].parts) == 1
            if part in empty and part not in self._parts[path] and can_build:
                continue  # the receiver keeps its own tensor, or creates one without elements
            key = self._key(path, part, rank, is_tensor=bool(model.leaves[leaf].parts))
            if key is not None:
                numbers[key] = number
        return tree, numbers

    def _key(self, path: Path, part: Part | None, rank: int, *, is_tensor: bool) -> Key | None:
        parts = self._parts.get(path, [])
        if part in parts:
            return path, part
        if part is not None and any(each is not None and each.layout == part.layout for each in parts):
            self._lost[path, part.position].append(rank)
            return None
        if parts:
            # It has another kind or layout. When the receiver compares it, the error says exactly which.
            return path, parts[0]
        if is_tensor:
            self._lost[path, part.position if part is not None else ""].append(rank)
        return None

    def raise_if_lost(self) -> None:
        if not self._lost:
            return
        lost = [LostPart(format_path(path), where, tuple(who)) for (path, where), who in self._lost.items()]
        served = [path for path in self._parts if path not in self._own]
        hints = wrapper_hints(served, [path for path, _ in self._lost if path not in self._parts])
        advice = (
            f"{show_ranks(list(self._sources))} {'has' if len(self._sources) == 1 else 'have'} the version: "
        )
        advice += "load a checkpoint, or start the ranks that hold the rest"
        raise PartsLost(lost, "\n  ".join([*hints, advice]))


def _is_empty(leaf: Leaf, manifest: Manifest) -> bool:
    return bool(leaf.parts) and all(0 in manifest.tensors[part].shape for part in leaf.parts)


def is_named(path: Path, names: Collection[str]) -> bool:
    """Return whether `names` has a path, or one above it, as text.

    >>> is_named(("optim", "state", 0), ["optim.state"]), is_named(("optimizer",), ["optim"])
    (True, False)
    """
    return bool(names) and any(format_path(path[: n + 1]) in names for n in range(len(path)))
