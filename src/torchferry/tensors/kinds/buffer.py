"""Large bytes: from 64 KiB on, bytes, bytearray, memoryview, BytesIO and array.array are payload.

They are values all the same: nothing is written into a local one, and the received one takes its place.
Smaller ones are values in the manifest.
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
        # A copy is made only when it is written to.
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
    """Return the value of a leaf that has these bytes. bytes and BytesIO do not copy them."""
    form = BufferForm.read(leaf.traits)
    if form.type == "bytearray":
        return bytearray(data)
    if form.type == "array":
        return make_array(data, form.typecode, form.itemsize)
    return make_stream(data, form.position) if form.type == "BytesIO" else data


def make_array(data: bytes, typecode: str, itemsize: int) -> object:
    """Create an array of a peer; raise ValueError if this machine has no such items."""
    if typecode not in array.typecodes or array.array(typecode).itemsize != itemsize:
        raise ValueError(f"{show(typecode)} is no type of array with items of {itemsize} bytes here")
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
        raise ValueError(f"its tensor is {show_name(spec.dtype)}{show(spec.shape)}, expected uint8 in a row")
    if form.type == "array":
        make_array(b"", form.typecode, form.itemsize)
        if spec.shape[0] % form.itemsize:
            raise ValueError(f"it has {spec.shape[0]} bytes in items of {form.itemsize}")


BUFFERS = Kind(BUFFER, _describe, _rebuild, 1, None, BufferForm, _check)
