"""The root of a state: a digest over its tree, its values, and its chunks.

Equal roots mean equal states with equal chunks, in the same order. So a receiver may take the manifest from
one source and each chunk from any source of the same root. The digests of all chunks are in the root. Each
node of the tree has a digest too: that of a leaf is over its path, kind, dtype, shape, strides, the position
of its shard, and where its bytes are in the chunks; that of a value is over its path and the value; that of a
container is over its path and its type.

Devices, mesh ranks, and the storages and offsets of tensors do not matter: views of one buffer have the root
of their clones, unless the views overlap or interleave irregularly. Which tensors share bytes is a part of
the state, because a receiver gets them so: tied and untied weights of equal values have different roots.
Traits such as requires_grad, which a receiver that writes in place does not take over, do not matter.
"""

from collections.abc import Sequence
from typing import TypeAlias

from msgspec.msgpack import Encoder
from xxhash import xxh3_128_digest, xxh3_128_hexdigest

from torchferry.core.destinations import tensors_by_extent
from torchferry.core.extents import Extent
from torchferry.core.manifest import BUFFER, PICKLED, VALUE, Leaf, Manifest
from torchferry.core.plan import Plan
from torchferry.core.pull import encode_digests
from torchferry.core.tree import walk

_encoder = Encoder()


def root_of(manifest: Manifest, plan: Plan, digests: Sequence[int]) -> str:
    """Return the root of a state, given the digest of each chunk of its plan.

    Raises TooIrregular if it takes too long to find the extents of each tensor.
    """
    used = _used_by_tensor(manifest, plan.extents, _positions_of_extents(plan))
    nodes = []
    for path, child in walk(manifest):
        content: tuple[object, ...]
        if child < 0:
            branch = manifest.branches[~child]
            content = branch.kind, branch.extra
        else:
            content = _content_of(manifest, manifest.leaves[child], used)
        nodes.append(xxh3_128_digest(_encoder.encode((path, *content))))
    return xxh3_128_hexdigest(b"".join((*nodes, xxh3_128_digest(encode_digests(digests)))))


def leaf_digests(
    manifest: Manifest, extents: Sequence[Extent], extent_digests: Sequence[bytes]
) -> list[bytes]:
    """Return the digest of each leaf, given those of all extents: leaves of equal digests are equal.

    Raises TooIrregular if it takes too long to find the extents of each tensor.
    """
    used = _used_by_tensor(manifest, extents, extent_digests)
    return [xxh3_128_digest(_encoder.encode(_content_of(manifest, leaf, used))) for leaf in manifest.leaves]


Used: TypeAlias = list[list[tuple[int, object]]]
"""For each tensor, where it starts in each of its extents, and what is known of that extent."""


def _used_by_tensor(manifest: Manifest, extents: Sequence[Extent], about: Sequence[object]) -> Used:
    used: Used = [[] for _ in manifest.tensors]
    for number, tensors in enumerate(tensors_by_extent(extents, manifest)):
        for tensor in tensors:
            start = manifest.tensors[tensor].offset - extents[number].offset
            used[tensor].append((start, about[number]))
    return used


def _content_of(manifest: Manifest, leaf: Leaf, used: Used) -> tuple[object, ...]:
    if leaf.kind in (VALUE, PICKLED):
        return leaf.kind, leaf.fixed, leaf.traits
    parts = []
    for part in leaf.parts:
        spec = manifest.tensors[part]
        parts.append((spec.dtype, spec.shape, spec.stride, spec.conj, spec.neg, used[part]))
    return leaf.kind, leaf.fixed, parts, *((leaf.traits,) if leaf.kind == BUFFER else ())


def _positions_of_extents(plan: Plan) -> list[int]:
    """Return where the bytes of each extent start in the payload, which is all chunks one after the other."""
    positions = [0] * len(plan.extents)
    end = 0
    for chunk in plan.chunks:
        for piece in chunk.pieces:
            positions[piece.extent] = end - piece.position
            end += piece.nbytes
    return positions
