"""The wire format: what goes in comes out, and what is wrong is called wrong."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec.msgpack import Decoder
from msgspec.structs import replace
from xxhash import xxh3_64_intdigest

from torchferry.core.codec import (
    MAGIC,
    VERSION,
    EncodedManifest,
    Frame,
    data_of,
    decode,
    decode_refusal,
    decode_value,
    encode,
    encode_refusal,
    encode_value,
    is_frame,
)
from torchferry.core.manifest import Branch, Leaf, Manifest, Nested, Special, TensorSpec
from torchferry.core.push import Route
from torchferry.core.tree import MAX_DEPTH
from torchferry.errors import BadManifest

TENSOR = TensorSpec("float32", 4, (3, 4), (4, 1), 0, 8)
STATE = Manifest(
    -1,
    (Branch("dict", (0, -2), ("a", Special(16, encode_value([1, 2])))), Branch("list", (1, 0))),
    (Leaf("tensor", (0,)), Leaf("value", traits=Special(2, b"\x01"))),
    (TENSOR,),
    (56,),
)


def frame_of(manifest: Manifest) -> bytes:
    return encode(Frame(manifest, 1 << 20))


def test_a_manifest_comes_back_as_it_was() -> None:
    frame = Frame(STATE, 1 << 20, 7)
    assert decode(encode(frame)) == frame


def test_a_special_stays_packed_and_one_inside_it_stays_where_it_is() -> None:
    outer = Special(40, encode_value(["x", Special(2, b"\x05")]))
    assert data_of(decode_value(encode_value(outer), Decoder(Special))) == outer.data
    name, inner = decode_value(outer.data, Decoder(tuple[str, Nested]))
    assert (name, inner.code, bytes(data_of(inner))) == ("x", 2, b"\x05")


def test_what_is_inside_a_special_must_be_a_payload() -> None:
    (inner,) = decode_value(encode_value([[2, "text"]]), Decoder(tuple[Nested]))
    with pytest.raises(BadManifest, match="bytes"):
        data_of(inner)


@pytest.mark.parametrize("reason", ["", "model.f: a lambda", "a\nb", "\udce4", "x" * 5000])
def test_a_refusal_says_why_in_one_short_line_and_is_no_frame(reason: str) -> None:
    refusal = encode_refusal(reason)
    assert not is_frame(refusal)
    found = decode_refusal(refusal)
    assert found is not None
    assert found.step is None
    assert found.reason.isprintable()
    assert len(found.reason) <= 1000
    assert decode_refusal(frame_of(STATE)) is None


def test_a_damaged_refusal_is_not_believed() -> None:
    refusal = bytearray(encode_refusal("why"))
    refusal[-1] ^= 1
    with pytest.raises(BadManifest, match="digest"):
        decode_refusal(bytes(refusal))
    with pytest.raises(BadManifest, match="only 4 bytes"):
        decode_refusal(b"TFNO")


def test_a_frame_is_known_by_its_first_bytes() -> None:
    assert is_frame(frame_of(STATE))
    assert not is_frame(b"\x80\x04")
    assert not is_frame(b"")


@pytest.mark.parametrize("version", [0, VERSION + 1, 255])
def test_another_version_is_refused_with_both_numbers(version: int) -> None:
    frame = frame_of(STATE)
    with pytest.raises(BadManifest, match=f"format {version}.*reads format {VERSION}"):
        decode(MAGIC + bytes([version]) + frame[5:])


def test_every_truncation_is_refused() -> None:
    frame = frame_of(STATE)
    for length in range(len(MAGIC), len(frame)):
        with pytest.raises(BadManifest):
            decode(frame[:length])


def test_bytes_after_the_end_are_refused() -> None:
    with pytest.raises(BadManifest):
        decode(frame_of(STATE) + b"\x00")


def change(manifest: Manifest, **fields: object) -> Manifest:
    return msgspec.structs.replace(manifest, **fields)


def tensor(**fields: object) -> Manifest:
    return change(STATE, tensors=(msgspec.structs.replace(TENSOR, **fields),))


@pytest.mark.parametrize(
    ("manifest", "complaint"),
    [
        (tensor(shape=(3, 5)), "ends at byte .* of storage 0, which has"),
        (tensor(stride=(2**40, 1)), "ends at byte .* of storage 0, which has"),
        (tensor(shape=(2**62, 2**62)), "ends at byte .* of storage 0, which has"),
        (tensor(offset=12), "ends at byte .* of storage 0, which has"),
        (tensor(offset=6), "offset"),
        (tensor(storage=1), "storage"),
        (tensor(itemsize=3), "item size"),
        (tensor(itemsize=0), "item size"),
        (tensor(stride=(1,)), "stride"),
        (tensor(shape=(-3, 4)), "decoded"),
        (tensor(stride=(-4, 1)), "decoded"),
        (tensor(offset=-4), "decoded"),
        (change(STATE, storages=(-1,)), "decoded"),
        (
            change(STATE, leaves=(Leaf("tensor", (1,)), Leaf("value"))),
            "leaf 0 refers to tensor 1, but there are only 1",
        ),
        (change(STATE, leaves=(*STATE.leaves, Leaf("value"))), "leaf 2 is not in the tree"),
        (change(STATE, root=0), "branch 0 is not in the tree"),
        (change(STATE, root=-2), "branch 0 is not in the tree"),
        (change(STATE, root=5), "the root refers to leaf 5, but there are only 2"),
        (change(STATE, branches=(Branch("list", (0, 1, -1)),)), "comes before its parent"),
        (change(STATE, branches=(Branch("list", (0, 1, -9)),)), "refers to branch 8, but there are only 1"),
        (change(STATE, branches=(Branch("list", (-2, -2)), Branch("list", (0, 1)))), "has another parent"),
        (change(STATE, branches=(Branch("dict", (0, 1), ("a", "a")),)), "2 keys, of which only 1"),
        (change(STATE, branches=(Branch("dict", (0, 1), ("a",)),)), "1 keys for 2"),
        (change(STATE, branches=(Branch("dict", (0, 1), ("a", ["b"])),)), "decoded"),  # type: ignore[arg-type]
    ],
)
def test_a_number_that_points_nowhere_is_refused(manifest: Manifest, complaint: str) -> None:
    with pytest.raises(BadManifest, match=complaint):
        decode(frame_of(manifest))


def test_a_tree_that_is_too_deep_is_refused() -> None:
    depth = MAX_DEPTH + 1
    chain = tuple(Branch("list", (~(n + 1) if n + 1 < depth else 0,)) for n in range(depth))
    with pytest.raises(
        BadManifest, match=f"branch {MAX_DEPTH} is at level {depth}; the limit is {MAX_DEPTH}"
    ):
        decode(frame_of(Manifest(-1, chain, (Leaf("value"),), (), ())))


def test_msgpack_that_nests_without_end_is_refused() -> None:
    with pytest.raises(BadManifest):
        decode(MAGIC + bytes([VERSION]) + b"\x91" * 1_000_000)
    with pytest.raises(BadManifest):
        decode_value(b"\x91" * 1_000_000, Decoder(object))


def test_a_chunk_of_no_size_is_refused() -> None:
    with pytest.raises(BadManifest, match="chunk"):
        decode(encode(Frame(STATE, 0)))


def test_an_encoded_manifest_is_not_encoded_again() -> None:
    frame = Frame(STATE, 1 << 20, 7, 3, b"n" * 16, digests=(1, 2), origin=4)
    assert encode(frame, EncodedManifest(STATE, encode_value(STATE))) == encode(frame)


@pytest.mark.parametrize("value", [True, 1.0, "1"])
def test_manifests_that_are_equal_to_python_but_not_the_same_have_different_keys(
    value: bool | float | str,
) -> None:
    one = replace(STATE, leaves=(STATE.leaves[0], Leaf("value", traits=1)))
    other = replace(STATE, leaves=(STATE.leaves[0], Leaf("value", traits=value)))
    assert encode_value(one) != encode_value(other)
    received = decode(frame_of(other)).manifest.leaves[1].traits
    assert (type(received), received) == (type(value), value)


def test_every_part_of_a_manifest_is_held_to_its_type() -> None:
    parts = [STATE.root, list(STATE.branches), ["no leaf"], list(STATE.tensors), list(STATE.storages)]
    body = encode_value([parts, 1 << 20])
    frame = MAGIC + bytes([VERSION]) + xxh3_64_intdigest(body).to_bytes(8, "little") + body
    with pytest.raises(BadManifest, match="can't be decoded"):
        decode(frame)


@pytest.mark.parametrize(
    "fields",
    [
        {"offer": b"t" * 15, "nonce": b"n" * 16},
        {"offer": b"t" * 16},
        {"offer": b"t" * 16, "nonce": b"n" * 16, "route": Route(0)},
    ],
    ids=["short token", "no nonce", "route"],
)
def test_an_invalid_offer_of_memory_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(BadManifest, match="offers memory"):
        decode(encode(Frame(STATE, 1 << 20, **fields)))


def test_an_offer_of_memory_is_decoded() -> None:
    frame = Frame(STATE, 1 << 20, nonce=b"n" * 16, offer=b"t" * 16)
    assert decode(encode(frame)).offer == b"t" * 16
