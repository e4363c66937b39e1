"""numpy arrays and scalars, without a dependency on numpy.

A value can only be numpy's if numpy is imported, so describing looks it up in `sys.modules`. Only rebuilding
imports it, and raises UnknownType if it is not installed.

An array is described as a uint8 tensor with one more dimension, the bytes of an item. A tensor's strides
can't be negative, so axes with negative strides are reversed, and reversed again in the result.
"""

import importlib
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any, TypeAlias

import msgspec
import torch
from msgspec import Meta, Struct

from torchferry.core.manifest import Count, Leaf, TensorSpec
from torchferry.core.text import MAX_CHARACTERS, show, show_name
from torchferry.errors import UnknownType, Unsendable
from torchferry.tensors.kinds.base import AddTensor, Form, Kind, RebuildContext
from torchferry.tensors.memory import memory_at, strided

_MAX_AXES = 64

_FORMAT = re.compile(r"[<>|=]?[A-Za-z?][0-9]{0,10}(\[[A-Za-z0-9/]{1,30}\])?")
"""A byte order, a kind, a size, and for times the unit. numpy's own parser accepts much more."""


class DtypeField(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A field of a structured dtype. If it has a shape, `dtype` is that of its items."""

    name: str
    title: str | None
    dtype: "str | DtypeFields"
    shape: tuple[Count, ...]
    offset: Count


class DtypeFields(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A structured dtype. `aligned` is only of a dtype that is a value: arrays are equal without it."""

    fields: tuple[DtypeField, ...]
    itemsize: Count
    aligned: bool


DtypeForm: TypeAlias = str | DtypeFields
ScalarForm: TypeAlias = tuple[DtypeForm, bytes]


class NumpyScalar:
    """Stands for numpy's scalar types in a table, because numpy may not be installed."""


def numpy_class(name: str) -> type:
    """Return a class of numpy; if numpy is not imported, a class that has no instances."""
    return getattr(sys.modules.get("numpy"), name, NumpyScalar)


def is_masked(value: Any) -> bool:
    """Return whether a value is a masked array, and not of a subclass."""
    return type(value) is getattr(sys.modules.get("numpy.ma"), "MaskedArray", NumpyScalar)


def split_masked(array: Any) -> tuple[object, object, object]:
    """Return the data of a masked array, its mask or None, and its fill value."""
    mask = None if array.mask is sys.modules["numpy.ma"].nomask else array.mask
    return array.data, mask, array.fill_value


def make_masked(data: Any, mask: Any, fill_value: Any, *, hard: bool) -> object:
    """Create a masked array over the memory of its data and its mask, which may be None."""
    masked: Any = importlib.import_module("numpy.ma")
    mask = masked.nomask if mask is None else mask
    return masked.MaskedArray(data, mask, fill_value=fill_value, hard_mask=hard, copy=False)


def is_scalar(value: Any) -> bool:
    """Return whether a value is a numpy scalar, and not of a subclass that a user defined."""
    return issubclass(type(value), numpy_class("generic")) and type(value) is value.dtype.type


def _is_bytes(dtype: Any) -> bool:
    """Return whether items of a dtype are their bytes, without references to objects or strings."""
    return not dtype.hasobject and dtype.kind in "biufcSUVmM"


def dtype_to_wire(dtype: Any, *, is_value: bool = False) -> DtypeForm:
    """Describe a dtype; raises Unsendable if it can't be rebuilt exactly, or if its items are not bytes.

    If it `is_value` itself, and not the dtype of an array, its items may be references. Records, which are
    structures whose fields are attributes too, become structures.
    """
    if dtype.type is numpy_class("record"):
        dtype = _numpy().dtype((_numpy().void, dtype))
    what = f"numpy values of dtype {dtype} can't be sent: "
    if not is_value and not _is_bytes(dtype):
        raise Unsendable(what + "the items are references, not bytes. Convert an array to a list")
    with suppress(ValueError):
        wire: DtypeForm = msgspec.convert(_split(dtype, is_value), DtypeForm)
        rebuilt = value_from_wire(wire)
        if rebuilt == dtype and rebuilt.type is dtype.type and not (is_value and dtype.metadata):
            return wire
    # A dtype with records as fields, with metadata, or of another library.
    raise Unsendable(
        what + "there is no exact description of that dtype. Send .view() of a plain dtype, such as uint8, "
        "and view it back at the receiver"
    )


def _split(dtype: Any, is_value: bool) -> object:
    """Return a structured dtype as DtypeFields has it, and any other as text."""
    if dtype.names is None:
        return dtype.str
    fields = []
    for name in dtype.names:
        inner, offset, *title = dtype.fields[name]
        fields.append([name, [*title, None][0], _split(inner.base, is_value), inner.shape, offset])
    return [fields, dtype.itemsize, is_value and dtype.isalignedstruct]


def dtype_from_wire(wire: DtypeForm) -> Any:
    """Rebuild the dtype of an array; raise ValueError if numpy can't, or if its items are not bytes."""
    dtype = value_from_wire(wire)
    if not _is_bytes(dtype):
        raise ValueError(f"items of the dtype {str(dtype)[:MAX_CHARACTERS]} are references, expected bytes")
    return dtype


def value_from_wire(wire: DtypeForm) -> Any:
    """Rebuild a dtype that is a value itself; raise ValueError if numpy can't."""
    if isinstance(wire, str) and not _FORMAT.fullmatch(wire):
        raise ValueError(f"{show(wire)} is not a byte order, a kind and a size, such as '<f4'")
    make = _numpy().dtype
    try:
        if isinstance(wire, str):
            return make(wire)
        items = [value_from_wire(field.dtype) for field in wire.fields]
        shapes = [field.shape for field in wire.fields]
        fields = {
            "names": [field.name for field in wire.fields],
            "titles": [field.title for field in wire.fields],
            "formats": [make(pair) if pair[1] else pair[0] for pair in zip(items, shapes, strict=True)],
            "offsets": [field.offset for field in wire.fields],
            "itemsize": wire.itemsize,
        }
        return make(fields, align=wire.aligned)
    except (SyntaxError, TypeError, LookupError, RecursionError, OverflowError) as error:
        reason = str(error)[:MAX_CHARACTERS]
        raise ValueError(f"numpy can't create the dtype {show(wire)}: {reason}") from None


def scalar_to_wire(value: Any) -> ScalarForm:
    """Describe a numpy scalar as its dtype and its bytes; raises Unsendable if its dtype can't be sent."""
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
    array = array.view(_numpy().ndarray)  # of a memmap, matrix or recarray
    dtype = dtype_to_wire(array.dtype)
    backwards = tuple(axis for axis, step in enumerate(array.strides) if step < 0)
    forwards = array[_reversing(array.ndim, backwards)]
    low, high = _numpy().lib.array_utils.byte_bounds(array)
    start = forwards.__array_interface__["data"][0] - low if array.size else 0
    shape, strides = (*array.shape, array.itemsize), (*forwards.strides, 1)
    data = strided(memory_at(low, high - low), torch.uint8, start, shape, strides)
    fixed = NdarrayFixed(dtype, backwards)
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
    dtype, shape, strides = dtype_from_wire(fixed.dtype), tuple(data.shape[:-1]), data.stride()[:-1]
    array = _numpy().ndarray(shape, dtype, buffer, offset, strides)
    array = array[_reversing(array.ndim, fixed.backwards)]
    array.flags.writeable = leaf.traits
    return array


def _check(leaf: Leaf, specs: Sequence[TensorSpec]) -> None:
    fixed, (spec,) = NdarrayFixed.read(leaf.fixed), specs
    dtype = dtype_from_wire(fixed.dtype)
    if spec.dtype != "uint8" or spec.shape[-1:] != (dtype.itemsize,) or spec.conj or spec.neg:
        raise ValueError(
            f"its tensor is {show_name(spec.dtype)}{show(spec.shape)}, expected uint8[..., {dtype.itemsize}] "
            f"for items of {str(dtype)[:MAX_CHARACTERS]}"
        )
    axes = len(spec.shape) - 1
    if axes > _MAX_AXES:
        raise ValueError(f"it has {axes} axes, expected at most {_MAX_AXES}")
    if max(fixed.backwards, default=-1) >= axes:
        raise ValueError(f"its reversed axes are {show(fixed.backwards)}, but it has only {axes} axes")


def _properties(leaf: Leaf, specs: Sequence[TensorSpec]) -> dict[str, str]:
    fixed = NdarrayFixed.read(leaf.fixed)
    return {
        "dtype": str(dtype_from_wire(fixed.dtype)),
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
