"""Strided tensors and parameters: the kind that nearly every leaf is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Annotated

import torch
from msgspec import Meta

from torchferry.core.manifest import Leaf, TensorSpec
from torchferry.tensors.kinds.base import Kind, Part, Site
from torchferry.tensors.memory import DTYPES

_REQUIRES_GRAD = 1
_PARAMETER = 2

Grad = Annotated[int, Meta(ge=0, le=_REQUIRES_GRAD | _PARAMETER)]


def grad_traits(tensor: torch.Tensor) -> int:
    """Say as a number whether a tensor requires a gradient and whether it is a Parameter."""
    # `isinstance` of a Parameter is a function of torch's own, and slow; a plain tensor is none.
    is_parameter = type(tensor) is not torch.Tensor and isinstance(tensor, torch.nn.Parameter)
    return _REQUIRES_GRAD * tensor.requires_grad + _PARAMETER * is_parameter


def with_grad_traits(tensor: torch.Tensor, traits: int) -> torch.Tensor:
    """Give a fresh tensor what `grad_traits` said of the original."""
    requires_grad = bool(traits & _REQUIRES_GRAD)
    if traits & _PARAMETER:
        return torch.nn.Parameter(tensor, requires_grad=requires_grad)
    return tensor.requires_grad_() if requires_grad else tensor


def check_grad(traits: int, spec: TensorSpec) -> None:
    """Check that a tensor from a peer can require a gradient, if it is said to.

    Raises:
        ValueError: it can't.
    """
    dtype = DTYPES[spec.dtype]
    if traits & _REQUIRES_GRAD and not (dtype.is_floating_point or dtype.is_complex):
        raise ValueError(f"{spec.dtype} has no gradient")


def _describe(tensor: torch.Tensor, part: Part) -> Leaf:
    return Leaf(DENSE.name, (part(tensor),), None, grad_traits(tensor) or None)


def describe_many(tensors: Sequence[torch.Tensor], grads: Sequence[bool], parts: Sequence[int]) -> list[Leaf]:
    """Describe plain strided tensors, all at once.

    Which of them require a gradient is known; the parts are their own numbers.
    """
    types = list(map(type, tensors))
    traits: Iterable[int | None] = repeat(None)
    if any(grads) or torch.nn.Parameter in types:
        parameters = [each is not torch.Tensor for each in types]
        pairs = zip(grads, parameters, strict=True)
        traits = [_REQUIRES_GRAD * grad + _PARAMETER * parameter or None for grad, parameter in pairs]
    return list(map(Leaf, repeat(DENSE.name), zip(parts), repeat(None), traits))


def _rebuild(leaf: Leaf, parts: list[torch.Tensor], site: Site) -> object:
    return with_grad_traits(parts[0], leaf.traits or 0)  # type: ignore[arg-type]


def _check(leaf: Leaf, specs: Sequence[TensorSpec]) -> None:
    check_grad(leaf.traits or 0, specs[0])  # type: ignore[arg-type]


DENSE = Kind("tensor", _describe, _rebuild, parts=1, fixed=None, traits=Grad | None, check=_check)
