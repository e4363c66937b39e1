"""Describing a state: many tensors in one step, and errors that name the path of the tensor that fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

from torchferry.core.manifest import OPAQUE, PICKLED
from torchferry.errors import Unsendable
from torchferry.tensors.describe import describe, describe_target

COUNT = 40
"""Enough tensors to be described in one step."""

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{text}")
    for text in ("torch.quantize_per", "The PyTorch API of nested tensors")
]


def state(**others: object) -> dict[str, Any]:
    return {**{f"layer {n}": torch.full((2, 3), float(n)) for n in range(COUNT)}, **others}


def freed() -> torch.Tensor:
    tensor = torch.arange(4.0)
    tensor.untyped_storage().resize_(0)
    return tensor


UNSENDABLE: dict[str, Callable[[], torch.Tensor]] = {
    "freed": freed,
    "meta device": lambda: torch.ones(2, device="meta"),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2)]),
    "neg bit": lambda: torch._neg_view(torch.ones(2, dtype=torch.int32)),
    "129 dimensions": lambda: torch.ones(1).as_strided((1,) * 129, (1,) * 129),
}


@pytest.mark.parametrize("reason", UNSENDABLE)
def test_the_error_names_the_one_tensor_of_many_that_can_not_be_sent(reason: str) -> None:
    with pytest.raises(Unsendable, match=reason) as raised:
        describe({"model": state(odd=UNSENDABLE[reason]())})
    assert (raised.value.path, raised.value.phase) == ("model.odd", "describe")


@pytest.mark.parametrize("reason", UNSENDABLE)
def test_in_a_local_state_that_tensor_is_opaque_and_the_others_are_not(reason: str) -> None:
    odd = UNSENDABLE[reason]()
    leaves = describe_target(state(odd=odd)).manifest.leaves
    assert [leaf.kind for leaf in leaves] == ["tensor"] * COUNT + [OPAQUE]
    assert describe_target([odd]).manifest.leaves[0].fixed is not None


@pytest.mark.parametrize("reason", UNSENDABLE)
def test_a_tensor_that_can_not_be_sent_is_pickled_if_that_is_allowed(reason: str) -> None:
    described = describe(state(odd=UNSENDABLE[reason]()), pickle=lambda value: b"a pickle")
    assert described.manifest.leaves[-1].kind == PICKLED
    assert len(described.tensors) == len(described.memories) == COUNT


def test_a_tensor_that_stands_in_two_places_is_one_leaf() -> None:
    one = state()
    twice = describe([one, {**one}, list(one.values())])
    assert len(twice.manifest.leaves) == COUNT
    again = describe(state() | {"again": one["layer 3"], "and again": one["layer 3"]})
    assert len(again.manifest.leaves) == COUNT + 1


def test_tensors_that_were_written_since_are_listed() -> None:
    one = state()
    described = describe(one)
    assert described.changed_tensors() == []
    one["layer 3"].add_(1)
    one["layer 7"].zero_()
    assert described.changed_tensors() == [3, 7]


def test_ndarrays_and_inference_tensors_are_listed_as_uncounted() -> None:
    with torch.inference_mode():
        inference = torch.ones(3)
    described = describe({"plain": torch.ones(3), "array": numpy.ones(3), "inference": inference})
    assert described.uncounted == {1, 2}


def test_a_tensor_whose_memory_torch_hides_is_refused_with_its_path() -> None:
    """torch.vmap passes tensors that have no storage."""

    def send(row: torch.Tensor) -> torch.Tensor:
        describe({"model": {"row": row}})
        return row

    with pytest.raises(Unsendable, match=r"model\.row: a tensor without accessible memory"):
        torch.vmap(send)(torch.ones(2, 3))
