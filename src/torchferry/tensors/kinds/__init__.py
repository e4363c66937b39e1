"""The kinds of leaf that contain tensors, and the lookup by value and by name.

To add a kind, write a module with one `Kind`, and add it to `_by_name` and to `kind_of`. The kinds of
distributed tensors are imported on first use, because they import torch modules that load slowly.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from torchferry.core.assignment import Part
from torchferry.core.manifest import Leaf, TensorSpec
from torchferry.core.text import show
from torchferry.errors import BadManifest, UnknownType, Unsendable
from torchferry.tensors import registry
from torchferry.tensors.kinds.base import Kind, Misfit, RebuildContext, check_form, dense_properties
from torchferry.tensors.kinds.buffer import BUFFERS, is_large
from torchferry.tensors.kinds.dense import DENSE
from torchferry.tensors.kinds.ndarray import NDARRAY, numpy_class
from torchferry.tensors.kinds.quantized import QUANTIZED
from torchferry.tensors.kinds.sparse import SPARSE, SPARSE_LAYOUTS
from torchferry.tensors.kinds.subclass import SUBCLASS

__all__ = [
    "Kind",
    "Misfit",
    "RebuildContext",
    "check_form",
    "is_plain_parameter",
    "kind_named",
    "kind_of",
    "part_of",
    "properties_of",
]

_by_name = {kind.name: kind for kind in (DENSE, SPARSE, QUANTIZED, SUBCLASS, NDARRAY, BUFFERS)}

_DISTRIBUTED_TYPES = {
    "torch.distributed.tensor.DTensor": "dtensor",
    "torch.distributed._shard.sharded_tensor.api.ShardedTensor": "sharded",
}


def kind_of(value: object) -> Kind | None:
    """Return the kind of a value, None if it has no tensors.

    Raises Unsendable for a subclass of Tensor that is neither known nor registered.
    """
    cls: Any = type(value)
    tensor: Any = value
    if issubclass(cls, torch.Tensor):
        if registry.is_registered(cls):
            return SUBCLASS
        if name := _DISTRIBUTED_TYPES.get(f"{cls.__module__}.{cls.__qualname__}"):
            return kind_named(name)
        if cls is not torch.Tensor and cls is not torch.nn.Parameter and not is_plain_parameter(tensor):
            raise Unsendable(_explain_subclass(tensor))
        return SPARSE if tensor.layout in SPARSE_LAYOUTS else QUANTIZED if tensor.is_quantized else DENSE
    if cls in map(numpy_class, ("ndarray", "memmap", "matrix", "recarray")):
        return NDARRAY
    return BUFFERS if is_large(value) else None


def is_plain_parameter(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a Parameter, or of a subclass that only adds attributes and methods."""
    cls: Any = type(tensor)
    return (
        issubclass(cls, torch.nn.Parameter)
        and not is_lazy(tensor)
        and not registry.is_tensor_subclass(cls)
        and cls.__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    )


def _explain_subclass(tensor: torch.Tensor) -> str:
    if is_lazy(tensor):
        return "a lazy parameter has no data yet: run a forward pass first"
    name = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
    what = f"the tensor subclass {name} can't be sent: only its data would arrive. "
    with suppress(Exception):
        inner, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        if registry.is_tensor_subclass(type(tensor)):
            return what + f"Call torchferry.register({type(tensor).__qualname__}) on both sides"
        return what + f"Send the tensors that it contains ({', '.join(map(str, inner))})"
    with suppress(Exception):
        if type(tensor.as_subclass(torch.Tensor)) is torch.Tensor:
            return what + "Send .as_subclass(torch.Tensor) if its data is all that you need"
    return what + "Send the plain tensors that it contains"


def kind_named(name: str) -> Kind:
    """Return the kind with a name on the wire.

    Raises BadManifest if the name is unknown, and UnknownType if this torch does not have such tensors.
    """
    if name == "dtensor":
        from torchferry.tensors.kinds.dtensor import DTENSOR

        return DTENSOR
    if name == "sharded":
        try:
            from torchferry.tensors.kinds.sharded import SHARDED
        except ImportError:
            raise UnknownType("this version of torch has no ShardedTensor") from None
        return SHARDED
    if name not in _by_name:
        raise BadManifest(f"a leaf has the unknown kind {show(name)}")
    return _by_name[name]


def part_of(leaf: Leaf, rank: int | None = None) -> Part | None:
    """Return which part of a sharded tensor a leaf holds, or a rank would hold; None if it is not sharded."""
    part = kind_named(leaf.kind).part if leaf.kind in _DISTRIBUTED_TYPES.values() else None
    return None if part is None else part(leaf, rank)


def properties_of(leaf: Leaf, specs: Sequence[TensorSpec]) -> dict[str, str]:
    """Return the properties of a leaf that are compared; if it can't be read, those of its tensors."""
    try:
        return kind_named(leaf.kind).properties(leaf, specs)
    except Exception:
        return dense_properties(leaf, specs)
