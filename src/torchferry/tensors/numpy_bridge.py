"""numpy scalars, dtypes and arrays, without a dependency on numpy.

A value can only be numpy's if numpy is imported, so describing looks it up in `sys.modules`. Only rebuilding
imports it, and raises UnknownType if it is not installed.
"""

from __future__ import annotations

import importlib
import re
import sys
from typing import Any, TypeAlias

import torch
from msgspec import Struct

from torchferry.core.manifest import Count
from torchferry.core.showing import MOST_CHARACTERS, show
from torchferry.errors import UnknownType

MAX_NDARRAY_DIMS = 64

# A byte order, a kind, a size, and for times the unit.
_FORMAT = re.compile(r"[<>|=]?[A-Za-z?][0-9]{0,10}(\[[A-Za-z0-9/]{1,30}\])?")


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
    if numpy is None or not isinstance(value, numpy.generic):
        return False
    return is_bytes(value.dtype) and is_describable(value.dtype)


def is_array(value: object) -> bool:
    """Return whether a value is an ndarray, and not of a subclass, which may hold more than an array."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(value) is numpy.ndarray


def is_array_type(cls: type) -> bool:
    """Return whether a class is ndarray or derived from it."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and issubclass(cls, numpy.ndarray)


def is_bytes(dtype: Any) -> bool:
    """Return whether items of a dtype are their bytes, without references to objects or strings."""
    return not dtype.hasobject and dtype.kind in "biufcSUVmM"


def is_describable(dtype: Any) -> bool:
    """Return whether a dtype can be rebuilt exactly from its description.

    It can't if its fields overlap, if it is a record, or if it comes from another library.
    """
    try:
        rebuilt = dtype_from_wire(dtype_to_wire(dtype))
    except ValueError:
        return False
    return bool(rebuilt == dtype) and rebuilt.type is dtype.type


def dtype_to_wire(dtype: Any) -> DtypeForm:
    """Describe a dtype as the .npy format does: by its name, or by its fields if it has any."""
    return _descr_to_wire(_numpy().lib.format.dtype_to_descr(dtype))


def _descr_to_wire(descr: Any) -> DtypeForm:
    if isinstance(descr, str):
        return descr
    if not isinstance(descr, list):
        raise ValueError(f"numpy describes the dtype as {descr}, which is neither a name nor fields")
    fields = (DtypeField(name, _descr_to_wire(inner), *shape) for name, inner, *shape in descr)
    return StructuredDtype(tuple(fields))


def dtype_from_wire(wire: DtypeForm) -> Any:
    """Rebuild a dtype.

    Raises:
        UnknownType: numpy is not installed.
        ValueError: the description is malformed, or of a dtype whose items are not bytes.
    """
    try:
        dtype = _numpy().lib.format.descr_to_dtype(_descr_from_wire(wire))
    except (SyntaxError, TypeError, ValueError, LookupError, RecursionError, OverflowError) as error:
        raise ValueError(f"not a numpy dtype: {str(error)[:MOST_CHARACTERS]}") from None
    if not is_bytes(dtype):
        raise ValueError(f"items of the numpy dtype {str(dtype)[:MOST_CHARACTERS]} are not bytes")
    return dtype


def _descr_from_wire(wire: DtypeForm) -> Any:
    """Return numpy's description. Names must match `_FORMAT`, because numpy's parser accepts much more."""
    if isinstance(wire, str):
        if not _FORMAT.fullmatch(wire):
            raise ValueError(f"{show(wire)} is not a format")
        return wire
    fields = [(field.name, _descr_from_wire(field.dtype), field.shape) for field in wire.fields]
    return [field[:2] if field[2] is None else field for field in fields]


def scalar_to_wire(value: Any) -> ScalarForm:
    """Describe a numpy scalar as its dtype and its bytes."""
    return dtype_to_wire(value.dtype), value.tobytes()


def scalar_from_wire(wire: ScalarForm) -> object:
    """Rebuild a numpy scalar from its dtype and its bytes."""
    described, data = wire
    dtype = dtype_from_wire(described)
    data = data[: dtype.itemsize]  # numpy writes an empty string as one zero
    # An item of an array of strings loses the zeros at its end.
    if dtype.kind == "S":
        return dtype.type(data)
    if dtype.kind == "U":
        return dtype.type(data.decode("utf-32-le", "surrogatepass"))
    if dtype.itemsize == 0:
        return _numpy().zeros((), dtype)[()]
    return _numpy().frombuffer(data, dtype=dtype)[0]


def owner_bounds(array: Any) -> tuple[int, int]:
    """Return the first and the end address of the memory that the array shares with its bases."""
    numpy = _numpy()
    low, high = numpy.lib.array_utils.byte_bounds(array)
    while isinstance(array := array.base, numpy.ndarray):
        base_low, base_high = numpy.lib.array_utils.byte_bounds(array)
        low, high = min(low, base_low), max(high, base_high)
    return low, high


def array_over(data: torch.Tensor, dtype: Any) -> Any:
    """Create an ndarray over a uint8 tensor whose last dimension is the bytes of an item.

    The array keeps the tensor's memory alive.

    Raises:
        ValueError: the last dimension is not the size of an item.
    """
    if data.dtype is not torch.uint8 or not data.ndim or data.shape[-1] != dtype.itemsize:
        raise ValueError(f"{data.dtype}{list(data.shape)} does not hold items of {dtype}")
    shape, strides = tuple(data.shape[:-1]), data.stride()[:-1]
    if data.numel() == 0:
        # Without a buffer, numpy sets the strides of an empty array to zero.
        return _numpy().ndarray(shape, dtype, buffer=bytearray(), strides=strides)
    whole = torch.empty(0, dtype=torch.uint8, device=data.device).set_(data.untyped_storage())
    return _numpy().ndarray(shape, dtype, buffer=whole.numpy(), offset=data.storage_offset(), strides=strides)


def _numpy() -> Any:
    try:
        return importlib.import_module("numpy")
    except ImportError:
        raise UnknownType(
            "the incoming state holds numpy values, and numpy is not installed here: pip install numpy"
        ) from None
