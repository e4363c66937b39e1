"""A receiver written from docs/protocol.md alone fetches the same bytes as torchferry.fetch."""

from __future__ import annotations

import ast
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

import torchferry
from tests.pull.second_implementation import Receiver
from tests.support.cluster import Cluster

SOURCE = Path(__file__).with_name("second_implementation.py")

_sources: list[torchferry.Source] = []


def make_state() -> dict[str, Any]:
    numbers = torch.Generator().manual_seed(3)

    def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, generator=numbers).to(dtype)

    flat = random(1_000_003)
    return {
        "model": {
            "large.weight": random(700, 1100),
            "exact.weight": random(1 << 18),
            "half": random(300_001, dtype=torch.bfloat16),
            "scalar": torch.tensor(7),
            "empty": torch.empty(0, 5),
        },
        # Two tensors of one storage that touch, the second at the lower address.
        "flat": [flat[3:], flat[:3]],
        "packed": [random(n + 1) for n in range(300)] + [random(30_000) for _ in range(20)],
        "groups": [{"lr": 0.1, "betas": [0.9, 0.999]}, {}, []],
        "step": 41,
        "note": "a value",
        "missing": None,
    }


def serve(rank: int) -> str:
    """Serve the state in this process, and return the address."""
    if rank:
        return ""
    _sources.append(torchferry.serve(make_state(), version=41))
    return _sources[0].address


def close(rank: int) -> list[tuple[str, str, int]]:
    """Close the source, and return who has read it."""
    if rank:
        return []
    source = _sources.pop()
    readers = [(reader.receiver, reader.state, reader.version) for reader in source.status().readers]
    source.close()
    return readers


def plain(value: Any) -> Any:
    """Return a state with each tensor as (dtype, shape, bytes)."""
    if isinstance(value, torch.Tensor):
        data = value.reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
        return str(value.dtype).removeprefix("torch."), list(value.shape), data
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    return [plain(inner) for inner in value] if isinstance(value, list) else value


def test_a_second_implementation_fetches_what_torchferry_fetches(pair: Cluster) -> None:
    address = pair.run(serve)[0]
    try:
        with closing(Receiver(address)) as receiver:
            found, version = receiver.fetch()
        fetched = torchferry.fetch(address)
    finally:
        readers = pair.run(close)[0]
    assert version == fetched.version == 41
    assert fetched.report.bytes_total > 8 << 20
    assert found == plain(fetched.state) == plain(make_state())
    assert ("second implementation", "confirmed", 41) in readers


def test_the_second_implementation_is_short_and_uses_little() -> None:
    text = SOURCE.read_text()
    assert len(text.splitlines()) < 100
    modules = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None
            assert not node.level, "a relative import"
            modules.add(node.module)
    roots = {module.partition(".")[0] for module in modules}
    assert roots - sys.stdlib_module_names == {"msgspec", "xxhash"}
    assert "http.client" in modules


@pytest.mark.parametrize("token", ["", "wrong"])
def test_the_second_implementation_is_refused_without_the_token(token: str) -> None:
    with torchferry.serve({"w": torch.ones(3)}, version=1) as source:
        address = source.address.partition("#")[0] + "#" + token
        with closing(Receiver(address)) as receiver, pytest.raises(AssertionError, match="401"):
            receiver.fetch()
