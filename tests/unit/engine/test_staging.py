"""Staged in bounded pieces: whatever the size of the state, what is set aside beside it has a ceiling."""

from __future__ import annotations

import pytest
import torch

from tests.support.transfer import TIMEOUT_S
from torchferry.core.plan import CHUNK_BYTES, WINDOW_BYTES
from torchferry.core.protocol import FRAME_TAG, LENGTH_TAG, MAX_METADATA_BYTES
from torchferry.engine import Pull, Push, group, pull, push, staging
from torchferry.errors import LinkTimeout
from torchferry.links.base import Pending
from torchferry.testing import MemoryLink, MemoryNetwork
from torchferry.testing.memory_link import Sent

MiB = 1 << 20


class Counted(staging.Staging):
    """Staging that counts what it holds: what it has given out, and what it keeps for later."""

    most_bytes = 0

    def __init__(self, device: torch.device, *, pinned: bool = False) -> None:
        super().__init__(device, pinned=pinned)
        self._given: dict[int, int] = {}

    def take(self, nbytes: int) -> torch.Tensor:
        buffer = super().take(nbytes)
        storage = buffer.untyped_storage()
        self._given[storage.data_ptr()] = storage.nbytes()
        held = sum(self._given.values()) + sum(free.nbytes for free in self._free)
        Counted.most_bytes = max(Counted.most_bytes, held)
        return buffer

    def give_back(self, buffer: torch.Tensor) -> None:
        del self._given[buffer.untyped_storage().data_ptr()]
        super().give_back(buffer)


@pytest.fixture(autouse=True)
def _count_what_is_staged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Counted, "most_bytes", 0)
    monkeypatch.setattr(group, "Staging", Counted)


class Lazy(MemoryLink):
    """A link that takes no memory but its own. What is sent over it goes nowhere."""

    def __init__(self, network: MemoryNetwork, rank: int) -> None:
        super().__init__(network, rank, own_buffers=True)
        self.largest = 0

    def send(self, buffer: torch.Tensor, peer: int, tag: int) -> Pending:
        self.largest = max(self.largest, buffer.nbytes)
        return Sent()

    def recv(self, buffer: torch.Tensor, peer: int, tag: int) -> Pending:
        self.largest = max(self.largest, buffer.nbytes)
        return super().recv(buffer, peer, tag)


def staged_at_the_sender(state: object) -> Lazy:
    link = Lazy(MemoryNetwork(), 0)
    push(link, [1], state, Push(TIMEOUT_S, MAX_METADATA_BYTES))
    return link


def test_a_large_tensor_is_staged_in_pieces_at_the_sender() -> None:
    large = torch.zeros(3 * WINDOW_BYTES, dtype=torch.uint8)
    link = staged_at_the_sender({"large": large})
    assert link.largest == CHUNK_BYTES
    assert CHUNK_BYTES < Counted.most_bytes <= WINDOW_BYTES


def test_a_large_tensor_is_staged_in_pieces_at_the_receiver() -> None:
    network = MemoryNetwork()
    large = torch.zeros(3 * WINDOW_BYTES, dtype=torch.uint8)
    push(network.link(0), [1], {"large": large}, Push(TIMEOUT_S, MAX_METADATA_BYTES))
    link = Lazy(network, 1)
    received, _ = pull(link, 0, Pull(TIMEOUT_S, MAX_METADATA_BYTES, target=lambda: {"large": large}))
    assert isinstance(received, dict)
    assert received["large"] is large
    assert link.largest == CHUNK_BYTES
    assert CHUNK_BYTES < Counted.most_bytes <= WINDOW_BYTES


def test_a_large_strided_tensor_is_staged_in_pieces_too() -> None:
    column = torch.zeros(8 * MiB, 16, dtype=torch.uint8)[:, :8]
    network = MemoryNetwork()
    push(network.link(0), [1], {"c": column}, Push(TIMEOUT_S, MAX_METADATA_BYTES))
    assert Counted.most_bytes <= WINDOW_BYTES


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
    assert Counted.most_bytes <= 2 * WINDOW_BYTES + CHUNK_BYTES


class OnlyFrames(MemoryLink):
    """A link that takes no memory but its own, and loses all but the length and the frame."""

    def send(self, buffer: torch.Tensor, peer: int, tag: int) -> Pending:
        return super().send(buffer, peer, tag) if tag in (LENGTH_TAG, FRAME_TAG) else Sent()


def many_small() -> dict[str, torch.Tensor]:
    return {str(n): torch.full((1000,), n, dtype=torch.int32) for n in range(600)}


class TestTheNextTransferOnTheGroup:
    """What one transfer has staged in is left to the next, at both ends."""

    def test_stages_in_the_same_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        made: list[int] = []
        original = torch.empty

        def watched(*args: object, **kwargs: object) -> torch.Tensor:
            tensor = original(*args, **kwargs)  # type: ignore[call-overload]
            if tensor.dtype == torch.uint8 and tensor.nbytes > MiB // 2:
                made.append(tensor.nbytes)
            return tensor  # type: ignore[no-any-return]

        network, ends = MemoryNetwork(), [group.Group(), group.Group()]
        monkeypatch.setattr(torch, "empty", watched)
        for turn in range(3):
            before = len(made)
            push(network.link(0), [1], many_small(), Push(TIMEOUT_S, MAX_METADATA_BYTES), ends[0])
            state, _ = pull(network.link(1), 0, Pull(TIMEOUT_S, MAX_METADATA_BYTES), ends[1])
            assert isinstance(state, dict)
            assert all(torch.equal(state[key], value) for key, value in many_small().items())
            assert (len(made) > before) == (turn == 0)

    def test_gets_none_of_what_a_failed_one_may_still_be_written_to(self) -> None:
        network, end = MemoryNetwork(), group.Group(lasting=False)
        # Only the frame arrives, so that every receive of the payload is left behind.
        push(OnlyFrames(network, 0, own_buffers=True), [1], many_small(), Push(TIMEOUT_S, MAX_METADATA_BYTES))
        with pytest.raises(LinkTimeout):
            pull(network.link(1), 0, Pull(0.2, MAX_METADATA_BYTES), end)
        assert not end._stagings


class TestStagingForAnAccelerator:
    """None is there to run it on: only what is asked for, and what is done where there is none."""

    def test_is_page_locked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[dict[str, object]] = []

        def empty(*_: object, **terms: object) -> torch.Tensor:
            asked.append(terms)
            return torch.zeros(MiB, dtype=torch.uint8)

        monkeypatch.setattr(torch, "empty", empty)
        staging.Staging(torch.device("cpu"), pinned=True).take(MiB)
        assert asked == [{"dtype": torch.uint8, "device": "cpu", "pin_memory": True}]

    def test_falls_back_to_plain_memory(self) -> None:
        if torch.accelerator.is_available():
            pytest.skip("there is one here")
        assert staging.Staging(torch.device("cpu"), pinned=True).take(MiB).nbytes == MiB

    def test_is_not_mixed_up_with_the_other(self) -> None:
        end = group.Group()
        plain, locked = (end.staging(torch.device("cpu"), pinned=pinned) for pinned in (False, True))
        end.keep(plain)
        end.keep(locked)
        assert end.staging(torch.device("cpu"), pinned=True) is locked
        assert end.staging(torch.device("cpu")) is plain

    def test_is_found_again_where_the_link_works_on_one(self) -> None:
        end = group.Group()
        kept = end.staging(torch.device("meta"), pinned=True)
        end.keep(kept)
        assert end.staging(torch.device("meta"), pinned=True) is kept


def test_what_was_staged_under_inference_mode_can_be_written_to_without() -> None:
    end = group.Group()
    with torch.inference_mode():
        buffers = end.staging(torch.device("cpu"))
        buffers.give_back(buffers.take(MiB))
    buffers.take(MiB).fill_(1)
