"""In place: bytes land directly where the layouts agree, and item by item where they do not.

Whatever the layout, the neighbours in the local storage keep their values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.transfer import TIMEOUT_S, transfer
from torchferry.core.push import MAX_METADATA_BYTES
from torchferry.engine.push import ReceiveOptions, SendOptions, receive_state, send_state
from torchferry.errors import StateMismatch
from torchferry.links.base import Pending
from torchferry.testing import MemoryLink, MemoryNetwork

View = Callable[[torch.Tensor], torch.Tensor]

# Each makes a view of 3 by 4 out of a storage of 60.
VIEWS: dict[str, View] = {
    "contiguous": lambda base: base[:12].view(3, 4),
    "offset": lambda base: base[17:29].view(3, 4),
    "transposed": lambda base: base[:12].view(4, 3).t(),
    "with gaps": lambda base: base.view(6, 10)[1:4, 2:6],
    "with steps": lambda base: base.view(6, 10)[::2, 1::2][:, :4],
    "turned with gaps": lambda base: base.view(6, 10)[1:5, 3:6].t(),
    "interlocked": lambda base: base.as_strided((3, 4), (4, 3)).clone().as_strided((3, 4), (4, 1)),
}


@pytest.mark.parametrize("chunk_bytes", [16, 40, 1 << 20])
@pytest.mark.parametrize("own_buffers", [False, True], ids=["where it lies", "staged"])
@pytest.mark.parametrize("local_view", VIEWS)
@pytest.mark.parametrize("sent_view", VIEWS)
def test_any_layout_goes_into_any_other_and_the_neighbours_keep_their_values(
    sent_view: str, local_view: str, own_buffers: bool, chunk_bytes: int
) -> None:
    sent = VIEWS[sent_view](torch.arange(60.0))
    storage = torch.full((60,), -1.0)
    local = VIEWS[local_view](storage)
    expected = storage.clone()
    VIEWS[local_view](expected).copy_(sent)
    received = transfer(
        {"t": sent}, into={"t": local}, own_buffers=own_buffers, chunk_bytes=chunk_bytes
    ).state
    assert received["t"] is local
    assert torch.equal(local, sent)
    assert torch.equal(storage, expected)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize("local_view", VIEWS)
def test_items_of_any_size_are_spread(local_view: str, dtype: torch.dtype) -> None:
    sent = torch.arange(12).view(4, 3).to(dtype).t()
    local = VIEWS[local_view](torch.zeros(60, dtype=dtype))
    transfer({"t": sent}, into={"t": local}, chunk_bytes=16)
    assert torch.equal(local, sent)


class Watching(MemoryLink):
    """A link that notes which memory it is asked to receive into."""

    def __init__(self, network: MemoryNetwork, rank: int) -> None:
        super().__init__(network, rank)
        self.asked: list[tuple[int, int]] = []

    def recv(self, buffer: torch.Tensor, peer: int, tag: int) -> Pending:
        self.asked.append((buffer.data_ptr(), buffer.nbytes))
        return super().recv(buffer, peer, tag)


def memory_asked_for(state: object, local: object, chunk_bytes: int = 1 << 20) -> list[tuple[int, int]]:
    """Receive in place, and list the memory that payload was received into."""
    network = MemoryNetwork()
    send_state(
        network.link(0), [1], state, SendOptions(TIMEOUT_S, MAX_METADATA_BYTES, chunk_bytes=chunk_bytes)
    )
    link = Watching(network, 1)
    receive_state(link, 0, ReceiveOptions(TIMEOUT_S, MAX_METADATA_BYTES, local_state=lambda: local))
    return link.asked[2:]


def test_where_the_layouts_agree_bytes_land_directly_in_the_local_tensor() -> None:
    whole = torch.zeros(100)
    local = {"a": torch.zeros(5, 4), "t": torch.zeros(4, 5).t(), "view": whole[10:30]}
    state = {"a": torch.randn(5, 4), "t": torch.randn(4, 5).t(), "view": torch.randn(20)}
    assert memory_asked_for(state, local) == [(tensor.data_ptr(), 80) for tensor in local.values()]
    assert all(torch.equal(local[name], state[name]) for name in state)


def test_large_tensors_land_directly_chunk_by_chunk() -> None:
    local = torch.zeros(100)
    asked = memory_asked_for({"w": torch.randn(100)}, {"w": local}, chunk_bytes=160)
    assert asked == [(local.data_ptr() + start, min(160, 400 - start)) for start in range(0, 400, 160)]


def test_tied_weights_land_directly_and_once() -> None:
    sent, local = torch.randn(4, 4), torch.zeros(4, 4)
    asked = memory_asked_for({"a": sent, "b": sent.t()}, {"a": local, "b": local.t()})
    assert asked == [(local.data_ptr(), 64)]


def test_tied_weights_go_into_two_tensors_where_the_local_ones_are_not_tied() -> None:
    sent, local = torch.randn(4), {"a": torch.zeros(4), "b": torch.zeros(4)}
    asked = memory_asked_for({"a": sent, "b": sent}, local)
    assert len(asked) == 1
    assert torch.equal(local["a"], sent)
    assert torch.equal(local["b"], sent)


def test_where_the_layouts_differ_bytes_do_not_land_in_the_local_tensor() -> None:
    local = torch.zeros(4, 4)
    (asked,) = memory_asked_for({"w": torch.randn(4, 4).t()}, {"w": local})
    assert asked[0] != local.data_ptr()


def test_two_values_can_not_go_into_one_storage() -> None:
    tied = torch.zeros(4)
    local: dict[str, Any] = {"a": tied, "b": tied, "other": torch.zeros(2)}
    with pytest.raises(StateMismatch) as raised:
        transfer({"a": torch.ones(4), "b": torch.full((4,), 2.0), "other": torch.ones(2)}, into=local)
    assert [mismatch.path for mismatch in raised.value.mismatches] == ["b"]
    assert "shares local memory with a" in str(raised.value)
    assert tied.tolist() == [0, 0, 0, 0]
    assert local["other"].tolist() == [0, 0]


def test_two_values_can_go_side_by_side_into_one_storage() -> None:
    whole = torch.zeros(4)
    transfer({"a": torch.ones(2), "b": torch.full((2,), 2.0)}, into={"a": whole[:2], "b": whole[2:]})
    assert whole.tolist() == [1, 1, 2, 2]


def test_small_tensors_of_which_some_are_dropped_are_put_together_a_thousand_at_a_time() -> None:
    """What is kept, what is dropped and what is spread lie in one message, and each goes its own way."""
    count = 3000
    sent = {f"t{n}": torch.full((2, 3), n, dtype=torch.int32) for n in range(count)}
    local = {key: torch.zeros_like(value) for n, (key, value) in enumerate(sent.items()) if n % 1500}
    local["t7"] = torch.zeros(3, 2, dtype=torch.int32).t()
    network = MemoryNetwork()
    send_state(network.link(0), [1], sent, SendOptions(TIMEOUT_S, MAX_METADATA_BYTES))
    receive_state(
        network.link(1),
        0,
        ReceiveOptions(TIMEOUT_S, MAX_METADATA_BYTES, local_state=lambda: local, strict=False),
    )
    assert all(torch.equal(value, sent[key]) for key, value in local.items())
