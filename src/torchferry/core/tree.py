"""Where each leaf stands: walking a manifest's tree without recursion.

A path is the tuple of keys from the root. Two paths are the same place only if their keys are equal, so
`{"a.b": x}` and `{"a": {"b": x}}` differ, although both are shown as `a.b`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from torchferry.core.manifest import Branch, Manifest, Special, Value
from torchferry.core.showing import MOST_CHARACTERS, show, show_name

MAX_DEPTH = 256
"""Deeper trees are refused: no state dict comes near, and a cycle would never end."""

Path = tuple[Value, ...]


class Occurrence(NamedTuple):
    """A place in the tree and the leaf that stands there; one leaf may stand in several places."""

    path: Path
    leaf: int


def occurrences(manifest: Manifest) -> list[Occurrence]:
    """List every place of the tree in order, with its leaf."""
    return [Occurrence(path, child) for path, child in _places(manifest) if child >= 0]


def _places(manifest: Manifest) -> Iterator[tuple[Path, int]]:
    """Go through the tree in order, and give what stands where: the leaf c, or for c < 0 the branch ~c."""
    # A stack of (path, child); children are pushed in reverse so that they come off in order.
    stack: list[tuple[Path, int]] = [((), manifest.root)]
    while stack:
        path, child = stack.pop()
        yield path, child
        if child >= 0:
            continue
        branch = manifest.branches[~child]
        keys = keys_of(branch)
        stack.extend(
            ((*path, key), grandchild)
            for key, grandchild in zip(reversed(keys), reversed(branch.children), strict=True)
        )


def keys_of(branch: Branch) -> Sequence[Value]:
    """Give the keys of a branch's children: its own, or their positions."""
    return range(len(branch.children)) if branch.keys is None else branch.keys


def rebuild(
    manifest: Manifest,
    values: Sequence[object],
    build: Callable[[int, list[object]], object],
) -> object:
    """Put `values`, one for each leaf, back into the tree. `build` makes one container out of its children.

    Parents come before their children, so the containers are built from the last to the first.
    """
    built: list[object] = [None] * len(manifest.branches)
    for index in range(len(manifest.branches) - 1, -1, -1):
        children = manifest.branches[index].children
        built[index] = build(index, [values[c] if c >= 0 else built[~c] for c in children])
    return values[manifest.root] if manifest.root >= 0 else built[~manifest.root]


def rebuild_places(
    manifest: Manifest,
    values: Iterable[object],
    build: Callable[[int, list[object]], object],
) -> object:
    """The same with one value for each occurrence, in order, for one leaf may be several things here.

    The first pass walks down and hands out the values, the second builds the containers, innermost first.
    """
    following = iter(values)
    top: list[object] = [None]
    opened: list[tuple[int, list[object], list[object], int]] = []
    stack: list[tuple[list[object], int, int]] = [(top, 0, manifest.root)]
    while stack:
        siblings, place, child = stack.pop()
        if child >= 0:
            siblings[place] = next(following)
            continue
        branch = manifest.branches[~child]
        children: list[object] = [None] * len(branch.children)
        opened.append((~child, children, siblings, place))
        stack.extend(
            (children, index, branch.children[index]) for index in range(len(branch.children) - 1, -1, -1)
        )
    for index, children, siblings, place in reversed(opened):
        siblings[place] = build(index, children)
    return top[0]


def path_of(manifest: Manifest, child: int) -> Path:
    """Give the first place where the leaf `child` stands, or for a negative one the branch ~child."""
    return next(path for path, found in _places(manifest) if found == child)


def format_path(path: Sequence[Any]) -> str:
    """Show a path the way people write one.

    >>> format_path(("model", "layers", 0, "weight"))
    'model.layers.0.weight'
    >>> format_path(())
    '(the state itself)'
    """
    if not path:
        return "(the state itself)"
    return ".".join(_format_key(key) for key in path)


def _format_key(key: object) -> str:
    if isinstance(key, Special):
        return f"<{key.code}:{key.data[:MOST_CHARACTERS].hex()}>"
    if isinstance(key, str):
        return show_name(key)
    return show(key)
