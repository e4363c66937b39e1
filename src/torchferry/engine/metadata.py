"""The steps of a transfer that need only metadata: encoding, decoding, planning, preparing.

Weights go to an inference engine step after step: the bytes change, and the manifest does not. So what
follows from a manifest alone is taken from a cache, where it is keyed by the manifest's encoding.
"""

from collections.abc import Collection, Sequence
from sys import maxsize

from torchferry.core import codec
from torchferry.core.codec import EncodedManifest, Frame
from torchferry.core.extents import TooIrregular
from torchferry.core.manifest import Manifest
from torchferry.core.plan import PACK_FROM, Plan, TooManyChunks, make_plan
from torchferry.engine.workspace import Cache
from torchferry.errors import BadManifest, Unsendable
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
    frame = codec.decode(data, lambda manifest: decode_manifest(manifest, cache).manifest)
    return frame, encode(frame.manifest, cache)


def decode_manifest(data: bytes, cache: Cache) -> EncodedManifest:
    """Decode a manifest, unless it is kept; raises BadManifest if it is malformed."""
    return cache.get(("manifest", data), lambda: EncodedManifest(codec.decode_manifest(data), data))


def plan(encoded: EncodedManifest, cache: Cache, *sizes: int, pack_from: int = PACK_FROM) -> Plan:
    """Plan a transfer as `make_plan` does, with the same arguments after the manifest."""

    def count_bytes(made: Plan) -> int:
        # A short manifest may have a plan of many chunks.
        return _PIECE_BYTES * sum(1 + len(chunk.pieces) for chunk in made.chunks)

    # Only the tensors matter: a plan is kept while values, such as a step, change.
    key = ("plan", codec.encode_value(encoded.manifest.tensors), sizes, pack_from)
    return cache.get(key, lambda: make_plan(encoded.manifest, *sizes, pack_from=pack_from), count_bytes)


def plan_outgoing(encoded: EncodedManifest, cache: Cache, chunk_sizes: Sequence[int], pack_from: int) -> Plan:
    """Plan with the first chunk size that does not give too many chunks; raises Unsendable if none does."""
    for chunk_bytes in chunk_sizes:
        try:
            return plan(encoded, cache, chunk_bytes, pack_from=pack_from)
        except TooIrregular as error:
            raise too_irregular(error) from None
        except TooManyChunks as error:
            reason = str(error)
    raise Unsendable(f"{reason}: send the state in parts")


def too_irregular(error: TooIrregular) -> Unsendable:
    """Return the error for a state with too many byte ranges to list."""
    return Unsendable(
        f"the views in the state use too many separate byte ranges of a storage ({error}): clone() "
        "the strided or overlapping views before sending"
    )


def plan_incoming(
    encoded: EncodedManifest, cache: Cache, chunk_bytes: int, pack_bytes: int, digests: Sequence[int] | None
) -> Plan:
    """Plan the transfer of an incoming state as the peer did; raises BadManifest if that is impossible."""
    try:
        found = plan(encoded, cache, chunk_bytes, pack_bytes)
    except TooIrregular as error:
        raise BadManifest(f"the views overlap too irregularly to list ({error})") from None
    except TooManyChunks as error:
        raise BadManifest(f"the peer announces more than can be received at once: {error}") from None
    if digests is not None and len(digests) != len(found.chunks):
        raise BadManifest(f"the peer sent {len(digests)} digests for {len(found.chunks)} chunks")
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
