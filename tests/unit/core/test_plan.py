"""The plan: one message a tensor, unless it is large; and nothing but what is used."""

from __future__ import annotations

from torchferry.core.manifest import Leaf, Manifest, TensorSpec
from torchferry.core.plan import CHUNK_BYTES, make_plan


def state(*tensors: TensorSpec) -> Manifest:
    return Manifest(0, (), (Leaf("tensor", (0,)),), tensors, (1 << 40,) * 10)


def test_small_tensors_are_one_message_each_in_order() -> None:
    plan = make_plan(state(*(TensorSpec("float32", 4, (10,), (1,), n, 0) for n in range(5))))
    assert [message.piece.storage for message in plan.messages] == [0, 1, 2, 3, 4]
    assert [message.number for message in plan.messages] == [0, 1, 2, 3, 4]
    assert plan.payload_bytes == 5 * 40


def test_a_large_tensor_is_cut_and_the_pieces_follow_one_another() -> None:
    nbytes = 3 * CHUNK_BYTES + 8
    plan = make_plan(state(TensorSpec("uint8", 1, (nbytes,), (1,), 0, 0)))
    assert [message.position for message in plan.messages] == [n * CHUNK_BYTES for n in range(4)]
    assert max(message.nbytes for message in plan.messages) == CHUNK_BYTES
    assert plan.payload_bytes == nbytes


def test_an_empty_tensor_needs_no_message() -> None:
    assert make_plan(state(TensorSpec("float32", 4, (0,), (1,), 0, 0))).messages == ()


def test_both_ends_derive_the_same_plan() -> None:
    described = state(TensorSpec("float32", 4, (1000, 1000), (2000, 1), 0, 16))
    assert make_plan(described, 4096) == make_plan(described, 4096)
