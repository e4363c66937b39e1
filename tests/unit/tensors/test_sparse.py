"""Sparse tensors: indices and values of every layout arrive unchanged, fresh and in place."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.support.equality import assert_same
from tests.support.transfer import transfer
from tests.unit.tensors.refusing import refusal_at_a_path
from torchferry.errors import BadManifest, StateMismatch

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse"),
    pytest.mark.filterwarnings("ignore:.*checks are implicitly disabled"),
]


def coo(*, coalesced: bool = True, scale: float = 1.0) -> torch.Tensor:
    """Return a tensor of two items with different indices, flagged as coalesced or not."""
    indices, values = torch.tensor([[0, 1], [1, 1]]), scale * torch.tensor([1.0, 2.0])
    return torch.sparse_coo_tensor(indices, values, (2, 2), is_coalesced=coalesced, check_invariants=True)


def repeated_indices() -> torch.Tensor:
    return torch.sparse_coo_tensor(
        torch.tensor([[1, 1, 0], [0, 0, 1]]), torch.tensor([1.0, 2.0, 4.0]), (2, 2), check_invariants=True
    )


def csr(**changes: torch.Tensor) -> torch.Tensor:
    parts = {
        "crow": torch.tensor([0, 1, 2], dtype=torch.int32),
        "col": torch.tensor([1, 0], dtype=torch.int32),
        "values": torch.tensor([1.0, 2.0], dtype=torch.float64),
    } | changes
    return torch.sparse_csr_tensor(
        parts["crow"], parts["col"], parts["values"], (2, 2), check_invariants=True
    )


SPARSE: dict[str, Callable[[], torch.Tensor]] = {
    "coo": coo,
    "coo, not coalesced": repeated_indices,
    "coo, flagged uncoalesced": lambda: coo(coalesced=False),
    "coo without items": lambda: torch.zeros(3, 4).to_sparse(),
    "coo, hybrid": lambda: torch.sparse_coo_tensor(
        torch.tensor([[0, 2]]), torch.randn(2, 3), (4, 3), check_invariants=True
    ),
    "coo of complex": lambda: torch.tensor([[0, 1 + 2j]]).to_sparse(),
    "coo of 0-dim": lambda: torch.tensor(2.0).to_sparse(),
    "coo that requires grad": lambda: coo().requires_grad_(),
    "coo parameter": lambda: torch.nn.Parameter(coo()),
    "csr": csr,
    "csr that requires grad": lambda: csr().requires_grad_(),
    "csr, batched": lambda: torch.stack([torch.eye(3), 2 * torch.eye(3)]).to_sparse_csr(),
    "csr without items": lambda: torch.zeros(3, 4).to_sparse_csr(),
    "csc": lambda: torch.eye(3, 4).to_sparse_csc(),
    "bsr": lambda: torch.eye(4, 6).to_sparse_bsr((2, 3)),
    "bsc": lambda: torch.eye(4, 6).to_sparse_bsc((2, 3)),
    "bsr parameter": lambda: torch.nn.Parameter(torch.eye(4).to_sparse_bsr((2, 2))),
}


@pytest.mark.parametrize("own_buffers", [False, True], ids=["direct", "staged"])
@pytest.mark.parametrize("name", SPARSE)
def test_every_sparse_layout_arrives_unchanged(name: str, own_buffers: bool) -> None:
    state = {"s": SPARSE[name](), "dense": torch.ones(2)}
    assert_same(state, transfer(state, own_buffers=own_buffers).state)


@pytest.mark.parametrize("name", SPARSE)
def test_every_sparse_layout_can_be_received_in_place(name: str) -> None:
    incoming, local = SPARSE[name](), SPARSE[name]()
    with torch.no_grad():
        values = local._values() if local.layout is torch.sparse_coo else local.values()
        values.zero_()
    received = transfer({"s": incoming}, into={"s": local}).state
    assert received["s"] is local
    assert_same({"s": incoming}, {"s": local})


def test_shared_indices_are_sent_once() -> None:
    indices = torch.tensor([[0, 1, 2]])
    state = [
        torch.sparse_coo_tensor(indices, torch.randn(3), (4,), is_coalesced=True, check_invariants=True)
        for _ in range(2)
    ]
    ferried = transfer(state)
    assert_same(state, ferried.state)
    assert ferried.payload_bytes == 24 + 12 + 12


@pytest.mark.parametrize(
    "make", [coo, lambda **kw: torch.nn.Parameter(coo(**kw))], ids=["tensor", "parameter"]
)
@pytest.mark.parametrize("coalesced", [False, True])
def test_in_place_the_local_tensor_gets_the_coalesced_flag(
    make: Callable[..., torch.Tensor], coalesced: bool
) -> None:
    """torch ignores repeated indices in a tensor that is flagged as coalesced."""
    local = make(coalesced=not coalesced)
    transfer({"s": coo(coalesced=coalesced, scale=3)}, into={"s": local})
    assert local.is_coalesced() == coalesced
    assert local.detach()._values().tolist() == [3, 6]


def test_in_place_values_of_repeated_indices_are_added() -> None:
    local = torch.sparse_coo_tensor(
        torch.tensor([[0, 0, 1], [0, 1, 1]]), torch.ones(3), (2, 2), is_coalesced=True, check_invariants=True
    )
    transfer({"s": repeated_indices()}, into={"s": local})
    assert local.to_dense().tolist() == [[0, 4], [3, 0]]


@pytest.mark.parametrize(
    ("incoming", "local", "said"),
    [
        (coo, csr, ["layout: incoming torch.sparse_coo, local torch.sparse_csr"]),
        (coo, lambda: torch.ones(2, 2), ["kind", "incoming sparse", "local tensor float32[2, 2]"]),
        (csr, lambda: csr().to_sparse_csc(), ["torch.sparse_csr", "torch.sparse_csc"]),
        (coo, repeated_indices, ["shape", "incoming [2, 2], local [2, 3]"]),
        (csr, lambda: csr(values=torch.tensor([1.0, 2.0])), ["dtype", "incoming float64, local float32"]),
        (lambda: torch.zeros(3, 4).to_sparse(), lambda: torch.zeros(4, 3).to_sparse(), ["[3, 4]", "[4, 3]"]),
    ],
)
def test_in_place_layout_shape_and_number_of_items_must_match(
    incoming: Callable[[], torch.Tensor], local: Callable[[], torch.Tensor], said: list[str]
) -> None:
    with pytest.raises(StateMismatch) as raised:
        transfer({"s": incoming()}, into={"s": local()})
    message = str(raised.value)
    assert [words for words in ["s:", *said] if words not in message] == []


def test_a_sparse_tensor_on_the_meta_device_is_refused() -> None:
    assert "meta" in refusal_at_a_path(torch.empty(2, 2, layout=torch.sparse_coo, device="meta"))


def test_indices_out_of_range_are_refused_with_the_path() -> None:
    """torch would read and write outside of such a tensor."""
    bad = torch.sparse_coo_tensor(torch.tensor([[0, 9]]), torch.ones(2), (4,), check_invariants=False)
    with pytest.raises(BadManifest, match=r"^model\.bad: a sparse can't be built: .*index 9") as raised:
        transfer({"model": {"bad": bad}})
    assert (raised.value.path, raised.value.phase) == ("model.bad", "assemble")
