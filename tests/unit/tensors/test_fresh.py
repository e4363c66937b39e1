"""Fresh memory: small tensors made out of a packed message are what they were, bit for bit."""

from __future__ import annotations

import pytest
import torch

from tests.support.transfer import TIMEOUT_S
from torchferry.core.plan import PACK_FROM, make_plan
from torchferry.core.push import MAX_METADATA_BYTES
from torchferry.engine import ReceiveOptions, SendOptions, receive_state, send_state
from torchferry.errors import StateError
from torchferry.tensors import fresh as module
from torchferry.tensors.describe import describe
from torchferry.tensors.memory import DTYPES
from torchferry.testing import MemoryNetwork

DENSE = sorted(name for name in DTYPES if not name.startswith("q"))
COUNT = 2 * PACK_FROM


def ferried(state: object) -> object:
    network = MemoryNetwork()
    send_state(network.link(0), [1], state, SendOptions(TIMEOUT_S, MAX_METADATA_BYTES))
    received, report = receive_state(network.link(1), 0, ReceiveOptions(TIMEOUT_S, MAX_METADATA_BYTES))
    assert report.messages < COUNT, "nothing was packed"
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
@pytest.mark.parametrize("shapes", [[(3, 5)], [(7,), (2, 3), (), (1, 4), (5, 1, 1)]], ids=["alike", "mixed"])
def test_every_dtype_arrives_bit_for_bit(name: str, shapes: list[tuple[int, ...]]) -> None:
    state = [of_bits(DTYPES[name], shapes[n % len(shapes)], n) for n in range(COUNT)]
    received = ferried(state)
    assert isinstance(received, list)
    assert all(is_same(theirs, ours) for theirs, ours in zip(received, state, strict=True))
    addresses = {tensor.untyped_storage().data_ptr() for tensor in received}
    assert len(addresses) == COUNT, "each has memory of its own"


def test_dtypes_by_turns_and_at_places_that_are_no_multiple_of_their_size() -> None:
    dtypes = [torch.uint8, torch.float64, torch.bool, torch.int16, torch.complex128]
    state = [of_bits(dtypes[n % len(dtypes)], (1 + n % 3,), n) for n in range(COUNT)]
    received = ferried(state)
    assert isinstance(received, list)
    assert all(is_same(theirs, ours) for theirs, ours in zip(received, state, strict=True))


def test_what_is_not_plain_is_among_what_is() -> None:
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


def test_what_is_fresh_can_be_resized_and_goes_when_it_is_dropped() -> None:
    received = ferried([torch.full((100,), float(n)) for n in range(COUNT)])
    assert isinstance(received, list)
    first = received[0]
    assert first.untyped_storage().nbytes() == 400
    first.resize_(1000)
    assert first[:100].tolist() == [0.0] * 100
    assert received[1].tolist() == [1.0] * 100


def test_no_memory_for_small_tensors_is_said_and_the_sender_finishes(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise MemoryError("none left")

    network = MemoryNetwork()
    send_state(
        network.link(0), [1], list(torch.ones(COUNT, 10).unbind()), SendOptions(TIMEOUT_S, MAX_METADATA_BYTES)
    )
    state = [torch.full((100,), float(n)) for n in range(COUNT)]
    send_state(network.link(0), [1], state, SendOptions(TIMEOUT_S, MAX_METADATA_BYTES))
    receive_state(network.link(1), 0, ReceiveOptions(TIMEOUT_S, MAX_METADATA_BYTES))
    monkeypatch.setattr(module, "_unbind_copy", full)
    with pytest.raises(StateError, match="no memory for the 51200 bytes"):
        receive_state(network.link(1), 0, ReceiveOptions(TIMEOUT_S, MAX_METADATA_BYTES))
    monkeypatch.undo()
    # All of it was taken, so that the next transfer finds nothing of it.
    send_state(network.link(0), [1], state, SendOptions(TIMEOUT_S, MAX_METADATA_BYTES))
    received, _ = receive_state(network.link(1), 0, ReceiveOptions(TIMEOUT_S, MAX_METADATA_BYTES))
    assert isinstance(received, list)
    assert torch.equal(received[5], state[5])


def test_only_what_goes_straight_is_set_aside_before() -> None:
    state = [torch.zeros(1 << 20), *(torch.zeros(10) for _ in range(COUNT))]
    assert make_plan(describe(state).manifest).unpacked_storages() == {0}


@pytest.mark.parametrize("mode", [True, False])
def test_under_inference_mode_all_of_it_is_inference_tensors(mode: bool) -> None:
    state = [torch.zeros(1 << 20), *(torch.full((10,), float(n)) for n in range(COUNT))]
    with torch.inference_mode(mode):
        received = ferried(state)
    assert isinstance(received, list)
    assert {tensor.is_inference() for tensor in received} == {mode}
