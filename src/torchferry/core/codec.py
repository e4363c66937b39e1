"""Manifests as bytes: MessagePack, a closed set of types, and nothing that can run.

A frame is

    4 bytes   b"TFRY"
    1 byte    the version of the format
    8 bytes   XXH3 of the rest, little-endian
    the rest  MessagePack of Envelope

A sender that can't send its state sends a refusal instead of a frame: the same preamble with b"TFNO", then
MessagePack of Refusal.

What MessagePack lacks is a Special: a code and a payload, which stays packed until `unpack` is asked.
Decoding checks types, ranges and references, so whoever holds a Manifest from here may believe it. All that
is decoded has a type, and none of the types lets a byte become a container: what a frame takes in memory is
at most sixty times its length, and that only if it is made for it.
"""

from __future__ import annotations

import struct
from typing import Annotated, Any, Generic, NamedTuple, TypeAlias, TypeVar, cast

import msgspec
from msgspec import Meta, Raw, Struct, structs
from msgspec.msgpack import Decoder, Encoder
from xxhash import xxh3_64_intdigest

from torchferry.core.extents import ITEM_BYTES
from torchferry.core.manifest import Branch, Count, Leaf, Manifest, Nested, Special, TensorSpec
from torchferry.core.plan import MAX_CHUNK_BYTES
from torchferry.core.routes import Route
from torchferry.core.seals import NONCE_BYTES
from torchferry.core.validation import validate
from torchferry.errors import BadManifest

MAGIC = b"TFRY"
REFUSAL_MAGIC = b"TFNO"
VERSION = 5
_PREAMBLE = struct.Struct("<4sBQ")

Digest: TypeAlias = Annotated[int, Meta(ge=0)]

T = TypeVar("T")
M = TypeVar("M")


class Letter(Struct, Generic[M], frozen=True, array_like=True):
    """A manifest with what the plan and the receiver need beside it.

    `chunk_bytes` and `pack_bytes` are what the plan depends on; `origin`, `serial` and `nonce` tell transfers
    apart; `digests` has one for each chunk if they were made ahead, `sealed` says that they come in seals
    instead; `route` says where the payload comes from and goes to, if not simply from the sender to here.
    """

    manifest: M
    chunk_bytes: Count
    step: int | None = None
    serial: Count = 0
    nonce: bytes = b""
    digests: tuple[Digest, ...] | None = None
    sealed: bool = False
    pack_bytes: Count = 0
    origin: Count = 0
    route: Route | None = None


Envelope: TypeAlias = Letter[Manifest]


class _Parts(Struct, frozen=True, array_like=True):
    """A manifest of which the parts are still packed."""

    root: int
    branches: Raw
    leaves: Raw
    tensors: Raw
    storages: Raw


class Known(NamedTuple):
    """A manifest that was made here, and its parts packed: what arrives is nearly always the same."""

    manifest: Manifest
    parts: dict[str, bytes]

    @property
    def nbytes(self) -> int:
        """How long the parts are."""
        return sum(map(len, self.parts.values()))


_encoder = Encoder()
_envelope_decoder = Decoder(Envelope)
_packed_decoder = Decoder(Letter[_Parts])
_part_decoders: dict[str, Decoder[Any]] = {
    "branches": Decoder(tuple[Branch, ...]),
    "leaves": Decoder(tuple[Leaf, ...]),
    "tensors": Decoder(tuple[TensorSpec, ...]),
    "storages": Decoder(tuple[Count, ...]),
}
_view_decoder = Decoder(memoryview)


def pack(value: object) -> bytes:
    """Encode a payload: wire values, and lists, maps and records of them.

    >>> unpack(pack([1, 2]), Decoder(tuple[int, ...]))
    (1, 2)
    """
    return _encoder.encode(value)


def unpack(data: bytes | memoryview, decoder: Decoder[T]) -> T:
    """Decode a payload as what it must be.

    Raises:
        BadManifest: it is not that.
    """
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise BadManifest(f"a value in the metadata can't be decoded: {error}") from None


def payload_of(value: Special | Nested) -> bytes | memoryview:
    """Give the packed payload of a Special, or of one inside another.

    Raises:
        BadManifest: it is no payload.
    """
    return value.data if type(value) is Special else unpack(value.data, _view_decoder)


def encode(envelope: Envelope, known: Known | None = None) -> bytes:
    """Encode a manifest and its envelope as one frame; `known`, if there is one, is of that manifest."""
    letter: object = envelope
    if known is not None:
        parts = {name: Raw(part) for name, part in known.parts.items()}
        letter = structs.replace(envelope, manifest=_Parts(envelope.manifest.root, **parts))
    body = _encoder.encode(letter)
    return _PREAMBLE.pack(MAGIC, VERSION, xxh3_64_intdigest(body)) + body


def is_frame(data: bytes) -> bool:
    """Say whether these bytes claim to be a frame of ours, of any version."""
    return data[: len(MAGIC)] == MAGIC


_MOST_REASON_CHARACTERS = 1000


class Refusal(Struct, frozen=True, array_like=True):
    """Why a sender does not send its state, and the step that it was asked to send, if any."""

    reason: str
    step: int | None = None


def encode_refusal(reason: str, step: int | None = None) -> bytes:
    """Encode the refusal that a sender sends instead of a frame.

    >>> decode_refusal(encode_refusal("model.hook: a lambda can't travel", step=7))
    Refusal(reason="model.hook: a lambda can't travel", step=7)
    """
    text = reason[:_MOST_REASON_CHARACTERS].encode(errors="replace").decode()
    body = _encoder.encode(Refusal(text, step))
    return _PREAMBLE.pack(REFUSAL_MAGIC, VERSION, xxh3_64_intdigest(body)) + body


def decode_refusal(data: bytes) -> Refusal | None:
    """Decode a refusal, with its reason in one line; None if the data is not a refusal.

    Raises:
        BadManifest: it is malformed.
    """
    if data[: len(REFUSAL_MAGIC)] != REFUSAL_MAGIC:
        return None
    found = unpack(_checked_body(data), _refusal_decoder)
    line = "".join(char if char.isprintable() else " " for char in found.reason[:_MOST_REASON_CHARACTERS])
    return Refusal(line, found.step)


_refusal_decoder = Decoder(Refusal)


def know(manifest: Manifest, last: Known | None = None) -> Known:
    """Pack the parts of a manifest that was made here, to know it again when it arrives.

    If it is packed as the `last` one is, it is that one: equal would not do, for to Python 1 is True. Parts
    that are the very objects of the last are not packed again.
    """
    parts: dict[str, bytes] = {}
    for name in _part_decoders:
        part = getattr(manifest, name)
        if last is not None and part is getattr(last.manifest, name):
            parts[name] = last.parts[name]
        else:
            parts[name] = _encoder.encode(part)
    if last is not None and manifest.root == last.manifest.root and parts == last.parts:
        return last
    return Known(manifest, parts)


def decode(data: bytes, known: Known | None = None) -> Envelope:
    """Decode and check a frame. What is the same as in `known` is not decoded, but taken from there.

    Raises:
        BadManifest: another version, or something in it is malformed or points nowhere.
    """
    body = _checked_body(data)
    try:
        envelope = _envelope_decoder.decode(body) if known is None else _recognise(body, known)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise BadManifest(f"the peer's metadata can't be decoded: {error}") from None
    _check_terms(envelope)
    if known is None or envelope.manifest is not known.manifest:
        validate(envelope.manifest)
    return envelope


def _checked_body(data: bytes) -> memoryview:
    if len(data) < _PREAMBLE.size:
        raise BadManifest(f"the peer's metadata is only {len(data)} bytes long")
    _, version, digest = _PREAMBLE.unpack_from(data)
    if version != VERSION:
        raise BadManifest(
            f"the peer's metadata is of format {version}, this torchferry speaks {VERSION}: "
            "install the same version on both sides"
        )
    body = memoryview(data)[_PREAMBLE.size :]
    if xxh3_64_intdigest(body) != digest:
        raise BadManifest("the peer's metadata was damaged on the way: its digest does not fit")
    return body


def _recognise(body: memoryview, known: Known) -> Envelope:
    packed = _packed_decoder.decode(body)
    root = packed.manifest.root
    parts = {name: bytes(getattr(packed.manifest, name)) for name in _part_decoders}
    if root == known.manifest.root and parts == known.parts:
        manifest = known.manifest
    else:
        found = {
            name: getattr(known.manifest, name) if part == known.parts[name] else decoder.decode(part)
            for (name, part), decoder in zip(parts.items(), _part_decoders.values(), strict=True)
        }
        manifest = Manifest(root, **found)
    return cast(Envelope, structs.replace(packed, manifest=manifest))


def _check_terms(envelope: Envelope) -> None:
    if not ITEM_BYTES <= envelope.chunk_bytes <= MAX_CHUNK_BYTES:
        raise BadManifest(
            f"a chunk of {envelope.chunk_bytes} bytes: from {ITEM_BYTES} to {MAX_CHUNK_BYTES} are accepted"
        )
    if envelope.pack_bytes > envelope.chunk_bytes:
        raise BadManifest(f"packed up to {envelope.pack_bytes} bytes, in chunks of {envelope.chunk_bytes}")
    if envelope.nonce and len(envelope.nonce) != NONCE_BYTES:
        raise BadManifest(f"a nonce of {len(envelope.nonce)} bytes, not {NONCE_BYTES}")
    if envelope.sealed and not envelope.nonce:
        raise BadManifest("seals without a nonce to tell them from another transfer's")
    if envelope.sealed and envelope.digests is not None:
        raise BadManifest("digests in the frame and seals behind the messages: it can only be one of them")
