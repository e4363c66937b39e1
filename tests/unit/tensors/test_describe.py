"""Describing a state: many tensors in one step, and errors that name the path of the tensor that fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

from torchferry.core.manifest import OPAQUE, PICKLED
from torchferry.errors import Unsendable
from torchferry.tensors.describe import Description, describe, describe_target
from torchferry.tensors.memory import tensor_over

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


LIMIT = 1 << 20


def bytes_in(described: Description, number: int) -> bytes:
    """Return the bytes of a tensor, as a source reads them."""
    spec = described.manifest.tensors[number]
    return tensor_over(described.memories[spec.storage], spec).clone().numpy().tobytes()


def test_small_tensors_are_copied_and_large_ones_are_not() -> None:
    small, large = (
        torch.arange(LIMIT // 4, dtype=torch.int32),
        torch.arange(LIMIT // 4 + 1, dtype=torch.int32),
    )
    before = small.numpy().tobytes()
    copied = describe({"small": small, "large": large}).with_copies(LIMIT)
    small.zero_()
    assert bytes_in(copied, 0) == before
    assert copied.changed_tensors() == []
    large.zero_()
    assert copied.changed_tensors() == [1]
    assert not any(bytes_in(copied, 1))


def test_copied_tensors_share_the_memory_that_they_shared() -> None:
    tied, base = torch.ones(3), torch.arange(10)
    tree = {"a": tied, "b": tied, "head": base[1:4], "tail": base[2:], "array": base.numpy()[:2]}
    described = describe(tree)
    copied = described.with_copies(LIMIT)
    assert copied.manifest is described.manifest
    assert len(copied.memories) == len(described.memories) == 2
    tied.zero_()
    base.zero_()
    specs = copied.manifest.tensors
    found = [tensor_over(copied.memories[spec.storage], spec).tolist() for spec in specs]
    # The array of two items is described as bytes.
    assert found == [[1, 1, 1], [1, 2, 3], [2, 3, 4, 5, 6, 7, 8, 9], [[0] * 8, [1, *[0] * 7]]]
    assert copied.changed_tensors() == []
    assert not copied.uncounted


def test_small_tensors_of_one_large_buffer_are_copied_unless_most_of_it_is_unused() -> None:
    buffer = torch.ones(LIMIT)  # 4 MiB
    tight = describe(list(buffer.split(LIMIT // 8))).with_copies(LIMIT)
    sparse = describe([buffer[:8], buffer[-8:]]).with_copies(LIMIT)
    mixed = describe([buffer[:8], buffer[8:]]).with_copies(LIMIT)
    buffer.zero_()
    assert tight.changed_tensors() == []
    assert bytes_in(tight, 0) == torch.ones(LIMIT // 8).numpy().tobytes()
    assert sparse.changed_tensors() == [0, 1]
    assert mixed.changed_tensors() == [0, 1]
