"""Quantized tensors arrive with their integers, scales and zero points, fresh and in place."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import torchferry
from tests.support.equality import assert_same
from tests.support.transfer import transfer
from torchferry.errors import FerryError, StateMismatch

# torch deprecates quantized tensors.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")


def per_tensor(seed: int, dtype: torch.dtype = torch.qint8) -> torch.Tensor:
    values = torch.linspace(-seed - 1, seed + 1, 12).view(3, 4)
    return torch.quantize_per_tensor(values, 0.1 + seed, 3 + seed, dtype)


def per_channel(seed: int, dtype: torch.dtype = torch.quint8, axis: int = 0) -> torch.Tensor:
    values = torch.linspace(-seed - 1, seed + 1, 15).view(3, 5)
    count = values.shape[axis]
    scales, zeros = torch.arange(1, count + 1) * (0.1 + seed), torch.arange(count) + seed
    return torch.quantize_per_channel(values, scales, zeros, axis, dtype)


def with_float_zeros(seed: int, dtype: torch.dtype) -> torch.Tensor:
    values = torch.linspace(-seed - 1, seed + 1, 15).view(3, 5)
    scales, zeros = torch.tensor([0.1, 0.2, 0.4]) + seed, torch.tensor([0.5, 1.0, 2.0])
    return torch.quantize_per_channel(values, scales, zeros, 0, dtype)


EXAMPLES: dict[str, Callable[[int], torch.Tensor]] = {
    "qint8": per_tensor,
    "quint8": lambda seed: per_tensor(seed, torch.quint8),
    "qint32": lambda seed: per_tensor(seed, torch.qint32),
    "transposed": lambda seed: per_tensor(seed).t(),
    "a view": lambda seed: per_tensor(seed)[1:, ::2],
    "empty": lambda seed: per_tensor(seed)[:0],
    "of no dimensions": lambda seed: per_tensor(seed)[0, 0],
    "a parameter": lambda seed: torch.nn.Parameter(per_tensor(seed), requires_grad=False),
    "per channel": per_channel,
    "per channel, qint8 along the last axis": lambda seed: per_channel(seed, torch.qint8, 1),
    "float zero points": lambda seed: with_float_zeros(seed, torch.quint8),
    "quint4x2": lambda seed: with_float_zeros(seed, torch.quint4x2),
    "quint2x4": lambda seed: with_float_zeros(seed, torch.quint2x4),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_quantized_tensor_arrives(name: str) -> None:
    state = {"q": EXAMPLES[name](0), "step": 1}
    assert_same(state, transfer(state).state)


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_quantized_tensor_is_written_in_place_with_its_scale_and_zero_point(name: str) -> None:
    state, local = {"q": EXAMPLES[name](0)}, {"q": EXAMPLES[name](1)}
    target, address = local["q"], local["q"].data_ptr()
    assert transfer(state, into=local).state["q"] is target
    assert_same(state, local)
    assert target.data_ptr() == address


def test_views_of_one_quantized_tensor_share_memory_at_the_receiver() -> None:
    whole = per_tensor(0)
    received = transfer([whole, whole[1]]).state
    assert received[1].data_ptr() == received[0][1].data_ptr()


def test_a_quantized_tensor_does_not_land_in_one_of_another_scheme() -> None:
    for local in (per_tensor(0, torch.quint8), per_channel(0), torch.zeros(3, 4)):
        with pytest.raises(StateMismatch, match="q: "):
            transfer({"q": per_tensor(0)}, into={"q": local})


def test_a_quantized_tensor_that_changes_while_it_is_served_is_noticed() -> None:
    tensor = per_tensor(0)
    with torchferry.serve({"q": tensor}, version=1, snapshot=False) as source:
        tensor.copy_(per_tensor(5))
        with pytest.raises(FerryError, match="changed"):
            torchferry.fetch(source.address, timeout=5)
