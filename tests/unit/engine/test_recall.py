"""What one transfer leaves to the next: used where it holds, and nowhere else."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.equality import assert_same
from tests.support.transfer import ferry
from torchferry.core.plan import make_plan
from torchferry.engine import recall, receiving
from torchferry.engine.group import Group
from torchferry.errors import StateMismatch, Unsendable

COUNT = 40
"""Enough to be described at once."""


def state(fill: float = 0.0) -> dict[str, Any]:
    return {f"layer {n}": torch.full((2, 3), float(fill + n)) for n in range(COUNT)}


@pytest.fixture
def groups() -> tuple[Group, Group]:
    return Group(), Group()


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Every plan that is made."""
    made: list[object] = []

    def make(*asked: Any) -> object:
        made.append(make_plan(*asked))
        return made[-1]

    monkeypatch.setattr(recall, "make_plan", make)
    return made


@pytest.mark.parametrize("in_place", [False, True], ids=["fresh", "in place"])
def test_a_state_that_is_sent_again_is_planned_once_on_each_side(
    groups: tuple[Group, Group], plans: list[object], in_place: bool
) -> None:
    for fill in (0.0, 1.0, 2.0):
        into = state(-1.0) if in_place else None
        assert_same(ferry(state(fill), into=into, groups=groups).state, state(fill))
    assert len(plans) == 2


def test_what_arrives_again_is_recognised_and_not_decoded(groups: tuple[Group, Group]) -> None:
    ferry(state(), groups=groups)
    known = groups[1]._recalls["receive"].arrived
    ferry(state(1.0), groups=groups)
    assert known is not None
    assert groups[1]._recalls["receive"].arrived is known


def as_it_is(one: dict[str, Any]) -> dict[str, Any]:
    return one


def tied(one: dict[str, Any]) -> dict[str, Any]:
    return {**one, "layer 1": one["layer 0"]}


def overlapping(one: dict[str, Any]) -> dict[str, Any]:
    return {**one, "layer 1": one["layer 0"].view(-1)[3:].expand(2, 3)}


def moved_on(one: dict[str, Any]) -> dict[str, Any]:
    return {name: torch.cat([torch.zeros(6), tensor.view(-1)])[6:].view(2, 3) for name, tensor in one.items()}


CHANGES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "dtype": lambda one: {**one, "layer 3": one["layer 3"].to(torch.int32)},
    "dtype of all, with the same item size": lambda one: {n: t.to(torch.int32) for n, t in one.items()},
    "shape": lambda one: {n: t.view(3, 2) for n, t in one.items()},
    "strides": lambda one: {n: t.t().contiguous().t() for n, t in one.items()},
    "offset": moved_on,
    "tied": tied,
    "overlap": overlapping,
    "neg bit": lambda one: {**one, "layer 5": torch._neg_view(one["layer 5"])},
    "conj bit": lambda one: {n: torch.complex(t, t).conj() for n, t in one.items()},
    "grad": lambda one: {n: t.requires_grad_() for n, t in one.items()},
    "parameters": lambda one: {n: torch.nn.Parameter(t) for n, t in one.items()},
    "keys": lambda one: {f"{n}!": t for n, t in one.items()},
    "order": lambda one: dict(reversed(one.items())),
    "one less": lambda one: {n: t for n, t in one.items() if n != "layer 7"},
    "one more": lambda one: {**one, "more": torch.ones(2, 3)},
    "a value": lambda one: {**one, "step": 7},
    "sparse": lambda one: {**one, "layer 2": one["layer 2"].to_sparse()},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_state_that_differs_in_anything_arrives_as_it_is(
    groups: tuple[Group, Group], change: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    # By turns, and each three times: what was seen twice is recognised the third time.
    for fill, make in enumerate([as_it_is, change] * 2 + [as_it_is] * 3 + [change] * 3 + [as_it_is]):
        sent = make(state(fill))
        assert_same(ferry(sent, groups=groups).state, make(state(fill)))
        if not any(tensor.requires_grad for tensor in sent.values() if isinstance(tensor, torch.Tensor)):
            assert_same(ferry(sent, into=make(state(-1.0)), groups=groups).state, make(state(fill)))


ALIKE_TO_PYTHON: dict[str, list[object]] = {
    "values": [1, True, 1.0, 1 + 0j],
    "zeros": [0.0, -0.0, 0, False],
    "in a list": [[1], [True], [1.0]],
    "in a set": [{1}, {True}, {1.0}],
    "keys": [{1: 2}, {True: 2}, {1.0: 2}],
    "deep keys": [{(1, 0.0): 2}, {(True, 0.0): 2}, {(1, -0.0): 2}],
    "namedtuple and tuple": [torch.Size([1, 2]), (1, 2)],
    "strings": ["1", b"1"],
}


@pytest.mark.parametrize("in_place", [False, True], ids=["fresh", "in place"])
@pytest.mark.parametrize("alike", ALIKE_TO_PYTHON.values(), ids=ALIKE_TO_PYTHON)
def test_what_python_calls_equal_is_not_taken_for_the_same(
    groups: tuple[Group, Group], alike: list[object], in_place: bool
) -> None:
    for value in (value for value in [*alike, *alike] for _ in range(3)):
        into = {**state(-1.0), "value": value} if in_place else None
        arrived = ferry({**state(), "value": value}, into=into, groups=groups).state["value"]
        assert repr(arrived) == repr(value)
        assert type(arrived) is type(value)


def test_what_is_left_of_long_metadata_is_not_kept_by_the_sender(
    groups: tuple[Group, Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recall, "MOST_FRAME_BYTES", 10_000)
    ferry(state(), groups=groups)
    assert groups[0]._recalls
    ferry({**state(), "long": b"1" * 10_000}, groups=groups)
    assert not groups[0]._recalls


def test_values_are_made_anew_for_every_arrival(groups: tuple[Group, Group]) -> None:
    sent = {**state(), "seen": {1, 2}, "order": [1, {"a": 2}], "rng": (3, (4, 5))}
    first = ferry(sent, groups=groups).state
    first["seen"].clear()
    first["order"][1]["a"] = "spoilt"
    assert_same(ferry(sent, groups=groups).state, sent)


def test_what_is_left_keeps_no_tensor_alive(groups: tuple[Group, Group]) -> None:
    sent, into = state(), state(-1.0)
    received = ferry(sent, groups=groups).state, ferry(sent, into=into, groups=groups).state
    watched = [weakref.ref(one["layer 0"]) for one in (sent, into, received[0])]
    del sent, into, received
    gc.collect()
    assert [ref() for ref in watched] == [None] * 3


def test_memory_that_was_freed_meanwhile_is_found_though_the_description_is_the_same(
    groups: tuple[Group, Group],
) -> None:
    sent = state()
    ferry(sent, groups=groups)
    sent["layer 4"].untyped_storage().resize_(0)
    with pytest.raises(Unsendable, match=r"layer 4.*freed"):
        ferry(sent, groups=groups)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("count", [1, COUNT], ids=["one", "many"])
def test_a_nested_tensor_where_plain_ones_were_is_refused_and_ends_nothing(
    groups: tuple[Group, Group], count: int
) -> None:
    sent = {f"layer {n}": torch.ones(2) for n in range(count)}
    for _ in range(3):
        ferry(sent, into=dict(sent), groups=groups)
    nested = {**sent, "layer 0": torch.nested.nested_tensor([torch.ones(2)])}
    with pytest.raises(Unsendable, match="nested"):
        ferry(nested, groups=groups)
    for _ in range(3):
        ferry(sent, into=dict(sent), groups=groups)
    with pytest.raises(StateMismatch, match="layer 0"):
        ferry(sent, into=nested, groups=groups)


LARGE: dict[str, Callable[[], dict[object, object]]] = {
    "containers": lambda: {"a": [{} for _ in range(1000)]},
    "keys": lambda: dict.fromkeys(range(1000), 0),
    "values": lambda: {"a": list(range(1000))},
    "bytes": lambda: {"a": b"0" * 9_000_000},
}


@pytest.mark.parametrize("large", LARGE.values(), ids=LARGE)
def test_what_takes_much_memory_without_tensors_is_not_kept(
    groups: tuple[Group, Group], monkeypatch: pytest.MonkeyPatch, large: Callable[[], dict[object, object]]
) -> None:
    monkeypatch.setattr(recall, "MOST_ITEMS", 1000)
    for into in (None, large()):
        ferry(large(), into=into, groups=groups)
        assert not groups[0]._recalls
        assert not groups[1]._recalls


def test_what_takes_much_memory_is_not_kept(
    groups: tuple[Group, Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recall, "MOST_ITEMS", COUNT)
    ferry(state(), groups=groups)
    assert not groups[0]._recalls
    assert not groups[1]._recalls


def test_nothing_is_kept_of_long_metadata(
    groups: tuple[Group, Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiving, "MOST_FRAME_BYTES", 100)
    for into in (None, state(-1.0)):
        ferry(state(), into=into, groups=groups)
        assert not groups[1]._recalls


def test_a_large_local_state_is_not_kept_though_little_of_it_arrives(
    groups: tuple[Group, Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recall, "MOST_ITEMS", COUNT - 1)
    ferry({"layer 0": torch.ones(2, 3)}, into=state(), strict=False, groups=groups)
    assert groups[0]._recalls
    assert not groups[1]._recalls


def test_what_was_refused_leaves_nothing(groups: tuple[Group, Group]) -> None:
    ferry(state(), into=state(), groups=groups)
    with pytest.raises(StateMismatch):
        ferry(state(), into=moved_on(state()) | {"more": torch.ones(1)}, groups=groups)
    assert not groups[1]._recalls
    assert_same(ferry(state(1.0), into=state(), groups=groups).state, state(1.0))
