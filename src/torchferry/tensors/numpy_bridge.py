"""numpy where it is installed, and nothing of it where it is not.

A value can only be numpy's if somebody has imported numpy, so describing looks in `sys.modules` and never
imports; only rebuilding does, and says so plainly if it can't.
"""

from __future__ import annotations

import importlib
import re
import sys
from typing import Any, TypeAlias

import torch
from msgspec import Struct

from torchferry.core.manifest import Count
from torchferry.core.text import MAX_CHARACTERS, show
from torchferry.errors import UnknownType

MAX_DIMS = 64
"""The most dimensions of an ndarray."""

# A byte order, a kind, a size, and for times the unit.
_FORMAT = re.compile(r"[<>|=]?[A-Za-z?][0-9]{0,10}(\[[A-Za-z0-9/]{1,30}\])?")


class Field(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A field of a dtype on the wire; its name may have a title beside it."""

    name: str | tuple[str, ...]
    dtype: str | Fields
    shape: tuple[Count, ...] | None = None


class Fields(Struct, frozen=True, forbid_unknown_fields=True):
    """A dtype that has fields."""

    fields: tuple[Field, ...]


DtypeForm: TypeAlias = str | Fields
ScalarForm: TypeAlias = tuple[DtypeForm, bytes]


class Scalar:
    """Stands for numpy's scalar types in tables, since numpy may be missing."""


def is_scalar(value: object) -> bool:
    """Say whether it is a numpy scalar that is nothing but bytes."""
    numpy = sys.modules.get("numpy")
    return (
        numpy is not None
        and isinstance(value, numpy.generic)
        and is_bytes(value.dtype)
        and is_describable(value.dtype)
    )


def is_array(value: object) -> bool:
    """Say whether it is an ndarray, and not a subclass, which may hold more than an array."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(value) is numpy.ndarray


def is_array_type(cls: type) -> bool:
    """Return whether a class is ndarray or derived from it."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and issubclass(cls, numpy.ndarray)


def is_bytes(dtype: Any) -> bool:
    """Say whether items of a dtype are their bytes: no Python objects, no pointers to strings."""
    return not dtype.hasobject and dtype.kind in "biufcSUVmM"


def is_describable(dtype: Any) -> bool:
    """Say whether the dtype's description makes the very same dtype again.

    It does not for fields that overlap, for records, and for dtypes of other libraries, which are shown as
    plain bytes.
    """
    try:
        again = dtype_from_wire(dtype_to_wire(dtype))
    except ValueError:
        return False
    return bool(again == dtype) and again.type is dtype.type


def dtype_to_wire(dtype: Any) -> DtypeForm:
    """Describe a dtype: its name, or its fields if it has any."""
    # The .npy format's own description: a string, or for fields a list of tuples.
    return _descr_to_wire(_numpy().lib.format.dtype_to_descr(dtype))


def dtype_from_wire(wire: DtypeForm) -> Any:
    """Make the dtype again.

    Raises:
        UnknownType: numpy is not installed.
        ValueError: it is no description of a dtype that is all bytes.
    """
    try:
        dtype = _numpy().lib.format.descr_to_dtype(_descr_from_wire(wire))
    except (SyntaxError, TypeError, ValueError, LookupError, RecursionError, OverflowError) as error:
        raise ValueError(f"not a numpy dtype: {str(error)[:MAX_CHARACTERS]}") from None
    if not is_bytes(dtype):
        raise ValueError("a numpy dtype that is not plain bytes")
    return dtype


def _descr_to_wire(descr: Any) -> DtypeForm:
    if isinstance(descr, str):
        return descr
    if not isinstance(descr, list):
        raise ValueError(f"a numpy dtype that is described as {descr}")
    return Fields(tuple(Field(name, _descr_to_wire(inner), *shape) for name, inner, *shape in descr))


def _descr_from_wire(wire: DtypeForm) -> Any:
    """Make numpy's description again: a format, or a list of fields, and nothing else numpy might parse."""
    if isinstance(wire, Fields):
        return [_field_from_wire(field) for field in wire.fields]
    if not _FORMAT.fullmatch(wire):
        raise ValueError(f"no format {show(wire)}")
    return wire


def _field_from_wire(field: Field) -> Any:
    described = (field.name, _descr_from_wire(field.dtype))
    return described if field.shape is None else (*described, field.shape)


def scalar_to_wire(value: Any) -> ScalarForm:
    """Describe a numpy scalar as its dtype and its bytes."""
    return dtype_to_wire(value.dtype), value.tobytes()


def scalar_from_wire(wire: ScalarForm) -> object:
    """Make a numpy scalar out of its dtype and bytes."""
    described, data = wire
    dtype = dtype_from_wire(described)
    data = data[: dtype.itemsize]  # numpy shows an empty string as one zero
    # As an item of an array, a string would lose the zeros at its end.
    if dtype.kind == "S":
        return dtype.type(data)
    if dtype.kind == "U":
        return dtype.type(data.decode("utf-32-le", "surrogatepass"))
    if dtype.itemsize == 0:
        return _numpy().zeros((), dtype)[()]
    return _numpy().frombuffer(data, dtype=dtype)[0]


def owner_bounds(array: Any) -> tuple[int, int]:
    """Give the addresses between which the array's memory lies, with all that shares it."""
    numpy = _numpy()
    low, high = numpy.lib.array_utils.byte_bounds(array)
    base = array.base
    while isinstance(base, numpy.ndarray):
        base_low, base_high = numpy.lib.array_utils.byte_bounds(base)
        low, high = min(low, base_low), max(high, base_high)
        base = base.base
    return low, high


def array_over(data: torch.Tensor, dtype: Any) -> Any:
    """Make an ndarray of a dtype over a uint8 tensor whose last dimension is the item's bytes.

    The tensor's memory stays alive as long as the array does.

    Raises:
        ValueError: the last dimension is not the size of an item.
    """
    if data.dtype is not torch.uint8 or not data.ndim or data.shape[-1] != dtype.itemsize:
        raise ValueError(f"these bytes are no array of {dtype}")
    shape, strides = tuple(data.shape[:-1]), data.stride()[:-1]
    if data.numel() == 0:
        # On memory of its own making numpy sets the strides of an empty array to zero.
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
