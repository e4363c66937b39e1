"""The plan: one message per tensor, unless it is large or there are many small ones; only used bytes."""

from __future__ import annotations

import pytest

from torchferry.core.manifest import Leaf, Manifest, TensorSpec
from torchferry.core.plan import (
    BLOCK_CHUNKS,
    BLOCK_LAG,
    BLOCK_MESSAGES,
    CHUNK_BYTES,
    MAX_MESSAGES,
    PACK_BYTES,
    PACK_FROM,
    PACKED_BYTES,
    Message,
    TooManyMessages,
    make_plan,
)
from torchferry.core.push import DigestBlock


def state(*tensors: TensorSpec) -> Manifest:
    return Manifest(0, (), (Leaf("tensor", (0,)),), tensors, (1 << 40,) * len(tensors))


def tensors(count: int, nbytes: int) -> list[TensorSpec]:
    return [TensorSpec("uint8", 1, (nbytes,), (1,), n, 0) for n in range(count)]


def test_a_few_small_tensors_are_one_message_each_in_order() -> None:
    plan = make_plan(state(*tensors(PACK_FROM - 1, 40)))
    assert [chunk.piece.storage for chunk in plan.chunks] == list(range(PACK_FROM - 1))
    assert [message.number for message in plan.messages] == list(range(PACK_FROM - 1))
    assert plan.payload_bytes == (PACK_FROM - 1) * 40
    assert plan.pack_bytes == 0


def test_many_small_tensors_are_packed_and_large_ones_are_not() -> None:
    count = 2 * PACKED_BYTES // 4096
    specs = [*tensors(count, 4096), TensorSpec("uint8", 1, (PACK_BYTES,), (1,), count, 0)]
    plan = make_plan(state(*specs))
    assert [message.nbytes for message in plan.messages] == [PACKED_BYTES, PACKED_BYTES, PACK_BYTES]
    assert [chunk.extent for message in plan.messages for chunk in plan.chunks_of(message)] == list(
        range(count + 1)
    )
    assert all(chunk.position == 0 for chunk in plan.chunks)


def test_a_receiver_packs_as_the_sender_did() -> None:
    many = state(*tensors(PACK_FROM * 2, 40))
    assert len(make_plan(many, pack_bytes=0).messages) == PACK_FROM * 2
    few = state(*tensors(2, 40))
    assert len(make_plan(few, pack_bytes=64).messages) == 1
    sent = make_plan(many)
    assert make_plan(many, pack_bytes=sent.pack_bytes) == sent


@pytest.mark.parametrize("pack_bytes", [0, 1 << 12])
def test_a_plan_with_too_many_messages_is_refused(pack_bytes: int) -> None:
    huge = TensorSpec("uint8", 1, (MAX_MESSAGES * CHUNK_BYTES + 1,), (1,), 0, 0)
    with pytest.raises(TooManyMessages):
        make_plan(state(huge), pack_bytes=pack_bytes)


def test_every_chunk_is_in_one_seal_that_follows_it() -> None:
    for count in (1, BLOCK_MESSAGES, BLOCK_MESSAGES + 1, 5 * BLOCK_MESSAGES + 3):
        plan = make_plan(state(*tensors(count, PACK_BYTES)))
        sequence = plan.sequence(digest_blocks=True)
        seals = [item for item in sequence if isinstance(item, DigestBlock)]
        assert [n for seal in seals for n in range(seal.first, seal.end)] == list(range(len(plan.chunks)))
        assert [seal.last for seal in seals] == [False] * (len(seals) - 1) + [True]
        sent = 0
        for item in sequence:
            if isinstance(item, Message):
                sent = item.end
            else:
                assert item.end <= sent <= item.end + BLOCK_LAG, "soon after its messages, and not before"
        assert sequence[-1] == seals[-1]
        assert [item for item in sequence if isinstance(item, Message)] == list(plan.messages)
        assert plan.sequence(digest_blocks=False) == list(plan.messages)


def test_seals_of_packed_messages_have_a_limited_number_of_chunks() -> None:
    # 8,192 chunks in a message.
    plan = make_plan(state(*tensors(12 * BLOCK_CHUNKS // 2 + 1, 128)))
    seals = [item for item in plan.sequence(digest_blocks=True) if isinstance(item, DigestBlock)]
    assert [seal.end - seal.first for seal in seals] == [BLOCK_CHUNKS] * 6 + [1]


def test_a_large_tensor_is_split_into_consecutive_chunks() -> None:
    nbytes = 3 * CHUNK_BYTES + 8
    plan = make_plan(state(TensorSpec("uint8", 1, (nbytes,), (1,), 0, 0)))
    assert [chunk.position for chunk in plan.chunks] == [n * CHUNK_BYTES for n in range(4)]
    assert max(message.nbytes for message in plan.messages) == CHUNK_BYTES
    assert plan.payload_bytes == nbytes


def test_an_empty_tensor_needs_no_message() -> None:
    assert make_plan(state(TensorSpec("float32", 4, (0,), (1,), 0, 0))).messages == ()


def test_both_sides_compute_the_same_plan() -> None:
    described = state(TensorSpec("float32", 4, (1000, 1000), (2000, 1), 0, 16))
    assert make_plan(described, 4096) == make_plan(described, 4096)
