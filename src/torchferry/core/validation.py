"""Validates a manifest from a peer before anything is built or allocated from it.

The time is proportional to the size of the frame, whatever numbers the peer chooses.
"""

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
_RANDOMLY_HASHED = frozenset({str, Special})

_MANY_TENSORS = 2048
"""Fewer tensors are fast to look up in a table, even if their hashes collide."""


def validate(manifest: Manifest) -> None:
    """Check the tree, the keys, all references, and that every tensor lies within its storage.

    Raises BadManifest, which describes the first error.
    """
    _validate_tree(manifest)
    tensors = manifest.tensors
    for number, leaf in enumerate(manifest.leaves):
        if leaf.kind == OPAQUE:
            raise BadManifest(f"leaf {number} has the kind {OPAQUE}, which only a local leaf may have")
        if leaf.parts and max(leaf.parts) >= len(tensors):
            raise BadManifest(
                f"leaf {number} refers to tensor {max(leaf.parts)}, but there are only {len(tensors)} tensors"
            )
    if len(tensors) > _MANY_TENSORS:
        # They would collide in the cache of `find_pattern`. The distinct ones are found by their encoding,
        # because Python hashes bytes with a secret.
        patterns = [(spec.shape, spec.stride, spec.itemsize) for spec in tensors]
        distinct = dict(zip(map(msgpack.encode, patterns), patterns, strict=True))
        if is_hash_flood(list(distinct.values())):
            raise BadManifest("the shapes and strides of the tensors were chosen to collide in a hash table")
    for number, spec in enumerate(tensors):
        if problem := _find_problem(spec, manifest.storages):
            raise BadManifest(f"tensor {number} {problem}")


def _validate_tree(manifest: Manifest) -> None:
    """Check that branches come after their parent and have only one, and that every leaf is in the tree."""
    branches, leaves = manifest.branches, manifest.leaves
    is_used = bytearray(len(leaves))
    depths = [0] * len(branches)  # 0: no parent yet
    prefix_bytes = [0] * len(branches)
    total_bytes = 0

    def visit(child: int, parent: int, depth: int, child_path_bytes: int) -> None:
        if 0 <= child < len(leaves):
            is_used[child] = 1
        elif child >= 0 or ~child >= len(branches):
            referrer = f"branch {parent}" if parent >= 0 else "the root"
            what, count = (
                (f"leaf {child}", len(leaves)) if child >= 0 else (f"branch {~child}", len(branches))
            )
            raise BadManifest(f"{referrer} refers to {what}, but there are only {count}")
        elif ~child <= parent or depths[~child]:
            problem = "comes before its parent" if ~child <= parent else "has another parent too"
            raise BadManifest(f"branch {~child} is a child of branch {parent}, but {problem}")
        else:
            depths[~child], prefix_bytes[~child] = depth, child_path_bytes

    visit(manifest.root, -1, 1, 0)
    for number, branch in enumerate(branches):
        if not depths[number]:
            raise BadManifest(f"branch {number} is not in the tree")
        if depths[number] > MAX_DEPTH:
            raise BadManifest(f"branch {number} is at level {depths[number]}; the limit is {MAX_DEPTH}")
        _validate_keys(number, branch)
        for child, key_bytes in zip(branch.children, path_bytes(branch), strict=True):
            child_path_bytes = prefix_bytes[number] + 8 + key_bytes
            visit(child, number, depths[number] + 1, child_path_bytes)
            total_bytes += child_path_bytes + (8 * len(leaves[child].parts) if child >= 0 else 0)
        if total_bytes > MAX_PATH_BYTES:
            raise BadManifest(
                f"the paths of the tree have {total_bytes} bytes; the limit is {MAX_PATH_BYTES}"
            )
    if not all(is_used):
        raise BadManifest(f"leaf {is_used.index(0)} is not in the tree")


def _validate_keys(number: int, branch: Branch) -> None:
    keys, count = branch.keys, len(branch.children)
    if keys is None:
        return
    if len(keys) != count:
        raise BadManifest(f"branch {number} has {len(keys)} keys for {count} children")
    if is_hash_flood(keys, _RANDOMLY_HASHED):
        raise BadManifest(f"branch {number} has {count} keys that were chosen to collide in a hash table")
    if (distinct := len(dict.fromkeys(keys))) != count:
        raise BadManifest(f"branch {number} has {count} keys, of which only {distinct} are different")


def _find_problem(spec: TensorSpec, storages: Sequence[int]) -> str | None:
    """Return what is wrong with a tensor, or None."""
    shape, stride, itemsize = spec.shape, spec.stride, spec.itemsize
    if len(shape) != len(stride):
        return f"has {len(shape)} dimensions, but {len(stride)} strides"
    if len(shape) > MAX_DIMS:
        return f"has {len(shape)} dimensions; the limit is {MAX_DIMS}"
    if itemsize not in _ITEM_SIZES:
        return f"has item size {itemsize}, which is not 1, 2, 4, 8 or 16"
    if spec.storage >= len(storages):
        return f"refers to storage {spec.storage}, but there are only {len(storages)}"
    if spec.offset % itemsize:
        return f"has offset {spec.offset}, which is not a multiple of item size {itemsize}"
    end = spec.offset + find_pattern(shape, stride, itemsize).span_bytes
    if end > storages[spec.storage]:
        return f"ends at byte {end} of storage {spec.storage}, which has {storages[spec.storage]} bytes"
    # Expanded dimensions use no memory, but torch counts their items, also next to a dimension of size 0.
    if prod(filter(None, shape)) * itemsize > _MAX_TENSOR_BYTES:
        return f"has shape {show(shape)}, which is more than {_MAX_TENSOR_BYTES} bytes"
    return None
