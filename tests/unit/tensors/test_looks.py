"""What many tensors look like, whatever was seen before."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import torch
from hypothesis import given
from hypothesis import strategies as st

from torchferry.core.manifest import Leaf
from torchferry.tensors.looks import Sight, joined

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


@given(st.lists(st.lists(st.sampled_from(sorted(FORMS)), min_size=1, max_size=4), max_size=5))
def test_looks_are_those_of_a_first_look_whatever_was_seen_before(rounds: list[list[str]]) -> None:
    sight = Sight()
    for names in rounds:
        tensors = [FORMS[name]() for name in names]
        assert sight.look(tensors) == Sight().look(tensors)


def test_leaves_are_not_kept_from_what_looked_otherwise() -> None:
    sight = Sight()
    for _ in range(3):
        sight.look([torch.ones(3)])
    leaves = [Leaf("tensor", (0,))]
    sight.leaves.of(range(1), lambda: leaves)
    sight.look([torch.ones(3)])
    assert sight.leaves.answer is leaves
    sight.look([torch.ones(3, requires_grad=True)])
    assert sight.leaves.answer is None


def test_no_tensor_is_kept_alive() -> None:
    sight = Sight()
    tensors = [torch.ones(3) for _ in range(4)]
    for _ in range(3):
        sight.look(tensors)
    watched = [weakref.ref(tensor) for tensor in tensors]
    del tensors
    gc.collect()
    assert [ref() for ref in watched] == [None] * 4


def test_parts_are_joined_in_order() -> None:
    names = sorted(FORMS)
    for cut in range(len(names) + 1):
        parts = [[FORMS[name]() for name in some] for some in (names[:cut], names[cut:]) if some]
        whole = [tensor for part in parts for tensor in part]
        assert joined([Sight().look(part) for part in parts]) == Sight().look(whole)
