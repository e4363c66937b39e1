"""Staging memory is bounded, whatever the size of the state, and the next transfer reuses it."""

from __future__ import annotations

import pytest
import torch

from tests.support.transfer import TIMEOUT_S
from torchferry.core.plan import CHUNK_BYTES, WINDOW_BYTES
from torchferry.core.push import MAX_METADATA_BYTES
from torchferry.engine import workspace
from torchferry.engine.push import ReceiveOptions, SendOptions, receive_state, send_state
from torchferry.engine.workspace import Workspace
from torchferry.errors import LinkTimeout
from torchferry.links.base import FRAME_TAG, LENGTH_TAG, Pending
from torchferry.testing import MemoryLink, MemoryNetwork
from torchferry.testing.memory_link import CompletedSend

MiB = 1 << 20
SEND = SendOptions(TIMEOUT_S, MAX_METADATA_BYTES)
RECEIVE = ReceiveOptions(TIMEOUT_S, MAX_METADATA_BYTES)


class CountedStaging(workspace.Staging):
    """Counts the memory that it holds: buffers in use, and those kept for later."""

    most_bytes = 0

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._given: dict[int, int] = {}

    def take(self, nbytes: int, *, pinned: bool = False) -> torch.Tensor:
        buffer = super().take(nbytes, pinned=pinned)
        storage = buffer.untyped_storage()
        self._given[storage.data_ptr()] = storage.nbytes()
        held = sum(self._given.values()) + sum(free.nbytes for free in self._free)
        CountedStaging.most_bytes = max(CountedStaging.most_bytes, held)
        return buffer

    def give_back(self, buffer: torch.Tensor) -> None:
        del self._given[buffer.untyped_storage().data_ptr()]
        super().give_back(buffer)


@pytest.fixture(autouse=True)
def _count_staged_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CountedStaging, "most_bytes", 0)
    monkeypatch.setattr(workspace, "Staging", CountedStaging)


class DroppingLink(MemoryLink):
    """Accepts only its own memory, and drops what is sent."""

    def __init__(self, network: MemoryNetwork, rank: int) -> None:
        super().__init__(network, rank, own_buffers=True)
        self.largest = 0

    def send(self, buffer: torch.Tensor, peer: int, tag: int) -> Pending:
        self.largest = max(self.largest, buffer.nbytes)
        return CompletedSend()

    def recv(self, buffer: torch.Tensor, peer: int, tag: int) -> Pending:
        self.largest = max(self.largest, buffer.nbytes)
        return super().recv(buffer, peer, tag)


def staged_at_the_sender(state: object) -> DroppingLink:
    link = DroppingLink(MemoryNetwork(), 0)
    send_state(link, [1], state, SendOptions(TIMEOUT_S, MAX_METADATA_BYTES))
    return link


def test_a_large_tensor_is_staged_in_pieces_at_the_sender() -> None:
    large = torch.zeros(3 * WINDOW_BYTES, dtype=torch.uint8)
    link = staged_at_the_sender({"large": large})
    assert link.largest == CHUNK_BYTES
    assert CHUNK_BYTES < CountedStaging.most_bytes <= WINDOW_BYTES


def test_a_large_tensor_is_staged_in_pieces_at_the_receiver() -> None:
    network = MemoryNetwork()
    large = torch.zeros(3 * WINDOW_BYTES, dtype=torch.uint8)
    send_state(network.link(0), [1], {"large": large}, SendOptions(TIMEOUT_S, MAX_METADATA_BYTES))
    link = DroppingLink(network, 1)
    received, _ = receive_state(
        link, 0, ReceiveOptions(TIMEOUT_S, MAX_METADATA_BYTES, local_state=lambda: {"large": large})
    )
    assert isinstance(received, dict)
    assert received["large"] is large
    assert link.largest == CHUNK_BYTES
    assert CHUNK_BYTES < CountedStaging.most_bytes <= WINDOW_BYTES


def test_a_large_strided_tensor_is_staged_in_pieces_too() -> None:
    column = torch.zeros(8 * MiB, 16, dtype=torch.uint8)[:, :8]
    network = MemoryNetwork()
    send_state(network.link(0), [1], {"c": column}, SendOptions(TIMEOUT_S, MAX_METADATA_BYTES))
    assert CountedStaging.most_bytes <= WINDOW_BYTES


@pytest.mark.parametrize(
    "sizes",
    [
        [MiB + 4096 * n for n in range(100)],
        [MiB + 4096 * n for n in range(100, 0, -1)],
        [MiB * (1 + n * 37 % 7) + n for n in range(100)],
        ([8 * MiB] * 4 + [64] * 200) * 5,
    ],
    ids=["each larger than the one before", "each smaller", "mixed", "large and tiny by turns"],
)
def test_tensors_of_many_sizes_do_not_each_leave_a_buffer_behind(sizes: list[int]) -> None:
    state = [torch.empty(size, dtype=torch.uint8) for size in sizes]
    staged_at_the_sender(state)
    assert CountedStaging.most_bytes <= 2 * WINDOW_BYTES + CHUNK_BYTES


class FramesOnlyLink(MemoryLink):
    """Accepts only its own memory, and drops all but the length and the frame."""

    def send(self, buffer: torch.Tensor, peer: int, tag: int) -> Pending:
        return super().send(buffer, peer, tag) if tag in (LENGTH_TAG, FRAME_TAG) else CompletedSend()


def many_small() -> dict[str, torch.Tensor]:
    return {str(n): torch.full((1000,), n, dtype=torch.int32) for n in range(600)}


CPU = torch.device("cpu")


def test_the_next_transfer_stages_in_the_same_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    original = torch.empty

    def record(*args: object, **kwargs: object) -> torch.Tensor:
        tensor = original(*args, **kwargs)  # type: ignore[call-overload]
        if tensor.dtype == torch.uint8 and tensor.nbytes > MiB // 2:
            made.append(tensor.nbytes)
        return tensor  # type: ignore[no-any-return]

    network, sending, receiving = MemoryNetwork(), Workspace(CPU), Workspace(CPU)
    monkeypatch.setattr(torch, "empty", record)
    for turn in range(3):
        before = len(made)
        send_state(network.link(0), [1], many_small(), SEND, sending)
        state, _ = receive_state(network.link(1), 0, RECEIVE, receiving)
        assert isinstance(state, dict)
        assert all(torch.equal(state[key], value) for key, value in many_small().items())
        assert (len(made) > before) == (turn == 0)


def test_the_next_transfer_gets_no_buffer_of_a_failed_one() -> None:
    network, receiving = MemoryNetwork(), Workspace(CPU)
    # Only the frame arrives, so that every receive of the payload stays pending.
    send_state(FramesOnlyLink(network, 0, own_buffers=True), [1], many_small(), SEND)
    with pytest.raises(LinkTimeout):
        receive_state(network.link(1), 0, ReceiveOptions(0.2, MAX_METADATA_BYTES), receiving)
    assert not receiving.staging._free


class TestStagingForAnAccelerator:
    """There is none to run it on. These tests check the request, and the fallback."""

    def test_is_page_locked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        requested: list[dict[str, object]] = []

        def empty(*_: object, **keywords: object) -> torch.Tensor:
            requested.append(keywords)
            return torch.zeros(MiB, dtype=torch.uint8)

        monkeypatch.setattr(torch, "empty", empty)
        workspace.Staging(CPU).take(MiB, pinned=True)
        assert requested == [{"dtype": torch.uint8, "device": "cpu", "pin_memory": True}]

    def test_falls_back_to_plain_memory(self) -> None:
        if torch.accelerator.is_available():
            pytest.skip("this machine has an accelerator")
        assert workspace.Staging(CPU).take(MiB, pinned=True).nbytes == MiB

    def test_does_not_get_a_plain_buffer(self, monkeypatch: pytest.MonkeyPatch) -> None:
        buffers = workspace.Staging(CPU)
        plain = buffers.take(MiB)
        buffers.give_back(plain)
        assert buffers.take(MiB, pinned=True).data_ptr() != plain.data_ptr()
        assert buffers.take(MiB).data_ptr() == plain.data_ptr()


def test_a_buffer_from_inference_mode_can_be_written_outside_of_it() -> None:
    buffers = workspace.Staging(CPU)
    with torch.inference_mode():
        buffers.give_back(buffers.take(MiB))
    buffers.take(MiB).fill_(1)
