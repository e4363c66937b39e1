"""Sending: the whole state is checked first; then messages are sent as far as the window allows."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from tests.support.links import FreeingLink, ShortLink
from torchferry.core.plan import WINDOW_BYTES, Chunk
from torchferry.core.push import MAX_METADATA_BYTES
from torchferry.engine.push import ReceiveOptions, SendOptions, receive_state, send, send_state
from torchferry.engine.source import ChunkSource
from torchferry.errors import (
    LinkBroken,
    LinkStalled,
    LinkTimeout,
    PeerGaveUp,
    SendLate,
    StateChanged,
    StateError,
    Unsendable,
)
from torchferry.links.base import FRAME_TAG, LENGTH_TAG, Pending
from torchferry.testing import MemoryLink, MemoryNetwork

OPTIONS = SendOptions(timeout_s=10, max_metadata_bytes=MAX_METADATA_BYTES)


def assert_aborted(network: MemoryNetwork, reason: str) -> None:
    """Check that only an abort was sent, and that the receiver raises it."""
    with pytest.raises(PeerGaveUp, match="rank 0 refused to send its state") as raised:
        receive_state(network.link(1), 0, ReceiveOptions(5, MAX_METADATA_BYTES))
    assert reason in str(raised.value)
    assert (raised.value.peer, raised.value.failed_rank, raised.value.phase) == (0, 0, "receive metadata")
    assert network.messages == 2


def test_an_unsendable_leaf_is_found_before_anything_is_sent() -> None:
    network = MemoryNetwork()
    with pytest.raises(Unsendable, match=r"model\.act") as raised:
        send_state(network.link(0), [1], {"model": {"w": torch.ones(3), "act": lambda: 1}}, OPTIONS)
    assert (raised.value.path, raised.value.phase) == ("model.act", "describe")
    assert_aborted(network, str(raised.value.path or ""))


def test_metadata_above_the_limit_is_found_before_anything_is_sent() -> None:
    network = MemoryNetwork()
    with pytest.raises(Unsendable, match="max_metadata_bytes") as raised:
        send_state(network.link(0), [1], {"k": "x" * 1000}, SendOptions(10, max_metadata_bytes=500))
    assert_aborted(network, str(raised.value.path or ""))


def test_views_with_too_many_extents_are_found_before_anything_is_sent() -> None:
    network = MemoryNetwork()
    base = torch.zeros(8_000_000)
    with pytest.raises(Unsendable, match="clone") as raised:
        send_state(network.link(0), [1], {"a": base[::2], "b": base[::3]}, OPTIONS)
    assert_aborted(network, str(raised.value.path or ""))


def test_every_peer_gets_every_message() -> None:
    network = MemoryNetwork()
    report = send_state(network.link(0), [1, 2, 3], {"a": torch.ones(10), "b": torch.ones(5)}, OPTIONS)
    assert network.messages == 3 * (2 + 2)
    assert report.peers == (1, 2, 3)
    assert report.payload_bytes == 60


def test_bytes_are_sent_from_the_tensor_s_memory() -> None:
    sent_from: list[int] = []

    class RecordingLink(MemoryLink):
        """Records the memory that is sent."""

        def send(self, buffer: torch.Tensor, peer: int, tag: int) -> Pending:
            sent_from.append(buffer.data_ptr())
            return super().send(buffer, peer, tag)

    weight = torch.randn(100, 100)
    send_state(RecordingLink(MemoryNetwork(), 0), [1], {"w": weight, "part": weight[3]}, OPTIONS)
    assert sent_from[2:] == [weight.data_ptr()]


class CountingLink(MemoryLink):
    """A link whose messages complete when they are waited for. It counts the bytes in flight."""

    def __init__(self) -> None:
        super().__init__(MemoryNetwork(), 0)
        self.in_flight = 0
        self.max_in_flight = 0
        self.waits: list[float] = []

    def send(self, buffer: torch.Tensor, peer: int, tag: int) -> Pending:
        link, nbytes = self, buffer.nbytes
        link.in_flight += nbytes
        link.max_in_flight = max(link.max_in_flight, link.in_flight)

        class Work:
            def wait(self, timeout_s: float) -> None:
                link.in_flight -= nbytes
                link.waits.append(timeout_s)

        return Work()


def test_staged_bytes_in_flight_are_limited_by_the_window() -> None:
    link = CountingLink()
    every_other = torch.empty(6 * WINDOW_BYTES, dtype=torch.uint8)[::2]
    send_state(link, [1], {"big": every_other}, SendOptions(10, MAX_METADATA_BYTES, verify=False))
    assert WINDOW_BYTES / 2 < link.max_in_flight <= WINDOW_BYTES
    assert link.in_flight == 0


def test_bytes_that_are_not_staged_are_not_limited_by_the_window() -> None:
    link = CountingLink()
    send_state(
        link, [1], torch.empty(3 * WINDOW_BYTES, dtype=torch.uint8), SendOptions(10, 1000, verify=False)
    )
    assert link.max_in_flight >= 3 * WINDOW_BYTES
    assert link.in_flight == 0


def test_every_wait_gets_the_time_until_the_one_deadline() -> None:
    link = CountingLink()
    send_state(link, [1], [torch.ones(4) for _ in range(50)], OPTIONS)
    assert len(link.waits) == 52
    assert link.waits == sorted(link.waits, reverse=True)
    assert link.waits[0] <= 10


def test_nothing_is_sent_if_the_deadline_passes_during_the_description() -> None:
    network = MemoryNetwork()
    with pytest.raises(LinkTimeout, match="nothing was sent: 0 of 16 bytes done") as raised:
        send_state(network.link(0), [1], torch.ones(4), SendOptions(timeout_s=1e-9, max_metadata_bytes=1000))
    assert (raised.value.phase, raised.value.peer) == ("describe", 1)
    assert_aborted(network, "describing the state took longer than the timeout")


class UnreadLink(MemoryLink):
    """A link whose messages are never received."""

    def send(self, buffer: torch.Tensor, peer: int, tag: int) -> Pending:
        return self.recv(torch.empty_like(buffer), peer, tag)


def test_the_error_for_a_peer_that_does_not_receive_has_the_question() -> None:
    options = SendOptions(timeout_s=0.05, max_metadata_bytes=1000, question="Is rank {peer} there?")
    with pytest.raises(LinkTimeout) as raised:
        send_state(UnreadLink(MemoryNetwork(), 0), [1], {"w": torch.ones(20)}, options)
    message = str(raised.value)
    assert raised.value.phase == "send tensors"
    assert "0 of 80 bytes done, last at w (the metadata was not sent)" in message
    assert "Is rank 1 there?" in message
    assert "The timeout was 0.05 s" in message


def test_the_error_for_a_state_without_tensors_has_no_path() -> None:
    with pytest.raises(LinkTimeout, match=r"; 0 of 0 bytes done \(the metadata was not sent") as raised:
        send_state(
            UnreadLink(MemoryNetwork(), 0),
            [1],
            {"step": 7},
            SendOptions(timeout_s=0.05, max_metadata_bytes=1000),
        )
    assert raised.value.path is None


def test_the_error_for_a_stalled_peer_does_not_mention_the_timeout() -> None:
    network = MemoryNetwork()
    network.close(1)
    options = SendOptions(20, MAX_METADATA_BYTES, stall_s=0.2, relay=False)
    with pytest.raises(SendLate) as raised:
        send_state(
            HoldingLink(network, 0, held=2), [1, 2], {"w": torch.ones(3 << 20, dtype=torch.uint8)}, options
        )
    assert [type(error) for error in raised.value.failed.values()] == [LinkBroken, LinkStalled]
    assert "The timeout was" not in str(raised.value)


def test_a_failing_sender_sends_an_abort_even_after_tiny_messages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    network = MemoryNetwork()
    state = {
        "first": torch.ones(8),
        **{f"tiny{n}": torch.tensor(1.0) for n in range(40)},
        "last": torch.ones(64),
    }
    options = SendOptions(10, MAX_METADATA_BYTES, hash_first_bytes=0, pack_from=1000)

    def fail_after_two(self: ChunkSource, chunk: Chunk) -> torch.Tensor:
        if chunk.number >= 2:
            raise RuntimeError("this memory can't be read")
        return read(self, chunk)

    read = ChunkSource.read
    monkeypatch.setattr(ChunkSource, "read", fail_after_two)
    with pytest.raises(RuntimeError, match="can't be read"):
        send_state(ShortLink(network, 0), [1], state, options)
    with pytest.raises(PeerGaveUp):
        receive_state(ShortLink(network, 1), 0, ReceiveOptions(5, MAX_METADATA_BYTES))


def test_a_sender_that_can_t_hash_what_it_sent_sends_an_abort() -> None:
    network, tensor = MemoryNetwork(), torch.ones(48_000_000, dtype=torch.uint8)
    with pytest.raises(StateError, match="freed during the transfer"):
        send_state(FreeingLink(network, 0, tensor), [1], {"a": tensor}, SendOptions(10, MAX_METADATA_BYTES))
    with pytest.raises(PeerGaveUp, match="rank 0 aborted the transfer"):
        receive_state(ShortLink(network, 1), 0, ReceiveOptions(5, MAX_METADATA_BYTES))


class HookedLink(MemoryLink):
    """A link that calls `hook` when the first message of the payload is sent."""

    def __init__(self, hook: Callable[[], object]) -> None:
        super().__init__(MemoryNetwork(), 0)
        self._hook = hook
        self._sent = 0

    def send(self, buffer: torch.Tensor, peer: int, tag: int) -> Pending:
        self._sent += 1
        if self._sent == 3:
            self._hook()
        return super().send(buffer, peer, tag)


CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "in place": lambda tensor: tensor.fill_(2),
    "by .data": lambda tensor: tensor.data.fill_(2),
    "by ndarray": lambda tensor: tensor.numpy().fill(2),
}


@pytest.mark.parametrize("count", [20, 300_000], ids=["small", "large"])
@pytest.mark.parametrize("how", CHANGES)
def test_a_change_during_the_send_is_detected(how: str, count: int) -> None:
    pytest.importorskip("numpy")
    tensor = torch.ones(count)
    assert_detected(tensor, lambda: CHANGES[how](tensor))


@pytest.mark.parametrize("count", [20, 300_000], ids=["small", "large"])
def test_a_change_of_an_ndarray_is_detected(count: int) -> None:
    array = pytest.importorskip("numpy").ones(count)
    assert_detected(array, lambda: array.fill(2))


def assert_detected(value: object, hook: Callable[[], object]) -> None:
    with pytest.raises(StateChanged) as raised:
        send_state(HookedLink(hook), [1], {"same": torch.ones(4), "changed": value}, OPTIONS)
    assert raised.value.paths == ("changed",)


class HoldingLink(ShortLink):
    """A link that holds back the payload to one rank until `released` is set."""

    def __init__(self, network: MemoryNetwork, rank: int, held: int) -> None:
        super().__init__(network, rank)
        self._held = held
        self.released = threading.Event()

    def send(self, buffer: torch.Tensor, peer: int, tag: int) -> Pending:
        sent = super().send(buffer, peer, tag)
        return (
            HeldMessage(self.released) if peer == self._held and tag not in (LENGTH_TAG, FRAME_TAG) else sent
        )


class HeldMessage:
    """A message that completes when `released` is set."""

    def __init__(self, released: threading.Event) -> None:
        self._released = released

    def wait(self, timeout_s: float) -> None:
        if not self._released.wait(timeout_s):
            raise LinkTimeout("held back")


def test_a_stalled_peer_receives_the_abort_when_it_continues() -> None:
    network = MemoryNetwork()
    link = HoldingLink(network, 0, held=1)
    state = {"w": torch.ones(3 << 20, dtype=torch.uint8)}
    with pytest.raises(SendLate) as raised:
        send_state(link, [1, 2], state, SendOptions(20, MAX_METADATA_BYTES, stall_s=0.2, relay=False))
    assert raised.value.delivered == (2,)
    link.released.set()
    received, _ = receive_state(network.link(2), 0, ReceiveOptions(5, MAX_METADATA_BYTES))
    assert isinstance(received, dict)
    with pytest.raises(PeerGaveUp):
        receive_state(ShortLink(network, 1), 0, ReceiveOptions(5, MAX_METADATA_BYTES))


def test_a_peer_that_stalled_a_relay_receives_the_abort_when_it_continues() -> None:
    network = MemoryNetwork()
    state = {"w": torch.ones(3 << 20, dtype=torch.uint8)}
    send_state(ShortLink(network, 0), [1, 2], state, SendOptions(20, MAX_METADATA_BYTES, relay=True))
    relay = HoldingLink(network, 1, held=2)
    options = ReceiveOptions(20, MAX_METADATA_BYTES, stall_s=0.2, window_bytes=1 << 20)
    received, report = receive_state(relay, 0, options)
    assert isinstance(received, dict)
    assert torch.equal(received["w"], state["w"])
    assert report.not_forwarded is not None
    assert "stalled" in report.not_forwarded or "no message" in report.not_forwarded
    relay.released.set()
    with pytest.raises(PeerGaveUp, match="rank 1 aborted the transfer"):
        receive_state(ShortLink(network, 2), 0, ReceiveOptions(5, MAX_METADATA_BYTES))


def test_an_error_whose_text_fails_is_raised_and_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unprintable(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    def describe(*args: object, **keywords: object) -> None:
        raise Unprintable

    network = MemoryNetwork()
    monkeypatch.setattr(send, "describe", describe)
    with pytest.raises(Unprintable):
        send_state(network.link(0), [1], {}, SendOptions(5, MAX_METADATA_BYTES))
    with pytest.raises(PeerGaveUp, match="Unprintable"):
        receive_state(network.link(1), 0, ReceiveOptions(5, MAX_METADATA_BYTES))
