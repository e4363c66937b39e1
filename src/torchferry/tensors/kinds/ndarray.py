"""numpy arrays: their bytes move like a tensor's, whatever their dtype.

The bytes are entered as a uint8 tensor with one more dimension, the item's bytes. Axes that run backwards
are entered forwards and turned round again, because a tensor's strides can't be negative.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, TypeAlias

import torch
from msgspec import Meta

from torchferry.core.manifest import Count, Leaf, TensorSpec
from torchferry.core.text import MAX_CHARACTERS, show_name
from torchferry.errors import Unsendable
from torchferry.tensors import numpy_bridge
from torchferry.tensors.kinds.base import Form, Kind, Part, Site, packed, read
from torchferry.tensors.memory import memory_at, strided

Axes: TypeAlias = Annotated[tuple[Count, ...], Meta(max_length=numpy_bridge.MAX_DIMS)]


class Layout(Form, frozen=True):
    """What arrays have in common whose bytes mean the same."""

    dtype: numpy_bridge.DtypeForm
    backwards: Axes


def _describe(array: Any, part: Part) -> Leaf:
    if not numpy_bridge.is_bytes(array.dtype):
        raise Unsendable(
            f"an ndarray of dtype {array.dtype} can't travel: its items are references, not bytes. "
            "Convert it to a list"
        )
    if not numpy_bridge.is_describable(array.dtype):
        raise Unsendable(
            f"an ndarray of dtype {array.dtype} can't travel: numpy can't write that dtype down. Send "
            ".view() of a plain dtype, such as uint8, and view it back on the other side"
        )
    backwards = tuple(axis for axis, step in enumerate(array.strides) if step < 0)
    forwards = array[_turn(array.ndim, backwards)]
    low, high = numpy_bridge.owner_bounds(array)
    memory = memory_at(low, high - low)
    address = forwards.__array_interface__["data"][0]
    data = strided(
        memory,
        torch.uint8,
        address - low if array.size else 0,
        (*array.shape, array.itemsize),
        (*forwards.strides, 1),
    )
    return Leaf(
        NDARRAY.name,
        (part(data),),
        packed(Layout(numpy_bridge.dtype_to_wire(array.dtype), backwards)),
        bool(array.flags.writeable),
    )


def _rebuild(leaf: Leaf, parts: list[torch.Tensor], site: Site) -> object:
    (data,) = parts
    layout = read(Layout, leaf.fixed)
    dtype = numpy_bridge.dtype_from_wire(layout.dtype)
    array = numpy_bridge.array_over(data, dtype)
    array = array[_turn(array.ndim, layout.backwards)]
    array.flags.writeable = leaf.traits
    return array


def _check(leaf: Leaf, specs: Sequence[TensorSpec]) -> None:
    layout = read(Layout, leaf.fixed)
    dtype = numpy_bridge.dtype_from_wire(layout.dtype)
    (spec,) = specs
    if spec.dtype != "uint8" or not spec.shape or spec.shape[-1] != dtype.itemsize or spec.conj or spec.neg:
        raise ValueError(f"these bytes are no array of {str(dtype)[:MAX_CHARACTERS]}")
    axes = len(spec.shape) - 1
    if axes > numpy_bridge.MAX_DIMS or any(axis >= axes for axis in layout.backwards):
        raise ValueError("axes that it does not have")


def _look(leaf: Leaf, specs: Sequence[TensorSpec]) -> dict[str, str]:
    layout = read(Layout, leaf.fixed)
    return {
        "dtype": show_name(str(numpy_bridge.dtype_from_wire(layout.dtype))),
        "shape": str(list(specs[0].shape[:-1])),
        "axes that run backwards": str(list(layout.backwards)),
    }


def _turn(ndim: int, axes: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(None, None, -1 if axis in axes else None) for axis in range(ndim)) or (...,)  # type: ignore[return-value]


NDARRAY = Kind("ndarray", _describe, _rebuild, 1, Layout, bool, check=_check, look=_look)
