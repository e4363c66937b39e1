"""The steps of a transfer that need only metadata: encoding, decoding, planning, preparing.

Weights go to an inference engine step after step: the bytes change, and the manifest does not. So what
follows from a manifest alone is taken from a cache, where it is keyed by the manifest's encoding.
"""

from collections.abc import Collection
from sys import maxsize
from typing import Any

from torchferry.core import codec
from torchferry.core.codec import EncodedManifest, Frame
from torchferry.core.extents import TooIrregular
from torchferry.core.manifest import Manifest
from torchferry.core.plan import Plan, TooManyChunks, make_plan
from torchferry.engine.workspace import Cache
from torchferry.errors import BadManifest
from torchferry.tensors import assemble
from torchferry.tensors.assemble import Prepared
from torchferry.tensors.kinds import RebuildContext

_PIECE_BYTES = 48


def encode(manifest: Manifest, cache: Cache) -> EncodedManifest:
    """Encode a manifest and keep it, or return the kept one: both sides often have the same manifest."""
    encoded = EncodedManifest(manifest, codec.encode_value(manifest))
    return cache.get(("manifest", encoded.data), lambda: encoded)


def decode(data: bytes, cache: Cache) -> tuple[Frame, EncodedManifest]:
    """Decode a frame, except for its manifest if that is kept; raises BadManifest if it is malformed."""

    def decode_manifest(data: bytes) -> Manifest:
        key = ("manifest", data)
        return cache.get(key, lambda: EncodedManifest(codec.decode_manifest(data), data)).manifest

    frame = codec.decode(data, decode_manifest)
    return frame, encode(frame.manifest, cache)


def plan(encoded: EncodedManifest, cache: Cache, *sizes: Any, **more: Any) -> Plan:
    """Plan a transfer as `make_plan` does, with the same arguments after the manifest."""

    def count_bytes(made: Plan) -> int:
        # A short manifest may have a plan of many chunks.
        return _PIECE_BYTES * sum(1 + len(chunk.pieces) for chunk in made.chunks)

    # Only the tensors matter: a plan is kept while values, such as a step, change.
    key = ("plan", codec.encode_value(encoded.manifest.tensors), sizes, tuple(more.items()))
    return cache.get(key, lambda: make_plan(encoded.manifest, *sizes, **more), count_bytes)


def plan_incoming(frame: Frame, encoded: EncodedManifest, cache: Cache) -> Plan:
    """Plan the transfer of an incoming state as the sender did; raises BadManifest if that is impossible."""
    try:
        found = plan(encoded, cache, frame.chunk_bytes, frame.pack_bytes)
    except TooIrregular as error:
        raise BadManifest(f"the views overlap too irregularly to list ({error})") from None
    except TooManyChunks as error:
        raise BadManifest(f"the peer announces more than can be received at once: {error}") from None
    if frame.digests is not None and len(frame.digests) != len(found.chunks):
        raise BadManifest(f"the frame has {len(frame.digests)} digests for {len(found.chunks)} chunks")
    return found


def prepare(
    encoded: EncodedManifest, context: RebuildContext, cache: Cache, only: Collection[int] | None = None
) -> Prepared:
    """Prepare a manifest as `tensors.assemble.prepare` does. With `only`, nothing is kept."""
    if only is not None:
        return assemble.prepare(encoded.manifest, context, only=only)

    def count_bytes(made: Prepared) -> int:
        # Values belong to the caller that receives them, so they are decoded anew each time: a result of this
        # size is too large for the cache.
        return maxsize if made.values else 0

    key = ("prepared", encoded.data, context)
    return cache.get(key, lambda: assemble.prepare(encoded.manifest, context), count_bytes)
