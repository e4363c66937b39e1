"""Validates a manifest from a peer before anything is built or allocated from it.

It checks the tree, the keys, all references, and that every tensor lies within its storage. The time is
proportional to the size of the frame, whatever numbers the peer chooses.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from msgspec import msgpack

from torchferry.core.extents import find_pattern
from torchferry.core.hash_flooding import is_hash_flood
from torchferry.core.manifest import MAX_DIMS, OPAQUE, Branch, Manifest, Special, TensorSpec
from torchferry.core.text import show
from torchferry.core.tree import MAX_DEPTH, MAX_PATH_BYTES, path_bytes
from torchferry.errors import BadManifest

_MAX_TENSOR_BYTES = 2**63 - 1
_ITEM_SIZES = frozenset({1, 2, 4, 8, 16})
_SECRETLY_HASHED = frozenset({str, Special})

_MANY_TENSORS = 2048
"""Fewer tensors are fast to look up in a table, even if their hashes collide."""


def validate(manifest: Manifest) -> None:
    """Check the tree, the keys, the references and the tensors of a manifest.

    Raises:
        BadManifest: describes the first error.
    """
    _validate_tree(manifest)
    tensors = len(manifest.tensors)
    for number, leaf in enumerate(manifest.leaves):
        if leaf.kind == OPAQUE:
            raise BadManifest(f"leaf {number} is opaque, which only a local leaf can be")
        if leaf.parts and max(leaf.parts) >= tensors:
            raise BadManifest(f"leaf {number} refers to tensor {max(leaf.parts)}, but there are {tensors}")
    _reject_hash_flood(manifest.tensors)
    for number, spec in enumerate(manifest.tensors):
        if problem := _problem(spec, manifest.storages):
            raise BadManifest(f"tensor {number} {problem}")


def _validate_tree(manifest: Manifest) -> None:
    """Check that branches come after their parent and have only one, and that every leaf is in the tree."""
    branches, leaves = manifest.branches, manifest.leaves
    is_used = bytearray(len(leaves))
    depths = [0] * len(branches)  # 0: no parent yet
    prefix_bytes = [0] * len(branches)
    total_bytes = 0

    def visit(child: int, parent: int, depth: int, child_path_bytes: int) -> None:
        if child >= len(leaves):
            raise BadManifest(f"branch {parent} refers to leaf {child}, but there are {len(leaves)}")
        if child >= 0:
            is_used[child] = 1
        elif ~child <= parent or ~child >= len(branches) or depths[~child]:
            reason = "it comes earlier, does not exist or has another parent"
            raise BadManifest(f"branch {~child} can't be the child of branch {parent}: {reason}")
        else:
            depths[~child], prefix_bytes[~child] = depth, child_path_bytes

    if not -len(branches) <= manifest.root < len(leaves):
        raise BadManifest(f"the root {manifest.root} refers to no leaf or branch")
    visit(manifest.root, -1, 1, 0)
    for number, branch in enumerate(branches):
        if not depths[number]:
            raise BadManifest(f"branch {number} is not in the tree")
        if depths[number] > MAX_DEPTH:
            raise BadManifest(f"the tree is deeper than {MAX_DEPTH} levels")
        _validate_keys(number, branch)
        for child, key_bytes in zip(branch.children, path_bytes(branch), strict=True):
            child_path_bytes = prefix_bytes[number] + 8 + key_bytes
            visit(child, number, depths[number] + 1, child_path_bytes)
            total_bytes += child_path_bytes + (8 * len(leaves[child].parts) if child >= 0 else 0)
        if total_bytes > MAX_PATH_BYTES:
            raise BadManifest(f"the paths of the tree take more than {MAX_PATH_BYTES} bytes")
    if not all(is_used):
        raise BadManifest(f"leaf {is_used.index(0)} is not in the tree")


def _validate_keys(number: int, branch: Branch) -> None:
    keys, count = branch.keys, len(branch.children)
    if keys is None:
        return
    if len(keys) != count:
        raise BadManifest(f"branch {number} has {len(keys)} keys for {count} children")
    if is_hash_flood(keys, _SECRETLY_HASHED):
        raise BadManifest(f"branch {number} has keys that were chosen to collide in a hash table")
    if len(dict.fromkeys(keys)) != count:
        raise BadManifest(f"branch {number} has the same key twice")


def _problem(spec: TensorSpec, storages: Sequence[int]) -> str | None:
    """Return what is wrong with a tensor, or None."""
    shape, stride, itemsize = spec.shape, spec.stride, spec.itemsize
    if len(shape) != len(stride) or len(shape) > MAX_DIMS:
        return f"has {len(shape)} dimensions (at most {MAX_DIMS}) and {len(stride)} strides"
    if itemsize not in _ITEM_SIZES:
        return f"has item size {itemsize}: not 1, 2, 4, 8 or 16"
    if spec.storage >= len(storages):
        return f"refers to storage {spec.storage} of {len(storages)}"
    if spec.offset % itemsize:
        return f"has offset {spec.offset}, which is not a multiple of item size {itemsize}"
    end = spec.offset + find_pattern(shape, stride, itemsize).span_bytes
    if end > storages[spec.storage]:
        return f"reaches beyond its storage: it ends at byte {end} of {storages[spec.storage]}"
    # Expanded dimensions use no memory, but torch counts their items, also next to a dimension of size 0.
    if prod(filter(None, shape)) * itemsize > _MAX_TENSOR_BYTES:
        return f"has shape {show(shape)}, which is more than {_MAX_TENSOR_BYTES} bytes"
    return None


def _reject_hash_flood(tensors: Sequence[TensorSpec]) -> None:
    """Reject tensors whose shapes and strides collide in the cache of `find_pattern`."""
    if len(tensors) <= _MANY_TENSORS:
        return
    # Find the distinct ones by their encoding: Python hashes bytes with a secret.
    numbers = [(spec.shape, spec.stride, spec.itemsize) for spec in tensors]
    distinct = dict(zip(map(msgpack.encode, numbers), numbers, strict=True))
    if is_hash_flood(list(distinct.values())):
        raise BadManifest("the shapes and strides of the tensors were chosen to collide in a hash table")
