"""Put right what the first checks of a frame would find, so that the later ones have something to find.

Numbers that point nowhere are made to point somewhere, storages are made large enough, and what stands
nowhere in the tree is given a place.
"""

from __future__ import annotations

from typing import Any

BRANCHES, LEAVES, TENSORS, STORAGES = ROLES = (1, 2, 3, 4)
"""Where a decoded manifest has its lists."""

MOST_BYTES = 2**62


def mend(tree: Any) -> Any:
    """Mend a decoded envelope as far as it has the right form; whatever has not is left as it is."""
    try:
        root, branches, leaves, tensors, storages = tree[0]
        storages = list(storages) or [0]
        tensors = [_mend_tensor(each, storages) for each in tensors]
        leaves = [_mend_leaf(each, len(tensors)) for each in leaves]
        branches = _mend_branches(branches, len(leaves))
        root = -1 if branches else 0
        return [[root, branches, leaves, tensors, storages], *tree[1:]]
    except (TypeError, ValueError, LookupError):
        return tree


def _mend_tensor(tensor: Any, storages: list[int]) -> Any:
    dtype, itemsize, shape, stride, storage, offset, *bits = tensor
    storage = abs(storage) % len(storages)
    dims = min(len(shape), len(stride))
    shape, stride = [abs(n) for n in shape[:dims]], [abs(n) for n in stride[:dims]]
    offset = abs(offset) // itemsize * itemsize if itemsize > 0 else offset
    last = sum((n - 1) * step for n, step in zip(shape, stride, strict=True)) if 0 not in shape else -1
    end = offset + (last + 1) * itemsize
    if end < MOST_BYTES:
        storages[storage] = max(storages[storage], end)
    return [dtype, itemsize, shape, stride, storage, offset, *bits]


def _mend_leaf(leaf: Any, tensors: int) -> Any:
    kind, parts, *rest = leaf
    return [kind, [abs(part) % tensors for part in parts] if tensors else [], *rest]


def _mend_branches(branches: Any, leaves: int) -> Any:
    """Give every branch but the first, and every leaf, one place; what had a place keeps it if it can."""
    homeless = list(range(1, len(branches)))
    lonely = set(range(leaves))
    mended = []
    for number, (kind, children, *rest) in enumerate(branches):
        placed = []
        for child in children:
            if child < 0 and ~child in homeless and ~child > number:
                homeless.remove(~child)
                placed.append(child)
            elif leaves:
                placed.append(abs(child) % leaves)
        lonely.difference_update(placed)
        mended.append([kind, placed, *rest])
    for left in [~number for number in homeless] + sorted(lonely):
        mended[0][1].append(left)
    return [_mend_keys(branch) for branch in mended]


def _mend_keys(branch: Any) -> Any:
    kind, children, *rest = branch
    if rest and isinstance(rest[0], list):
        keys = rest[0][: len(children)]
        rest[0] = keys + [f"more{n}" for n in range(len(children) - len(keys))]
    return [kind, children, *rest]
