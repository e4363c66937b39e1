"""The protocol's small rules: lengths, tags, seals."""

from __future__ import annotations

import pytest

from torchferry.core.protocol import (
    FAREWELL_BYTES,
    FRAME_TAG,
    LENGTH_TAG,
    MAX_MESSAGES,
    NONCE_BYTES,
    PROBE_TAG,
    SEAL_MESSAGES,
    Tags,
    check_length,
    decode_seal,
    encode_seal,
    farewell,
    seals_of,
)
from torchferry.core.report import Report
from torchferry.errors import BadManifest


def test_no_two_messages_of_transfers_side_by_side_share_a_tag() -> None:
    seals = len(seals_of(MAX_MESSAGES))
    tags = [LENGTH_TAG, FRAME_TAG, PROBE_TAG]
    for serial in (1, 2, 3):
        of = Tags(serial)
        tags += [of.message(0), of.message(MAX_MESSAGES - 1), of.seal(0), of.seal(seals - 1)]
    assert len(set(tags)) == len(tags)
    assert Tags(5).message(MAX_MESSAGES - 1) < Tags(5).seal(seals - 1)
    assert max(Tags(serial).seal(0) for serial in range(5000)) < 2**31


def test_every_message_is_in_one_seal() -> None:
    for messages in (0, 1, SEAL_MESSAGES, SEAL_MESSAGES + 1, 5 * SEAL_MESSAGES + 3):
        covered = [n for seal in seals_of(messages) for n in range(seal.first, seal.end)]
        assert covered == list(range(messages))


@pytest.mark.parametrize("changed", [False, True])
def test_a_seal_says_digests_and_whether_all_is_well(changed: bool) -> None:
    (seal,) = seals_of(3)
    data = encode_seal([1, 2**64 - 1, 0], changed=changed)
    assert len(data) == seal.nbytes
    assert decode_seal(data) == ((1, 2**64 - 1, 0), changed)


def test_a_farewell_belongs_to_one_transfer() -> None:
    one, two = farewell(bytes(NONCE_BYTES)), farewell(b"x" * NONCE_BYTES)
    assert one != two
    assert len(one) == FAREWELL_BYTES


@pytest.mark.parametrize("length", [0, -1, 101, 2**62])
def test_a_length_that_cannot_be_is_refused_with_the_number(length: int) -> None:
    with pytest.raises(BadManifest, match=f" {length} bytes"):
        check_length(length, 100)


def test_a_length_up_to_the_most_is_accepted() -> None:
    check_length(1, 100)
    check_length(100, 100)


def test_a_report_adds_up_and_reads_well() -> None:
    report = Report((3,), 1_000_000, 200, 4, {"describe": 0.25, "send tensors": 0.25})
    assert report.seconds == 0.5
    assert report.bytes_per_second == 2_000_000
    assert "1,000,000 bytes in 4 messages with rank 3, 0.500 s" in str(report)
    assert Report((), 0, 0, 0, {}).bytes_per_second == 0
