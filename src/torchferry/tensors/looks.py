"""What tensors look like: all that a spec says of one, but for where its bytes are.

Querying tensor metadata dominates description time: a dozen calls for each tensor. They are made a column at
a time, and what follows from the answers is kept for the next state that gives the same ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from msgspec import Struct

from torchferry.core.last import Last
from torchferry.core.manifest import MAX_DIMS, Leaf
from torchferry.core.strides import find_pattern
from torchferry.tensors.memory import DTYPES

_NAMES = {dtype: name for name, dtype in DTYPES.items() if not name.startswith("q")}
"""The name of each dtype whose tensors are their bytes and nothing more."""


PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
"""The types of nearly all tensors. Others may have Python code behind their shapes and strides."""


class OddTensor(Exception):
    """A tensor that can't travel is among those that were entered without a look."""


class Look(Struct, frozen=True, gc=False):
    """What tensors of one dtype, shape and strides have in common. `form` is how a spec of them begins."""

    form: tuple[str, int, tuple[int, ...], tuple[int, ...]]
    span: int


class Looks(Struct, frozen=True):
    """What some tensors look like, a column for each thing that can be asked. No `conjs` if none could be."""

    looks: list[Look]
    on_cpu: list[bool]
    grads: list[bool]
    negs: list[bool]
    conjs: list[bool] | None


@lru_cache(maxsize=4096)
def _look(dtype: torch.dtype, shape: torch.Size, stride: tuple[int, ...]) -> Look:
    if dtype not in _NAMES or len(shape) > MAX_DIMS:
        raise OddTensor
    sizes = tuple(shape)
    span = find_pattern(sizes, stride, dtype.itemsize).span_bytes
    return Look((_NAMES[dtype], dtype.itemsize, sizes, stride), span)


def joined(parts: Sequence[Looks]) -> Looks:
    """Put the looks of tensors together that were looked at in several parts."""
    if len(parts) == 1:
        return parts[0]
    conjs: list[bool] | None = None
    if any(part.conjs is not None for part in parts):
        conjs = [conj for part in parts for conj in part.conjs or [False] * len(part.looks)]
    return Looks(
        [look for part in parts for look in part.looks],
        [on_cpu for part in parts for on_cpu in part.on_cpu],
        [grad for part in parts for grad in part.grads],
        [neg for part in parts for neg in part.negs],
        conjs,
    )


class Sight:
    """The looks of the tensors that were last seen at one place of a state. Keeps none of them alive.

    `leaves` is for who makes leaves of them, which follow from their looks and their first number.
    """

    def __init__(self) -> None:
        self.leaves: Last[list[Leaf]] = Last()
        self._asked: object = None
        self._looks: Looks | None = None

    def look(self, tensors: Sequence[torch.Tensor]) -> Looks:
        """Look at strided tensors.

        Raises:
            OddTensor: one can't travel.
            RuntimeError: torch says that one has no strides.
        """
        # A column at a time: a comprehension over one attribute costs little more than the attribute.
        dtypes = [tensor.dtype for tensor in tensors]
        shapes = [tensor.shape for tensor in tensors]
        strides = list(map(torch.Tensor.stride, tensors))
        on_cpu = [tensor.is_cpu for tensor in tensors]
        grads = [tensor.requires_grad for tensor in tensors]
        negs = list(map(torch.Tensor.is_neg, tensors))
        conjs: list[bool] | None = None
        if True in [dtype.is_complex for dtype in set(dtypes)]:
            conjs = list(map(torch.Tensor.is_conj, tensors))
        asked = list(map(type, tensors)), dtypes, shapes, strides, on_cpu, grads, negs, conjs
        if self._looks is None or asked != self._asked:
            self._looks = Looks(list(map(_look, dtypes, shapes, strides)), on_cpu, grads, negs, conjs)
            self.leaves = Last()
            self._asked = asked
        return self._looks
