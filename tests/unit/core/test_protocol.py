"""The protocol's small rules: lengths, tags, and the deadline."""

from __future__ import annotations

import pytest

from torchferry.core.protocol import FRAME_TAG, LENGTH_TAG, Deadline, check_length, message_tag
from torchferry.core.report import Report
from torchferry.errors import BadManifest, LinkTimeout


def test_every_message_has_a_tag_of_its_own() -> None:
    tags = [LENGTH_TAG, FRAME_TAG, *(message_tag(number) for number in range(1000))]
    assert len(set(tags)) == len(tags)
    assert max(tags) < 2**31


@pytest.mark.parametrize("length", [0, -1, 101, 2**62])
def test_a_length_that_cannot_be_is_refused_with_the_number(length: int) -> None:
    with pytest.raises(BadManifest, match=f" {length} bytes"):
        check_length(length, 100)


def test_a_length_up_to_the_most_is_accepted() -> None:
    check_length(1, 100)
    check_length(100, 100)


def test_a_deadline_is_one_point_in_time() -> None:
    deadline = Deadline(now_s=100.0, timeout_s=5.0)
    assert deadline.left_s(100.0) == 5.0
    assert deadline.left_s(104.0) == 1.0
    with pytest.raises(LinkTimeout, match="5 s"):
        deadline.left_s(105.0)


def test_a_report_adds_up_and_reads_well() -> None:
    report = Report((3,), 1_000_000, 200, 4, {"describe": 0.25, "send tensors": 0.25})
    assert report.seconds == 0.5
    assert report.bytes_per_second == 2_000_000
    assert "1,000,000 bytes in 4 messages with rank 3, 0.500 s" in str(report)
    assert Report((), 0, 0, 0, {}).bytes_per_second == 0
