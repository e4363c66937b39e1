"""Strided tensors and parameters: the kind of nearly every leaf."""

from collections.abc import Sequence
from itertools import repeat
from typing import Annotated

import torch
from msgspec import Meta

from torchferry.core.manifest import Leaf
from torchferry.tensors.kinds.base import Kind
from torchferry.tensors.memory import DTYPES

_REQUIRES_GRAD = 1
_PARAMETER = 2

GradFlags = Annotated[int, Meta(ge=0, le=_REQUIRES_GRAD | _PARAMETER)]
"""Whether a tensor requires a gradient, and whether it is a Parameter."""


def grad_flags(tensor: torch.Tensor) -> int:
    """Return the flags of a tensor."""
    # torch implements `isinstance` of a Parameter in Python. The comparison avoids that for plain tensors.
    is_parameter = type(tensor) is not torch.Tensor and isinstance(tensor, torch.nn.Parameter)
    return _REQUIRES_GRAD * tensor.requires_grad + _PARAMETER * is_parameter


def with_grad_flags(tensor: torch.Tensor, flags: int) -> torch.Tensor:
    """Return a fresh tensor with these flags."""
    requires_grad = bool(flags & _REQUIRES_GRAD)
    if flags & _PARAMETER:
        return torch.nn.Parameter(tensor, requires_grad=requires_grad)
    return tensor.requires_grad_() if requires_grad else tensor


def check_grad_flags(flags: int, dtype: str) -> None:
    """Raise ValueError if a tensor of a dtype can't have these flags."""
    can_have_grad = DTYPES[dtype].is_floating_point or DTYPES[dtype].is_complex
    if flags & _REQUIRES_GRAD and not can_have_grad:
        raise ValueError(f"it requires a gradient, but {dtype} has none")


def describe_many(tensors: Sequence[torch.Tensor], numbers: Sequence[int]) -> list[Leaf]:
    """Describe plain strided tensors with these numbers."""
    flags = [
        (_REQUIRES_GRAD if tensor.requires_grad else None)
        if type(tensor) is torch.Tensor
        else grad_flags(tensor)
        for tensor in tensors
    ]
    return list(map(Leaf, repeat(DENSE.name), zip(numbers, strict=False), repeat(None), flags))


def as_plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return the data of a subclass of Parameter as a plain tensor with the same version counter."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return tensor
    return tensor.detach().as_subclass(torch.Tensor)


DENSE = Kind(
    "tensor",
    describe=lambda tensor, add: Leaf("tensor", (add(as_plain(tensor)),), None, grad_flags(tensor) or None),
    rebuild=lambda leaf, parts, context: with_grad_flags(parts[0], leaf.traits or 0),  # type: ignore[arg-type]
    tensor_count=1,
    fixed=None,
    traits=GradFlags | None,
    check=lambda leaf, specs: check_grad_flags(leaf.traits or 0, specs[0].dtype),  # type: ignore[arg-type]
)
