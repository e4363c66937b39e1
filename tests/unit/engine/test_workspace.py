"""A workspace reuses manifests and plans of earlier transfers only where they are valid."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.equality import assert_same
from tests.support.transfer import transfer
from torchferry.core import codec
from torchferry.core.manifest import Leaf, Manifest, TensorSpec
from torchferry.core.plan import make_plan
from torchferry.engine import metadata, workspace
from torchferry.engine.workspace import Cache, Workspace
from torchferry.errors import StateMismatch, Unsendable

COUNT = 40
"""Enough tensors to be described at once."""

Workspaces = tuple[Workspace, Workspace]


def state(fill: float = 0.0) -> dict[str, Any]:
    return {f"layer {n}": torch.full((2, 3), float(fill + n)) for n in range(COUNT)}


@pytest.fixture
def workspaces() -> Workspaces:
    return Workspace(torch.device("cpu")), Workspace(torch.device("cpu"))


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """A list of all plans that are made."""
    made: list[object] = []

    def make(*args: Any, **keywords: Any) -> object:
        made.append(make_plan(*args, **keywords))
        return made[-1]

    monkeypatch.setattr(metadata, "make_plan", make)
    return made


@pytest.mark.parametrize("in_place", [False, True], ids=["fresh", "in place"])
def test_a_state_that_is_sent_again_is_planned_once_on_each_side(
    workspaces: Workspaces, plans: list[object], in_place: bool
) -> None:
    for fill in (0.0, 1.0, 2.0):
        into = state(-1.0) if in_place else None
        assert_same(transfer(state(fill), into=into, workspaces=workspaces).state, state(fill))
    assert len(plans) == 2


def test_a_manifest_that_arrives_again_is_not_decoded_again(
    workspaces: Workspaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfer(state(), workspaces=workspaces)

    def fail(*_: object) -> object:
        raise AssertionError("decoded again")

    monkeypatch.setattr(codec, "decode_manifest", fail)
    transfer(state(1.0), workspaces=workspaces)
    with pytest.raises(AssertionError, match="decoded again"):
        transfer({**state(), "more": torch.ones(1)}, workspaces=workspaces)


def test_a_state_with_another_value_is_not_planned_again(workspaces: Workspaces, plans: list[object]) -> None:
    for step in (1, 2):
        assert transfer({**state(), "step": step}, workspaces=workspaces).state["step"] == step
    assert len(plans) == 2


def unchanged(one: dict[str, Any]) -> dict[str, Any]:
    return one


def tied(one: dict[str, Any]) -> dict[str, Any]:
    return {**one, "layer 1": one["layer 0"]}


def overlapping(one: dict[str, Any]) -> dict[str, Any]:
    return {**one, "layer 1": one["layer 0"].view(-1)[3:].expand(2, 3)}


def at_another_offset(one: dict[str, Any]) -> dict[str, Any]:
    return {name: torch.cat([torch.zeros(6), tensor.view(-1)])[6:].view(2, 3) for name, tensor in one.items()}


CHANGES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "dtype": lambda one: {**one, "layer 3": one["layer 3"].to(torch.int32)},
    "dtype of all, with the same item size": lambda one: {n: t.to(torch.int32) for n, t in one.items()},
    "shape": lambda one: {n: t.view(3, 2) for n, t in one.items()},
    "strides": lambda one: {n: t.t().contiguous().t() for n, t in one.items()},
    "offset": at_another_offset,
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
def test_a_state_that_differs_from_the_last_one_arrives_exactly(
    workspaces: Workspaces, change: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    # Alternate, and repeat: a kept manifest must not be used for another state.
    for fill, make in enumerate([unchanged, change] * 2 + [unchanged] * 3 + [change] * 3 + [unchanged]):
        sent = make(state(fill))
        assert_same(transfer(sent, workspaces=workspaces).state, make(state(fill)))
        if not any(tensor.requires_grad for tensor in sent.values() if isinstance(tensor, torch.Tensor)):
            assert_same(
                transfer(sent, into=make(state(-1.0)), workspaces=workspaces).state, make(state(fill))
            )


EQUAL_TO_PYTHON: dict[str, list[object]] = {
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
@pytest.mark.parametrize("equal_values", EQUAL_TO_PYTHON.values(), ids=EQUAL_TO_PYTHON)
def test_values_that_are_equal_to_python_are_not_mixed_up(
    workspaces: Workspaces, equal_values: list[object], in_place: bool
) -> None:
    for value in (value for value in [*equal_values, *equal_values] for _ in range(3)):
        into = {**state(-1.0), "value": value} if in_place else None
        arrived = transfer({**state(), "value": value}, into=into, workspaces=workspaces).state["value"]
        assert repr(arrived) == repr(value)
        assert type(arrived) is type(value)


def test_every_receive_gets_values_of_its_own(workspaces: Workspaces) -> None:
    sent = {**state(), "seen": {1, 2}, "order": [1, {"a": 2}], "rng": (3, (4, 5))}
    first = transfer(sent, workspaces=workspaces).state
    first["seen"].clear()
    first["order"][1]["a"] = "changed"
    assert_same(transfer(sent, workspaces=workspaces).state, sent)


def test_a_workspace_keeps_no_tensor_alive(workspaces: Workspaces) -> None:
    sent, into = state(), state(-1.0)
    received = (
        transfer(sent, workspaces=workspaces).state,
        transfer(sent, into=into, workspaces=workspaces).state,
    )
    watched = [weakref.ref(one["layer 0"]) for one in (sent, into, received[0])]
    del sent, into, received
    gc.collect()
    assert [ref() for ref in watched] == [None] * 3


def test_freed_memory_is_detected_although_the_manifest_is_the_same(
    workspaces: Workspaces,
) -> None:
    sent = state()
    transfer(sent, workspaces=workspaces)
    sent["layer 4"].untyped_storage().resize_(0)
    with pytest.raises(Unsendable, match=r"layer 4.*freed"):
        transfer(sent, workspaces=workspaces)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("count", [1, COUNT], ids=["one", "many"])
def test_a_nested_tensor_in_the_place_of_a_plain_one_is_refused(workspaces: Workspaces, count: int) -> None:
    sent = {f"layer {n}": torch.ones(2) for n in range(count)}
    for _ in range(3):
        transfer(sent, into=dict(sent), workspaces=workspaces)
    nested = {**sent, "layer 0": torch.nested.nested_tensor([torch.ones(2)])}
    with pytest.raises(Unsendable, match="nested"):
        transfer(nested, workspaces=workspaces)
    for _ in range(3):
        transfer(sent, into=dict(sent), workspaces=workspaces)
    with pytest.raises(StateMismatch, match="layer 0"):
        transfer(sent, into=nested, workspaces=workspaces)


LARGE: dict[str, Callable[[], dict[object, object]]] = {
    "containers": lambda: {"a": [{} for _ in range(1000)]},
    "keys": lambda: dict.fromkeys(range(1000), 0),
    "values": lambda: {"a": list(range(1000))},
    "bytes": lambda: {"a": b"0" * 60_000},
    "tensors": lambda: {n: torch.ones(1) for n in range(1000)},
}


@pytest.mark.parametrize("large", LARGE.values(), ids=LARGE)
def test_long_parts_of_a_manifest_are_not_kept(
    workspaces: Workspaces, monkeypatch: pytest.MonkeyPatch, large: Callable[[], dict[object, object]]
) -> None:
    monkeypatch.setattr(workspace, "_MAX_ENTRY_BYTES", 2000)
    for into in (None, large()):
        transfer(large(), into=into, workspaces=workspaces)
        for each in workspaces:
            assert all(cost <= 2000 for _, cost in each.cache._entries.values())
            assert "manifest" not in {key[0] for key in each.cache._entries}


def test_a_plan_of_many_chunks_is_not_kept_for_its_short_manifest() -> None:
    cache = Cache()
    manifest = Manifest(
        0, (), (Leaf("tensor", (0,)),), (TensorSpec("uint8", 1, (1 << 22,), (1,), 0, 0),), (1 << 22,)
    )
    encoded = metadata.encode(manifest, cache)
    assert len(metadata.plan(encoded, cache, 16).chunks) == 1 << 18
    assert not [key for key in cache._entries if key[0] == "plan"]


def test_the_oldest_entries_are_removed_first(
    workspaces: Workspaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workspace, "_MAX_BYTES", 30_000)
    for number in range(20):
        transfer({str(number): torch.ones(number + 1)}, workspaces=workspaces)
        for each in workspaces:
            costs = [cost for _, cost in each.cache._entries.values()]
            assert each.cache._nbytes == sum(costs) <= 30_000
    assert_same(transfer({"0": torch.ones(1)}, workspaces=workspaces).state, {"0": torch.ones(1)})


def test_a_rejected_state_does_not_change_later_transfers(workspaces: Workspaces) -> None:
    transfer(state(), into=state(), workspaces=workspaces)
    with pytest.raises(StateMismatch):
        transfer(state(), into=at_another_offset(state()) | {"more": torch.ones(1)}, workspaces=workspaces)
    assert_same(transfer(state(1.0), into=state(), workspaces=workspaces).state, state(1.0))
