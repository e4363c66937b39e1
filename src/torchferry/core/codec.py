"""Manifests as bytes: MessagePack with a closed set of types.

A frame is a preamble (magic, version, XXH3 of the rest) and the MessagePack of FrameBody. A sender that can't
send its state sends a refusal instead: a preamble with another magic, and the MessagePack of Refusal.

Values that MessagePack lacks are Specials, which stay encoded until `decode_value` is called. Decoding
checks types, ranges and references, so a decoded manifest is safe to use. A decoded frame takes at most sixty
times its length in memory, because every field has a type and no type lets one byte become a container.
"""

import struct
from collections.abc import Callable
from typing import Annotated, Generic, NamedTuple, TypeAlias, TypeVar, cast

import msgspec
from msgspec import Meta, Raw, Struct, structs
from msgspec.msgpack import Decoder, Encoder
from xxhash import xxh3_64_intdigest

from torchferry.core.extents import ITEM_BYTES
from torchferry.core.manifest import Count, Manifest, Nested, Special
from torchferry.core.plan import MAX_CHUNK_BYTES
from torchferry.core.push import NONCE_BYTES, TOKEN_BYTES, Route, TransferId
from torchferry.core.text import show_text
from torchferry.core.validation import validate
from torchferry.errors import BadManifest

MAGIC = b"TFRY"
REFUSAL_MAGIC = b"TFNO"
VERSION = 9
_PREAMBLE = struct.Struct("<4sBQ")
_MAX_REASON_CHARACTERS = 1000

T = TypeVar("T")
M = TypeVar("M")


class FrameBody(Struct, Generic[M], frozen=True, array_like=True):
    """A manifest, decoded or still encoded, and what else the receiver needs.

    `digests` has one digest for each chunk. It is None if nothing is verified, or if `digest_blocks` follow
    the messages. `route` is None if the payload comes from the sender and is not forwarded. With `offer`, a
    token, the sender offers memory, and waits for an answer before it sends the payload.
    """

    manifest: M
    chunk_bytes: Count
    step: int | None = None
    serial: Count = 0
    nonce: bytes = b""
    digests: tuple[Annotated[int, Meta(ge=0)], ...] | None = None
    digest_blocks: bool = False
    pack_bytes: Count = 0
    origin: Count = 0
    route: Route | None = None
    offer: bytes = b""

    @property
    def transfer(self) -> TransferId:
        """The identity of the transfer."""
        return TransferId(self.origin, self.serial, self.nonce)


Frame: TypeAlias = FrameBody[Manifest]


class Refusal(Struct, frozen=True, array_like=True):
    """Why a sender does not send its state, and the step that it was asked to send, if any."""

    reason: str
    step: int | None = None


class EncodedManifest(NamedTuple):
    """A manifest and its encoding. Caches use the encoding as key: to Python, 1 equals True."""

    manifest: Manifest
    data: bytes


encode_value = Encoder().encode
"""Encodes wire values, and lists, maps and records of them."""

_body_decoder = Decoder(FrameBody[Raw])
_manifest_decoder = Decoder(Manifest)
_refusal_decoder = Decoder(Refusal)
_view_decoder = Decoder(memoryview)


def decode_value(data: bytes | memoryview, decoder: Decoder[T]) -> T:
    """Decode data of a peer with the decoder of its type; raises BadManifest if the data has another type.

    >>> decode_value(encode_value([1, 2]), Decoder(tuple[int, ...]))
    (1, 2)
    """
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        # The reason quotes unknown field names.
        raise BadManifest(f"the peer's metadata can't be decoded: {show_text(str(error))}") from None


def data_of(value: Special | Nested) -> bytes | memoryview:
    """Return the data of a Special, or of a Special inside another; raises BadManifest if it is not bytes."""
    return value.data if type(value) is Special else decode_value(value.data, _view_decoder)


def encode(frame: Frame, encoded: EncodedManifest | None = None) -> bytes:
    """Encode a frame. `encoded` is its manifest, if that is encoded already."""
    body = frame if encoded is None else structs.replace(frame, manifest=Raw(encoded.data))
    return _with_preamble(MAGIC, body)


def is_frame(data: bytes) -> bool:
    """Return whether data begins like a frame of any version."""
    return data.startswith(MAGIC)


def decode_manifest(data: bytes) -> Manifest:
    """Decode and validate a manifest; raises BadManifest."""
    manifest = decode_value(data, _manifest_decoder)
    validate(manifest)
    return manifest


def decode(data: bytes, decode_manifest: Callable[[bytes], Manifest] = decode_manifest) -> Frame:
    """Decode and check a frame; raises BadManifest if it has another version or is malformed.

    `decode_manifest` may return a manifest that was decoded before.
    """
    body = decode_value(_without_preamble(data), _body_decoder)
    if not ITEM_BYTES <= body.chunk_bytes <= MAX_CHUNK_BYTES:
        raise BadManifest(
            f"the chunk size is {body.chunk_bytes} bytes; {ITEM_BYTES} to {MAX_CHUNK_BYTES} are accepted"
        )
    if body.pack_bytes > body.chunk_bytes:
        raise BadManifest(f"pack_bytes is {body.pack_bytes}, more than the chunk size {body.chunk_bytes}")
    if body.nonce and len(body.nonce) != NONCE_BYTES:
        raise BadManifest(f"the nonce has {len(body.nonce)} bytes, not {NONCE_BYTES}")
    if body.digest_blocks and not body.nonce:
        raise BadManifest("digest blocks are announced, but the frame has no nonce to recognise them by")
    if body.digest_blocks and body.digests is not None:
        raise BadManifest("the frame has digests and announces digest blocks: only one is allowed")
    if body.offer and (len(body.offer) != TOKEN_BYTES or not body.nonce or body.route is not None):
        raise BadManifest(
            f"the frame offers memory with a token of {len(body.offer)} bytes, a nonce of {len(body.nonce)} "
            f"bytes and {'no' if body.route is None else 'a'} route: a token of {TOKEN_BYTES} bytes, a nonce "
            "and no route are needed"
        )
    return cast(Frame, structs.replace(body, manifest=decode_manifest(bytes(body.manifest))))


def encode_refusal(reason: str, step: int | None = None) -> bytes:
    """Encode the refusal that a sender sends instead of a frame.

    >>> decode_refusal(encode_refusal("model.hook: a lambda can't be sent", step=7))
    Refusal(reason="model.hook: a lambda can't be sent", step=7)
    """
    text = reason[:_MAX_REASON_CHARACTERS].encode(errors="replace").decode()
    return _with_preamble(REFUSAL_MAGIC, Refusal(text, step))


def decode_refusal(data: bytes) -> Refusal | None:
    """Decode a refusal, with its reason in one line; None if it is not a refusal. Raises BadManifest."""
    if not data.startswith(REFUSAL_MAGIC):
        return None
    refusal = decode_value(_without_preamble(data), _refusal_decoder)
    reason = refusal.reason[:_MAX_REASON_CHARACTERS]
    return Refusal("".join(char if char.isprintable() else " " for char in reason), refusal.step)


def _with_preamble(magic: bytes, body: object) -> bytes:
    data = encode_value(body)
    return _PREAMBLE.pack(magic, VERSION, xxh3_64_intdigest(data)) + data


def _without_preamble(data: bytes) -> memoryview:
    """Check the version and the digest of a frame or refusal, and return what follows its preamble."""
    if len(data) < _PREAMBLE.size:
        raise BadManifest(f"the peer's metadata has only {len(data)} bytes")
    _, version, digest = _PREAMBLE.unpack_from(data)
    if version != VERSION:
        raise BadManifest(
            f"the peer's metadata has format {version}, this torchferry reads format {VERSION}: "
            "install the same version of torchferry on both sides"
        )
    body = memoryview(data)[_PREAMBLE.size :]
    if xxh3_64_intdigest(body) != digest:
        raise BadManifest("the peer's metadata was damaged on the way: its digest does not match")
    return body
