"""The push protocol: the states of both ends, and the bytes around the payload."""

from __future__ import annotations

from enum import Enum

import pytest

from torchferry.core.machine import Machine
from torchferry.core.manifest import Manifest, TensorSpec
from torchferry.core.plan import PACK_BYTES, Chunk, make_plan
from torchferry.core.push import (
    ABORT_BYTES,
    ANSWER_BYTES,
    BLOCK_CHUNKS,
    BLOCK_LAG,
    NONCE_BYTES,
    Answer,
    DigestBlock,
    ReceiverState,
    SenderState,
    check_length,
    decode_abort,
    decode_answer,
    decode_block,
    encode_abort,
    encode_answer,
    encode_block,
    payload_order,
)
from torchferry.core.report import Report
from torchferry.errors import BadManifest

NONCE = b"n" * NONCE_BYTES


def reachable(start: SenderState | ReceiverState) -> set[str]:
    states = {state.label: state for state in type(start)}
    found, todo = {start.label}, [start.label]
    while todo:
        for label in set(states[todo.pop()].following) - found:
            found.add(label)
            todo.append(label)
    return found


@pytest.mark.parametrize(
    ("start", "final"),
    [
        (
            SenderState.DESCRIBING,
            {SenderState.REFUSED, SenderState.REJECTED, SenderState.ABORTED, SenderState.SENT},
        ),
        (ReceiverState.DESCRIBING, {ReceiverState.DONE, ReceiverState.REJECTED}),
    ],
    ids=["sender", "receiver"],
)
def test_every_state_can_be_reached(start: SenderState | ReceiverState, final: set[Enum]) -> None:
    assert {state.label for state in type(start)} == reachable(start)
    assert {state for state in type(start) if not state.following} == final
    assert all(state.label == state.name.lower() for state in type(start))


def test_every_state_that_can_fail_has_a_phase() -> None:
    assert all(bool(state.phase) == bool(state.following) for state in ReceiverState)


def test_no_message_is_pending_in_a_final_state() -> None:
    for state in (ReceiverState.DONE, ReceiverState.REJECTED, ReceiverState.CHECKING):
        assert not state.messages_pending


def test_a_machine_refuses_a_state_that_may_not_follow() -> None:
    machine = Machine(ReceiverState.DESCRIBING)
    machine.advance(ReceiverState.WAITING)
    with pytest.raises(AssertionError, match="not followed by"):
        machine.advance(ReceiverState.RECEIVING)
    assert machine.state is ReceiverState.WAITING


@pytest.mark.parametrize("changed", [False, True])
@pytest.mark.parametrize("digests", [(1, 2**64 - 1, 0), (5,)], ids=["three chunks", "one chunk"])
def test_a_digest_block_has_digests_and_whether_the_state_changed(
    changed: bool, digests: tuple[int, ...]
) -> None:
    block = DigestBlock(4, 4 + len(digests), is_last=True)
    data = encode_block(block, digests, NONCE, changed=changed)
    assert len(data) == block.nbytes
    assert decode_block(block, data) == (NONCE, digests, changed)


def test_an_abort_fits_in_the_place_of_any_digest_block() -> None:
    assert DigestBlock(0, 1, is_last=True).nbytes >= ABORT_BYTES


def test_an_abort_belongs_to_one_transfer_and_names_the_failed_rank() -> None:
    abort = encode_abort(NONCE, 7)
    assert len(abort) == ABORT_BYTES
    assert decode_abort(abort, NONCE) == 7
    assert decode_abort(abort + b"what the buffer held before", NONCE) == 7
    assert decode_abort(abort, bytes(NONCE_BYTES)) is None
    assert decode_abort(abort[:-1], NONCE) is None
    assert decode_abort(encode_abort(b"", 7), b"") is None, "a transfer without a nonce has no aborts"


@pytest.mark.parametrize("length", [0, -1, 101, 2**62])
def test_an_unacceptable_length_is_refused_with_the_number(length: int) -> None:
    with pytest.raises(BadManifest, match=f" {length} bytes"):
        check_length(length, 100)


def test_a_length_up_to_the_limit_is_accepted() -> None:
    check_length(1, 100)
    check_length(100, 100)


def test_a_report_adds_up_and_reads_well() -> None:
    report = Report((3,), 1_000_000, 200, 4, {"describe": 0.25, "send tensors": 0.25})
    assert report.seconds == 0.5
    assert report.bytes_per_second == 2_000_000
    assert "1,000,000 bytes in 4 messages with rank 3, 0.500 s" in str(report)
    assert Report((), 0, 0, 0, {}).bytes_per_second == 0
    assert "with no peer" in str(Report((), 0, 0, 0, {}))
    assert "with rank 0 through rank 2" in str(Report((0,), 1, 1, 1, {}, forwarded_by=2))


def test_every_chunk_is_in_one_digest_block_that_follows_it() -> None:
    for count in (1, BLOCK_CHUNKS, BLOCK_CHUNKS + 1, 5 * BLOCK_CHUNKS + 3):
        tensors = tuple(TensorSpec("uint8", 1, (PACK_BYTES,), (1,), n, 0) for n in range(count))
        plan = make_plan(Manifest(0, (), (), tensors, (PACK_BYTES,) * count))
        order = payload_order(plan, digest_blocks=True)
        blocks = [item for item in order if isinstance(item, DigestBlock)]
        assert [n for block in blocks for n in range(block.first, block.end)] == list(range(len(plan.chunks)))
        assert [block.is_last for block in blocks] == [False] * (len(blocks) - 1) + [True]
        sent = 0
        for item in order:
            if isinstance(item, Chunk):
                sent = item.number + 1
            else:
                assert item.end <= sent <= item.end + BLOCK_LAG, "soon after its chunks, and not before"
        assert order[-1] == blocks[-1]
        assert [item for item in order if isinstance(item, Chunk)] == list(plan.chunks)
        assert payload_order(plan, digest_blocks=False) == list(plan.chunks)


@pytest.mark.parametrize("answer", Answer)
def test_an_answer_is_decoded(answer: Answer) -> None:
    assert decode_answer(encode_answer(NONCE, answer), NONCE) is answer


@pytest.mark.parametrize(
    "data",
    [
        b"",
        bytes(ANSWER_BYTES),
        encode_answer(b"o" * NONCE_BYTES, Answer.TAKEN),
        encode_answer(NONCE, Answer.TAKEN)[:-1],
        NONCE + (4).to_bytes(8, "little"),
        NONCE + (2**63).to_bytes(8, "little"),
    ],
    ids=["empty", "zeros", "another transfer", "short", "unknown", "huge"],
)
def test_an_answer_that_is_not_one_is_rejected(data: bytes) -> None:
    with pytest.raises(BadManifest, match="answer"):
        decode_answer(data, NONCE)
