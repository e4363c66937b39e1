"""Where each leaf stands: walking a manifest's tree without recursion.

A path is the tuple of keys from the root. Two paths are the same place only if their keys are equal, so
`{"a.b": x}` and `{"a": {"b": x}}` differ, although both are shown as `a.b`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec.msgpack import Decoder
from msgspec.structs import replace

from torchferry.core.manifest import Branch, Manifest, Special, Value
from torchferry.core.showing import MOST_CHARACTERS, show

MAX_DEPTH = 256
"""Deeper trees are refused: no state dict comes near, and a cycle would never end."""

MAX_PATH_BYTES = 1 << 29
"""What the paths of all places of a tree may take together. One leaf may stand in many places, so that a
tree's paths can be a thousand times as long as its frame."""

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


def path_bytes(branch: Branch) -> Sequence[int]:
    """Return how many bytes each child's key adds to its path."""
    if branch.keys is None:
        return (8,) * len(branch.children)
    if set(map(type, branch.keys)) <= _TEXTS:
        return list(map(len, branch.keys))  # type: ignore[arg-type]
    return [len(key) if isinstance(key, str) else 8 for key in branch.keys]


_TEXTS = frozenset({str})


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


def merge(local: Manifest, incoming: Manifest) -> Manifest:
    """Merge two trees. Where both have a container, the merged one has the local type and the keys of both.

    Leaves keep their local numbers. A leaf that only the incoming tree has gets number 0.
    """
    branches: list[Branch] = []
    waiting: deque[tuple[int | None, int | None]] = deque()

    def enter(ours: int | None, theirs: int | None) -> int:
        # A leaf replaces a container of the other side, which must be empty: both can't be in one tree.
        if (ours is not None and ours >= 0) or (theirs is not None and theirs >= 0):
            return ours if ours is not None and ours >= 0 else 0
        waiting.append((ours, theirs))
        return ~(len(branches) + len(waiting) - 1)

    root = enter(local.root, incoming.root)
    while waiting:
        ours, theirs = waiting[0]
        a = None if ours is None else local.branches[~ours]
        b = None if theirs is None else incoming.branches[~theirs]
        kind = a or b
        assert kind is not None, "only containers are queued"
        children: dict[Value, tuple[int | None, int | None]] = {}
        for key, child in zip(keys_of(a), a.children, strict=True) if a else ():
            children[key] = (child, None)
        for key, child in zip(keys_of(b), b.children, strict=True) if b else ():
            children[key] = (children.get(key, (None, None))[0], child)
        if kind.keys is None and list(children) != list(range(len(children))) and b is not None:
            # A list can't have these keys, so the container of the other side is used.
            kind = b
        keys = None if kind.keys is None else tuple(children)
        # The containers in the queue are numbered already; the children of this one follow them.
        waiting.popleft()
        branches.append(Branch(kind.kind, (), keys, kind.extra))
        entered = tuple(enter(*pair) for pair in children.values())
        branches[-1] = replace(branches[-1], children=entered)
    return Manifest(root, tuple(branches), local.leaves, (), ())


def path_of(manifest: Manifest, child: int) -> Path:
    """Give the first place where the leaf `child` stands, or for a negative one the branch ~child."""
    return next(path for path, found in _places(manifest) if found == child)


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


def _format_key(key: object) -> str:
    if isinstance(key, Special):
        return f"[{_show_packed(key)}]"
    if isinstance(key, str) and _is_bare(key):
        return f".{key}"
    return f"[{show(key)}]"


_IN_BRACKETS = frozenset("[]'\"")


def _is_bare(key: str) -> bool:
    """Return whether a string key can be shown without quotes: short, printable and not ambiguous."""
    if not key or len(key) > MOST_CHARACTERS or not key.isprintable() or not _IN_BRACKETS.isdisjoint(key):
        return False
    return not _is_number(key)


_TUPLE = 16


def _show_packed(key: Special) -> str:
    """Show a key that is no msgpack scalar: a tuple as it is, another by its code and bytes."""
    if key.code == _TUPLE and len(key.data) <= MOST_CHARACTERS:
        try:
            return show(_numbers_and_texts.decode(key.data))
        except (msgspec.DecodeError, RecursionError):
            pass
    return f"<{key.code}:{key.data[:MOST_CHARACTERS].hex()}>"


_numbers_and_texts = Decoder(tuple[bool | int | float | str | None, ...])


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
