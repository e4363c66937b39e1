"""RNG: after loading its state dict, all generators go on as those of the source."""

from __future__ import annotations

import random
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import torchferry
from tests.support.equality import assert_same
from torchferry import RNG, fetch, serve
from torchferry.tensors import rng


def draw() -> list[Any]:
    """Draw from every generator. Gaussians come in pairs, one of which is kept for the next call."""
    return [
        random.random(),
        random.gauss(0, 1),
        np.random.rand(),
        np.random.randn(),
        torch.rand(3).tolist(),
        torch.randn(3).tolist(),
    ]


@pytest.mark.parametrize("options", [{}, {"atomic": True}, {"compare": True}])
def test_all_generators_go_on_bit_for_bit(options: dict[str, Any]) -> None:
    random.gauss(0, 1)
    np.random.randn()
    with serve({"rng": RNG(), "step": 1}, version=1) as source:
        expected = [draw() for _ in range(3)]
        for _ in range(2):
            fetch(source.address, into={"rng": RNG(), "step": 0}, **options)
            assert [draw() for _ in range(3)] == expected


def test_publishing_draws_nothing() -> None:
    state = RNG().state_dict()
    with serve({"rng": RNG()}, version=1):
        pass
    assert_same(RNG().state_dict(), state)


def test_another_generator_of_numpy_goes_on_too() -> None:
    module: Any = np.random
    before = module.get_bit_generator()
    try:
        for generator in (np.random.PCG64, np.random.Philox, np.random.SFC64):
            module.set_bit_generator(generator(5))
            with serve(RNG(), version=1) as source:
                expected = draw()
                fetch(source.address, into=RNG())
            assert draw() == expected
    finally:
        module.set_bit_generator(before)


def test_a_process_without_numpy_loads_the_rest() -> None:
    script = """
import sys
sys.modules["numpy"] = None
import random, torch, torchferry
torchferry.fetch(sys.argv[1], into={"rng": torchferry.RNG()})
print(random.random(), torch.rand(1).item())
"""
    with serve({"rng": RNG()}, version=1) as source:
        expected = f"{random.random()} {torch.rand(1).item()}"
        command = [sys.executable, "-W", "ignore", "-c", script, source.address]
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.strip() == expected


class FakeAccelerators:
    """Stands for torch.cuda: as many generators as devices, and one current device."""

    __name__ = "torch.fake"

    def __init__(self, count: int, current: int, seed: int) -> None:
        self.states = [torch.tensor([seed, index], dtype=torch.uint8) for index in range(count)]
        self._current = current

    def current_device(self) -> int:
        return self._current

    def device_count(self) -> int:
        return len(self.states)

    def get_rng_state(self, device: int) -> torch.Tensor:
        return self.states[device]

    def set_rng_state(self, state: torch.Tensor, device: int) -> None:
        self.states[device] = state


@pytest.mark.parametrize(
    ("count", "current", "expected"),
    [(2, 0, [1, 0]), (3, 2, [0, 2, 1]), (1, 0, [1]), (4, 1, [0, 1, 2, None])],
)
def test_the_current_accelerator_gets_the_state_of_the_current_one(
    count: int, current: int, expected: list[int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = FakeAccelerators(3, 1, seed=1), FakeAccelerators(count, current, seed=2)
    monkeypatch.setattr(rng, "_accelerator", lambda: source)
    state = RNG().state_dict()
    monkeypatch.setattr(rng, "_accelerator", lambda: target)
    RNG().load_state_dict(state)
    assert [each.tolist() for each in target.states] == [
        [2, index] if other is None else [1, other] for index, other in enumerate(expected)
    ]


def test_accelerators_of_another_type_and_none_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rng, "_accelerator", lambda: FakeAccelerators(1, 0, seed=1))
    state = RNG().state_dict()
    monkeypatch.setattr(rng, "_accelerator", lambda: SimpleNamespace(__name__="torch.other"))
    RNG().load_state_dict(state)
    monkeypatch.undo()
    RNG().load_state_dict(state)
    assert torchferry.RNG is RNG
