"""The protocol's small rules: lengths, tags, seals."""

from __future__ import annotations

import pytest

from torchferry.core.plan import Message
from torchferry.core.protocol import (
    FAREWELL_BYTES,
    FRAME_TAG,
    LENGTH_TAG,
    PROBE_TAG,
    Tags,
    check_length,
    culprit_in,
    farewell,
)
from torchferry.core.report import Report
from torchferry.core.seals import NONCE_BYTES, Seal, decode_seal, encode_farewell, encode_seal
from torchferry.errors import BadManifest

_NONCE = b"n" * NONCE_BYTES


def test_no_two_messages_under_way_at_once_share_a_tag() -> None:
    tags = [LENGTH_TAG, FRAME_TAG, PROBE_TAG]
    for origin in (0, 1, 255):
        for serial in (1, 2, 511):
            of = Tags(origin, serial)
            # More than a window ever holds; after 2,048 they begin again, and are taken in order.
            tags += [of.of(Message(number, 0, 1, 1)) for number in range(1000, 3000)]
            tags += [of.of(Seal(number, 0, 1, False)) for number in range(1000, 3000)]
    assert len(set(tags)) == len(tags)


def test_every_tag_is_one_that_gloo_takes() -> None:
    for origin in (0, 255, 256, 10**6):
        for serial in (0, 511, 512, 10**9):
            tag = Tags(origin, serial).of(Seal(10**6 - 1, 0, 1, True))
            assert LENGTH_TAG < tag < 2**31


@pytest.mark.parametrize("changed", [False, True])
def test_a_seal_says_digests_and_whether_all_is_well(changed: bool) -> None:
    data = encode_seal([1, 2**64 - 1, 0], _NONCE, changed=changed)
    assert len(data) == Seal(0, 4, 7, last=True).nbytes
    assert decode_seal(data) == (_NONCE, (1, 2**64 - 1, 0), changed, None)


def test_a_seal_may_be_a_farewell() -> None:
    seal = Seal(0, 4, 7, last=True)
    data = encode_farewell(seal, _NONCE, 3)
    assert len(data) == seal.nbytes
    assert decode_seal(data)[0] == _NONCE
    assert (decode_seal(data).changed, decode_seal(data).culprit) == (False, 3)


def test_a_farewell_belongs_to_one_transfer_and_names_a_culprit() -> None:
    word = farewell(_NONCE, 7)
    assert len(word) == FAREWELL_BYTES
    assert culprit_in(word, _NONCE) == 7
    assert culprit_in(word + b"what the buffer held before", _NONCE) == 7
    assert culprit_in(word, bytes(NONCE_BYTES)) is None
    assert culprit_in(word[:-1], _NONCE) is None
    assert culprit_in(farewell(b"", 7), b"") is None, "a transfer without a nonce has no farewell"


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
    assert "with nobody" in str(Report((), 0, 0, 0, {}))
    assert "with rank 0 by way of rank 2" in str(Report((0,), 1, 1, 1, {}, forwarded_by=2))
