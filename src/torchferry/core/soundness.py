"""Whether a manifest can be believed: every number in it points where it may.

A peer may have chosen any of them, so whatever is looked at here takes time in proportion to the frame.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import chain
from math import prod
from operator import add, gt, itemgetter, mod
from typing import NamedTuple, TypeAlias

from msgspec.msgpack import Encoder

from torchferry.core.crowding import are_crowded
from torchferry.core.figures import figure
from torchferry.core.manifest import MAX_DIMS, Branch, Manifest, Special, TensorSpec
from torchferry.core.tree import MAX_DEPTH, MAX_PATH_BYTES, path_bytes
from torchferry.errors import BadManifest

_COUNTABLE = 2**63 - 1
_ITEM_SIZES = frozenset({1, 2, 4, 8, 16})

_KEYS = frozenset({type(None), bool, int, float, str, Special})
_SALTED = frozenset({str, Special})

_FEW_TENSORS = 2048
"""Among so many it takes little time to find those that are alike, whatever their numbers are."""

_Numbers: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], int]
"""What makes a tensor's figure: its shape, its strides, and the bytes of an item."""

_encoder = Encoder()


def check(manifest: Manifest) -> None:
    """Check that every number in a manifest points where it may.

    Raises:
        BadManifest: naming the first thing that is wrong.
    """
    parts = [leaf.parts for leaf in manifest.leaves]
    _check_tree(manifest, list(map(len, parts)))
    if max(chain.from_iterable(parts), default=-1) >= len(manifest.tensors):
        number = next(n for n, some in enumerate(parts) if some and max(some) >= len(manifest.tensors))
        raise BadManifest(f"leaf {number} refers to a tensor that is not there")
    _check_tensors(manifest.tensors, manifest.storages)


class _Place(NamedTuple):
    """Where a branch stands: how deep, and how many bytes its path takes."""

    depth: int
    path_bytes: int


def _check_tree(manifest: Manifest, parts: list[int]) -> None:
    """Parents come before children, every branch has one parent, every leaf stands somewhere.

    `parts` has the number of tensors of each leaf. A branch's children are looked at all at once where they
    can be, for there may be many thousands.
    """
    used = bytearray(len(parts))
    # By number, not in dicts: a peer chooses in which order they come.
    places: list[_Place | None] = [None] * len(manifest.branches)
    if manifest.root < 0:
        _adopt(places, manifest.root, -1, _Place(1, 0))
    elif manifest.root < len(parts):
        used[manifest.root] = 1
    else:
        raise BadManifest("the root is a leaf that is not there")
    total_bytes = 0
    for index, branch in enumerate(manifest.branches):
        place = places[index]
        if place is None:
            raise BadManifest(f"branch {index} stands nowhere in the tree")
        if place.depth > MAX_DEPTH:
            raise BadManifest(f"the tree is deeper than {MAX_DEPTH}")
        children = branch.children
        _check_keys(index, branch)
        key_bytes = path_bytes(branch)
        total_bytes += len(children) * (place.path_bytes + 8) + sum(key_bytes)
        if children and max(children) >= len(parts):
            raise BadManifest(f"branch {index} refers to a leaf that is not there")
        leaves: Sequence[int] = children
        if children and min(children) < 0:
            leaves = [child for child in children if child >= 0]
            for child, nbytes in zip(children, key_bytes, strict=True):
                if child < 0:
                    _adopt(places, child, index, _Place(place.depth + 1, place.path_bytes + 8 + nbytes))
        for child in leaves:
            used[child] = 1
        total_bytes += 8 * sum(map(parts.__getitem__, leaves))
        if total_bytes > MAX_PATH_BYTES:
            raise BadManifest(f"the paths of the tree take more than {MAX_PATH_BYTES} bytes")
    if not all(used):
        raise BadManifest(f"leaf {used.index(0)} stands nowhere in the tree")


def _adopt(places: list[_Place | None], child: int, parent: int, place: _Place) -> None:
    if ~child <= parent or ~child >= len(places) or places[~child] is not None:
        raise BadManifest(f"branch {parent} refers to branch {~child}, which can't be its child")
    places[~child] = place


def _check_keys(index: int, branch: Branch) -> None:
    keys, count = branch.keys, len(branch.children)
    if keys is None:
        return
    if len(keys) != count:
        raise BadManifest(f"branch {index} has {len(keys)} keys for {count}")
    types = set(map(type, keys))
    if not types <= _KEYS:
        raise BadManifest(f"branch {index} has a key that can't be one")
    if are_crowded(keys, _SALTED):
        raise BadManifest(f"branch {index} has keys that were chosen to collide")
    if len(dict.fromkeys(keys)) != count:
        raise BadManifest(f"branch {index} has the same key twice")


def _check_tensors(tensors: Sequence[TensorSpec], storages: Sequence[int]) -> None:
    """Check what each figure says once, and where the tensors lie all at once."""
    figures = [(spec.shape, spec.stride, spec.itemsize) for spec in tensors]
    different = _different(figures)
    for shape, stride, itemsize in different:
        if len(shape) != len(stride) or itemsize not in _ITEM_SIZES or len(shape) > MAX_DIMS:
            number = figures.index((shape, stride, itemsize))
            raise BadManifest(
                f"tensor {number} has a shape, stride or item size that can't be: {len(shape)} dimensions, "
                f"{len(stride)} strides, {itemsize} bytes an item"
            )
    spans = {each: figure(*each).span for each in different}
    offsets = [spec.offset for spec in tensors]
    owners = [spec.storage for spec in tensors]
    if max(owners, default=-1) >= len(storages):
        raise BadManifest(f"tensor {owners.index(max(owners))} has a storage that is not there")
    if any(map(mod, offsets, map(itemgetter(2), figures))):
        number = next(n for n, spec in enumerate(tensors) if spec.offset % spec.itemsize)
        offset, itemsize = tensors[number].offset, tensors[number].itemsize
        raise BadManifest(f"tensor {number}: offset {offset} is not a multiple of item size {itemsize}")
    ends = list(map(add, offsets, map(spans.__getitem__, figures)))
    sizes = list(map(storages.__getitem__, owners))
    if any(map(gt, ends, sizes)):
        raise BadManifest(f"tensor {list(map(gt, ends, sizes)).index(True)} reaches beyond its storage")
    for each in different:
        # Expanded dimensions reach nowhere, and still there can't be more items than torch can count.
        items = figure(*each).items or prod(n for n in each[0] if n)
        if items * each[2] > _COUNTABLE:
            raise BadManifest(f"tensor {figures.index(each)} has more items than can be counted")


def _different(figures: list[_Numbers]) -> Collection[_Numbers]:
    """Give each figure once.

    Raises:
        BadManifest: they were chosen so that a table takes minutes over them.
    """
    if len(figures) <= _FEW_TENSORS:
        return set(figures)
    # A peer can choose numbers that crowd, but not what their bytes are hashed to.
    different = list(dict(zip(map(_encoder.encode, figures), figures, strict=True)).values())
    if are_crowded(different):
        raise BadManifest("the shapes and strides of the tensors were chosen to collide")
    return different
