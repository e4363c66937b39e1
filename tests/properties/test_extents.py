"""Extents, chunks, boxes and frames of random tensors, compared with a computation byte by byte."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from itertools import pairwise, product
from math import prod
from typing import Any

from hypothesis import assume, given, note
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.hostile.attacks.base import framed
from tests.properties.strategies import Draw, fit, recipes, span, stride_for
from tests.support.sizes import examples
from tests.support.states import Recipe, build
from torchferry.core.codec import MAGIC, Frame, decode, encode
from torchferry.core.extents import (
    Extent,
    count_items_below,
    extents_of,
    footprint,
    memory_order,
    overlaps_itself,
    split,
    split_into_boxes,
    uses_of,
)
from torchferry.core.manifest import VALUE, Branch, Leaf, Manifest, Special, TensorSpec
from torchferry.core.plan import MAX_CHUNK_BYTES, make_plan
from torchferry.errors import BadManifest
from torchferry.tensors.describe import describe

_SIZES = {1: "uint8", 2: "int16", 4: "float32", 8: "int64", 16: "complex128"}
_CAPACITY = 160

Byte = tuple[int, int]


@st.composite
def specs(draw: Draw) -> TensorSpec:
    """Draw a tensor of a few items somewhere in one of two storages."""
    size = draw(st.sampled_from(sorted(_SIZES)))
    shape = tuple(draw(st.lists(st.sampled_from((2, 3, 1, 4, 0, 5)), max_size=4)))
    stride = stride_for(draw, shape)
    shape = fit(shape, stride, _CAPACITY // size)
    offset = draw(st.integers(0, _CAPACITY // size - span(shape, stride)))
    return TensorSpec(_SIZES[size], size, shape, stride, draw(st.integers(0, 1)), offset * size)


@st.composite
def families(draw: Draw) -> list[TensorSpec]:
    """Draw tensors of which many differ only in their offsets, like the columns of a matrix."""
    found = draw(st.lists(specs(), max_size=3))
    for spec in draw(st.lists(specs(), max_size=2)):
        room = (_CAPACITY - span(spec.shape, spec.stride) * spec.itemsize) // spec.itemsize
        offsets = draw(st.lists(st.integers(0, min(room, 5)), min_size=2, max_size=4))
        found.extend(replace(spec, storage=0, offset=offset * spec.itemsize) for offset in offsets)
    return draw(st.permutations(found))  # type: ignore[no-any-return]


def items_of(spec: TensorSpec) -> list[range]:
    """List a tensor's items, in order, as ranges of bytes of its storage."""
    starts = (
        spec.offset + spec.itemsize * sum(i * s for i, s in zip(index, spec.stride, strict=True))
        for index in product(*map(range, spec.shape))
    )
    return [range(start, start + spec.itemsize) for start in starts]


def bytes_of(extent: Extent) -> list[int]:
    """List an extent's bytes in the order in which they are sent."""
    return [
        extent.offset + sum(i * step for i, (_, step) in zip(index, extent.repeats, strict=True)) + byte
        for index in product(*(range(count) for count, _ in extent.repeats))
        for byte in range(extent.run_bytes)
    ]


@examples(600)
@given(families())
def test_every_used_byte_is_in_exactly_one_extent_and_no_other_byte_in_any(tensors: list[TensorSpec]) -> None:
    used = {(spec.storage, byte) for spec in tensors for item in items_of(spec) for byte in item}
    extents = extents_of(tensors)
    note(f"{extents}")
    sent = Counter((extent.storage, byte) for extent in extents for byte in bytes_of(extent))
    assert sent == Counter(used)
    assert [extent.nbytes for extent in extents] == [len(bytes_of(extent)) for extent in extents]
    assert all(extent.end == max(bytes_of(extent)) + 1 for extent in extents)
    assert extents == sorted(extents, key=lambda extent: (extent.storage, extent.offset))


@examples(600)
@given(families(), st.integers(16, 200))
def test_chunks_cover_an_extent_in_order_and_divide_no_item(
    tensors: list[TensorSpec], max_bytes: int
) -> None:
    for use in uses_of(tensors):
        extent = use.extent
        pieces = list(split(extent, max_bytes, use.item_bytes))
        note(f"{extent} in {pieces}")
        assert [byte for piece in pieces for byte in bytes_of(piece)] == bytes_of(extent)
        assert all(0 < piece.nbytes <= max_bytes for piece in pieces)
        of_byte = {byte: number for number, piece in enumerate(pieces) for byte in bytes_of(piece)}
        for spec in tensors:
            if spec.storage == extent.storage:
                for item in items_of(spec):
                    assert len({of_byte.get(byte) for byte in item}) == 1, f"item {item} of {spec} is divided"


@examples(300)
@given(families(), st.integers(16, 200), st.integers(0, 16))
def test_a_plan_carries_each_used_byte_once(
    tensors: list[TensorSpec], chunk_bytes: int, pack_bytes: int
) -> None:
    plan = make_plan(Manifest(0, (), (), tuple(tensors), (_CAPACITY, _CAPACITY)), chunk_bytes, pack_bytes)
    used = {(spec.storage, byte) for spec in tensors for item in items_of(spec) for byte in item}
    assert plan.payload_bytes == len(used)
    positions: Counter[int] = Counter()
    for number, chunk in enumerate(plan.chunks):
        assert chunk.number == number
        assert chunk.nbytes == sum(piece.nbytes for piece in chunk.pieces) <= chunk_bytes
        assert len(chunk.pieces) == 1 or all(piece.nbytes < pack_bytes for piece in chunk.pieces)
        for piece in chunk.pieces:
            assert piece.position == positions[piece.extent]
            positions[piece.extent] += piece.nbytes
    assert [positions[n] for n in range(len(plan.extents))] == [e.nbytes for e in plan.extents]


@examples(400)
@given(specs())
def test_footprint_overlap_and_memory_order_of_one_tensor_are_correct(spec: TensorSpec) -> None:
    items = items_of(spec)
    assert {byte for extent in footprint(spec) for byte in bytes_of(extent)} == {b for i in items for b in i}
    assert overlaps_itself(spec) == (len(set(items)) < len(items))
    dims = memory_order(spec)
    if dims is not None and items:
        walked = [
            sum(i * spec.stride[d] for i, d in zip(index, dims, strict=True))
            for index in product(*(range(spec.shape[d]) for d in dims))
        ]
        assert all(a < b for a, b in pairwise(walked))
        assert {spec.offset + at * spec.itemsize for at in walked} == {item.start for item in items}


@examples(400)
@given(st.data(), st.lists(st.integers(1, 5), max_size=4))
def test_boxes_cover_a_range_of_items_in_order(data: st.DataObject, shape: list[int]) -> None:
    total = prod(shape)
    first = data.draw(st.integers(0, total))
    end = data.draw(st.integers(first, total))
    found = list(split_into_boxes(shape, first, end))
    note(f"{found}")
    indices = [
        index
        for start, size in found
        for index in product(*(range(a, a + n) for a, n in zip(start, size, strict=True)))
    ]
    assert indices == list(product(*map(range, shape)))[first:end]
    assert len(found) <= max(2 * len(shape), 1)


@examples(400)
@given(specs(), st.integers(-20, 200))
def test_items_below_an_address_are_counted(spec: TensorSpec, address: int) -> None:
    dims = memory_order(spec)
    assume(dims is not None and 0 not in spec.shape)
    assert dims is not None
    levels = [(spec.shape[d], spec.stride[d] * spec.itemsize) for d in dims]
    starts = {item.start - spec.offset for item in items_of(spec)}
    assert count_items_below(address, levels) == sum(start < address for start in starts)


_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(allow_nan=False),
    st.text(st.characters(codec="utf-8"), max_size=5),
    st.builds(Special, st.integers(0, 127), st.binary(max_size=5)),
)


@st.composite
def manifests(draw: Draw) -> Manifest:
    """Draw any valid manifest."""
    tensors = tuple(draw(st.lists(specs(), max_size=3)))
    parts = st.lists(st.integers(0, len(tensors) - 1), max_size=3).map(tuple) if tensors else st.just(())
    leaves: list[Leaf] = []
    branches: list[Branch | None] = []

    def leaf() -> int:
        kind = draw(st.sampled_from((VALUE, "tensor", "ndarray")))
        leaves.append(Leaf(kind, draw(parts), draw(_VALUES), draw(_VALUES)))
        return len(leaves) - 1

    def child(depth: int) -> int:
        if depth > 3 or draw(st.booleans()):
            return draw(st.integers(0, len(leaves) - 1)) if leaves and draw(st.booleans()) else leaf()
        branches.append(None)
        index = len(branches) - 1
        children = tuple(child(depth + 1) for _ in range(draw(st.integers(0, 3))))
        keys: Any = None
        if draw(st.booleans()):
            count = len(children)
            keys = tuple(draw(st.lists(_VALUES, min_size=count, max_size=count, unique=True)))
        branches[index] = Branch(draw(st.sampled_from(("dict", "list"))), children, keys, draw(_VALUES))
        return ~index

    root = child(0)
    built = tuple(branch for branch in branches if branch is not None)
    return Manifest(root, built, tuple(leaves), tensors, (_CAPACITY, _CAPACITY))


@examples(300)
@given(manifests(), st.integers(16, MAX_CHUNK_BYTES), st.none() | st.integers(-(2**63), 2**63 - 1))
def test_decoding_a_frame_returns_the_encoded_manifest(
    manifest: Manifest, chunk_bytes: int, step: int | None
) -> None:
    frame = Frame(manifest, chunk_bytes, step)
    data = encode(frame)
    assert decode(data) == frame
    assert encode(decode(data)) == data


@examples(100)
@given(recipes())
def test_decoding_a_frame_returns_the_manifest_of_a_real_state(recipe: Recipe) -> None:
    frame = encode(Frame(describe(build(recipe).state).manifest, 1000, 7))
    # Compared as bytes, because a NaN does not equal itself.
    assert encode(decode(frame)) == frame


_MUTATIONS = st.lists(
    st.tuples(
        st.sampled_from(("set", "set", "delete", "insert", "truncate", "repeat")),
        st.floats(0, 1, exclude_max=True),
        # Bytes with a meaning in MessagePack: limits of small ints, strings, arrays, maps, extensions.
        st.sampled_from((0x00, 0x7F, 0x80, 0x90, 0xA0, 0xC0, 0xC1, 0xC7, 0xCF, 0xD4, 0xDD, 0xDF, 0xFF))
        | st.integers(0, 255),
    ),
    min_size=1,
    max_size=6,
)


def mutate(frame: bytes, mutations: list[tuple[str, float, int]]) -> bytes:
    """Damage the body of a frame and compute its digest again, so that the decoder reads the damage."""
    body = bytearray(frame[len(framed(b"")) :])
    for how, where, byte in mutations:
        at = int(where * len(body))
        if how == "insert":
            body.insert(at, byte)
        elif how == "truncate":
            del body[at:]
        elif how == "delete":
            del body[at : at + 1 + byte % 8]
        elif how == "repeat":
            body[at:at] = body[at : at + byte]
        elif body:
            body[at] = byte
    return framed(bytes(body))


@examples(400)
@given(manifests(), _MUTATIONS)
def test_a_damaged_frame_is_refused_or_is_another_valid_frame(
    manifest: Manifest, mutations: list[tuple[str, float, int]]
) -> None:
    frame = mutate(encode(Frame(manifest, 1000)), mutations)
    note(f"{frame!r}")
    with suppress(BadManifest):
        decode(frame)


@examples(200)
@given(st.binary(max_size=60))
def test_random_bytes_are_refused_or_are_a_valid_frame(body: bytes) -> None:
    for frame in (body, MAGIC + body, framed(body)):
        with suppress(BadManifest):
            decode(frame)
