"""State to manifest: walk the tree, enter the tensors, find out who shares memory.

Everything that can't travel is found here, before anything is sent, with its path.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch

from torchferry.core.manifest import OPAQUE, PICKLED, VALUE, Branch, Leaf, Manifest, Value
from torchferry.core.tree import MAX_DEPTH, MAX_PATH_BYTES, format_path, path_bytes
from torchferry.errors import Unsendable
from torchferry.tensors.containers import ContainerParts, take_apart
from torchferry.tensors.kinds import kind_of
from torchferry.tensors.kinds.dense import describe_many
from torchferry.tensors.kinds.ndarray import NDARRAY
from torchferry.tensors.looks import PLAIN, Looks, OddTensor, Sight
from torchferry.tensors.memory import CPU, Memory
from torchferry.tensors.storages import StorageTable, Traces
from torchferry.tensors.values import to_wire
from torchferry.tensors.writable import READ_ONLY, find_read_only, holds_tensors, why_not_written
from torchferry.torch_internals import UNCOUNTED, versions_of


@dataclass(frozen=True)
class Description:
    """A manifest, and what it describes: memory by storage, tensors by number, values by leaf.

    It holds the values, so that the memory stays alive and stays theirs. `uncounted` are the tensors whose
    changes torch does not count: inference tensors, and what ndarrays are seen as.
    """

    manifest: Manifest
    memories: tuple[Memory, ...]
    tensors: tuple[torch.Tensor, ...]
    values: tuple[object, ...]
    versions: list[int]
    uncounted: frozenset[int]

    @property
    def is_all_cpu(self) -> bool:
        """Whether all of it is in the CPU's memory."""
        return [memory.device for memory in self.memories].count(CPU) == len(self.memories)

    def changed_tensors(self) -> list[int]:
        """List the tensors that torch has written to since they were described."""
        now = versions_of(self.tensors)
        if now == self.versions:
            return []
        pairs = enumerate(zip(now, self.versions, strict=True))
        return [number for number, (version, earlier) in pairs if version != earlier]


def describe(
    state: object, *, pickle: Callable[[object], bytes] | None = None, traces: Traces | None = None
) -> Description:
    """Describe a state that is to be sent.

    `pickle` turns leaves outside the closed set into bytes; without it they are refused. `traces` are
    the last description's.

    Raises:
        Unsendable: a leaf, key or container can't travel; names its path.
    """
    return _describe(state, _pickled_or_refused(pickle), traces)


def describe_target(state: object, *, traces: Traces | None = None) -> Description:
    """Describe a local state that is to be written in place.

    A value that can't be described or written becomes an opaque leaf with the reason. It only matters if
    something arrives at its path.
    """
    found = _describe(state, _opaque, traces)
    tensors, leaves = found.manifest.tensors, found.manifest.leaves
    unwritable = set(find_read_only(found.memories))
    if not unwritable and not found.uncounted:
        # No memory is read-only, and there are no ndarrays that could be.
        return found
    checked = tuple(
        Leaf(OPAQUE, fixed=f"{leaf.kind} {READ_ONLY}")
        if (leaf.kind == NDARRAY.name and not leaf.traits)
        or any(tensors[part].storage in unwritable for part in leaf.parts)
        else leaf
        for leaf in leaves
    )
    return replace(found, manifest=msgspec.structs.replace(found.manifest, leaves=checked))


def _opaque(value: object, error: Unsendable) -> Leaf:
    return Leaf(OPAQUE, fixed=why_not_written(value, error), traits=f"a {type(value).__qualname__}")


def _describe(state: object, otherwise: _Otherwise, traces: Traces | None) -> Description:
    traces = traces or Traces()
    try:
        try:
            return _Describer(otherwise, traces, careful=False).run(state)
        except OddTensor:
            return _Describer(otherwise, traces, careful=True).run(state)
    except RecursionError:
        raise Unsendable(
            "the state is nested deeper than Python's stack allows here: flatten it, or call from less deep",
            phase="describe",
        ) from None


_MANY = 16
"""So many tensors side by side are described at once."""

_MANY_BRANCHES = 1 << 15
"""After this many containers, all paths of the state are counted once."""

_Otherwise = Callable[[object, Unsendable], Leaf]


def _pickled_or_refused(pickle: Callable[[object], bytes] | None) -> _Otherwise:
    def otherwise(value: object, error: Unsendable) -> Leaf:
        if pickle is None:
            raise error
        return Leaf(PICKLED, fixed=holds_tensors(value) or None, traits=to_wire(pickle(value)))

    return otherwise


def _keys_to_wire(keys: Sequence[object]) -> tuple[Value, ...]:
    if set(map(type, keys)) == {str} and all(map(str.isascii, keys)):  # type: ignore[arg-type]
        return tuple(keys)  # type: ignore[arg-type]
    return tuple(map(_key_to_wire, keys))


def _key_to_wire(key: object) -> Value:
    try:
        return to_wire(key)
    except Unsendable as error:
        raise Unsendable(f"among its keys, {error.what}") from None


def _are_plain(values: Sequence[Any]) -> bool:
    return PLAIN.issuperset(map(type, values)) and {value.layout for value in values} == {torch.strided}


def _look_at(tensors: Sequence[torch.Tensor], sight: Sight) -> Looks:
    try:
        return sight.look(tensors)
    except RuntimeError as error:
        raise OddTensor from error


class _Describer:
    """One walk through one state."""

    def __init__(self, otherwise: _Otherwise, traces: Traces, *, careful: bool) -> None:
        self._otherwise = otherwise
        self._careful = careful
        self._branches: list[Branch | None] = []
        self._leaves: list[Leaf] = []
        self._values: list[object] = []
        self._storages = StorageTable(traces, careful=careful)
        self._known: dict[int, int] = {}
        self._state: object = None
        self._path_bytes = 0
        self._uncounted: list[int] = []

    def run(self, state: object) -> Description:
        self._state = state
        root = self._walk(state, (), 0)
        storages = self._storages.finish()
        manifest = Manifest(
            root,
            tuple(branch for branch in self._branches if branch is not None),
            tuple(self._leaves),
            storages.specs,
            storages.sizes,
        )
        entered = tuple(self._storages.tensors)
        versions = versions_of(entered)
        if UNCOUNTED in versions:
            self._uncounted += [number for number, each in enumerate(versions) if each == UNCOUNTED]
        uncounted = frozenset(self._uncounted)
        values = tuple(self._values)
        return Description(manifest, storages.memories, entered, values, versions, uncounted)

    def _walk(self, value: object, path: tuple[object, ...], length_bytes: int) -> int:
        """Describe a value that is perhaps a container; the path is its own, and so is its length."""
        try:
            opened = None if type(value) in PLAIN else take_apart(value)
            if opened is None:
                return self._leaf(value)
            keys = None if opened.keys is None else _keys_to_wire(opened.keys)
        except Unsendable as error:
            return self._unknown(value, path, error)
        if len(path) >= MAX_DEPTH:
            where = format_path(path[:8]) + "…"
            raise Unsendable(
                f"{where}: a {type(value).__qualname__} nested deeper than {MAX_DEPTH}, in a state that "
                "perhaps contains itself: such a state can't travel, so break the cycle or flatten it",
                path=where,
                phase="describe",
            )
        index = len(self._branches)
        self._branches.append(None)
        names = _names_of(opened)
        added = path_bytes(Branch(opened.kind, (0,) * len(opened.children), keys))
        self._path_bytes += len(added) * (length_bytes + 16) + sum(added)
        # Nested containers that are in two places each have exponentially many paths: count them first.
        in_all = _paths_of(self._state, {})[1] if index == _MANY_BRANCHES else self._path_bytes
        if in_all > MAX_PATH_BYTES:
            raise _too_many_places(path)
        children = self._plain_tensors(opened.children)
        if children is None:
            children = [
                self._walk(child, (*path, name), length_bytes + 8 + more)
                for name, child, more in zip(names, opened.children, added, strict=True)
            ]
        self._branches[index] = Branch(opened.kind, tuple(children), keys, opened.extra)
        return ~index

    def _plain_tensors(self, values: Sequence[Any]) -> Sequence[int] | None:
        """Describe many values at once, if all are plain tensors that were not seen before; None if not."""
        if self._careful or len(values) < _MANY:
            return None
        sight = self._storages.sight
        if not _are_plain(values):
            return None
        ids = list(map(id, values))
        if len(set(ids)) < len(ids) or not self._known.keys().isdisjoint(ids):
            return None
        numbers = range(len(self._leaves), len(self._leaves) + len(values))
        looks = _look_at(values, sight)
        entered = self._storages.enter_many(values, looks)
        self._leaves += sight.leaves.of(entered, lambda: describe_many(values, looks.grads, entered))
        self._values += values
        self._known.update(zip(ids, numbers, strict=True))
        return numbers

    def _leaf(self, value: object) -> int:
        known = self._known.get(id(value))
        if known is not None:
            return known
        kind = kind_of(value)
        if kind is None:
            return self._add(Leaf(VALUE, traits=to_wire(value)), value)
        entered = len(self._storages)
        try:
            leaf = kind.describe(value, self._storages.enter)
        except Unsendable:
            self._storages.forget(entered)
            raise
        index = self._add(leaf, value)
        if kind is NDARRAY:
            self._uncounted += leaf.parts
        # The same tensor in two places is one leaf, and arrives as one object.
        self._known[id(value)] = index
        return index

    def _unknown(self, value: object, path: tuple[object, ...], error: Unsendable) -> int:
        try:
            return self._add(self._otherwise(value, error), value)
        except Unsendable as refusal:
            where = format_path(path)
            raise Unsendable(f"{where}: {refusal.what}", path=where, phase="describe") from None

    def _add(self, leaf: Leaf, value: object) -> int:
        self._leaves.append(leaf)
        self._values.append(value)
        return len(self._leaves) - 1


def _names_of(opened: ContainerParts) -> Sequence[object]:
    """Return the keys of a container, or its positions if it has none."""
    return range(len(opened.children)) if opened.keys is None else opened.keys


def _paths_of(value: object, known: dict[int, tuple[int, int, object]]) -> tuple[int, int]:
    """Return the number of paths below a value and their bytes, visiting each container once."""
    if id(value) in known:
        return known[id(value)][:2]
    try:
        opened = None if type(value) in PLAIN else take_apart(value)
    except Unsendable:
        opened = None
    places = nbytes = 0
    for key, child in () if opened is None else zip(_names_of(opened), opened.children, strict=True):
        inner, inner_bytes = _paths_of(child, known)
        places += 1 + inner
        nbytes += inner_bytes + 8 + (1 + inner) * (8 + (len(key) if isinstance(key, str) else 8))
    # `opened` may hold the only references to its children, whose ids are keys here.
    known[id(value)] = places, nbytes, opened
    return places, nbytes


def _too_many_places(path: tuple[object, ...]) -> Unsendable:
    where = format_path(path[:8]) + "…"
    return Unsendable(
        f"{where}: the paths of the state take more than {MAX_PATH_BYTES:,} bytes together, which no "
        "receiver accepts. Is one container in very many places? Each arrives as a container of its own",
        path=where,
        phase="describe",
    )
