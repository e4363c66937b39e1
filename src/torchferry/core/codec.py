"""Manifests as bytes: MessagePack, a closed set of types, and nothing that can run.

A frame is

    4 bytes   b"TFRY"
    1 byte    the version of the format
    8 bytes   XXH3 of the rest, little-endian
    the rest  MessagePack of Envelope

What MessagePack lacks is an extension: a code and a payload, which stays packed until `unpack` is asked.
Decoding checks types, ranges and references, so whoever holds a Manifest from here may believe it.
"""

from __future__ import annotations

import struct

import msgspec
from msgspec import Struct
from msgspec.msgpack import Decoder, Encoder, Ext
from xxhash import xxh3_64_intdigest

from torchferry.core.extents import ITEM_BYTES
from torchferry.core.manifest import Branch, Count, Manifest, Special, TensorSpec, Value
from torchferry.core.tree import MAX_DEPTH
from torchferry.errors import BadManifest

MAGIC = b"TFRY"
VERSION = 1
_PREAMBLE = struct.Struct("<4sBQ")


class Envelope(Struct, frozen=True, array_like=True):
    """A manifest with what the plan and the receiver need beside it.

    `serial` and `nonce` tell transfers apart; `digests` has one for each message if they were made ahead,
    `sealed` says that they come in seals instead.
    """

    manifest: Manifest
    chunk_bytes: Count
    step: int | None = None
    serial: Count = 0
    nonce: bytes = b""
    digests: tuple[int, ...] | None = None
    sealed: bool = False


def _to_extension(value: object) -> Ext:
    if isinstance(value, Special):
        return Ext(value.code, value.data)
    raise TypeError(f"{type(value).__qualname__} is not a wire value")


def _from_extension(code: int, data: memoryview) -> Special:
    return Special(code, bytes(data))


_encoder = Encoder(enc_hook=_to_extension)
_envelope_decoder = Decoder(Envelope, ext_hook=_from_extension)
_value_decoder = Decoder(ext_hook=_from_extension)


def pack(value: Value) -> bytes:
    """Encode one wire value: the payload of a Special.

    >>> unpack(pack([1, "a", None]))
    [1, 'a', None]
    """
    return _encoder.encode(value)


def unpack(data: bytes) -> Value:
    """Decode the payload of a Special.

    Raises:
        BadManifest: it is not MessagePack.
    """
    try:
        return _value_decoder.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise BadManifest(f"a value in the metadata can't be decoded: {error}") from None


def encode(envelope: Envelope) -> bytes:
    """Encode a manifest and its envelope as one frame."""
    body = _encoder.encode(envelope)
    return _PREAMBLE.pack(MAGIC, VERSION, xxh3_64_intdigest(body)) + body


def is_frame(data: bytes) -> bool:
    """Say whether these bytes claim to be a frame of ours, of any version."""
    return data[: len(MAGIC)] == MAGIC


def decode(data: bytes) -> Envelope:
    """Decode and check a frame.

    Raises:
        BadManifest: another version, or something in it is malformed or points nowhere.
    """
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
    try:
        envelope = _envelope_decoder.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise BadManifest(f"the peer's metadata can't be decoded: {error}") from None
    if envelope.chunk_bytes < ITEM_BYTES:
        raise BadManifest(f"a chunk of {envelope.chunk_bytes} bytes is too small")
    check(envelope.manifest)
    return envelope


def check(manifest: Manifest) -> None:
    """Check that every number in a manifest points where it may.

    Raises:
        BadManifest: naming the first thing that is wrong.
    """
    _check_tree(manifest)
    for number, leaf in enumerate(manifest.leaves):
        if leaf.parts and max(leaf.parts) >= len(manifest.tensors):
            raise BadManifest(f"leaf {number} refers to a tensor that is not there")
    for number, spec in enumerate(manifest.tensors):
        _check_tensor(number, spec, manifest.storages)


def _check_tree(manifest: Manifest) -> None:
    """Parents come before children, every branch has one parent, every leaf stands somewhere."""
    depth: dict[int, int] = {}
    used = [False] * len(manifest.leaves)
    _adopt(manifest, manifest.root, -1, depth, used)
    for index, branch in enumerate(manifest.branches):
        if index not in depth:
            raise BadManifest(f"branch {index} stands nowhere in the tree")
        _check_branch(index, branch)
        if depth[index] > MAX_DEPTH:
            raise BadManifest(f"the tree is deeper than {MAX_DEPTH}")
        for child in branch.children:
            _adopt(manifest, child, index, depth, used)
    if not all(used):
        raise BadManifest(f"leaf {used.index(False)} stands nowhere in the tree")


def _adopt(manifest: Manifest, child: int, parent: int, depth: dict[int, int], used: list[bool]) -> None:
    if child >= 0:
        if child >= len(used):
            raise BadManifest(f"branch {parent} refers to a leaf that is not there")
        used[child] = True
        return
    if ~child <= parent or ~child >= len(manifest.branches) or ~child in depth:
        raise BadManifest(f"branch {parent} refers to branch {~child}, which can't be its child")
    depth[~child] = depth.get(parent, 0) + 1


def _check_branch(index: int, branch: Branch) -> None:
    if branch.keys is None:
        return
    if len(branch.keys) != len(branch.children):
        raise BadManifest(f"branch {index} has {len(branch.keys)} keys for {len(branch.children)}")
    try:
        distinct = len(set(branch.keys))
    except TypeError:
        raise BadManifest(f"branch {index} has a key that can't be one") from None
    if distinct != len(branch.keys):
        raise BadManifest(f"branch {index} has the same key twice")


def _check_tensor(number: int, spec: TensorSpec, storages: tuple[int, ...]) -> None:
    if len(spec.shape) != len(spec.stride) or spec.itemsize not in (1, 2, 4, 8, 16):
        raise BadManifest(f"tensor {number} has a shape, stride or item size that can't be")
    if spec.storage >= len(storages) or spec.offset % spec.itemsize:
        raise BadManifest(f"tensor {number} has a storage or offset that can't be")
    if 0 in spec.shape:
        return
    last = sum((n - 1) * step for n, step in zip(spec.shape, spec.stride, strict=True))
    if spec.offset + (last + 1) * spec.itemsize > storages[spec.storage]:
        raise BadManifest(f"tensor {number} reaches beyond its storage")
