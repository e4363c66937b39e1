"""New memory: tensors created from a packed message equal those that were sent, bit for bit; huge pages."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.support.transfer import TIMEOUT_S
from torchferry.core.plan import PACK_FROM, make_plan
from torchferry.core.push import MAX_METADATA_BYTES
from torchferry.engine import ReceiveOptions, SendOptions, receive_state, send_state
from torchferry.errors import StateError
from torchferry.tensors import fresh as module
from torchferry.tensors.describe import describe
from torchferry.tensors.fresh import _HUGE_PAGE_BYTES, HugePages
from torchferry.tensors.memory import DTYPES, new_memory
from torchferry.testing import MemoryNetwork

DENSE = sorted(name for name in DTYPES if not name.startswith("q"))
COUNT = 2 * PACK_FROM
FAST_S, SLOW_S = 0.0003, 0.009


def ferried(state: object) -> object:
    network = MemoryNetwork()
    send_state(network.link(0), [1], state, SendOptions(TIMEOUT_S, MAX_METADATA_BYTES))
    received, report = receive_state(network.link(1), 0, ReceiveOptions(TIMEOUT_S, MAX_METADATA_BYTES))
    assert report.messages < COUNT, "no message was packed"
    return received


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.untyped_storage().tolist())


def of_bits(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    chance = torch.Generator().manual_seed(seed)
    nbytes = dtype.itemsize * torch.Size(shape).numel()
    raw = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=chance)
    return torch.empty(0, dtype=dtype).set_(raw.untyped_storage(), 0, shape, torch.empty(shape).stride())


def is_same(received: torch.Tensor, sent: torch.Tensor) -> bool:
    return (
        received.dtype == sent.dtype
        and received.shape == sent.shape
        and received.stride() == sent.stride()
        and bits(received) == bits(sent)
        and received._base is None
    )


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize(
    "shapes", [[(3, 5)], [(7,), (2, 3), (), (1, 4), (5, 1, 1)]], ids=["one shape", "many shapes"]
)
def test_every_dtype_arrives_bit_for_bit(name: str, shapes: list[tuple[int, ...]]) -> None:
    state = [of_bits(DTYPES[name], shapes[n % len(shapes)], n) for n in range(COUNT)]
    received = ferried(state)
    assert isinstance(received, list)
    assert all(is_same(theirs, ours) for theirs, ours in zip(received, state, strict=True))
    addresses = {tensor.untyped_storage().data_ptr() for tensor in received}
    assert len(addresses) == COUNT, "each tensor has its own memory"


def test_alternating_dtypes_that_are_not_aligned_in_the_message_arrive_bit_for_bit() -> None:
    dtypes = [torch.uint8, torch.float64, torch.bool, torch.int16, torch.complex128]
    state = [of_bits(dtypes[n % len(dtypes)], (1 + n % 3,), n) for n in range(COUNT)]
    received = ferried(state)
    assert isinstance(received, list)
    assert all(is_same(theirs, ours) for theirs, ours in zip(received, state, strict=True))


def test_views_and_other_layouts_among_contiguous_tensors_arrive_as_they_were() -> None:
    base = torch.arange(40.0)
    odd = [
        base[:10],
        base[5:20],
        torch.ones(3, 4).t(),
        torch.ones(1).expand(6),
        torch.zeros(0, 3),
        torch.ones(1, 4).as_strided((1, 4), (9, 1)),
        torch.randn(4, dtype=torch.complex64).conj(),
    ]
    state = [torch.full((n + 1,), float(n)) for n in range(COUNT)]
    for n, tensor in enumerate(odd):
        state.insert(9 * n, tensor)
    received = ferried(state)
    assert isinstance(received, list)
    for theirs, ours in zip(received, state, strict=True):
        assert theirs.stride() == ours.stride()
        assert theirs.is_conj() == ours.is_conj()
        assert torch.equal(theirs, ours)
    views = [theirs for theirs, ours in zip(received, state, strict=True) if ours is odd[0] or ours is odd[1]]
    assert views[0].untyped_storage().data_ptr() == views[1].untyped_storage().data_ptr()


def test_a_received_tensor_has_its_own_memory_and_can_be_resized() -> None:
    received = ferried([torch.full((100,), float(n)) for n in range(COUNT)])
    assert isinstance(received, list)
    first = received[0]
    assert first.untyped_storage().nbytes() == 400
    first.resize_(1000)
    assert first[:100].tolist() == [0.0] * 100
    assert received[1].tolist() == [1.0] * 100


def test_a_failed_allocation_for_small_tensors_raises_and_the_sender_finishes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_tensors(*_: object) -> None:
        raise MemoryError("none left")

    def no_memory(nbytes: int) -> None:
        raise StateError(f"no memory for {nbytes} bytes")

    network = MemoryNetwork()
    send_state(
        network.link(0), [1], list(torch.ones(COUNT, 10).unbind()), SendOptions(TIMEOUT_S, MAX_METADATA_BYTES)
    )
    state = [torch.full((100,), float(n)) for n in range(COUNT)]
    send_state(network.link(0), [1], state, SendOptions(TIMEOUT_S, MAX_METADATA_BYTES))
    receive_state(network.link(1), 0, ReceiveOptions(TIMEOUT_S, MAX_METADATA_BYTES))
    monkeypatch.setattr(torch, "split_with_sizes_copy", no_tensors)
    monkeypatch.setattr(module, "new_memory", no_memory)
    with pytest.raises(StateError, match="no memory for 400 bytes"):
        receive_state(network.link(1), 0, ReceiveOptions(TIMEOUT_S, MAX_METADATA_BYTES))
    monkeypatch.undo()
    # The receiver took all messages, so the next transfer is not disturbed.
    send_state(network.link(0), [1], state, SendOptions(TIMEOUT_S, MAX_METADATA_BYTES))
    received, _ = receive_state(network.link(1), 0, ReceiveOptions(TIMEOUT_S, MAX_METADATA_BYTES))
    assert isinstance(received, list)
    assert torch.equal(received[5], state[5])


def test_memory_that_can_not_be_allocated_raises() -> None:
    with pytest.raises(StateError, match=f"no memory for {2**62} bytes"):
        new_memory(2**62)


def test_only_storages_that_are_not_packed_are_allocated_before() -> None:
    state = [torch.zeros(1 << 20), *(torch.zeros(10) for _ in range(COUNT))]
    assert make_plan(describe(state).manifest).unpacked_storages() == {0}


@pytest.mark.parametrize("mode", [True, False])
def test_under_inference_mode_all_received_tensors_are_inference_tensors(mode: bool) -> None:
    state = [torch.zeros(1 << 20), *(torch.full((10,), float(n)) for n in range(COUNT))]
    with torch.inference_mode(mode):
        received = ferried(state)
    assert isinstance(received, list)
    assert {tensor.is_inference() for tensor in received} == {mode}


class FakeMadvise:
    """Replaces the kernel's madvise: records the requested pages, and advances a clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: Iterator[float]) -> None:
        self.pages: list[int] = []
        self._seconds = seconds
        self.now_s = 0.0
        monkeypatch.setattr(module, "_madvise", self._advise)

    def _advise(self, address: int, nbytes: int, advice: int) -> int:
        assert nbytes == _HUGE_PAGE_BYTES
        if advice == module._MADV_POPULATE_WRITE:
            self.pages.append(address // _HUGE_PAGE_BYTES)
            self.now_s += next(self._seconds)
        return 0

    def clock(self) -> float:
        return self.now_s


def page(number: float) -> int:
    return int(number * _HUGE_PAGE_BYTES)


def test_every_huge_page_is_requested_once_however_the_memory_is_divided(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = FakeMadvise(monkeypatch, iter([FAST_S] * 100))
    huge = HugePages(fake.clock)
    # The memory starts and ends in the middle of pages, which other memory may share.
    for start, end in [(1.5, 3.25), (3.25, 6.0), (6.0, 8.75)]:
        huge.fault_in(page(start), page(end), page(8.75))
    assert fake.pages == [2, 3, 4, 5, 6, 7]


def test_no_more_huge_pages_are_requested_after_two_slow_ones_in_a_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = FakeMadvise(monkeypatch, iter([FAST_S, SLOW_S, FAST_S, SLOW_S, SLOW_S, FAST_S]))
    huge = HugePages(fake.clock)
    huge.fault_in(page(0), page(50), page(50))
    assert fake.pages == [0, 1, 2, 3, 4]
    huge.fault_in(page(60), page(70), page(70))
    assert len(fake.pages) == 5
    assert not huge.wanted


def test_a_kernel_that_can_not_populate_pages_is_asked_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    advised: list[int] = []

    def refuses_to_populate(address: int, nbytes: int, advice: int) -> int:
        advised.append(advice)
        return -1 if advice == module._MADV_POPULATE_WRITE else 0

    monkeypatch.setattr(module, "_madvise", refuses_to_populate)
    HugePages(lambda: 0.0).fault_in(page(0), page(50), page(50))
    assert advised == [module._MADV_HUGEPAGE, module._MADV_POPULATE_WRITE]


def test_no_huge_pages_are_requested_without_madvise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_madvise", None)
    HugePages(lambda: 0.0).fault_in(page(0), page(50), page(50))


def test_faulting_in_does_not_change_the_content() -> None:
    memory = torch.arange(3 * _HUGE_PAGE_BYTES // 8)
    before, first = memory.clone(), memory.data_ptr()
    HugePages(lambda: 0.0).fault_in(first, first + memory.nbytes, first + memory.nbytes)
    assert torch.equal(memory, before)
