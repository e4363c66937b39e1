"""torchao's quantized weights and optimizer states, with the real library where it is installed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import torchferry
from tests.support.equality import assert_same
from torchferry.tensors import registry

pytest.importorskip("torchao", reason="torchao is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")

WEIGHTS = (
    "Int8WeightOnlyConfig",
    "Int8DynamicActivationInt8WeightConfig",
    "Float8WeightOnlyConfig",
    "IntxWeightOnlyConfig",
)
OPTIMIZERS = ("AdamW8bit", "AdamW4bit", "AdamWFp8")


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_types", dict(registry._types))
    torchferry.register_known("torchao")


def weights(config: str, seed: int) -> Any:
    import torchao.quantization

    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64, dtype=torch.bfloat16))
    torchao.quantization.quantize_(model, getattr(torchao.quantization, config)())
    return model.state_dict()


def optimizer_state(name: str, seed: int) -> Any:
    import torchao.optim

    torch.manual_seed(seed)
    model = torch.nn.Linear(256, 256)
    optimizer = getattr(torchao.optim, name)(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return optimizer.state_dict()


@pytest.mark.parametrize("name", [*WEIGHTS, *OPTIMIZERS])
def test_quantized_weights_and_optimizer_states_arrive_fresh_and_in_place(name: str) -> None:
    make = weights if name in WEIGHTS else optimizer_state
    state, local = make(name, 0), make(name, 1)
    with torchferry.serve(state, version=1) as source:
        assert_same(state, torchferry.fetch(source.address).state)
        received = torchferry.fetch(source.address, into=local).state
    assert_same(state, received)
    assert_same(state, local)
