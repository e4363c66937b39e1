"""Digests of leaves and of whole states: equal roots, equal states.

The digest of an extent is the XXH3 of its bytes, or of the digests of its pieces if it has several, so that
no byte is hashed twice: roots can be compared if the chunk sizes are equal. The digest of a leaf is over its
path, kind, dtype, shape, strides, the position of its shard, and the digests of the extents that it uses;
that of a value is over its path and the value. The digest of a container is over its path and its type. The
root is over all these digests, in order.

Devices, mesh ranks, and how storages are numbered do not matter. Nor do traits such as requires_grad, which
a receiver that writes in place does not take over.
"""

from collections.abc import Sequence

from msgspec.msgpack import Encoder
from xxhash import xxh3_64_hexdigest, xxh3_64_intdigest, xxh3_128_digest, xxh3_128_hexdigest

from torchferry.core.destinations import tensors_by_extent
from torchferry.core.manifest import PICKLED, VALUE, Manifest
from torchferry.core.plan import Plan
from torchferry.core.pull import encode_digests
from torchferry.core.tree import occurrences, walk

_encoder = Encoder()


def root_of(manifest: Manifest, plan: Plan, pieces: Sequence[int]) -> str:
    """Return the root of a state, given the digest of each piece of its plan, in order."""
    extents = _digests_of_extents(plan, pieces)
    used: list[list[tuple[int, int]]] = [[] for _ in manifest.tensors]
    for number, tensors in enumerate(tensors_by_extent(plan.extents, manifest)):
        for tensor in tensors:
            start = manifest.tensors[tensor].offset - plan.extents[number].offset
            used[tensor].append((start, extents[number]))
    digests = []
    for path, child in walk(manifest):
        content: tuple[object, ...]
        if child < 0:
            branch = manifest.branches[~child]
            content = path, branch.kind, branch.extra
        elif (leaf := manifest.leaves[child]).kind in (VALUE, PICKLED):
            content = path, leaf.kind, leaf.fixed, leaf.traits
        else:
            parts = []
            for part in leaf.parts:
                spec = manifest.tensors[part]
                parts.append((spec.dtype, spec.shape, spec.stride, spec.conj, spec.neg, used[part]))
            content = path, leaf.kind, leaf.fixed, parts
        digests.append(xxh3_128_digest(_encoder.encode(content)))
    return xxh3_128_hexdigest(b"".join(digests))


def _digests_of_extents(plan: Plan, pieces: Sequence[int]) -> list[int]:
    found: list[list[int]] = [[] for _ in plan.extents]
    numbers = (piece.extent for chunk in plan.chunks for piece in chunk.pieces)
    for extent, digest in zip(numbers, pieces, strict=True):
        found[extent].append(digest)
    return [each[0] if len(each) == 1 else xxh3_64_intdigest(encode_digests(each)) for each in found]


def layout_of(manifest: Manifest, plan: Plan) -> str:
    """Return a digest of where the bytes are: states of equal root and layout have equal chunks.

    It is over the tensors of each path too. Otherwise tensors that are shared in another way could be
    numbered in another order, with equal roots.
    """
    parts = [manifest.leaves[leaf].parts for _, leaf in occurrences(manifest)]
    return xxh3_64_hexdigest(_encoder.encode((manifest.tensors, parts, plan.chunk_bytes, plan.pack_bytes)))
