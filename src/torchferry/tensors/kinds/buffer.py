"""Large bytes: from 64 KiB on, bytes, bytearray, memoryview, BytesIO and array.array are payload.

Like other values, they are never written in place: the received one replaces the local one. Smaller ones are
values in the manifest.
"""

import array
import ctypes
import io
from collections.abc import Sequence
from typing import Any, Literal

import torch

from torchferry.core.manifest import BUFFER, Count, Leaf, TensorSpec
from torchferry.core.text import show, show_name
from torchferry.tensors.kinds.base import AddTensor, Form, Kind, RebuildContext
from torchferry.tensors.memory import memory_of_bytes, strided

MIN_BYTES = 1 << 16

_TYPES: Any = {
    bytes: "bytes",
    memoryview: "bytes",
    bytearray: "bytearray",
    io.BytesIO: "BytesIO",
    array.array: "array",
}


class BufferForm(Form, frozen=True):
    """The type of a value, the position of a BytesIO, and the typecode and item size of an array."""

    type: Literal["bytes", "bytearray", "BytesIO", "array"]
    position: Count
    typecode: str
    itemsize: Count


def is_large(value: Any) -> bool:
    """Return whether a value is sent as payload."""
    cls = type(value)
    if cls not in _TYPES:
        return False
    if cls is io.BytesIO:
        # `getbuffer()` would copy bytes that the stream shares, and keep the copy.
        return not value.closed and len(value.getvalue()) >= MIN_BYTES
    if cls is memoryview:
        return bool(value.nbytes >= MIN_BYTES)
    return len(value) * (value.itemsize if cls is array.array else 1) >= MIN_BYTES


def _describe(value: Any, add_tensor: AddTensor) -> Leaf:
    cls = type(value)
    form = BufferForm(_TYPES[cls], 0, "", 1)
    if cls is array.array:
        form = BufferForm("array", 0, value.typecode, value.itemsize)
    elif cls is io.BytesIO:
        # `getvalue` does not copy. Python copies when the stream is written to.
        form, value = BufferForm("BytesIO", value.tell(), "", 1), value.getvalue()
    elif cls is memoryview:
        value = _readable(value)
    if type(value) is bytes:
        data = strided(memory_of_bytes(value), torch.uint8, 0, (len(value),), (1,))
    else:
        # As long as this tensor exists, Python does not let the value be resized.
        data = torch.frombuffer(value, dtype=torch.uint8)
    return Leaf(BUFFER, (add_tensor(data),), traits=form.packed())


def _readable(value: memoryview) -> object:
    """Return what has the bytes of a memoryview, without a copy if torch can read them."""
    if value.c_contiguous and type(value.obj) is bytes and len(value.obj) == value.nbytes:
        return value.obj
    return value.cast("B") if value.c_contiguous and not value.readonly else bytes(value)


def value_from_bytes(leaf: Leaf, data: bytes) -> object:
    """Return the value of a leaf that has these bytes. They are not copied for bytes and BytesIO."""
    form = BufferForm.read(leaf.traits)
    if form.type == "bytearray":
        return bytearray(data)
    if form.type == "array":
        return make_array(data, form.typecode, form.itemsize)
    return make_stream(data, form.position) if form.type == "BytesIO" else data


def make_array(data: bytes, typecode: str, itemsize: int) -> object:
    """Create an array from what a peer sent; raises ValueError if this machine has no such item type."""
    if typecode not in array.typecodes or array.array(typecode).itemsize != itemsize:
        raise ValueError(f"this machine has no array type {show(typecode)} with items of {itemsize} bytes")
    return array.array(typecode, data)


def make_stream(data: bytes, position: int) -> object:
    """Create a BytesIO that shares its data until it is written to."""
    stream = io.BytesIO(data)
    stream.seek(position)
    return stream


def _rebuild(leaf: Leaf, parts: list[torch.Tensor], context: RebuildContext) -> object:
    return value_from_bytes(leaf, ctypes.string_at(parts[0].data_ptr(), parts[0].nbytes))


def _check(leaf: Leaf, specs: Sequence[TensorSpec]) -> None:
    form, (spec,) = BufferForm.read(leaf.traits), specs
    if spec.dtype != "uint8" or len(spec.shape) != 1 or spec.stride != (1,):
        found = f"{show_name(spec.dtype)}{show(spec.shape)}"
        raise ValueError(f"its tensor is {found}, expected a contiguous uint8 tensor of one dimension")
    if form.type == "array":
        make_array(b"", form.typecode, form.itemsize)
        if spec.shape[0] % form.itemsize:
            raise ValueError(f"its {spec.shape[0]} bytes are not a multiple of the item size {form.itemsize}")


BUFFERS = Kind(BUFFER, _describe, _rebuild, 1, None, BufferForm, _check)
