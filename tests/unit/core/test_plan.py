"""The plan: one chunk per tensor, unless it is large or there are many small ones; only used bytes."""

from __future__ import annotations

import pytest

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
