"""What many tensors look like: asked once for all of them if it was asked before, and never wrong."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchferry.core.manifest import Leaf
from torchferry.tensors import looks
from torchferry.tensors.looks import Looks, Sight, joined

FORMS: dict[str, Callable[[], torch.Tensor]] = {
    "plain": lambda: torch.ones(2, 3),
    "another plain": lambda: torch.zeros(2, 3),
    "shape": lambda: torch.ones(3, 2),
    "flat": lambda: torch.ones(6),
    "strides": lambda: torch.ones(3, 2).t(),
    "strides with gaps": lambda: torch.ones(2, 6)[:, ::2],
    "strides of one row": lambda: torch.ones(2, 6)[:, :3],
    "expanded": lambda: torch.ones(1, 3).expand(2, 3),
    "offset": lambda: torch.ones(12)[6:].view(2, 3),
    "dtype": lambda: torch.ones(2, 3, dtype=torch.int32),
    "half": lambda: torch.ones(2, 3, dtype=torch.bfloat16),
    "bool": lambda: torch.ones(2, 3, dtype=torch.bool),
    "complex": lambda: torch.ones(2, 3, dtype=torch.complex64),
    "conj": lambda: torch.ones(2, 3, dtype=torch.complex64).conj(),
    "neg": lambda: torch._neg_view(torch.ones(2, 3)),
    "neg of complex": lambda: torch._neg_view(torch.ones(2, 3, dtype=torch.complex64)),
    "scalar": lambda: torch.ones(()),
    "empty": lambda: torch.ones(0, 3),
    "meta": lambda: torch.ones(2, 3, device="meta"),
    "grad": lambda: torch.ones(2, 3, requires_grad=True),
    "parameter": lambda: torch.nn.Parameter(torch.ones(2, 3)),
    "frozen": lambda: torch.nn.Parameter(torch.ones(2, 3), requires_grad=False),
}


def seen(sight: Sight, tensors: Sequence[torch.Tensor]) -> Looks:
    return sight.recognise(tensors) or sight.look(tensors)


def test_this_torch_can_be_asked_of_many_at_once() -> None:
    assert looks._are_sound()


def test_what_was_seen_twice_is_recognised() -> None:
    sight = Sight()
    first = sight.look([make() for make in FORMS.values()])
    assert sight.recognise([make() for make in FORMS.values()]) is None, "it may never be asked again"
    assert sight.look([make() for make in FORMS.values()]) is first
    assert sight.recognise([make() for make in FORMS.values()]) is first


@pytest.mark.parametrize("before", FORMS)
@pytest.mark.parametrize("now", FORMS)
def test_nothing_is_taken_for_what_it_is_not(before: str, now: str) -> None:
    sight = Sight()
    for _ in range(3):
        seen(sight, [FORMS["plain"](), FORMS[before]()])
    others = [FORMS["plain"](), FORMS[now]()]
    alike = {"plain", "another plain", "offset"}
    recognised = sight.recognise(others) is not None
    assert recognised == (before == now or {before, now} <= alike)
    assert seen(sight, others) == Sight().look(others)


@given(st.lists(st.lists(st.sampled_from(sorted(FORMS)), min_size=1, max_size=4), min_size=2, max_size=12))
def test_looks_are_those_of_a_first_look_whatever_was_seen_before(rounds: list[list[str]]) -> None:
    sight = Sight()
    for names in (names for names in rounds for _ in range(2)):
        tensors = [FORMS[name]() for name in names]
        assert seen(sight, tensors) == Sight().look(tensors)


def in_inference_mode() -> Any:
    return torch.inference_mode()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, in_inference_mode])
@pytest.mark.parametrize("later", [torch.no_grad, torch.enable_grad, in_inference_mode])
def test_gradients_are_told_apart_in_every_mode(mode: Callable[[], Any], later: Callable[[], Any]) -> None:
    sight = Sight()
    with mode():
        for _ in range(3):
            seen(sight, [torch.ones(3), torch.ones(3)])
    with torch.inference_mode(mode=False):
        other = [torch.ones(3), torch.ones(3, requires_grad=True)]
    with later():
        assert sight.recognise(other) is None


def test_one_that_is_there_twice_is_not_recognised() -> None:
    sight = Sight()
    for _ in range(3):
        seen(sight, [torch.ones(3), torch.ones(3)])
    one = torch.ones(3)
    assert sight.recognise([one, one]) is None


@pytest.mark.parametrize(
    "values",
    [[], [torch.ones(3)], [torch.ones(3)] * 3, [torch.ones(3), 1], [torch.ones(3), {}], [None, None]],
    ids=["none", "one", "three", "an int", "a dict", "nothing"],
)
def test_what_is_no_tensor_or_not_as_many_is_not_recognised(values: list[object]) -> None:
    sight = Sight()
    for _ in range(3):
        seen(sight, [torch.ones(3), torch.ones(3)])
    assert sight.recognise(values) is None


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_a_nested_tensor_is_not_recognised_and_ends_nothing(layout: torch.layout) -> None:
    sight = Sight()
    for _ in range(3):
        seen(sight, [torch.ones(2), torch.ones(3)])
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)
    assert sight.recognise([torch.ones(2), nested]) is None
    assert sight.recognise([nested, torch.ones(3)]) is None


class Subclass(torch.Tensor):
    """Not plain: there may be Python code behind its strides."""


def test_what_is_not_plain_is_never_asked_at_once() -> None:
    sight = Sight()
    for _ in range(4):
        tensors = [torch.ones(2), torch.ones(3).as_subclass(Subclass)]
        assert sight.recognise(tensors) is None
        assert sight.look(tensors) == Sight().look(tensors)


@pytest.mark.parametrize("key", ["Conjugate", "Negative"])
@pytest.mark.parametrize("from_the_start", [True, False])
def test_bits_are_seen_even_where_torch_is_told_not_to_see_them(key: str, from_the_start: bool) -> None:
    assert looks._are_sound()
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
    make = torch.conj if key == "Conjugate" else torch._neg_view
    plain = torch.ones(2, dtype=torch.complex64)
    odd = make(plain)
    sight = Sight()
    if not from_the_start:
        for _ in range(3):
            seen(sight, [plain])
    with torch._C._ExcludeDispatchKeyGuard(keys):
        for _ in range(3):
            assert seen(sight, [plain]) == Sight().look([plain])
        assert seen(sight, [odd]) == Sight().look([odd]) != Sight().look([plain])


def test_a_version_that_was_not_tried_is_asked_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.14.0")
    looks._are_sound.cache_clear()
    try:
        assert not looks._are_sound()
    finally:
        looks._are_sound.cache_clear()


def test_leaves_are_not_kept_from_what_looked_otherwise() -> None:
    sight = Sight()
    for _ in range(3):
        seen(sight, [torch.ones(3)])
    leaves = [Leaf("tensor", (0,))]
    sight.leaves.of(range(1), lambda: leaves)
    assert sight.recognise([torch.ones(3)])
    assert sight.leaves.answer is leaves
    seen(sight, [torch.ones(3, requires_grad=True)])
    assert sight.leaves.answer is None


def test_no_tensor_is_kept_alive() -> None:
    sight = Sight()
    tensors = [torch.ones(3) for _ in range(4)]
    for _ in range(3):
        seen(sight, tensors)
    watched = [weakref.ref(tensor) for tensor in tensors]
    del tensors
    gc.collect()
    assert [ref() for ref in watched] == [None] * 4


class Careless:
    """A check that says yes to everything."""

    def check(self, *tensors: object) -> bool:
        return True


def unheard_of(*asked: object) -> Any:
    raise ImportError("no such thing in this torch")


@pytest.mark.parametrize("make", [lambda *asked: Careless(), unheard_of], ids=["careless", "unheard of"])
def test_a_torch_that_can_not_be_asked_like_that_is_asked_one_by_one(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(looks, "_make_guards", make)
    looks._are_sound.cache_clear()
    try:
        sight = Sight()
        for name in ("plain", "plain", "plain", "shape"):
            tensors = [FORMS[name]()]
            assert sight.recognise(tensors) is None
            assert sight.look(tensors) == Sight().look(tensors)
    finally:
        looks._are_sound.cache_clear()


def test_parts_are_joined_in_order() -> None:
    names = sorted(FORMS)
    for cut in range(len(names) + 1):
        parts = [[FORMS[name]() for name in some] for some in (names[:cut], names[cut:]) if some]
        whole = [tensor for part in parts for tensor in part]
        assert joined([Sight().look(part) for part in parts]) == Sight().look(whole)
