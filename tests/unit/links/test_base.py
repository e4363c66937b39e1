"""Ordered channels over tagged messages: which tags they use, and what all links on a group share."""

from __future__ import annotations

import threading

import pytest
import torch

from torchferry.core.push import ABORT_BYTES, NONCE_BYTES, TransferId, decode_abort
from torchferry.errors import GroupBroken, LinkTimeout, PeerGaveUp
from torchferry.links.base import FRAME_TAG, LENGTH_TAG, PROBE_TAG
from torchferry.testing import MemoryLink, MemoryNetwork

NONCE = b"n" * NONCE_BYTES


class RecordingLink(MemoryLink):
    """Records the tag and the size of every message."""

    sends_short = True

    def __init__(self) -> None:
        super().__init__(MemoryNetwork(), 0)
        self.sent: list[tuple[int, int]] = []

    def send(self, buffer: torch.Tensor, peer: int, tag: int) -> object:  # type: ignore[override]
        self.sent.append((tag, buffer.nbytes))
        return super().send(buffer, peer, tag)


def tags(origin: int, serial: int, count: int) -> list[int]:
    link = RecordingLink()
    channel = link.channel(1, TransferId(origin, serial, NONCE))
    for _ in range(count):
        channel.send(torch.zeros(1, dtype=torch.uint8))
    return [tag for tag, _ in link.sent]


def test_no_two_messages_in_flight_share_a_tag() -> None:
    found = [LENGTH_TAG, FRAME_TAG, PROBE_TAG]
    for origin in (0, 1, 255):
        for serial in (1, 2, 511):
            # More than a window holds.
            found += tags(origin, serial, 4096)
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("origin", [0, 255, 256, 10**6])
@pytest.mark.parametrize("serial", [0, 511, 512, 10**9])
def test_every_tag_is_in_the_range_of_gloo(origin: int, serial: int) -> None:
    assert all(PROBE_TAG < tag < 2**31 for tag in tags(origin, serial, 5000))


def test_a_length_and_a_frame_have_their_own_tags() -> None:
    link = RecordingLink()
    with link.frames(1, "send", 1.0) as frames:
        for _ in range(2):
            frames.send(torch.zeros(1, dtype=torch.uint8))
    assert [tag for tag, _ in link.sent] == [LENGTH_TAG, FRAME_TAG]


def test_an_abort_takes_the_place_of_the_first_message_that_is_long_enough() -> None:
    link = RecordingLink()
    channel = link.channel(1, TransferId(0, 1, NONCE))
    assert len(channel.send_abort(3, [4, 8, 1000, 1000])) == 3
    assert [nbytes for _, nbytes in link.sent] == [4, 8, ABORT_BYTES]
    last = link._network.get((0, 1, link.sent[-1][0]), 1.0)
    assert decode_abort(bytes(last.tolist()), NONCE) == 3


@pytest.mark.parametrize("expected", [[], [4, 8]], ids=["nothing expected", "all too short"])
def test_no_abort_is_sent_if_no_message_is_long_enough(expected: list[int]) -> None:
    link = RecordingLink()
    assert link.channel(1, TransferId(0, 1, NONCE)).send_abort(3, expected) == []
    assert not link.sent


def test_an_abort_names_the_failed_rank_and_the_peer() -> None:
    link = RecordingLink()
    channel = link.channel(1, TransferId(0, 1, NONCE))
    channel.raise_if_aborted(bytes(ABORT_BYTES))
    channel.send_abort(3, [1000])
    message = link._network.get((0, 1, link.sent[-1][0]), 1.0)
    with pytest.raises(PeerGaveUp, match=r"rank 1 aborted .* rank 3's side") as raised:
        channel.raise_if_aborted(bytes(message.tolist()))
    assert (raised.value.peer, raised.value.failed_rank) == (1, 3)


def test_one_transfer_at_a_time_holds_the_frames_of_a_peer() -> None:
    network = MemoryNetwork()
    with network.link(0).frames(1, "send", 1.0):
        # Another link of the same group, the other direction, and another peer.
        with pytest.raises(LinkTimeout, match="rank 1 still exchanges its frame"):
            network.link(0).frames(1, "send", 0.01).__enter__()
        with network.link(0).frames(1, "receive", 0.01), network.link(0).frames(2, "send", 0.01):
            pass
    with network.link(0).frames(1, "send", 0.01):
        pass


def test_transfers_of_several_threads_get_different_serial_numbers() -> None:
    network, found = MemoryNetwork(), list[int]()
    threads = [
        threading.Thread(
            target=lambda: found.extend(network.link(0).new_transfer().serial for _ in range(200))
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 800


def test_the_first_failure_breaks_all_links_of_a_group() -> None:
    network = MemoryNetwork()
    one, two = network.link(0), network.link(0)
    one.check_usable()
    one.mark_broken(ValueError("first\nwith a second line"))
    one.mark_broken(ValueError("later"))
    with pytest.raises(GroupBroken, match="ValueError: first") as raised:
        two.check_usable()
    assert "second line" not in str(raised.value)
    assert "later" not in str(raised.value)
