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
from torchferry.core.tree import MAX_DEPTH, format_path
from torchferry.errors import Unsendable
from torchferry.tensors.branches import open_branch
from torchferry.tensors.kinds import kind_of
from torchferry.tensors.kinds.dense import describe_many
from torchferry.tensors.kinds.ndarray import NDARRAY
from torchferry.tensors.looks import PLAIN, Looks, OddTensor, Sight
from torchferry.tensors.memory import CPU, Memory
from torchferry.tensors.storages import StorageTable, Traces
from torchferry.tensors.values import to_wire


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
        now = _versions(self.tensors)
        if now == self.versions:
            return []
        pairs = enumerate(zip(now, self.versions, strict=True))
        return [number for number, (version, earlier) in pairs if version != earlier]


_UNCOUNTED = -1


def _version(tensor: torch.Tensor) -> int:
    # Inference tensors do not count their versions.
    return _UNCOUNTED if tensor.is_inference() else tensor._version


def _versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:
        return [_version(tensor) for tensor in tensors]


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

    What can't be described becomes an opaque leaf, and what can't be written a kind of its own: both only
    matter if something arrives at their path.
    """

    def opaque(value: object, error: Unsendable) -> Leaf:
        return Leaf(OPAQUE)

    found = _describe(state, opaque, traces)
    if not found.uncounted:
        # No ndarrays in it.
        return found
    leaves = tuple(
        _if_writable(leaf) if leaf.kind == NDARRAY.name else leaf for leaf in found.manifest.leaves
    )
    return replace(found, manifest=msgspec.structs.replace(found.manifest, leaves=leaves))


def _if_writable(leaf: Leaf) -> Leaf:
    return leaf if leaf.traits else msgspec.structs.replace(leaf, kind=f"read-only {leaf.kind}")


def _describe(state: object, otherwise: _Otherwise, traces: Traces | None) -> Description:
    traces = traces or Traces()
    try:
        return _Describer(otherwise, traces, careful=False).run(state)
    except OddTensor:
        return _Describer(otherwise, traces, careful=True).run(state)


_MANY = 16
"""So many tensors side by side are described at once."""

_Otherwise = Callable[[object, Unsendable], Leaf]


def _pickled_or_refused(pickle: Callable[[object], bytes] | None) -> _Otherwise:
    def otherwise(value: object, error: Unsendable) -> Leaf:
        if pickle is None:
            raise error
        return Leaf(PICKLED, traits=to_wire(pickle(value)))

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
        self._uncounted: list[int] = []

    def run(self, state: object) -> Description:
        root = self._walk(state, ())
        storages = self._storages.finish()
        manifest = Manifest(
            root,
            tuple(branch for branch in self._branches if branch is not None),
            tuple(self._leaves),
            storages.specs,
            storages.sizes,
        )
        entered = tuple(self._storages.tensors)
        versions = _versions(entered)
        if _UNCOUNTED in versions:
            self._uncounted += [number for number, each in enumerate(versions) if each == _UNCOUNTED]
        uncounted = frozenset(self._uncounted)
        values = tuple(self._values)
        return Description(manifest, storages.memories, entered, values, versions, uncounted)

    def _walk(self, value: object, path: tuple[object, ...]) -> int:
        """Describe a value that is perhaps a container; the path is its own."""
        try:
            opened = None if type(value) in PLAIN else open_branch(value)
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
        names = range(len(opened.children)) if opened.keys is None else opened.keys
        children = self._plain_tensors(opened.children)
        if children is None:
            children = [
                self._walk(child, (*path, name)) for name, child in zip(names, opened.children, strict=True)
            ]
        self._branches[index] = Branch(opened.kind, tuple(children), keys, opened.extra)
        return ~index

    def _plain_tensors(self, values: Sequence[Any]) -> Sequence[int] | None:
        """Describe many values at once, if all are plain tensors that were not seen before; None if not."""
        if self._careful or len(values) < _MANY:
            return None
        sight = self._storages.sight
        looks = sight.recognise(values)
        if looks is None and not _are_plain(values):
            return None
        ids = list(map(id, values))
        if len(set(ids)) < len(ids) or not self._known.keys().isdisjoint(ids):
            return None
        numbers = range(len(self._leaves), len(self._leaves) + len(values))
        looks = looks or _look_at(values, sight)
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
