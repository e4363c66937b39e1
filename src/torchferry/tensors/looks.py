"""What tensors look like: all that a spec says of one, but for where its bytes are.

To ask torch takes longer than anything else there is to describing: a dozen calls for each tensor. Of a state
that was described before, one is enough for all of them: whether they look as they did. Torch has such a
question, made for its compiler, which asks it before every compiled call. It is none of torch's promises, and
where it goes wrong it ends the process; so it is only asked in versions in which it was tried, of plain
tensors, and after a look at the one thing that is known to go wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any, cast

import torch
from msgspec import Struct

from torchferry.core.figures import figure
from torchferry.core.last import Last
from torchferry.core.manifest import MAX_DIMS, Leaf
from torchferry.tensors.memory import DTYPES

_NAMES = {dtype: name for name, dtype in DTYPES.items() if not name.startswith("q")}
"""The name of each dtype whose tensors are their bytes and nothing more."""


PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
"""The types of nearly all tensors. Others may have Python code behind their shapes and strides."""

_TRIED = ("2.13.",)
"""The versions of torch in which many tensors are asked at once."""


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
    span = figure(sizes, stride, dtype.itemsize).span
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
        self._guards: Any = None

    def recognise(self, tensors: Sequence[object]) -> Looks | None:
        """Give what these look like if they do as the last ones did; None if they don't, or perhaps don't.

        If they do, they are as many, of the same types, and require the same gradients, too, and none is
        among them twice.
        """
        if self._guards is None or _bits_are_hidden():
            return None
        try:
            # Nested tensors have no strides, and the check would end the process for it.
            is_nested = True in [tensor.is_nested for tensor in tensors]  # type: ignore[attr-defined]
            return self._looks if not is_nested and self._guards.check(*tensors) else None
        except (AttributeError, TypeError):
            # No tensors, or more, or fewer.
            return None

    def look(self, tensors: Sequence[torch.Tensor]) -> Looks:
        """Look at strided tensors that were not recognised.

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
        if self._looks is not None and asked == self._asked:
            # The same for the second time, so it will be asked again.
            self._guards = _guards(tensors, shapes, strides)
            # Which then is the answer to what else could be asked, in a third of the memory.
            self._asked = self._asked if self._guards is None else None
            return self._looks
        self._guards = None
        self._looks = Looks(list(map(_look, dtypes, shapes, strides)), on_cpu, grads, negs, conjs)
        self.leaves = Last()
        self._asked = asked
        return self._looks


def _guards(tensors: Sequence[torch.Tensor], shapes: list[torch.Size], strides: list[tuple[int, ...]]) -> Any:
    """Note what tensors look like in torch's own way; None if they or this torch can't be asked like that."""
    if not PLAIN.issuperset(map(type, tensors)) or _bits_are_hidden() or not _are_sound():
        return None
    return _make_guards(tensors, shapes, strides)


def _make_guards(
    tensors: Sequence[torch.Tensor], shapes: Sequence[torch.Size], strides: Sequence[tuple[int, ...]]
) -> Any:
    from torch._C._dynamo.guards import TensorGuards

    # Torch's own stubs have them be those of one tensor.
    sizes: Any = list(map(list, shapes))
    steps: Any = list(map(list, strides))
    return TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=steps)


def _bits_are_hidden() -> bool:
    """Say whether torch is told, by this thread, not to see that tensors are conjugated or turned round."""
    return any(map(torch._C._dispatch_tls_is_dispatch_key_excluded, ("Conjugate", "Negative")))


@cache
def _are_sound() -> bool:
    """Try once whether torch tells apart what must be told apart."""
    try:
        return torch.__version__.startswith(_TRIED) and _tells_apart()
    except Exception:
        return False


def _tells_apart() -> bool:
    with torch.device("cpu"), torch.inference_mode(mode=False):
        plain = torch.zeros(2, 3, dtype=torch.complex64)
        others = [
            torch.zeros(2, 3, dtype=torch.complex128),
            torch.zeros(3, 2, dtype=torch.complex64),
            torch.zeros(6, dtype=torch.complex64),
            torch.zeros(3, 2, dtype=torch.complex64).t(),
            torch.zeros(2, 6, dtype=torch.complex64)[:, :3],
            torch.zeros(2, 3, dtype=torch.complex64, device="meta"),
            plain.clone().requires_grad_(),
            torch.nn.Parameter(plain, requires_grad=False),
            plain.conj(),
            torch._neg_view(plain),
            plain.to_sparse(),
        ]
        guards = _make_guards([plain], [plain.shape], [plain.stride()])
        alike = cast(bool, guards.check(plain.clone()))
        return alike and not any(guards.check(other) for other in others)
