"""numpy arrays and scalars, without a dependency on numpy.

A value can only be numpy's if numpy is imported, so describing looks it up in `sys.modules`. Only rebuilding
imports it, and raises UnknownType if it is not installed.

An array is described as a uint8 tensor with one more dimension, the bytes of an item. A tensor's strides
can't be negative, so axes with negative strides are reversed, and reversed again in the result.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Sequence
from typing import Annotated, Any, TypeAlias

import torch
from msgspec import Meta, Struct

from torchferry.core.manifest import Count, Leaf, TensorSpec
from torchferry.core.text import MAX_CHARACTERS, show
from torchferry.errors import UnknownType, Unsendable
from torchferry.tensors.kinds.base import AddTensor, Form, Kind, RebuildContext
from torchferry.tensors.memory import memory_at, strided

_MAX_AXES = 64

_FORMAT = re.compile(r"[<>|=]?[A-Za-z?][0-9]{0,10}(\[[A-Za-z0-9/]{1,30}\])?")
"""A byte order, a kind, a size, and for times the unit. numpy's own parser accepts much more."""


class DtypeField(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A field of a structured dtype on the wire. Its name may come with a title."""

    name: str | tuple[str, ...]
    dtype: str | StructuredDtype
    shape: tuple[Count, ...] | None = None


class StructuredDtype(Struct, frozen=True, forbid_unknown_fields=True):
    """A dtype with fields on the wire."""

    fields: tuple[DtypeField, ...]


DtypeForm: TypeAlias = str | StructuredDtype
ScalarForm: TypeAlias = tuple[DtypeForm, bytes]


class NumpyScalar:
    """Stands for numpy's scalar types in a table, because numpy may not be installed."""


def is_scalar(value: object) -> bool:
    """Return whether a value is a numpy scalar that can be sent as its bytes."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not issubclass(type(value), numpy.generic):
        return False
    dtype: Any = value.dtype  # type: ignore[attr-defined]
    return type(value) is dtype.type and _is_bytes(dtype) and _is_describable(dtype)


def is_array(value: object) -> bool:
    """Return whether a value is an ndarray, and not of a subclass, which may hold more than an array."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(value) is numpy.ndarray


def is_array_type(cls: type) -> bool:
    """Return whether a class is ndarray or derived from it."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and issubclass(cls, numpy.ndarray)


def _is_bytes(dtype: Any) -> bool:
    """Return whether items of a dtype are their bytes, without references to objects or strings."""
    return not dtype.hasobject and dtype.kind in "biufcSUVmM"


def _is_describable(dtype: Any) -> bool:
    """Return whether a dtype can be rebuilt exactly: records and dtypes with overlapping fields can't."""
    try:
        rebuilt = _dtype_from_wire(_dtype_to_wire(dtype))
    except ValueError:
        return False
    return bool(rebuilt == dtype) and rebuilt.type is dtype.type


def _dtype_to_wire(dtype: Any) -> DtypeForm:
    return _descr_to_wire(_numpy().lib.format.dtype_to_descr(dtype))


def _descr_to_wire(descr: Any) -> DtypeForm:
    if isinstance(descr, str):
        return descr
    if not isinstance(descr, list):
        raise ValueError(f"numpy describes the dtype as {descr}, which is neither a name nor fields")
    fields = (DtypeField(name, _descr_to_wire(inner), *shape) for name, inner, *shape in descr)
    return StructuredDtype(tuple(fields))


def _dtype_from_wire(wire: DtypeForm) -> Any:
    """Rebuild a dtype; raise ValueError if it is malformed, or if its items are not bytes."""
    try:
        dtype = _numpy().lib.format.descr_to_dtype(_descr_from_wire(wire))
    except (SyntaxError, TypeError, ValueError, LookupError, RecursionError, OverflowError) as error:
        raise ValueError(f"not a numpy dtype: {str(error)[:MAX_CHARACTERS]}") from None
    if not _is_bytes(dtype):
        raise ValueError(f"items of the numpy dtype {str(dtype)[:MAX_CHARACTERS]} are not bytes")
    return dtype


def _descr_from_wire(wire: DtypeForm) -> Any:
    if isinstance(wire, str):
        if not _FORMAT.fullmatch(wire):
            raise ValueError(f"{show(wire)} is not a format")
        return wire
    fields = [(field.name, _descr_from_wire(field.dtype), field.shape) for field in wire.fields]
    return [field[:2] if field[2] is None else field for field in fields]


def scalar_to_wire(value: Any) -> ScalarForm:
    """Describe a numpy scalar as its dtype and its bytes."""
    return _dtype_to_wire(value.dtype), value.tobytes()


def scalar_from_wire(wire: ScalarForm) -> object:
    """Rebuild a numpy scalar from its dtype and its bytes."""
    described, data = wire
    dtype = _dtype_from_wire(described)
    data = data[: dtype.itemsize]  # numpy writes an empty string as one zero
    # An item of an array of strings loses the zeros at its end.
    if dtype.kind == "S":
        return dtype.type(data)
    if dtype.kind == "U":
        encoding = "utf-32-be" if dtype.str[0] == ">" else "utf-32-le"
        return dtype.type(data.decode(encoding, "surrogatepass"))
    if dtype.itemsize == 0:
        return _numpy().zeros((), dtype)[()]
    return _numpy().frombuffer(data, dtype=dtype)[0]


class NdarrayFixed(Form, frozen=True):
    """The dtype of an array, and its axes with negative strides."""

    dtype: DtypeForm
    backwards: Annotated[tuple[Count, ...], Meta(max_length=_MAX_AXES)]


def _describe(array: Any, add_tensor: AddTensor) -> Leaf:
    what = f"an ndarray of dtype {array.dtype} can't be sent: "
    if not _is_bytes(array.dtype):
        raise Unsendable(what + "its items are references, not bytes. Convert it to a list")
    if not _is_describable(array.dtype):
        raise Unsendable(
            what + "numpy has no exact description of that dtype. Send .view() of a plain dtype, such as "
            "uint8, and view it back at the receiver"
        )
    backwards = tuple(axis for axis, step in enumerate(array.strides) if step < 0)
    forwards = array[_reversing(array.ndim, backwards)]
    # The memory that the array shares with its bases.
    numpy, owner = _numpy(), array
    low, high = numpy.lib.array_utils.byte_bounds(array)
    while isinstance(owner := owner.base, numpy.ndarray):
        owner_low, owner_high = numpy.lib.array_utils.byte_bounds(owner)
        low, high = min(low, owner_low), max(high, owner_high)
    start = forwards.__array_interface__["data"][0] - low if array.size else 0
    shape, strides = (*array.shape, array.itemsize), (*forwards.strides, 1)
    data = strided(memory_at(low, high - low), torch.uint8, start, shape, strides)
    fixed = NdarrayFixed(_dtype_to_wire(array.dtype), backwards)
    return Leaf(NDARRAY.name, (add_tensor(data),), fixed.packed(), bool(array.flags.writeable))


def _reversing(ndim: int, axes: Sequence[int]) -> Any:
    """Return the index that reverses some axes."""
    return tuple(slice(None, None, -1 if axis in axes else None) for axis in range(ndim)) or ...


def _rebuild(leaf: Leaf, parts: list[torch.Tensor], context: RebuildContext) -> object:
    (data,), fixed = parts, NdarrayFixed.read(leaf.fixed)
    # Without a buffer, numpy would set the strides of an empty array to zero.
    buffer: Any = bytearray()
    offset = 0
    if data.numel():
        whole = torch.empty(0, dtype=torch.uint8, device=data.device).set_(data.untyped_storage())
        buffer, offset = whole.numpy(), int(data.storage_offset())
    dtype, shape, strides = _dtype_from_wire(fixed.dtype), tuple(data.shape[:-1]), data.stride()[:-1]
    array = _numpy().ndarray(shape, dtype, buffer, offset, strides)
    array = array[_reversing(array.ndim, fixed.backwards)]
    array.flags.writeable = leaf.traits
    return array


def _check(leaf: Leaf, specs: Sequence[TensorSpec]) -> None:
    fixed, (spec,) = NdarrayFixed.read(leaf.fixed), specs
    dtype = _dtype_from_wire(fixed.dtype)
    if spec.dtype != "uint8" or not spec.shape or spec.shape[-1] != dtype.itemsize or spec.conj or spec.neg:
        raise ValueError(f"its tensor does not hold the bytes of {str(dtype)[:MAX_CHARACTERS]} items")
    axes = len(spec.shape) - 1
    if axes > _MAX_AXES or any(axis >= axes for axis in fixed.backwards):
        raise ValueError(f"{axes} axes, of which {fixed.backwards} are reversed")


def _properties(leaf: Leaf, specs: Sequence[TensorSpec]) -> dict[str, str]:
    fixed = NdarrayFixed.read(leaf.fixed)
    return {
        "dtype": str(_dtype_from_wire(fixed.dtype)),
        "shape": str(list(specs[0].shape[:-1])),
        "axes with negative strides": str(list(fixed.backwards)),
    }


def _numpy() -> Any:
    try:
        return importlib.import_module("numpy")
    except ImportError:
        raise UnknownType(
            "the incoming state holds numpy values, and numpy is not installed here: pip install numpy"
        ) from None


NDARRAY = Kind("ndarray", _describe, _rebuild, 1, NdarrayFixed, bool, _check, _properties)
