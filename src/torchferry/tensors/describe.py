"""Describes a state: walks its tree, and lists its containers, leaves, tensors and storages in a manifest.

Everything that can't be sent, or overwritten, is found here, before anything is sent or received.
"""

import gc
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import prod
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import msgspec
import torch
from torch.nn.parameter import is_lazy

from torchferry.core.manifest import BUFFER, OPAQUE, PICKLED, VALUE, Branch, Leaf, Manifest, Value
from torchferry.core.tree import MAX_DEPTH, MAX_PATH_BYTES, Path, format_path, path_bytes
from torchferry.errors import Unsendable, what_of
from torchferry.tensors import registry
from torchferry.tensors.containers import take_apart
from torchferry.tensors.kinds import kind_of
from torchferry.tensors.kinds.dense import describe_many
from torchferry.tensors.kinds.ndarray import NDARRAY, numpy_class
from torchferry.tensors.kinds.quantized import QUANTIZED
from torchferry.tensors.memory import CPU, Memory, strided
from torchferry.tensors.objects import PlacedObjects, ReadObject, ReadObjects
from torchferry.tensors.storages import check_tensor, find_storages
from torchferry.tensors.values import to_wire
from torchferry.torch_internals import UNCOUNTED, versions_of

_PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})

_COUNT_PATHS_AT = 1 << 15
"""At this many containers, the walk computes the size of all paths, to reject exponential growth early."""

_NO_OBJECTS: ReadObjects = {}

_SubstituteLeaf = Callable[[object, Unsendable], Leaf]
"""Called with a value that can't be described and the reason. Returns a substitute leaf, or raises."""


@dataclass(frozen=True)
class Description:
    """A manifest, and what it describes: memory by storage, tensors by number, values by leaf.

    It keeps the memory alive. `versions` are the version counters of the tensors. `uncounted` are the tensors
    whose changes torch does not count: inference tensors, and views of ndarrays, quantized tensors and large
    values. `objects` are those whose state dicts are described in their places, inner ones first.
    """

    manifest: Manifest
    memories: tuple[Memory, ...]
    tensors: tuple[torch.Tensor, ...]
    values: tuple[object, ...]
    versions: list[int]
    uncounted: frozenset[int]
    objects: PlacedObjects = field(default_factory=dict)

    @property
    def is_all_cpu(self) -> bool:
        """Whether all tensors are in CPU memory."""
        return all(memory.device is CPU for memory in self.memories)

    def current_versions(self) -> list[int]:
        """Return the version counters of the tensors as they are now."""
        return versions_of(self.tensors)

    def increment_versions(self, numbers: Iterable[int]) -> None:
        """Increment the version counters of tensors that were written without torch."""
        tensors = [self.tensors[number] for number in numbers]
        if self.uncounted:
            tensors = [tensor for tensor in tensors if not tensor.is_inference()]
        torch.autograd.graph.increment_version(tensors)

    def changed_tensors(self) -> list[int]:
        """List the tensors whose version counters changed since they were described."""
        pairs = zip(self.current_versions(), self.versions, strict=True)
        return [number for number, (version, earlier) in enumerate(pairs) if version != earlier]

    def with_copies(self, up_to_bytes: int) -> "Description":
        """Return this description with copies of its small tensors, so that these may change.

        Tensors that share a storage share its copy. So a storage is copied as a whole, or not if one of its
        tensors is larger or most of its bytes are in no tensor.
        """
        specs, sizes = self.manifest.tensors, self.manifest.storages
        members: list[list[int]] = [[] for _ in sizes]
        for number, spec in enumerate(specs):
            members[spec.storage].append(number)
        memories, tensors, versions = list(self.memories), list(self.tensors), list(self.versions)
        copied: set[int] = set()
        for storage, (nbytes, numbers) in enumerate(zip(sizes, members, strict=True)):
            used = [prod(specs[number].shape) * specs[number].itemsize for number in numbers]
            if nbytes <= up_to_bytes or (max(used) <= up_to_bytes and nbytes <= 2 * sum(used)):
                copy = strided(memories[storage], torch.uint8, 0, (nbytes,), (1,)).clone()
                memories[storage] = Memory(copy.untyped_storage(), 0, memories[storage].device)
                copied.update(numbers)
                for number in numbers:
                    tensors[number], versions[number] = copy, versions_of([copy])[0]
        return replace(
            self,
            memories=tuple(memories),
            tensors=tuple(tensors),
            versions=versions,
            uncounted=self.uncounted - copied,
        )


def describe(
    state: object, pickle: Callable[[object], bytes] | None = None, objects: ReadObjects = _NO_OBJECTS
) -> Description:
    """Describe a state that is to be sent; raises Unsendable, which names the path of what can't be sent.

    `pickle` encodes values of types that torchferry does not know. Without it, such values raise. `objects`
    are those of the state that `read_objects` returned.
    """

    def pickled_leaf(value: object, error: Unsendable) -> Leaf:
        if pickle is None:
            raise error
        return Leaf(PICKLED, fixed=holds_tensors(value) or None, traits=to_wire(pickle(value)))

    return _describe(state, pickled_leaf, objects)


def describe_target(state: object, objects: ReadObjects = _NO_OBJECTS) -> Description:
    """Describe a local state that is to be written in place.

    A value that can't be described or written becomes an opaque leaf with the reason. It matters only if the
    incoming state has the same path.
    """

    def opaque_leaf(value: object, error: Unsendable) -> Leaf:
        return Leaf(OPAQUE, fixed=_why_not_written(value, error), traits=f"a {type(value).__qualname__}")

    described = _describe(state, opaque_leaf, objects)
    # What torch allocated, and so can resize, is writable and overlaps nothing. Others are arrays, mapped
    # files and bytes.
    if not described.uncounted and all(memory.storage.resizable() for memory in described.memories):
        return described
    manifest = described.manifest
    used = sorted(
        (memory.address, nbytes, number)
        for number, (memory, nbytes) in enumerate(zip(described.memories, manifest.storages, strict=True))
        if nbytes and memory.device is CPU
    )
    unwritable = dict.fromkeys(_find_overlapping(used), _OVERLAPPING)
    unwritable |= dict.fromkeys(_find_read_only(used), _READ_ONLY)

    def checked(leaf: Leaf) -> Leaf:
        if leaf.kind == BUFFER:
            return Leaf(OPAQUE, traits="large bytes")
        # The `traits` of an ndarray say whether it is writeable.
        reasons = [unwritable.get(manifest.tensors[part].storage) for part in leaf.parts]
        reasons += [_READ_ONLY] if leaf.kind == NDARRAY.name and not leaf.traits else []
        reason = next(filter(None, reasons), None)
        return leaf if reason is None else Leaf(OPAQUE, fixed=f"a {leaf.kind} {reason}")

    leaves = tuple(map(checked, manifest.leaves))
    return replace(described, manifest=msgspec.structs.replace(manifest, leaves=leaves))


def _describe(state: object, substitute_leaf: _SubstituteLeaf, objects: ReadObjects) -> Description:
    try:
        walk = _Walk(state, substitute_leaf, objects)
        try:
            specs, memories, sizes = find_storages(walk.tensors)
        except (Unsendable, RuntimeError):
            # Checking all tensors at once is fast, but does not tell which one can't be sent.
            walk = _Walk(state, substitute_leaf, objects, check_each=True)
            specs, memories, sizes = find_storages(walk.tensors)
    except RecursionError:
        what = "the state is nested deeper than Python's stack allows: flatten it, or break its cycle"
        raise Unsendable(what, phase="describe") from None
    manifest = Manifest(walk.root, tuple(walk.branches), tuple(walk.leaves), specs, sizes)
    versions = versions_of(walk.tensors)
    if UNCOUNTED in versions:
        walk.uncounted |= {number for number, version in enumerate(versions) if version == UNCOUNTED}
    tensors, values, uncounted = tuple(walk.tensors), tuple(walk.values), frozenset(walk.uncounted)
    return Description(manifest, memories, tensors, values, versions, uncounted, walk.objects)


class _Walk:
    """One pass through a state. With `check_each`, each tensor is checked at its path."""

    def __init__(
        self,
        state: object,
        substitute_leaf: _SubstituteLeaf,
        objects: ReadObjects,
        *,
        check_each: bool = False,
    ) -> None:
        self.branches: list[Branch] = []
        self.leaves: list[Leaf] = []
        self.values: list[object] = []
        self.tensors: list[torch.Tensor] = []
        self.uncounted: set[int] = set()
        self.objects: dict[Path, ReadObject] = {}
        self._state = state
        self._read = objects
        self._substitute_leaf = substitute_leaf
        self._check_each = check_each
        self._leaf_by_id: dict[int, int] = {}
        self._number_by_id: dict[int, int] = {}
        self._all_path_bytes = 0
        self.root = self._visit(state, (), 0)

    def _visit(self, value: object, path: tuple[object, ...], prefix_bytes: int) -> int:
        """Describe the value at a path of `prefix_bytes`, and return its number for `Branch.children`."""
        if (read := self._read.get(id(value))) is not None:
            number = self._visit(read.state, path, prefix_bytes)
            self.objects[tuple(map(to_wire, path))] = read
            return number
        count = len(self.tensors)
        try:
            parts = None if type(value) in _PLAIN_TYPES else take_apart(value)
            if parts is None:
                return self._visit_leaf(value)
            keys = None if type(parts.keys) is range else _keys_to_wire(parts.keys)
        except (RecursionError, MemoryError):
            raise
        except Exception as error:
            del self.tensors[count:]
            # The value may run code of the user: properties, methods of a mapping, __torch_function__.
            raised = Unsendable(f"reading a {type(value).__qualname__} raised {what_of(error)}")
            unsendable, cause = (error, None) if isinstance(error, Unsendable) else (raised, error)
            try:
                return self._add_leaf(self._substitute_leaf(value, unsendable), value)
            except Unsendable as refusal:
                raise refusal.at(format_path(path)).with_context(phase="describe") from cause
        if len(path) >= MAX_DEPTH:
            raise _too_large(
                path,
                f"a {type(value).__qualname__} is nested deeper than {MAX_DEPTH} levels. If the state "
                "contains itself, break the cycle; if not, flatten it",
            )
        index = len(self.branches)
        branch = Branch(parts.kind, (0,) * len(parts.children), keys, parts.extra)
        # Parents come before their children. The numbers of the children are set below.
        self.branches.append(branch)
        key_bytes = path_bytes(branch)
        self._all_path_bytes += len(key_bytes) * (prefix_bytes + 16) + sum(key_bytes)
        if index == _COUNT_PATHS_AT:
            # If nested containers are each in two places, the number of paths grows exponentially.
            self._all_path_bytes = max(self._all_path_bytes, _count_paths(self._state, {})[1])
        if self._all_path_bytes > MAX_PATH_BYTES:
            raise _too_large(
                path,
                f"the paths of the state take more than {MAX_PATH_BYTES:,} bytes, which no receiver accepts. "
                "A container in several places is sent once for each place: reduce the number of places",
            )
        children = self._add_plain_tensors(parts.children) or [
            self._visit(child, (*path, name), prefix_bytes + 8 + nbytes)
            for name, child, nbytes in zip(parts.keys, parts.children, key_bytes, strict=True)
        ]
        self.branches[index] = Branch(parts.kind, tuple(children), keys, parts.extra)
        return ~index

    def _add_plain_tensors(self, values: Sequence[Any]) -> Sequence[int] | None:
        """Describe all values at once, which is faster; return None unless all are new plain tensors."""
        ids = list(map(id, values))
        if (
            self._check_each
            or not _PLAIN_TYPES.issuperset(map(type, values))
            or {value.layout for value in values} != {torch.strided}
            or len(set(ids)) < len(ids)
            or not self._leaf_by_id.keys().isdisjoint(ids)
        ):
            return None
        numbers = range(len(self.leaves), len(self.leaves) + len(values))
        self.leaves += describe_many(values, range(len(self.tensors), len(self.tensors) + len(values)))
        self.tensors += values
        self.values += values
        self._leaf_by_id.update(zip(ids, numbers, strict=True))
        return numbers

    def _visit_leaf(self, value: object) -> int:
        # A tensor that stands in two places is one leaf, and is received as one object.
        if id(value) in self._leaf_by_id:
            return self._leaf_by_id[id(value)]
        kind = kind_of(value)
        if kind is None:
            return self._add_leaf(Leaf(VALUE, traits=to_wire(value)), value)
        leaf = kind.describe(value, self._add_tensor)
        if leaf.kind in (NDARRAY.name, QUANTIZED.name) or (leaf.kind == BUFFER and type(value) is not bytes):
            self.uncounted.update(leaf.parts)
        self._leaf_by_id[id(value)] = len(self.leaves)
        return self._add_leaf(leaf, value)

    def _add_tensor(self, tensor: torch.Tensor) -> int:
        if self._check_each:
            try:
                check_tensor(tensor)
            except RuntimeError as error:
                raise Unsendable(f"a tensor without accessible memory can't be sent: {error}") from None
        # Tensor subclasses may share an inner tensor, and jagged ones must: their sizes are equal only then.
        number = self._number_by_id.get(id(tensor), -1)
        if not (0 <= number < len(self.tensors) and self.tensors[number] is tensor):
            number = self._number_by_id[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
        return number

    def _add_leaf(self, leaf: Leaf, value: object) -> int:
        self.leaves.append(leaf)
        self.values.append(value)
        return len(self.leaves) - 1


def _too_large(path: tuple[object, ...], what: str) -> Unsendable:
    return Unsendable(what, phase="describe").at(format_path(path[:8]) + ("…" if len(path) > 8 else ""))


def _keys_to_wire(keys: Sequence[object]) -> tuple[Value, ...]:
    if set(map(type, keys)) == {str} and all(map(str.isascii, keys)):  # type: ignore[arg-type]
        return tuple(keys)  # type: ignore[arg-type]
    try:
        return tuple(map(to_wire, keys))
    except Unsendable as error:
        raise Unsendable(f"one of its keys can't be sent: {error.what}") from None


def _count_paths(value: object, counted: dict[int, tuple[int, int, object]]) -> tuple[int, int]:
    """Return the number of paths below a value and their bytes, visiting each container once."""
    if id(value) in counted:
        return counted[id(value)][:2]
    parts = None
    with suppress(Exception):
        parts = take_apart(value)
    paths = nbytes = 0
    for key, child in () if parts is None else zip(parts.keys, parts.children, strict=True):
        inner, inner_bytes = _count_paths(child, counted)
        paths += 1 + inner
        nbytes += inner_bytes + 8 + (1 + inner) * (8 + (len(key) if type(key) is str else 8))
    # `parts` may hold the only references to the children, whose ids must not be reused.
    counted[id(value)] = paths, nbytes, parts
    return paths, nbytes


def _why_not_written(value: Any, error: Unsendable) -> str | None:
    """Return why the tensors in a local value can't be overwritten, or None if it has no tensors."""
    # `isinstance` would read `__class__`, which may be a property that raises.
    cls = type(value)
    name = registry.name_of(cls)
    if issubclass(cls, torch.Tensor):
        if is_lazy(value):
            return "a lazy parameter without a shape: run a forward pass first"
        if value.device.type == "meta":
            return "a tensor on the meta device: call `to_empty()` first"
        return f"a tensor of the class {name} ({value.layout}), which can't be overwritten in place"
    if issubclass(cls, numpy_class("ndarray")):
        return f"an array of the class {name}, which can't be overwritten in place"
    if not holds_tensors(value):
        return None
    if issubclass(cls, (dict, list, tuple)):
        return f"a {name} with tensors that can't be described: {error.what}"
    return f"a {name} that holds tensors: put the tensors themselves into the state, as its state_dict() does"


_MAX_OBJECTS = 1 << 22
"""A value with more objects than this, not counting numbers and strings, is assumed to hold tensors."""

_SCALAR_TYPES = frozenset({type(None), bool, int, float, complex, str, bytes})
_SKIPPED_TYPES = (type, ModuleType, FunctionType, BuiltinFunctionType, CodeType, FrameType, str, bytes)


def holds_tensors(value: object) -> bool:
    """Return whether an object refers to a tensor or array, directly or through other objects.

    References from classes, modules and functions don't count: they belong to the program, not to the state.
    """
    seen: set[int] = set()
    pending = [value]
    while pending:
        item = pending.pop()
        cls = type(item)
        if issubclass(cls, torch.Tensor) or issubclass(cls, numpy_class("ndarray")):
            return True
        if id(item) in seen or issubclass(cls, _SKIPPED_TYPES):
            continue
        seen.add(id(item))
        if len(seen) > _MAX_OBJECTS:
            return True
        pending += [inner for inner in gc.get_referents(item) if type(inner) not in _SCALAR_TYPES]
    return False


_READ_ONLY = "in read-only memory: receive into a copy of it"
_OVERLAPPING = "whose memory overlaps that of another tensor, at a misaligned distance: clone() one of them"


def _find_overlapping(used: Sequence[tuple[int, int, int]]) -> set[int]:
    """Return the storages that overlap another one. That happens only where their items are misaligned.

    `used` has the address, the size in bytes and the number of each storage on the CPU, by address.
    """
    found: set[int] = set()
    end, last = 0, 0
    for start, nbytes, number in used:
        if start < end:
            found |= {last, number}
        if start + nbytes > end:
            end, last = start + nbytes, number
    return found


_READ_ONLY_RANGE = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) r-", re.MULTILINE)


def _find_read_only(used: Sequence[tuple[int, int, int]]) -> Iterator[int]:
    """Find the storages in read-only pages. Finds none on systems without /proc."""
    with suppress(OSError), open("/proc/self/maps", "rb") as maps:
        for low, high in _READ_ONLY_RANGE.findall(maps.read()):
            # Storages do not overlap, except those that `_find_overlapping` finds.
            index = bisect_left(used, (int(high, 16),))
            while index and sum(used[index - 1][:2]) > int(low, 16):
                index -= 1
                yield used[index][2]
