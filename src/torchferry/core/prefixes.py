"""Detects that only one side's model is wrapped, for example by DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torchferry.core.showing import show_name
from torchferry.core.tree import Path

_MOST_WORDS = 3
"""Wrappers nest: DistributedDataParallel around a compiled module is `module._orig_mod.`"""

_MOST_TRIED = 8
"""Limits the work on states that differ in other ways."""

_MOST_CHARACTERS = 4096

_Words = tuple[str, ...]


def wrapper_hint(
    incoming_only: Iterable[Path], local_only: Iterable[Path], common: Iterable[Path] = ()
) -> list[str]:
    """Return a hint if the unmatched paths of one side share a prefix that the other side's do not have.

    `common` lists the paths that both sides have.

    >>> wrapper_hint([("module.w",), ("module.b",)], [("w",), ("b",)])
    ['all incoming paths begin with `module.`: wrapped on one side only?']
    >>> wrapper_hint([("model", "w"), ("step",)], [("model", "_orig_mod.w")])
    ['all local paths in `model` begin with `_orig_mod.`: wrapped on one side only?']
    """
    incoming, local = list(map(_words, incoming_only)), list(map(_words, local_only))
    both = list(map(_words, common))
    for side, wrapped, bare in (("incoming", incoming, local), ("local", local, incoming)):
        found = _wrapper(wrapped, bare)
        if found is not None:
            outside, words = found
            where = f" in `{show_name('.'.join(outside))}`" if outside else ""
            every = "all other" if any(path[: len(outside)] == outside for path in both) else "all"
            prefix = show_name(".".join((*words, "")))
            return [f"{every} {side} paths{where} begin with `{prefix}`: wrapped on one side only?"]
    return []


def _wrapper(wrapped: Sequence[_Words], bare: Sequence[_Words]) -> tuple[_Words, _Words] | None:
    """Find a prefix that all `wrapped` paths below one parent share; without it, one of them must be bare."""
    known = set(bare)
    tried: set[tuple[_Words, _Words]] = set()
    for path in wrapped:
        for place in range(len(path) - 1):
            for end in range(place + 1, min(place + _MOST_WORDS, len(path) - 1) + 1):
                outside, words = path[:place], path[place:end]
                if (outside, words) in tried or outside + path[end:] not in known:
                    continue
                if len(tried) == _MOST_TRIED:
                    return None
                tried.add((outside, words))
                inside = [each for each in wrapped if each[:place] == outside]
                if all(each[place:end] == words for each in inside):
                    return outside, words
    return None


def _words(path: Path) -> _Words:
    # A peer chooses the length of its keys.
    return tuple(word for key in path for word in str(key)[:_MOST_CHARACTERS].split("."))
