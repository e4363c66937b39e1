"""The plan: one chunk per tensor, unless it is large or there are many small ones; only used bytes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.support.sizes import examples
from torchferry.core.extents import find_pattern
from torchferry.core.manifest import Leaf, Manifest, TensorSpec
from torchferry.core.plan import (
    CHUNK_BYTES,
    MAX_CHUNKS,
    PACK_BYTES,
    PACK_FROM,
    PACKED_BYTES,
    TooManyChunks,
    make_plan,
)


def state(*tensors: TensorSpec) -> Manifest:
    return Manifest(0, (), (Leaf("tensor", (0,)),), tensors, (1 << 40,) * len(tensors))


def tensors(count: int, nbytes: int) -> list[TensorSpec]:
    return [TensorSpec("uint8", 1, (nbytes,), (1,), n, 0) for n in range(count)]


def test_a_few_small_tensors_are_one_chunk_each_in_order() -> None:
    plan = make_plan(state(*tensors(PACK_FROM - 1, 40)))
    assert [chunk.pieces[0].storage for chunk in plan.chunks] == list(range(PACK_FROM - 1))
    assert [chunk.number for chunk in plan.chunks] == list(range(PACK_FROM - 1))
    assert plan.payload_bytes == (PACK_FROM - 1) * 40
    assert plan.pack_bytes == 0


def test_many_small_tensors_are_packed_and_large_ones_are_not() -> None:
    count = 2 * PACKED_BYTES // 4096
    specs = [*tensors(count, 4096), TensorSpec("uint8", 1, (PACK_BYTES,), (1,), count, 0)]
    plan = make_plan(state(*specs))
    assert [chunk.nbytes for chunk in plan.chunks] == [PACKED_BYTES, PACKED_BYTES, PACK_BYTES]
    pieces = [piece for chunk in plan.chunks for piece in chunk.pieces]
    assert [(piece.extent, piece.position) for piece in pieces] == [(n, 0) for n in range(count + 1)]


def test_a_receiver_packs_as_the_sender_did() -> None:
    many = state(*tensors(PACK_FROM * 2, 40))
    assert len(make_plan(many, pack_bytes=0).chunks) == PACK_FROM * 2
    few = state(*tensors(2, 40))
    assert len(make_plan(few, pack_bytes=64).chunks) == 1
    sent = make_plan(many)
    assert make_plan(many, pack_bytes=sent.pack_bytes) == sent


@pytest.mark.parametrize("pack_bytes", [0, 1 << 12])
def test_a_plan_with_too_many_chunks_is_refused(pack_bytes: int) -> None:
    huge = TensorSpec("uint8", 1, (MAX_CHUNKS * CHUNK_BYTES + 1,), (1,), 0, 0)
    with pytest.raises(TooManyChunks):
        make_plan(state(huge), pack_bytes=pack_bytes)


def test_a_large_tensor_is_split_into_consecutive_chunks() -> None:
    nbytes = 3 * CHUNK_BYTES + 8
    plan = make_plan(state(TensorSpec("uint8", 1, (nbytes,), (1,), 0, 0)))
    assert [chunk.pieces[0].position for chunk in plan.chunks] == [n * CHUNK_BYTES for n in range(4)]
    assert max(chunk.nbytes for chunk in plan.chunks) == CHUNK_BYTES
    assert plan.payload_bytes == nbytes


def test_an_empty_tensor_needs_no_chunk() -> None:
    assert make_plan(state(TensorSpec("float32", 4, (0,), (1,), 0, 0))).chunks == ()


def test_both_sides_compute_the_same_plan() -> None:
    described = state(TensorSpec("float32", 4, (1000, 1000), (2000, 1), 0, 16))
    assert make_plan(described, 4096) == make_plan(described, 4096)


@st.composite
def own_and_flat(draw: st.DrawFn) -> tuple[list[TensorSpec], list[TensorSpec]]:
    """Tensors in storages of their own, and the same tensors in one storage, apart, in any order."""
    own = []
    for number in range(draw(st.integers(1, 5))):
        itemsize = draw(st.sampled_from([1, 2, 4, 8, 16]))
        shape = draw(st.sampled_from([(), (0,), (7,), (40,), (3, 5), (4, 2, 3)]))
        stride = {(3, 5): (8, 1), (4, 2, 3): (30, 9, 2)}.get(shape, (1,) * len(shape))
        own.append(TensorSpec("any", itemsize, shape, stride, number, draw(st.integers(0, 3)) * itemsize))
    flat, end = list(own), 0
    for number in draw(st.permutations(range(len(own)))):
        spec = own[number]
        offset = -(-(end + draw(st.integers(0, 20))) // spec.itemsize) * spec.itemsize
        flat[number] = replace(spec, storage=0, offset=offset)
        end = offset + find_pattern(spec.shape, spec.stride, spec.itemsize).span_bytes
    return own, flat


@examples(300)
@given(own_and_flat(), st.integers(16, 100), st.integers(0, 16))
def test_chunks_do_not_depend_on_storages_and_offsets(
    placed: tuple[list[TensorSpec], list[TensorSpec]], chunk_bytes: int, pack_bytes: int
) -> None:
    def chunks_of(specs: list[TensorSpec]) -> list[list[Any]]:
        """The pieces of each chunk: tensor, distance from its start, runs, position."""
        plan = make_plan(state(*specs), chunk_bytes, pack_bytes)
        tensor_at = {(s.storage, s.offset): n for n, s in enumerate(specs) if 0 not in s.shape}
        found = []
        for chunk in plan.chunks:
            starts = [plan.extents[piece.extent] for piece in chunk.pieces]
            found.append(
                [
                    (tensor_at[e.storage, e.offset], p.offset - e.offset, p.run_bytes, p.repeats, p.position)
                    for p, e in zip(chunk.pieces, starts, strict=True)
                ]
            )
        return found

    own, flat = placed
    assert chunks_of(own) == chunks_of(flat)


def test_interleaved_columns_are_planned_like_columns_of_two_matrices() -> None:
    second, first = (TensorSpec("float32", 4, (10, 2), (8, 1), 0, offset) for offset in (16, 0))
    together, apart = state(second, first), state(second, replace(first, storage=1))
    offsets = [
        [piece.offset for chunk in make_plan(each, 40).chunks for piece in chunk.pieces]
        for each in (together, apart)
    ]
    assert offsets[0] == offsets[1]
    assert offsets[0][0] == 16


def test_a_cut_splits_no_item_of_tensors_that_overlap_at_another_alignment() -> None:
    tensors = TensorSpec("uint8", 1, (40,), (1,), 0, 3), TensorSpec("int64", 8, (6,), (1,), 0, 16)
    pieces = [chunk.pieces[0] for chunk in make_plan(state(*tensors), 32).chunks]
    assert [(piece.offset, piece.nbytes) for piece in pieces] == [(3, 29), (32, 32)]
