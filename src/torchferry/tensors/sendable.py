"""Which strided tensors can travel, and what to do about those that can't."""

from __future__ import annotations

import torch

from torchferry.core.manifest import MAX_DIMS
from torchferry.errors import Unsendable
from torchferry.torch_internals import is_zerotensor


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
    if is_zerotensor(tensor):
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
