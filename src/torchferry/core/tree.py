"""Walks, rebuilds and merges the trees of manifests, without recursion, and formats paths.

A path is the tuple of keys from the root. Paths are equal only if their keys are equal: `{"a.b": x}` and
`{"a": {"b": x}}` have different paths, although both are shown as `a.b`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec
from msgspec.msgpack import Decoder

from torchferry.core.manifest import Branch, Manifest, Special, Value
from torchferry.core.text import MAX_CHARACTERS, show

MAX_DEPTH = 256
"""The deepest nesting. Real states are far less deep, and a cycle would have no end."""

MAX_PATH_BYTES = 1 << 29
"""The limit for all paths of a tree together. A key is in every path below it, but only once in a frame."""

Path = tuple[Value, ...]

Occurrence = tuple[Path, int]
"""A path and the leaf at that path. One leaf can occur at several paths."""


def occurrences(manifest: Manifest) -> list[Occurrence]:
    """List every path with its leaf, in order."""
    return [(path, child) for path, child in walk(manifest) if child >= 0]


def path_of(manifest: Manifest, child: int) -> Path:
    """Return the first path of leaf `child`, or of branch ~child if it is negative."""
    return next(path for path, found in walk(manifest) if found == child)


def walk(manifest: Manifest) -> Iterator[tuple[Path, int]]:
    """Yield every path with its child (see Branch), parents first."""
    stack: list[tuple[Path, int]] = [((), manifest.root)]
    while stack:
        path, child = stack.pop()
        yield path, child
        if child < 0:
            # The last item is popped first.
            stack += [((*path, key), inner) for key, inner in reversed(_items(manifest.branches[~child]))]


def _items(branch: Branch) -> list[tuple[Value, int]]:
    """Return (key, child) for each child of a branch. Without keys, the key is the position."""
    keys = range(len(branch.children)) if branch.keys is None else branch.keys
    return list(zip(keys, branch.children, strict=True))


def path_bytes(branch: Branch) -> list[int]:
    """Estimate how many bytes the key of each child adds to a path."""
    if branch.keys is None:
        return [8] * len(branch.children)
    if set(map(type, branch.keys)) == {str}:
        return list(map(len, branch.keys))  # type: ignore[arg-type]
    return [len(key) if isinstance(key, str) else 8 for key in branch.keys]


Build = Callable[[int, list[object]], object]
"""Builds the container of a branch, given its number and the built children."""


def rebuild(manifest: Manifest, values: Sequence[object], build: Build) -> object:
    """Build the tree with `values`, one for each leaf."""
    # Parents come before their children, so the containers are built from the last to the first.
    built: list[object] = [None] * len(manifest.branches)
    for number in reversed(range(len(built))):
        children = manifest.branches[number].children
        built[number] = build(number, [values[c] if c >= 0 else built[~c] for c in children])
    return values[manifest.root] if manifest.root >= 0 else built[~manifest.root]


def rebuild_places(
    manifest: Manifest,
    values: Iterable[object],
    build: Build,
    place: Callable[[Path, object], object] = lambda path, built: built,
) -> object:
    """Build the tree with `values`, one for each occurrence, in order.

    `place` is called with each path and what was built there, and returns what is put there.
    """
    remaining = list(values)
    built: list[object] = []
    # Backwards, children come before their branch: they are the last entries of `built`, the first one last.
    for path, child in reversed(list(walk(manifest))):
        if child >= 0:
            found = remaining.pop()
        else:
            found = build(~child, [built.pop() for _ in manifest.branches[~child].children])
        built.append(place(path, found))
    return built.pop()


def merge(
    local: Manifest,
    incoming: Manifest,
    adds: Callable[[Path], bool] = lambda path: True,
    varies: Callable[[Path], bool] = lambda path: False,
) -> Manifest:
    """Merge two trees. Where both have a container, the merged one has the local type and the keys of both.

    A path that only the incoming tree has is added if `adds` says so. At a path that `varies`, the merged
    tree is the incoming one.
    Leaves keep their local numbers. A leaf that only the incoming tree has gets the placeholder 0, which
    `rebuild_places` does not read.
    """
    # Entry n is a path, and the local and the incoming child that are merged to branch n. One may be None.
    merged: list[tuple[Path, int | None, int | None]] = []

    def add(path: Path, ours: int | None, theirs: int | None) -> int:
        if ours is not None and theirs is not None and (ours < 0) != (theirs < 0):
            ours = None if varies(path) else ours
            theirs = theirs if varies(path) or adds(path) else None
        if ours is not None and ours >= 0:
            return ours
        if theirs is not None and theirs >= 0:
            return 0
        merged.append((path, ours, theirs))
        return ~(len(merged) - 1)

    root = add((), local.root, incoming.root)
    branches: list[Branch] = []
    for path, ours, theirs in merged:
        sides = ((local, ours), (incoming, theirs))
        containers = [tree.branches[~child] for tree, child in sides if child is not None]
        our_children = dict(_items(containers[0])) if ours is not None else {}
        their_children = dict(_items(containers[-1])) if theirs is not None else {}
        keys = tuple(their_children | our_children if varies(path) else our_children | their_children)
        keys = tuple(key for key in keys if key in their_children or not varies((*path, key)))
        keys = tuple(key for key in keys if key in our_children or adds((*path, key)))
        children = tuple(add((*path, key), our_children.get(key), their_children.get(key)) for key in keys)
        # A list only has the keys 0 to n - 1. For other keys, the incoming container replaces a local list.
        fits_list = keys == tuple(range(len(keys)))
        takes_local = not varies(path) and (fits_list or containers[0].keys is not None)
        chosen = containers[0] if takes_local else containers[-1]
        branches.append(Branch(chosen.kind, children, None if chosen.keys is None else keys, chosen.extra))
    return Manifest(root, tuple(branches), local.leaves, (), ())


def format_path(path: Sequence[Any]) -> str:
    """Format a path: string keys bare, all others in brackets.

    A string key that would be ambiguous (a number, brackets, an empty string) is quoted in brackets.

    >>> format_path(("model", "layers.0.weight")), format_path(("optim", "state", 0, "exp_avg"))
    ('model.layers.0.weight', 'optim.state[0].exp_avg')
    >>> format_path(("state", "0"))
    "state['0']"
    >>> format_path(())
    '(the state itself)'
    """
    if not path:
        return "(the state itself)"
    return "".join(map(_format_key, path)).removeprefix(".")


_TUPLE_CODE = 16
_tuple_decoder = Decoder(tuple[bool | int | float | str | None, ...])
"""Only tuples of scalars are shown as they are. Other Specials are shown by their code and data."""


def _format_key(key: object) -> str:
    if isinstance(key, str) and 0 < len(key) <= MAX_CHARACTERS and key.isprintable():
        try:
            float(key)
        except ValueError:
            if set("[]'\"").isdisjoint(key):
                return f".{key}"
    if not isinstance(key, Special):
        return f"[{show(key)}]"
    if key.code == _TUPLE_CODE and len(key.data) <= MAX_CHARACTERS:
        try:
            return f"[{show(_tuple_decoder.decode(key.data))}]"
        except (msgspec.DecodeError, RecursionError):
            pass
    return f"[<{key.code}:{key.data[:MAX_CHARACTERS].hex()}>]"
