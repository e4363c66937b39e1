"""numpy arrays: their bytes are sent like a tensor's, whatever their dtype.

An array is described as a uint8 tensor with one more dimension, the bytes of an item. A tensor's strides
can't be negative, so axes with negative strides are reversed, and reversed again in the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import torch
from msgspec import Meta

from torchferry.core.manifest import Count, Leaf, TensorSpec
from torchferry.core.showing import MOST_CHARACTERS, show_name
from torchferry.errors import Unsendable
from torchferry.tensors import numpy_bridge
from torchferry.tensors.kinds.base import AddTensor, Form, Kind, RebuildContext
from torchferry.tensors.memory import memory_at, strided


class NdarrayFixed(Form, frozen=True):
    """The dtype of an array, and its axes with negative strides."""

    dtype: numpy_bridge.DtypeForm
    backwards: Annotated[tuple[Count, ...], Meta(max_length=numpy_bridge.MAX_NDARRAY_DIMS)]


def _describe(array: Any, add_tensor: AddTensor) -> Leaf:
    if not numpy_bridge.is_bytes(array.dtype):
        raise Unsendable(
            f"an ndarray of dtype {array.dtype} can't be sent: its items are references, not bytes. "
            "Convert it to a list"
        )
    if not numpy_bridge.is_describable(array.dtype):
        raise Unsendable(
            f"an ndarray of dtype {array.dtype} can't be sent: numpy has no exact description of that dtype. "
            "Send .view() of a plain dtype, such as uint8, and view it back at the receiver"
        )
    backwards = tuple(axis for axis, step in enumerate(array.strides) if step < 0)
    forwards = array[_reversing(array.ndim, backwards)]
    low, high = numpy_bridge.owner_bounds(array)
    data = strided(
        memory_at(low, high - low),
        torch.uint8,
        forwards.__array_interface__["data"][0] - low if array.size else 0,
        (*array.shape, array.itemsize),
        (*forwards.strides, 1),
    )
    fixed = NdarrayFixed(numpy_bridge.dtype_to_wire(array.dtype), backwards)
    return Leaf(NDARRAY.name, (add_tensor(data),), fixed.packed(), bool(array.flags.writeable))


def _reversing(ndim: int, axes: Sequence[int]) -> Any:
    """Return the index that reverses some axes."""
    return tuple(slice(None, None, -1 if axis in axes else None) for axis in range(ndim)) or ...


def _rebuild(leaf: Leaf, parts: list[torch.Tensor], context: RebuildContext) -> object:
    fixed = NdarrayFixed.read(leaf.fixed)
    array = numpy_bridge.array_over(parts[0], numpy_bridge.dtype_from_wire(fixed.dtype))
    array = array[_reversing(array.ndim, fixed.backwards)]
    array.flags.writeable = leaf.traits
    return array


def _check(leaf: Leaf, specs: Sequence[TensorSpec]) -> None:
    fixed, (spec,) = NdarrayFixed.read(leaf.fixed), specs
    dtype = numpy_bridge.dtype_from_wire(fixed.dtype)
    if spec.dtype != "uint8" or not spec.shape or spec.shape[-1] != dtype.itemsize or spec.conj or spec.neg:
        raise ValueError(f"its tensor does not hold the bytes of {str(dtype)[:MOST_CHARACTERS]} items")
    axes = len(spec.shape) - 1
    if axes > numpy_bridge.MAX_NDARRAY_DIMS or any(axis >= axes for axis in fixed.backwards):
        raise ValueError(f"{axes} axes, of which {fixed.backwards} are reversed")


def _properties(leaf: Leaf, specs: Sequence[TensorSpec]) -> dict[str, str]:
    fixed = NdarrayFixed.read(leaf.fixed)
    return {
        "dtype": show_name(str(numpy_bridge.dtype_from_wire(fixed.dtype))),
        "shape": str(list(specs[0].shape[:-1])),
        "axes with negative strides": str(list(fixed.backwards)),
    }


NDARRAY = Kind("ndarray", _describe, _rebuild, 1, NdarrayFixed, bool, _check, _properties)
