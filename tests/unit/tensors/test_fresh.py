"""New memory: tensors created from a packed message equal those that were sent, bit for bit; huge pages."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise

import pytest
import torch

from tests.support.transfer import TIMEOUT_S
from torchferry.core.codec import EncodedManifest
from torchferry.core.extents import Extent
from torchferry.core.manifest import Manifest
from torchferry.core.plan import PACK_FROM, make_plan
from torchferry.core.push import MAX_METADATA_BYTES
from torchferry.engine.push import ReceiveOptions, SendOptions, receive_state, send_state
from torchferry.engine.target import target_in_new_memory
from torchferry.engine.workspace import Cache
from torchferry.errors import StateError
from torchferry.tensors import fresh
from torchferry.tensors.describe import describe
from torchferry.tensors.fresh import _HUGE_PAGE_BYTES, FreshMemory
from torchferry.tensors.kinds import RebuildContext
from torchferry.tensors.memory import DTYPES, new_memory, run_of
from torchferry.testing import MemoryNetwork

DTYPE_NAMES = sorted(name for name in DTYPES if not name.startswith("q"))
COUNT = 2 * PACK_FROM
FAST_S, SLOW_S = 0.0003, 0.009


def sent_and_received(state: object) -> object:
    network = MemoryNetwork()
    send_state(network.link(0), [1], state, SendOptions(TIMEOUT_S, MAX_METADATA_BYTES))
    received, report = receive_state(network.link(1), 0, ReceiveOptions(TIMEOUT_S, MAX_METADATA_BYTES))
    assert report.messages < COUNT, "no message was packed"
    return received


def bytes_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.untyped_storage().tolist())


def tensor_of_random_bytes(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    nbytes = dtype.itemsize * torch.Size(shape).numel()
    raw = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)
    return torch.empty(0, dtype=dtype).set_(raw.untyped_storage(), 0, shape, torch.empty(shape).stride())


def is_bit_identical(received: torch.Tensor, sent: torch.Tensor) -> bool:
    return (
        received.dtype == sent.dtype
        and received.shape == sent.shape
        and received.stride() == sent.stride()
        and bytes_of(received) == bytes_of(sent)
        and received._base is None
    )


@pytest.mark.parametrize("name", DTYPE_NAMES)
@pytest.mark.parametrize(
    "shapes", [[(3, 5)], [(7,), (2, 3), (), (1, 4), (5, 1, 1)]], ids=["one shape", "many shapes"]
)
def test_small_tensors_of_every_dtype_arrive_bit_for_bit(name: str, shapes: list[tuple[int, ...]]) -> None:
    state = [tensor_of_random_bytes(DTYPES[name], shapes[n % len(shapes)], n) for n in range(COUNT)]
    received = sent_and_received(state)
    assert isinstance(received, list)
    assert all(
        is_bit_identical(received_tensor, sent_tensor)
        for received_tensor, sent_tensor in zip(received, state, strict=True)
    )
    addresses = {tensor.untyped_storage().data_ptr() for tensor in received}
    assert len(addresses) == COUNT, "each tensor has its own memory"


def test_tensors_that_are_not_aligned_in_their_message_arrive_bit_for_bit() -> None:
    dtypes = [torch.uint8, torch.float64, torch.bool, torch.int16, torch.complex128]
    state = [tensor_of_random_bytes(dtypes[n % len(dtypes)], (1 + n % 3,), n) for n in range(COUNT)]
    received = sent_and_received(state)
    assert isinstance(received, list)
    assert all(
        is_bit_identical(received_tensor, sent_tensor)
        for received_tensor, sent_tensor in zip(received, state, strict=True)
    )


def test_tensors_that_are_not_contiguous_keep_their_strides_and_shared_memory() -> None:
    base = torch.arange(40.0)
    not_contiguous = [
        base[:10],
        base[5:20],
        torch.ones(3, 4).t(),
        torch.ones(1).expand(6),
        torch.zeros(0, 3),
        torch.ones(1, 4).as_strided((1, 4), (9, 1)),
        torch.randn(4, dtype=torch.complex64).conj(),
    ]
    state = [torch.full((n + 1,), float(n)) for n in range(COUNT)]
    for n, tensor in enumerate(not_contiguous):
        state.insert(9 * n, tensor)
    received = sent_and_received(state)
    assert isinstance(received, list)
    for received_tensor, sent_tensor in zip(received, state, strict=True):
        assert received_tensor.stride() == sent_tensor.stride()
        assert received_tensor.is_conj() == sent_tensor.is_conj()
        assert torch.equal(received_tensor, sent_tensor)
    # The first two views of `base` are at 0 and 9.
    assert received[0].untyped_storage().data_ptr() == received[9].untyped_storage().data_ptr()


def test_a_received_tensor_has_its_own_memory_and_can_be_resized() -> None:
    received = sent_and_received([torch.full((100,), float(n)) for n in range(COUNT)])
    assert isinstance(received, list)
    first = received[0]
    assert first.untyped_storage().nbytes() == 400
    first.resize_(1000)
    assert first[:100].tolist() == [0.0] * 100
    assert received[1].tolist() == [1.0] * 100


def test_if_small_tensors_can_not_be_allocated_the_receiver_raises_and_takes_all_messages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse_to_split(*_: object) -> None:
        raise MemoryError("none left")

    def refuse_memory(nbytes: int, as_bytes: bool) -> None:
        raise StateError(f"no memory for {nbytes} bytes")

    network = MemoryNetwork()
    send_state(
        network.link(0), [1], list(torch.ones(COUNT, 10).unbind()), SendOptions(TIMEOUT_S, MAX_METADATA_BYTES)
    )
    state = [torch.full((100,), float(n)) for n in range(COUNT)]
    send_state(network.link(0), [1], state, SendOptions(TIMEOUT_S, MAX_METADATA_BYTES))
    receive_state(network.link(1), 0, ReceiveOptions(TIMEOUT_S, MAX_METADATA_BYTES))
    monkeypatch.setattr(torch, "split_with_sizes_copy", refuse_to_split)
    monkeypatch.setattr(fresh, "new_memory", refuse_memory)
    with pytest.raises(StateError, match="no memory for 400 bytes"):
        receive_state(network.link(1), 0, ReceiveOptions(TIMEOUT_S, MAX_METADATA_BYTES))
    monkeypatch.undo()
    # The receiver took all messages, so the next transfer is not disturbed.
    send_state(network.link(0), [1], state, SendOptions(TIMEOUT_S, MAX_METADATA_BYTES))
    received, _ = receive_state(network.link(1), 0, ReceiveOptions(TIMEOUT_S, MAX_METADATA_BYTES))
    assert isinstance(received, list)
    assert torch.equal(received[5], state[5])


def test_a_failed_allocation_raises_a_state_error() -> None:
    with pytest.raises(StateError, match=f"no memory for {2**62} bytes"):
        new_memory(2**62)


def test_storages_that_are_packed_are_not_allocated_before_they_arrive() -> None:
    state = [torch.zeros(1 << 20), *(torch.zeros(10) for _ in range(COUNT))]
    described = describe(state)
    encoded, plan = EncodedManifest(described.manifest, b""), make_plan(described.manifest)
    target = target_in_new_memory(encoded, plan, RebuildContext(), Cache())
    assert target.sink.fresh is not None
    assert list(target.sink.fresh._memories) == [0]


@pytest.mark.parametrize("mode", [True, False])
def test_under_inference_mode_all_received_tensors_are_inference_tensors(mode: bool) -> None:
    state = [torch.zeros(1 << 20), *(torch.full((10,), float(n)) for n in range(COUNT))]
    with torch.inference_mode(mode):
        received = sent_and_received(state)
    assert isinstance(received, list)
    assert {tensor.is_inference() for tensor in received} == {mode}


class FakeMadvise:
    """Replaces the kernel's madvise: records the requested pages, and advances a clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: Iterable[float], *, result: int = 0) -> None:
        self.pages: list[int] = []
        self._seconds = iter(seconds)
        self._result = result
        self._now_s = 0.0
        monkeypatch.setattr(fresh, "_madvise", self._advise)

    def _advise(self, address: int, nbytes: int, advice: int) -> int:
        assert nbytes == _HUGE_PAGE_BYTES
        if advice != fresh._MADV_POPULATE_WRITE:
            return 0
        self.pages.append(address)
        self._now_s += next(self._seconds)
        return self._result

    def clock(self) -> float:
        return self._now_s


STORAGE_BYTES = 10 * _HUGE_PAGE_BYTES


def fresh_storage(clock: Callable[[], float] = lambda: 0.0) -> FreshMemory:
    """Return fresh memory for one storage of ten huge pages."""
    return FreshMemory(Manifest(0, (), (), (), (STORAGE_BYTES,)), clock)


def test_every_huge_page_inside_a_storage_is_requested_once_however_the_storage_is_divided(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = FakeMadvise(monkeypatch, [FAST_S] * 100)
    memory = fresh_storage(fake.clock)
    # The memory starts and ends in the middle of pages, which other memory may share.
    first = memory.memory(0).storage.data_ptr()
    numbers = range(first // _HUGE_PAGE_BYTES, (first + STORAGE_BYTES) // _HUGE_PAGE_BYTES + 1)
    starts = [number * _HUGE_PAGE_BYTES for number in numbers]
    cuts = [0, _HUGE_PAGE_BYTES // 3, 3 * _HUGE_PAGE_BYTES, 7 * _HUGE_PAGE_BYTES + 16, STORAGE_BYTES]
    for start, end in pairwise(cuts):
        memory.fault_in(Extent(0, start, end - start))
    inside = [at for at in starts if first <= at and at + _HUGE_PAGE_BYTES <= first + STORAGE_BYTES]
    assert fake.pages == inside
    assert len(inside) >= 9


def test_no_more_huge_pages_are_requested_after_two_slow_ones_in_a_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = FakeMadvise(monkeypatch, [FAST_S, SLOW_S, FAST_S, SLOW_S, SLOW_S, FAST_S])
    memory = fresh_storage(fake.clock)
    for _ in range(2):
        memory.fault_in(Extent(0, 0, STORAGE_BYTES))
        assert len(fake.pages) == 5
    assert not memory.wants_huge_pages


def test_a_kernel_that_can_not_populate_pages_is_asked_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeMadvise(monkeypatch, [FAST_S] * 100, result=-1)
    memory = fresh_storage(fake.clock)
    memory.fault_in(Extent(0, 0, STORAGE_BYTES))
    assert len(fake.pages) == 1


def test_a_small_storage_gets_no_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeMadvise(monkeypatch, [FAST_S] * 100)
    nbytes = 3 * _HUGE_PAGE_BYTES
    FreshMemory(Manifest(0, (), (), (), (nbytes,)), fake.clock).fault_in(Extent(0, 0, nbytes))
    assert fake.pages == []


def test_no_huge_pages_are_requested_without_madvise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fresh, "_madvise", None)
    fresh_storage().fault_in(Extent(0, 0, STORAGE_BYTES))


def test_faulting_in_does_not_change_the_content() -> None:
    memory, whole = fresh_storage(), Extent(0, 0, STORAGE_BYTES)
    content = run_of(memory.memory(0), whole)
    content.copy_(torch.arange(STORAGE_BYTES) % 251)
    before = content.clone()
    memory.fault_in(whole)
    assert torch.equal(content, before)
