"""sync on real ranks over gloo: who takes what from whom, and what every rank is told."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import torchferry
from tests.support.cluster import Cluster

TIMEOUT_S = 20


def state_of(value: float, step: int) -> dict[str, Any]:
    return {"model": {"w": torch.full((1000,), value), "b": torch.full((3,), -value)}, "step": step}


def catch_up(rank: int, versions: list[int | None], **options: Any) -> dict[str, Any]:
    """Sync a state that differs by version, and return what became of it."""
    version = versions[rank]
    state = state_of(float(version or 0), version or 0)
    weight = state["model"]["w"]
    result = torchferry.sync(state, version, timeout=TIMEOUT_S, **options)
    return {
        "version": result.version,
        "role": result.role,
        "weight": weight[0].item(),
        "step": result.state["step"],
        "same": result.state["model"]["w"] is weight,
        "failed": result.failed,
        "bytes": 0 if result.report is None else result.report.bytes_moved,
    }


def test_ranks_behind_take_the_highest_version_in_place(quad: Cluster) -> None:
    answers = quad.run(catch_up, [3, 7, None, 7])
    assert [answer["role"] for answer in answers] == ["receiver", "source", "receiver", "source"]
    for answer in answers:
        assert (answer["version"], answer["weight"], answer["step"]) == (7, 7.0, 7)
        assert answer["same"]
        assert answer["failed"] == {}
    assert [answer["bytes"] for answer in answers] == [4012, 0, 4012, 0]


def test_nobody_moves_anything_if_all_have_the_version(quad: Cluster) -> None:
    answers = quad.run(catch_up, [5, 5, 5, 5])
    assert [answer["role"] for answer in answers] == ["idle"] * 4
