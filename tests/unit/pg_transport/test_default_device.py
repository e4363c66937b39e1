"""Transfers work under any default device of torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from tests.support.cluster import Cluster
from tests.support.equality import assert_same
from torchferry import PGTransport


@contextmanager
def default_device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


CONTEXTS: dict[str, Any] = {"set_default_device": default_device, "with torch.device": torch.device}


def make_state() -> dict[str, Any]:
    """Return a state with every kind of leaf that is built with a constructor of torch."""
    with torch.device("cpu"):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        return {
            "w": torch.arange(6.0).view(2, 3),
            "many": {f"t{n}": torch.full((3,), float(n)) for n in range(40)},
            "large": torch.ones(3 << 20, dtype=torch.uint8),
            "parameter": torch.nn.Parameter(torch.ones(2)),
            "column": torch.ones(4, 4)[:, 1],
            "conj": torch.ones(2, dtype=torch.complex64).conj(),
            "coo": torch.eye(3).to_sparse(),
            "csr": torch.eye(3).to_sparse_csr(),
            "array": numpy.arange(5),
            "scalar": numpy.float64(2.5),
            "backwards": numpy.arange(6.0)[::-2],
            "dtensor": DTensor.from_local(torch.ones(2, 2), mesh, [Replicate()], run_check=False),
            "step": 3,
        }


def zeroed(state: dict[str, Any]) -> dict[str, Any]:
    for value in [*state.values(), *state["many"].values()]:
        if isinstance(value, DTensor):
            value.to_local().zero_()
        elif isinstance(value, torch.Tensor):
            (value.values() if value.layout is not torch.strided else value.detach()).zero_()
        elif isinstance(value, numpy.ndarray):
            value[...] = 0
    return state


def transfer_under(rank: int, context: str, device: str, in_place: bool) -> str:
    """Send or receive under a default device, and compare the received state."""
    state = make_state()
    local = zeroed(make_state()) if in_place else None
    with CONTEXTS[context](device):
        transport = PGTransport(dist.group.WORLD, 20, "cpu", None if local is None else lambda: local)
        if rank == 0:
            transport.send_checkpoint([1], state)
            return ""
        received = transport.recv_checkpoint(0)
    assert_same(state, received)
    return str(transport.last_report)


@pytest.mark.parametrize("in_place", [False, True], ids=["fresh", "in place"])
@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize("context", CONTEXTS)
def test_a_state_arrives_under_any_default_device(
    context: str, device: str, in_place: bool, pair: Cluster
) -> None:
    pair.run(transfer_under, context, device, in_place)
