"""Local values that can't be written in place: the mismatch has the reason, and no tensor is changed."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from tests.unit.pg_transport.fake_group import TransportPair
from torchferry import StateMismatch
from torchferry.errors import Unsendable
from torchferry.tensors.describe import describe, holds_tensors


class Holder:
    """An object with a tensor in it, like a metric."""

    def __init__(self, held: object) -> None:
        self.held = held


class Slotted:
    """An object with a tensor in a slot."""

    __slots__ = ("held",)

    def __init__(self, held: object) -> None:
        self.held = held


class Subclass(torch.Tensor):
    pass


def mismatch_of(sent: object, local: object, **options: Any) -> str:
    """Return the mismatch of a leaf. The tensor beside it must stay unchanged."""
    neighbour = torch.zeros(3)
    transports = TransportPair({"model": {"leaf": local, "w": neighbour}}, sender=options, **options)
    with pytest.raises(StateMismatch) as raised:
        transports.transfer({"model": {"leaf": sent, "w": torch.ones(3)}})
    assert [mismatch.path for mismatch in raised.value.mismatches] == ["model.leaf"]
    assert not neighbour.any()
    return str(raised.value)


PICKLED: dict[str, Callable[[], Any]] = {
    "an object with a tensor": lambda: Holder(torch.ones(2)),
    "an object with slots": lambda: Slotted(torch.ones(2)),
    "an object deep inside": lambda: Holder([{"a": (Slotted(deque([torch.ones(2)])),)}]),
    "a partial": lambda: functools.partial(print, torch.ones(2)),
    "a module": lambda: torch.nn.Linear(2, 2),
    "an array": lambda: Holder(numpy.ones(2)),
    "a tensor subclass": lambda: torch.ones(2).as_subclass(Subclass),
}


@pytest.mark.parametrize("name", PICKLED)
def test_a_pickled_leaf_with_tensors_is_a_mismatch(name: str) -> None:
    message = mismatch_of(PICKLED[name](), PICKLED[name](), allow_pickle=True)
    assert "incoming a pickled object with tensors in it" in message


@pytest.mark.parametrize("name", PICKLED)
def test_a_value_for_a_local_object_with_tensors_is_a_mismatch(name: str) -> None:
    for options in ({}, {"allow_pickle": True}):
        mismatch_of(1, PICKLED[name](), **options)
    mismatch_of(Holder(1), PICKLED[name](), allow_pickle=True)


def test_a_pickled_leaf_for_a_local_tensor_is_a_mismatch() -> None:
    assert "local tensor float32[2]" in mismatch_of(Holder(1), torch.zeros(2), allow_pickle=True)


def test_pickled_values_without_tensors_are_returned() -> None:
    neighbour = torch.zeros(2)
    local = {"leaf": Holder("old"), "w": neighbour}
    transports = TransportPair(local, sender={"allow_pickle": True}, allow_pickle=True)
    received = transports.transfer({"leaf": Holder("new"), "w": torch.ones(2)})
    assert received["leaf"].held == "new"
    assert neighbour.tolist() == [1, 1]


def test_a_pickled_leaf_of_a_fresh_state_may_have_tensors() -> None:
    received = TransportPair(sender={"allow_pickle": True}, allow_pickle=True).transfer(Holder(torch.ones(2)))
    assert received.held.tolist() == [1, 1]


@pytest.mark.parametrize(
    "value", [1, "text", [1, {"a": 2}], len, torch, torch.Tensor, Holder(None), object()]
)
def test_objects_without_tensors_are_recognized(value: object) -> None:
    assert not holds_tensors(value)


def test_a_large_object_without_tensors_is_a_value() -> None:
    local = {"sampler": Holder(list(range(1_500_000))), "w": torch.zeros(2)}
    received = TransportPair(local, sender={"allow_pickle": True}, allow_pickle=True).transfer(
        {"sampler": Holder(list(range(1_500_000))), "w": torch.ones(2)}
    )
    assert received["w"].tolist() == [1, 1]


class RaisingClass:
    """An object whose `__class__` raises, like a proxy outside its context."""

    def __init__(self, held: object = None) -> None:
        self.held = held

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        raise RuntimeError("working outside of request context")


def test_the_class_attribute_of_an_object_is_not_read() -> None:
    assert not holds_tensors([RaisingClass()])
    assert "RaisingClass that holds tensors" in mismatch_of(torch.ones(2), RaisingClass(torch.zeros(2)))
    received = TransportPair({"leaf": RaisingClass(), "w": torch.zeros(2)}).transfer(
        {"leaf": 1, "w": torch.ones(2)}
    )
    assert received["leaf"] == 1


@pytest.mark.parametrize("wrap", [lambda value: value, lambda value: {value}], ids=["a leaf", "in a set"])
def test_an_object_whose_class_attribute_raises_is_refused_with_its_path(wrap: Callable[[Any], Any]) -> None:
    with pytest.raises(Unsendable, match=r"^model\.leaf: a value of type .*RaisingClass can't be sent"):
        describe({"model": {"leaf": wrap(RaisingClass())}})


def test_a_mismatch_names_the_attribute_of_a_local_state_dict_that_can_t_be_described() -> None:
    local: Any = torch.nn.Linear(1, 1).state_dict()
    local._metadata["odd"] = object()
    with pytest.raises(
        StateMismatch, match=r"with tensors that can't be described: in its attribute _metadata"
    ):
        TransportPair({"model": local}).transfer({"model": torch.ones(1)})


def test_an_object_that_contains_itself_is_searched_once() -> None:
    loop = Holder(None)
    loop.held = [loop]
    assert not holds_tensors(loop)


REASONS: dict[str, tuple[Callable[[], Any], str]] = {
    "on the meta device": (
        lambda: torch.zeros(3, device="meta"),
        "local a tensor on the meta device: call `to_empty()` first",
    ),
    "a parameter on the meta device": (
        lambda: torch.nn.Linear(1, 3, device="meta").weight,
        "local a tensor on the meta device: call `to_empty()` first",
    ),
    "lazy": (lambda: torch.nn.LazyLinear(3).weight, "run a forward pass first"),
    "a subclass": (lambda: torch.zeros(3).as_subclass(Subclass), "local a tensor of the class tests.unit."),
    "a wrapper": (lambda: TwoTensor(torch.zeros(3), torch.zeros(3)), "two_tensor.TwoTensor"),
    "quantized": (
        lambda: torch.quantize_per_tensor(torch.zeros(3), 1.0, 0, torch.qint8),
        "local quantized qint8[3]",
    ),
    "an optimizer": (
        lambda: torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))]),
        "local a torch.optim.sgd.SGD that holds tensors: put the tensors themselves into the state",
    ),
}


@pytest.mark.parametrize("name", REASONS)
def test_a_mismatch_has_the_reason_why_a_local_tensor_can_t_be_written(name: str) -> None:
    make, reason = REASONS[name]
    message = mismatch_of(torch.ones(3), make())
    assert reason in message
    assert "opaque" not in message


@pytest.mark.filterwarnings("ignore:.*not writ")
@pytest.mark.parametrize("many", [1, 40], ids=["alone", "among_many_small_tensors"])
def test_read_only_memory_is_a_mismatch(many: int, tmp_path: Path) -> None:
    """torch does not know that memory is read-only, and a write to it would kill the process."""
    file = tmp_path / "weights"
    file.write_bytes(bytes(1 << 16))
    fixed = torch.from_numpy(numpy.memmap(file, numpy.float32, mode="r", offset=256, shape=(64,)))
    local = {f"t{n}": torch.zeros(64) for n in range(many)}
    with pytest.raises(StateMismatch) as raised:
        TransportPair({**local, "fixed": fixed}).transfer(
            {name: torch.ones(64) for name in (*local, "fixed")}
        )
    (mismatch,) = raised.value.mismatches
    assert mismatch.path == "fixed"
    assert mismatch.local == "a tensor in read-only memory: receive into a copy of it"
    assert not any(tensor.any() for tensor in local.values())
