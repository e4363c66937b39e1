"""Sending: nothing before all is known to be sendable, then as much at once as the window allows."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from torchferry.core.plan import WINDOW_BYTES, Message
from torchferry.core.push import MAX_METADATA_BYTES
from torchferry.engine import ReceiveOptions, SendOptions, receive_state, send_state
from torchferry.engine.source import Source
from torchferry.errors import (
    LinkBroken,
    LinkStalled,
    LinkTimeout,
    PeerGaveUp,
    SendLate,
    StateChanged,
    Unsendable,
)
from torchferry.links.base import FRAME_TAG, LENGTH_TAG, Pending
from torchferry.testing import MemoryLink, MemoryNetwork
from torchferry.testing.memory_link import Receipt


class Short(MemoryLink):
    """A link whose messages may be shorter than what they are received into, as gloo's may."""

    sends_short = True

    def recv(self, buffer: torch.Tensor, peer: int, tag: int) -> Pending:
        return WhatThereIs(self._network, (peer, self.rank, tag), buffer)


class WhatThereIs(Receipt):
    """A message that fills as much of its buffer as it has."""

    def wait(self, timeout_s: float) -> None:
        message = self._network.get(self._address, timeout_s)
        self._buffer.view(torch.uint8)[: message.nbytes] = message.view(torch.uint8)


TERMS = SendOptions(timeout_s=10, max_metadata_bytes=MAX_METADATA_BYTES)


def assert_refused(network: MemoryNetwork, reason: str) -> None:
    """Nothing went over the network but the word that no state will come."""
    with pytest.raises(PeerGaveUp, match="rank 0 refused to send its state") as told:
        receive_state(network.link(1), 0, ReceiveOptions(5, MAX_METADATA_BYTES))
    assert reason in str(told.value)
    assert (told.value.peer, told.value.failed_rank, told.value.phase) == (0, 0, "receive metadata")
    assert network.messages == 2


def test_a_leaf_that_cannot_travel_is_found_before_anything_is_sent() -> None:
    network = MemoryNetwork()
    with pytest.raises(Unsendable, match=r"model\.act") as raised:
        send_state(network.link(0), [1], {"model": {"w": torch.ones(3), "act": lambda: 1}}, TERMS)
    assert (raised.value.path, raised.value.phase) == ("model.act", "describe")
    assert_refused(network, str(raised.value.path or ""))


def test_metadata_above_the_cap_is_found_before_anything_is_sent() -> None:
    network = MemoryNetwork()
    with pytest.raises(Unsendable, match="max_metadata_bytes") as raised:
        send_state(network.link(0), [1], {"k": "x" * 1000}, SendOptions(10, max_metadata_bytes=500))
    assert_refused(network, str(raised.value.path or ""))


def test_views_too_tangled_to_list_are_found_before_anything_is_sent() -> None:
    network = MemoryNetwork()
    base = torch.zeros(8_000_000)
    with pytest.raises(Unsendable, match="clone") as raised:
        send_state(network.link(0), [1], {"a": base[::2], "b": base[::3]}, TERMS)
    assert_refused(network, str(raised.value.path or ""))


def test_every_peer_gets_every_message() -> None:
    network = MemoryNetwork()
    report = send_state(network.link(0), [1, 2, 3], {"a": torch.ones(10), "b": torch.ones(5)}, TERMS)
    assert network.messages == 3 * (2 + 2)
    assert report.peers == (1, 2, 3)
    assert report.payload_bytes == 60


def test_bytes_are_sent_from_where_they_lie() -> None:
    handed_over: list[int] = []

    class Watching(MemoryLink):
        """Notes which memory is handed to the link."""

        def send(self, buffer: torch.Tensor, peer: int, tag: int) -> Pending:
            handed_over.append(buffer.data_ptr())
            return super().send(buffer, peer, tag)

    weight = torch.randn(100, 100)
    send_state(Watching(MemoryNetwork(), 0), [1], {"w": weight, "part": weight[3]}, TERMS)
    assert handed_over[2:] == [weight.data_ptr()]


class Slow(MemoryLink):
    """A link that completes nothing by itself, and counts what is under way."""

    def __init__(self) -> None:
        super().__init__(MemoryNetwork(), 0)
        self.under_way = 0
        self.most_under_way = 0
        self.waits: list[float] = []

    def send(self, buffer: torch.Tensor, peer: int, tag: int) -> Pending:
        slow, nbytes = self, buffer.nbytes
        slow.under_way += nbytes
        slow.most_under_way = max(slow.most_under_way, slow.under_way)

        class Work:
            def wait(self, timeout_s: float) -> None:
                slow.under_way -= nbytes
                slow.waits.append(timeout_s)

        return Work()


def test_only_so_many_bytes_are_staged_at_once() -> None:
    link = Slow()
    every_other = torch.empty(6 * WINDOW_BYTES, dtype=torch.uint8)[::2]
    send_state(link, [1], {"big": every_other}, SendOptions(10, MAX_METADATA_BYTES, verify=False))
    assert WINDOW_BYTES / 2 < link.most_under_way <= WINDOW_BYTES
    assert link.under_way == 0


def test_what_is_sent_from_where_it_lies_is_offered_at_once() -> None:
    link = Slow()
    send_state(
        link, [1], torch.empty(3 * WINDOW_BYTES, dtype=torch.uint8), SendOptions(10, 1000, verify=False)
    )
    assert link.most_under_way >= 3 * WINDOW_BYTES
    assert link.under_way == 0


def test_every_wait_gets_what_is_left_of_one_deadline() -> None:
    link = Slow()
    send_state(link, [1], [torch.ones(4) for _ in range(50)], TERMS)
    assert len(link.waits) == 52
    assert link.waits == sorted(link.waits, reverse=True)
    assert link.waits[0] <= 10


def test_a_deadline_that_passes_before_anything_was_sent_leaves_it_so() -> None:
    network = MemoryNetwork()
    with pytest.raises(LinkTimeout, match="nothing was sent: 0 of 16 bytes done") as raised:
        send_state(network.link(0), [1], torch.ones(4), SendOptions(timeout_s=1e-9, max_metadata_bytes=1000))
    assert (raised.value.phase, raised.value.peer) == ("describe", 1)
    assert_refused(network, "describing the state took longer than the timeout")


class Deaf(MemoryLink):
    """A link on which nobody takes anything."""

    def send(self, buffer: torch.Tensor, peer: int, tag: int) -> Pending:
        return self.recv(torch.empty_like(buffer), peer, tag)


def test_a_peer_that_does_not_listen_is_asked_after() -> None:
    terms = SendOptions(timeout_s=0.05, max_metadata_bytes=1000, question="Is rank {peer} there?")
    with pytest.raises(LinkTimeout) as raised:
        send_state(Deaf(MemoryNetwork(), 0), [1], {"w": torch.ones(20)}, terms)
    said = str(raised.value)
    assert raised.value.phase == "send tensors"
    assert "0 of 80 bytes done, last at w (the metadata was not sent)" in said
    assert "Is rank 1 there?" in said
    assert "The timeout was 0.05 s" in said


def test_a_state_without_tensors_has_no_last_path() -> None:
    with pytest.raises(LinkTimeout, match=r"; 0 of 0 bytes done \(the metadata was not sent") as raised:
        send_state(
            Deaf(MemoryNetwork(), 0), [1], {"step": 7}, SendOptions(timeout_s=0.05, max_metadata_bytes=1000)
        )
    assert raised.value.path is None


def test_a_peer_that_stalls_is_not_said_to_have_run_out_of_time() -> None:
    network = MemoryNetwork()
    network.close(1)
    terms = SendOptions(20, MAX_METADATA_BYTES, stall_s=0.2, relay=False)
    with pytest.raises(SendLate) as raised:
        send_state(Held(network, 0, held=2), [1, 2], {"w": torch.ones(3 << 20, dtype=torch.uint8)}, terms)
    assert [type(error) for error in raised.value.failed.values()] == [LinkBroken, LinkStalled]
    assert "The timeout was" not in str(raised.value)


def test_a_sender_that_gives_up_says_farewell_even_past_tiny_messages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    network = MemoryNetwork()
    state = {
        "first": torch.ones(8),
        **{f"tiny{n}": torch.tensor(1.0) for n in range(40)},
        "last": torch.ones(64),
    }
    terms = SendOptions(10, MAX_METADATA_BYTES, hash_first_bytes=0, pack_from=1000)

    def fail_after_two(self: Source, message: Message) -> torch.Tensor:
        if message.number >= 2:
            raise RuntimeError("this memory can't be read")
        return read(self, message)

    read = Source.read
    monkeypatch.setattr(Source, "read", fail_after_two)
    with pytest.raises(RuntimeError, match="can't be read"):
        send_state(Short(network, 0), [1], state, terms)
    with pytest.raises(PeerGaveUp):
        receive_state(Short(network, 1), 0, ReceiveOptions(5, MAX_METADATA_BYTES))


class Meddling(MemoryLink):
    """A link on which something happens as soon as the first message of the payload is sent."""

    def __init__(self, happens: Callable[[], object]) -> None:
        super().__init__(MemoryNetwork(), 0)
        self._happens = happens
        self._sent = 0

    def send(self, buffer: torch.Tensor, peer: int, tag: int) -> Pending:
        self._sent += 1
        if self._sent == 3:
            self._happens()
        return super().send(buffer, peer, tag)


CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "in place": lambda tensor: tensor.fill_(2),
    "by .data": lambda tensor: tensor.data.fill_(2),
    "by ndarray": lambda tensor: tensor.numpy().fill(2),
}


@pytest.mark.parametrize("count", [20, 300_000], ids=["small", "large"])
@pytest.mark.parametrize("how", CHANGES)
def test_a_change_during_the_send_is_noticed_however_it_is_made(how: str, count: int) -> None:
    pytest.importorskip("numpy")
    tensor = torch.ones(count)
    assert_noticed(tensor, lambda: CHANGES[how](tensor))


@pytest.mark.parametrize("count", [20, 300_000], ids=["small", "large"])
def test_a_change_of_an_ndarray_is_noticed(count: int) -> None:
    array = pytest.importorskip("numpy").ones(count)
    assert_noticed(array, lambda: array.fill(2))


def assert_noticed(value: object, happens: Callable[[], object]) -> None:
    with pytest.raises(StateChanged) as raised:
        send_state(Meddling(happens), [1], {"same": torch.ones(4), "changed": value}, TERMS)
    assert raised.value.paths == ("changed",)


class Held(Short):
    """A link on which what follows the frame is held back from one rank until it is let go."""

    def __init__(self, network: MemoryNetwork, rank: int, held: int) -> None:
        super().__init__(network, rank)
        self._held = held
        self.let_go = threading.Event()

    def send(self, buffer: torch.Tensor, peer: int, tag: int) -> Pending:
        sent = super().send(buffer, peer, tag)
        return HeldBack(self.let_go) if peer == self._held and tag not in (LENGTH_TAG, FRAME_TAG) else sent


class HeldBack:
    """A message that is complete when it is let go."""

    def __init__(self, let_go: threading.Event) -> None:
        self._let_go = let_go

    def wait(self, timeout_s: float) -> None:
        if not self._let_go.wait(timeout_s):
            raise LinkTimeout("held back")


def test_a_peer_that_was_given_up_is_told_so_if_it_comes_back() -> None:
    network = MemoryNetwork()
    link = Held(network, 0, held=1)
    state = {"w": torch.ones(3 << 20, dtype=torch.uint8)}
    with pytest.raises(SendLate) as raised:
        send_state(link, [1, 2], state, SendOptions(20, MAX_METADATA_BYTES, stall_s=0.2, relay=False))
    assert raised.value.delivered == (2,)
    link.let_go.set()
    received, _ = receive_state(network.link(2), 0, ReceiveOptions(5, MAX_METADATA_BYTES))
    assert isinstance(received, dict)
    with pytest.raises(PeerGaveUp):
        receive_state(Short(network, 1), 0, ReceiveOptions(5, MAX_METADATA_BYTES))


def test_a_peer_that_a_relay_has_given_up_is_told_so_if_it_comes_back() -> None:
    network = MemoryNetwork()
    state = {"w": torch.ones(3 << 20, dtype=torch.uint8)}
    send_state(Short(network, 0), [1, 2], state, SendOptions(20, MAX_METADATA_BYTES, relay=True))
    relay = Held(network, 1, held=2)
    terms = ReceiveOptions(20, MAX_METADATA_BYTES, rank=1, stall_s=0.2, window_bytes=1 << 20)
    received, report = receive_state(relay, 0, terms)
    assert isinstance(received, dict)
    assert torch.equal(received["w"], state["w"])
    assert report.not_forwarded is not None
    assert "stalled" in report.not_forwarded or "no message" in report.not_forwarded
    relay.let_go.set()
    with pytest.raises(PeerGaveUp, match="rank 1 aborted the transfer"):
        receive_state(Short(network, 2), 0, ReceiveOptions(5, MAX_METADATA_BYTES, rank=2))
