"""Repair errors that the first checks of a frame find, so that the later checks are tested too.

Invalid indices become valid, storages become large enough, and unused branches and leaves get a place in the
tree.
"""

from __future__ import annotations

from typing import Any

BRANCHES, LEAVES, TENSORS, STORAGES = LISTS = (1, 2, 3, 4)
"""The positions of the lists in a decoded manifest."""

MOST_BYTES = 2**62


def repair(tree: Any) -> Any:
    """Repair a decoded frame; a frame without the right structure is returned unchanged."""
    try:
        root, branches, leaves, tensors, storages = tree[0]
        storages = list(storages) or [0]
        tensors = [_repair_tensor(each, storages) for each in tensors]
        leaves = [_repair_leaf(each, len(tensors)) for each in leaves]
        branches = _repair_branches(branches, len(leaves))
        root = -1 if branches else 0
        return [[root, branches, leaves, tensors, storages], *tree[1:]]
    except (TypeError, ValueError, LookupError):
        return tree


def _repair_tensor(tensor: Any, storages: list[int]) -> Any:
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


def _repair_leaf(leaf: Any, tensors: int) -> Any:
    kind, parts, *rest = leaf
    return [kind, [abs(part) % tensors for part in parts] if tensors else [], *rest]


def _repair_branches(branches: Any, leaves: int) -> Any:
    """Give every branch but the first, and every leaf, a place in the tree; keep valid places."""
    unplaced_branches = list(range(1, len(branches)))
    unplaced_leaves = set(range(leaves))
    repaired = []
    for number, (kind, children, *rest) in enumerate(branches):
        placed = []
        for child in children:
            if child < 0 and ~child in unplaced_branches and ~child > number:
                unplaced_branches.remove(~child)
                placed.append(child)
            elif leaves:
                placed.append(abs(child) % leaves)
        unplaced_leaves.difference_update(placed)
        repaired.append([kind, placed, *rest])
    for left in [~number for number in unplaced_branches] + sorted(unplaced_leaves):
        repaired[0][1].append(left)
    return [_repair_keys(branch) for branch in repaired]


def _repair_keys(branch: Any) -> Any:
    kind, children, *rest = branch
    if rest and isinstance(rest[0], list):
        keys = rest[0][: len(children)]
        rest[0] = keys + [f"more{n}" for n in range(len(children) - len(keys))]
    return [kind, children, *rest]
