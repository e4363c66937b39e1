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
from math import prod

import msgspec
from msgspec import Struct
from msgspec.msgpack import Decoder, Encoder, Ext
from xxhash import xxh3_64_intdigest

from torchferry.core.extents import ITEM_BYTES, figure_of
from torchferry.core.manifest import MAX_DIMS, Branch, Count, Manifest, Special, TensorSpec, Value
from torchferry.core.plan import MAX_CHUNK_BYTES
from torchferry.core.protocol import NONCE_BYTES
from torchferry.core.routes import Route
from torchferry.core.tree import MAX_DEPTH, keys_of
from torchferry.errors import BadManifest

MAGIC = b"TFRY"
VERSION = 2
_PREAMBLE = struct.Struct("<4sBQ")

MAX_PATH_BYTES = 1 << 29
"""What the paths of all places of a tree may take together. One leaf may stand in many places, so that a
tree's paths can be a thousand times as long as its frame."""

_COUNTABLE = 2**63 - 1
_ITEM_SIZES = frozenset({1, 2, 4, 8, 16})

_COPIED_BYTES = 1 << 10
"""Extensions longer than this stay where they are, in the frame: nested in each other they would be copied
as often as they are deep."""


class Envelope(Struct, frozen=True, array_like=True):
    """A manifest with what the plan and the receiver need beside it.

    `chunk_bytes` and `pack_bytes` are what the plan depends on; `origin`, `serial` and `nonce` tell transfers
    apart; `digests` has one for each chunk if they were made ahead, `sealed` says that they come in seals
    instead; `route` says where the payload comes from and goes to, if not simply from the sender to here.
    """

    manifest: Manifest
    chunk_bytes: Count
    step: int | None = None
    serial: Count = 0
    nonce: bytes = b""
    digests: tuple[int, ...] | None = None
    sealed: bool = False
    pack_bytes: Count = 0
    origin: Count = 0
    route: Route | None = None


def _to_extension(value: object) -> Ext:
    if isinstance(value, Special):
        return Ext(value.code, value.data)
    raise TypeError(f"{type(value).__qualname__} is not a wire value")


def _from_extension(code: int, data: memoryview) -> Special:
    return Special(code, bytes(data) if len(data) <= _COPIED_BYTES else data.toreadonly())


_encoder = Encoder(enc_hook=_to_extension)
_envelope_decoder = Decoder(Envelope, ext_hook=_from_extension)
_value_decoder = Decoder(ext_hook=_from_extension)


def pack(value: Value) -> bytes:
    """Encode one wire value: the payload of a Special.

    >>> unpack(pack([1, "a", None]))
    [1, 'a', None]
    """
    return _encoder.encode(value)


def unpack(data: bytes | memoryview) -> Value:
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
    _check_terms(envelope)
    check(envelope.manifest)
    return envelope


def _check_terms(envelope: Envelope) -> None:
    if not ITEM_BYTES <= envelope.chunk_bytes <= MAX_CHUNK_BYTES:
        raise BadManifest(
            f"a chunk of {envelope.chunk_bytes} bytes: from {ITEM_BYTES} to {MAX_CHUNK_BYTES} are accepted"
        )
    if envelope.pack_bytes > envelope.chunk_bytes:
        raise BadManifest(f"packed up to {envelope.pack_bytes} bytes, in chunks of {envelope.chunk_bytes}")
    if envelope.nonce and len(envelope.nonce) != NONCE_BYTES:
        raise BadManifest(f"a nonce of {len(envelope.nonce)} bytes, not {NONCE_BYTES}")
    if envelope.sealed and envelope.digests is not None:
        raise BadManifest("digests in the frame and seals behind the messages: it can only be one of them")


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
    path_bytes = {~manifest.root: 0}
    total_bytes = 0
    for index, branch in enumerate(manifest.branches):
        if index not in depth:
            raise BadManifest(f"branch {index} stands nowhere in the tree")
        _check_branch(index, branch)
        if depth[index] > MAX_DEPTH:
            raise BadManifest(f"the tree is deeper than {MAX_DEPTH}")
        here = path_bytes.pop(index)
        for child, key in zip(branch.children, keys_of(branch), strict=True):
            _adopt(manifest, child, index, depth, used)
            nbytes = here + 8 + (len(key) if isinstance(key, str) else 8)
            if child < 0:
                path_bytes[~child] = nbytes
            else:
                total_bytes += nbytes + 8 * len(manifest.leaves[child].parts)
        if total_bytes > MAX_PATH_BYTES:
            raise BadManifest(f"the paths of the tree take more than {MAX_PATH_BYTES} bytes")
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
    if len(spec.shape) != len(spec.stride) or spec.itemsize not in _ITEM_SIZES:
        raise BadManifest(f"tensor {number} has a shape, stride or item size that can't be")
    if len(spec.shape) > MAX_DIMS:
        raise BadManifest(f"tensor {number} has {len(spec.shape)} dimensions, more than {MAX_DIMS}")
    if spec.storage >= len(storages) or spec.offset % spec.itemsize:
        raise BadManifest(f"tensor {number} has a storage or offset that can't be")
    seen = figure_of(spec)
    if spec.offset + seen.span > storages[spec.storage]:
        raise BadManifest(f"tensor {number} reaches beyond its storage")
    # Expanded dimensions reach nowhere, and still there can't be more items than torch can count.
    items = seen.items or prod(n for n in spec.shape if n)
    if items * spec.itemsize > _COUNTABLE:
        raise BadManifest(f"tensor {number} has more items than can be counted")
