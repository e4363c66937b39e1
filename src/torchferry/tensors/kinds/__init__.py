"""The kinds of leaf that have tensors in them, and which one a value is.

To add a kind: write a module with one `Kind`, add it to the table, and to `kind_of`.

The kinds of tensors that are spread over processes are imported when the first of them is met: torch takes
most of a second to import what they are made of, and most processes never have one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.parameter import is_lazy

from torchferry.core.manifest import Leaf, TensorSpec
from torchferry.core.text import show
from torchferry.errors import BadManifest, UnknownType, Unsendable
from torchferry.tensors import numpy_bridge
from torchferry.tensors.kinds.base import Kind, Misfit, Part, Site, check_form, look_dense
from torchferry.tensors.kinds.dense import DENSE
from torchferry.tensors.kinds.ndarray import NDARRAY
from torchferry.tensors.kinds.sparse import COMPRESSED, COO

__all__ = ["Kind", "Misfit", "Part", "Site", "check_form", "kind_named", "kind_of", "look_at"]

_by_name = {kind.name: kind for kind in (DENSE, COO, COMPRESSED, NDARRAY)}

_by_layout = {
    torch.strided: DENSE,
    torch.sparse_coo: COO,
    torch.sparse_csr: COMPRESSED,
    torch.sparse_csc: COMPRESSED,
    torch.sparse_bsr: COMPRESSED,
    torch.sparse_bsc: COMPRESSED,
}

_SPREAD_TYPES = {
    "torch.distributed.tensor.DTensor": "dtensor",
    "torch.distributed._shard.sharded_tensor.api.ShardedTensor": "sharded",
}


def kind_of(value: object) -> Kind | None:
    """Say which kind of leaf a value is; None if it has no tensors in it.

    Raises:
        Unsendable: a subclass of Tensor, of which only the base's part would arrive.
    """
    cls = type(value)
    if cls is torch.Tensor or cls is torch.nn.Parameter:
        return _by_layout.get(value.layout, DENSE)  # type: ignore[attr-defined]
    if issubclass(cls, torch.Tensor):
        spread = _SPREAD_TYPES.get(f"{cls.__module__}.{cls.__qualname__}")
        if spread is not None:
            return _spread(spread)
        raise Unsendable(_no_subclass(value))  # type: ignore[arg-type]
    return NDARRAY if numpy_bridge.is_array(value) else None


def _no_subclass(tensor: torch.Tensor) -> str:
    """Return why a tensor of a subclass can't be sent, and what to send instead."""
    cls = type(tensor)
    if is_lazy(tensor):
        return "a lazy parameter has no data yet: run a forward first"
    what = (
        f"a tensor subclass ({cls.__module__}.{cls.__qualname__}) can't travel: only its data would arrive. "
    )
    try:
        inner, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        return what + f"Send the tensors that it is made of ({', '.join(map(str, inner))})"
    except Exception:
        pass
    try:
        if type(tensor.as_subclass(torch.Tensor)) is torch.Tensor:
            return what + "Send .as_subclass(torch.Tensor), if that is all there is to it"
    except Exception:
        pass
    return what + "Send the plain tensors that it is made of"


def kind_named(name: str) -> Kind:
    """Find a kind by its name on the wire.

    Raises:
        BadManifest: there is no such kind.
    """
    try:
        return _by_name.get(name) or _spread(name)
    except KeyError:
        raise BadManifest(f"a leaf of unknown kind {show(name)}") from None


def look_at(leaf: Leaf, specs: Sequence[TensorSpec]) -> dict[str, str]:
    """Return the properties of a leaf that are compared; of an unknown kind, those of its tensors."""
    try:
        return kind_named(leaf.kind).look(leaf, specs)
    except Exception:
        return look_dense(leaf, specs)


def _spread(name: str) -> Kind:
    """Give one of the kinds that are imported when they are needed.

    Raises:
        KeyError: it is none of them.
    """
    match name:
        case "dtensor":
            from torchferry.tensors.kinds.dtensor import DTENSOR

            return DTENSOR
        case "sharded":
            try:
                from torchferry.tensors.kinds.sharded import SHARDED
            except ImportError:
                raise UnknownType("this version of torch has no ShardedTensor") from None
            return SHARDED
    raise KeyError(name)
