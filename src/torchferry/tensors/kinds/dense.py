"""Strided tensors and parameters: the kind that nearly every leaf is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import torch
from msgspec import Meta

from torchferry.core.manifest import MAX_DIMS, Leaf, TensorSpec
from torchferry.errors import Unsendable
from torchferry.tensors.kinds.base import Kind, Part, Site
from torchferry.tensors.memory import DTYPES

_REQUIRES_GRAD = 1
_PARAMETER = 2

Grad = Annotated[int, Meta(ge=0, le=_REQUIRES_GRAD | _PARAMETER)]


def grad_traits(tensor: torch.Tensor) -> int:
    """Say as a number whether a tensor requires a gradient and whether it is a Parameter."""
    return _REQUIRES_GRAD * tensor.requires_grad + _PARAMETER * isinstance(tensor, torch.nn.Parameter)


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


def check_dense(tensor: torch.Tensor) -> None:
    """Check that a strided tensor is its bytes and nothing more.

    Raises:
        Unsendable: it has a quantizer, no data, less data than its shape says, or a layout that is not
            strides.
    """
    if tensor.is_quantized:
        raise Unsendable(
            f"a quantized tensor ({tensor.dtype}) can't travel: send .int_repr() with its scale and "
            "zero point, or .dequantize()"
        )
    if tensor.is_nested or tensor.layout is not torch.strided:
        raise Unsendable(
            f"a tensor of layout {tensor.layout}{' (nested)' if tensor.is_nested else ''} can't travel: "
            "send the strided tensors that it is made of"
        )
    if tensor.ndim > MAX_DIMS:
        raise Unsendable(f"a tensor of {tensor.ndim} dimensions can't travel, only up to {MAX_DIMS} can")
    if tensor.device.type == "meta":
        raise Unsendable("a tensor on the meta device has no data: materialise it first")
    if tensor.is_neg() and not (tensor.is_floating_point() or tensor.is_complex()):
        raise Unsendable(
            f"a view of {tensor.dtype} that is read with its sign turned round: clone() it first"
        )
    if tensor._is_zerotensor():
        raise Unsendable("a tensor of zeros that autograd made without data: clone() it first")
    # Sharded training frees the storage of a parameter and leaves its shape; seeing such a tensor as bytes
    # would quietly give it new memory, with nothing in it.
    held = tensor.untyped_storage().nbytes()
    if tensor.numel() and _end_bytes(tensor) > held:
        raise Unsendable(
            f"a tensor of shape {list(tensor.shape)} whose storage holds {held} bytes of the "
            f"{_end_bytes(tensor)} that it needs: its memory was freed. Gather it first, or leave it out"
        )


def _end_bytes(tensor: torch.Tensor) -> int:
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (int(tensor.storage_offset()) + last + 1) * tensor.itemsize


def _describe(tensor: torch.Tensor, part: Part) -> Leaf:
    check_dense(tensor)
    return Leaf(DENSE.name, (part(tensor),), None, grad_traits(tensor) or None)


def _rebuild(leaf: Leaf, parts: list[torch.Tensor], site: Site) -> object:
    return with_grad_traits(parts[0], leaf.traits or 0)


def _check(leaf: Leaf, specs: Sequence[TensorSpec]) -> None:
    check_grad(leaf.traits or 0, specs[0])


DENSE = Kind("tensor", _describe, _rebuild, parts=1, fixed=None, traits=Grad | None, check=_check)
