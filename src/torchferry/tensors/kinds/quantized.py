"""torch's quantized tensors: their integers, scales and zero points are sent as plain tensors.

A tensor that is quantized as a whole has one number as scale and one as zero point. They are sent as tensors
of one item, because they are payload: a local tensor takes them over in place.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from torchferry.core.manifest import Count, Leaf, TensorSpec
from torchferry.core.text import show, show_name
from torchferry.errors import Unsendable
from torchferry.tensors.kinds.base import AddTensor, Dims, Form, Kind, RebuildContext
from torchferry.tensors.kinds.dense import GradFlags, check_grad_flags, grad_flags, with_grad_flags
from torchferry.tensors.memory import CPU, DTYPES, Memory, dtype_name, strided

_INTEGERS = {"qint8": "int8", "quint8": "uint8", "qint32": "int32", "quint4x2": "uint8", "quint2x4": "uint8"}
"""The dtype of the integers in memory."""

_PACKED = {"quint4x2": 2, "quint2x4": 4}
"""How many items a byte holds. Such a tensor is sent as its bytes."""

_PER_TENSOR = "torch.per_tensor_affine"
_PARAMETERS = {
    _PER_TENSOR: ("float64", "int64"),
    "torch.per_channel_affine": ("float64", "int64"),
    "torch.per_channel_affine_float_qparams": ("float32", "float32"),
}
"""The dtypes of scales and zero points, by scheme."""


class QuantizedFixed(Form, frozen=True):
    """The dtype, the scheme and the shape of a quantized tensor, and the axis of its channels, or 0."""

    dtype: str
    scheme: str
    size: Dims
    axis: Count


def _describe(tensor: torch.Tensor, add_tensor: AddTensor) -> Leaf:
    data = tensor.detach()
    try:
        scheme = str(data.qscheme())
    except RuntimeError:
        scheme = "no scheme"
    if scheme not in _PARAMETERS:
        raise Unsendable(f"a quantized tensor ({data.dtype}, {scheme}) can't be sent: dequantize() it")
    axis = 0
    if scheme == _PER_TENSOR:
        scales = torch.tensor([data.q_scale()], dtype=torch.float64, device=CPU)
        zeros = torch.tensor([data.q_zero_point()], dtype=torch.int64, device=CPU)
    else:
        scales, zeros = data.q_per_channel_scales(), data.q_per_channel_zero_points()
        axis = data.q_per_channel_axis()
    fixed = QuantizedFixed(dtype_name(data.dtype), scheme, tuple(data.shape), axis)
    shape, stride, offset = fixed.size, tuple(data.stride()), int(data.storage_offset())
    if fixed.dtype in _PACKED:
        # It is contiguous: torch has no views of packed tensors.
        shape, stride = (_packed_bytes(fixed),), (1,)
    integers = DTYPES[_INTEGERS[fixed.dtype]]
    memory = Memory(data.untyped_storage(), offset * integers.itemsize, data.device)
    parts = strided(memory, integers, 0, shape, stride), scales, zeros
    return Leaf(QUANTIZED.name, tuple(map(add_tensor, parts)), fixed.packed(), grad_flags(tensor) or None)


def _packed_bytes(fixed: QuantizedFixed) -> int:
    return -(-prod(fixed.size) // _PACKED[fixed.dtype])


def _make(leaf: Leaf, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Create a quantized tensor over the memory of its integers, with copies of scales and zero points."""
    fixed, (items, scales, zeros) = QuantizedFixed.read(leaf.fixed), parts
    dtype, axes = DTYPES[fixed.dtype], range(len(fixed.size))
    shape = [len(scales) if axis == fixed.axis else 1 for axis in axes]
    empty = torch.zeros(shape, dtype=torch.float32, device=items.device)
    if fixed.scheme == _PER_TENSOR:
        made = torch.quantize_per_tensor(empty, float(scales), int(zeros), dtype)
    else:
        made = torch.quantize_per_channel(empty, scales.clone(), zeros.clone(), fixed.axis, dtype)
    stride = items.stride()
    if fixed.dtype in _PACKED:
        stride = torch.empty(fixed.size, dtype=torch.uint8, device="meta").stride()
    return made.set_(items.untyped_storage(), int(items.storage_offset()), fixed.size, stride)


def _rebuild(leaf: Leaf, parts: list[torch.Tensor], context: RebuildContext) -> object:
    return with_grad_flags(_make(leaf, parts), leaf.traits or 0)  # type: ignore[arg-type]


def _finish_in_place(leaf: Leaf, local: Any, parts: Sequence[torch.Tensor]) -> object:
    # `copy_` also sets scales and zero points. It copies the integers, which are received, onto themselves.
    with torch.no_grad():
        local.copy_(_make(leaf, parts))
    return local


def _check(leaf: Leaf, specs: Sequence[TensorSpec]) -> None:
    fixed, (items, scales, zeros) = QuantizedFixed.read(leaf.fixed), specs
    if fixed.dtype not in _INTEGERS or fixed.scheme not in _PARAMETERS:
        raise ValueError(f"its dtype {show(fixed.dtype)} or scheme {show(fixed.scheme)} is not supported")
    check_grad_flags(leaf.traits or 0, fixed.dtype)  # type: ignore[arg-type]
    if prod(n for n in fixed.size if n) >= 2**60:
        raise ValueError(f"its shape {show(fixed.size)} has more items than torch can count")
    is_packed = fixed.dtype in _PACKED
    shape = (_packed_bytes(fixed),) if is_packed else fixed.size
    if (items.dtype, items.shape) != (_INTEGERS[fixed.dtype], shape) or (is_packed and items.stride != (1,)):
        found = f"{show_name(items.dtype)}{show(items.shape)}"
        raise ValueError(f"its integers are {found}, expected {_INTEGERS[fixed.dtype]}{show(shape)}")
    channels = 1
    if fixed.scheme != _PER_TENSOR:
        if fixed.axis >= len(fixed.size):
            raise ValueError(
                f"its channels are on axis {fixed.axis}, but it has {len(fixed.size)} dimensions"
            )
        channels = fixed.size[fixed.axis]
    for spec, dtype in zip((scales, zeros), _PARAMETERS[fixed.scheme], strict=True):
        # torch copies them, so they must not be expanded: a small payload could become a large copy.
        if (spec.dtype, spec.shape, spec.stride) != (dtype, (channels,), (1,)):
            found = f"{show_name(spec.dtype)}{show(spec.shape)}"
            raise ValueError(f"its scales or zero points are {found}, expected {dtype}[{channels}]")


def _properties(leaf: Leaf, specs: Sequence[TensorSpec]) -> dict[str, str]:
    fixed = QuantizedFixed.read(leaf.fixed)
    found = {"dtype": fixed.dtype, "scheme": fixed.scheme, "axis of the channels": str(fixed.axis)}
    return {name: show_name(value) for name, value in found.items()} | {"shape": str(list(fixed.size))}


QUANTIZED = Kind(
    "quantized",
    _describe,
    _rebuild,
    3,
    QuantizedFixed,
    GradFlags | None,
    _check,
    _properties,
    _finish_in_place,
)
