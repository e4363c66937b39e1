"""Equality of states: types, values bit for bit, layouts, and shared memory."""

from __future__ import annotations

import argparse
import dataclasses
import io
import struct
import sys
from collections import OrderedDict, defaultdict, deque
from datetime import date, time, timezone
from decimal import Decimal
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor

_WORD = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def assert_same(one: object, two: object) -> None:
    """Check that two states are equal in everything that torchferry preserves."""
    first, second = _Walk(), _Walk()
    _compare(one, two, "state", first, second)
    assert first.aliases() == second.aliases(), "the states share memory in different ways"


class _Walk:
    """The tensors of a state in order, with their identities and addresses."""

    def __init__(self) -> None:
        self._places: list[tuple[int, int, int, int]] = []
        self._keep: list[object] = []

    def add(self, value: object, address: int, storage: int, nbytes: int) -> None:
        self._keep.append(value)
        self._places.append((id(value), storage, address, nbytes))

    def aliases(self) -> list[tuple[int, int, int]]:
        """Return for each tensor: the first equal object, the first in its storage, and the offset to that.

        Tensors without bytes share no memory.
        """
        objects: dict[int, int] = {}
        storages: dict[int, tuple[int, int]] = {}
        seen = []
        for number, (identity, storage, address, nbytes) in enumerate(self._places):
            same = objects.setdefault(identity, number)
            if nbytes == 0:
                seen.append((same, -1, 0))
                continue
            first, start = storages.setdefault(storage, (number, address))
            seen.append((same, first, address - start))
        return seen


def _compare(one: Any, two: Any, path: str, first: _Walk, second: _Walk) -> None:
    assert type(one) is type(two), f"{path}: {type(one)} became {type(two)}"
    if isinstance(one, DTensor):
        _compare_dtensors(one, two, path, first, second)
    elif isinstance(one, ShardedTensor):
        _compare_sharded(one, two, path, first, second)
    elif hasattr(one, "__tensor_flatten__"):
        _compare_subclasses(one, two, path, first, second)
    elif isinstance(one, torch.Tensor):
        _compare_tensors(one, two, path, first, second)
    elif isinstance(one, (argparse.Namespace, SimpleNamespace)):
        _compare_mappings(vars(one), vars(two), path, first, second)
    elif isinstance(one, io.BytesIO):
        assert (one.getvalue(), one.tell()) == (two.getvalue(), two.tell()), path
    elif isinstance(one, (torch.finfo, torch.iinfo)):
        assert one.dtype == two.dtype, path
    elif isinstance(one, (Decimal, date, time, timezone)):
        # Some that are not equal in all respects are equal to Python.
        assert repr(one) == repr(two), f"{path}: {one!r} became {two!r}"
    elif _is_ndarray(one):
        _compare_arrays(one, two, path, first, second)
    elif isinstance(one, (dict, MappingProxyType)):
        _compare_mappings(one, two, path, first, second)
    elif isinstance(one, (list, tuple, deque)):
        assert len(one) == len(two), f"{path}: {len(one)} items became {len(two)}"
        if isinstance(one, deque):
            assert one.maxlen == two.maxlen, path
        for number, (a, b) in enumerate(zip(one, two, strict=True)):
            _compare(a, b, f"{path}.{number}", first, second)
    elif dataclasses.is_dataclass(one) and not isinstance(one, type):
        for field in dataclasses.fields(one):
            _compare(
                getattr(one, field.name), getattr(two, field.name), f"{path}.{field.name}", first, second
            )
    else:
        _compare_values(one, two, path)


def _compare_mappings(one: Any, two: Any, path: str, first: _Walk, second: _Walk) -> None:
    assert list(one) == list(two), f"{path}: keys {list(one)} became {list(two)}"
    assert [type(key) for key in one] == [type(key) for key in two], f"{path}: types of keys changed"
    if isinstance(one, defaultdict):
        assert one.default_factory is two.default_factory, path
    if isinstance(one, OrderedDict):
        assert vars(one) == vars(two), f"{path}: attributes {vars(one)} became {vars(two)}"
    for key in one:
        _compare(one[key], two[key], f"{path}.{key}", first, second)


def _compare_values(one: Any, two: Any, path: str) -> None:
    if isinstance(one, float):
        assert struct.pack("<d", one) == struct.pack("<d", two), f"{path}: {one!r} became {two!r}"
    elif isinstance(one, complex):
        _compare_values(one.real, two.real, path)
        _compare_values(one.imag, two.imag, path)
    elif hasattr(one, "tobytes") and hasattr(one, "dtype"):
        assert one.dtype == two.dtype, path
        assert one.tobytes() == two.tobytes(), f"{path}: {one!r} became {two!r}"
    else:
        assert one == two, f"{path}: {one!r} became {two!r}"


def _compare_tensors(one: torch.Tensor, two: torch.Tensor, path: str, first: _Walk, second: _Walk) -> None:
    assert one.dtype is two.dtype, f"{path}: {one.dtype} became {two.dtype}"
    assert one.shape == two.shape, f"{path}: {one.shape} became {two.shape}"
    assert one.requires_grad == two.requires_grad, f"{path}: requires_grad"
    assert one.layout is two.layout, f"{path}: layout"
    if one.is_quantized:
        _compare_quantized(one, two, path)
    elif one.layout is torch.strided:
        _compare_strided(one, two, path, first, second)
    else:
        _compare_sparse(one, two, path, first, second)


def _compare_subclasses(one: Any, two: Any, path: str, first: _Walk, second: _Walk) -> None:
    names, context = one.__tensor_flatten__()
    other_names, other_context = two.__tensor_flatten__()
    assert list(names) == list(other_names), f"{path}: {names} became {other_names}"
    assert context == other_context, f"{path}: {context} became {other_context}"
    assert one.requires_grad == two.requires_grad, f"{path}: requires_grad"
    assert isinstance(one, torch.nn.Parameter) == isinstance(two, torch.nn.Parameter), path
    if not one.is_nested:
        assert (one.shape, one.stride(), one.dtype) == (two.shape, two.stride(), two.dtype), path
    for name in names:
        _compare(getattr(one, name), getattr(two, name), f"{path}.{name}", first, second)


def _compare_quantized(one: torch.Tensor, two: torch.Tensor, path: str) -> None:
    assert one.stride() == two.stride(), f"{path}: strides {one.stride()} became {two.stride()}"
    assert torch.equal(one.int_repr(), two.int_repr()), f"{path}: {one} became {two}"
    assert one.qscheme() == two.qscheme(), path
    if one.qscheme() == torch.per_tensor_affine:
        assert (one.q_scale(), one.q_zero_point()) == (two.q_scale(), two.q_zero_point()), path
        return
    assert one.q_per_channel_axis() == two.q_per_channel_axis(), path
    for name in ("q_per_channel_scales", "q_per_channel_zero_points"):
        assert torch.equal(getattr(one, name)(), getattr(two, name)()), f"{path}: {name}"


def _compare_sparse(one: torch.Tensor, two: torch.Tensor, path: str, first: _Walk, second: _Walk) -> None:
    if one.layout is torch.sparse_coo:
        assert one.is_coalesced() == two.is_coalesced(), f"{path}: coalesced"
        names = ("_indices", "_values")
    elif one.layout in (torch.sparse_csr, torch.sparse_bsr):
        names = ("crow_indices", "col_indices", "values")  # type: ignore[assignment]
    else:
        names = ("ccol_indices", "row_indices", "values")  # type: ignore[assignment]
    for name in names:
        member, other = getattr(one.detach(), name)(), getattr(two.detach(), name)()
        _compare_strided(member, other, f"{path}.{name}", first, second)


def _compare_strided(one: torch.Tensor, two: torch.Tensor, path: str, first: _Walk, second: _Walk) -> None:
    assert one.dtype is two.dtype, f"{path}: {one.dtype} became {two.dtype}"
    assert one.shape == two.shape, f"{path}: {one.shape} became {two.shape}"
    assert one.stride() == two.stride(), f"{path}: strides {one.stride()} became {two.stride()}"
    assert one.is_conj() == two.is_conj(), f"{path}: conj bit"
    assert one.is_neg() == two.is_neg(), f"{path}: neg bit"
    assert bytes_of(one) == bytes_of(two), f"{path}: {one} became {two}"
    for tensor, walk in ((one, first), (two, second)):
        walk.add(tensor, tensor.data_ptr(), tensor.untyped_storage().data_ptr(), tensor.nbytes)


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a strided tensor's items in order, whatever its dtype and its bits."""
    tensor = tensor.detach()
    size = tensor.itemsize
    shape, stride, offset = tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
    if size == 16:
        shape, stride, offset, size = (*shape, 2), (*(s * 2 for s in stride), 1), offset * 2, 8
    raw = torch.empty(0, dtype=_WORD[size], device=tensor.device).set_(
        tensor.untyped_storage(), offset, shape, stride
    )
    # This works without numpy.
    packed = raw.cpu().flatten().clone(memory_format=torch.contiguous_format)
    return bytes(packed.view(torch.uint8).tolist()) if raw.numel() else b""


def _compare_arrays(one: Any, two: Any, path: str, first: _Walk, second: _Walk) -> None:
    assert one.dtype == two.dtype, f"{path}: {one.dtype} became {two.dtype}"
    assert one.shape == two.shape, f"{path}: {one.shape} became {two.shape}"
    assert one.strides == two.strides, f"{path}: strides {one.strides} became {two.strides}"
    assert one.flags.writeable == two.flags.writeable, f"{path}: writeable"
    assert one.tobytes() == two.tobytes(), f"{path}: {one} became {two}"


def _compare_dtensors(one: DTensor, two: DTensor, path: str, first: _Walk, second: _Walk) -> None:
    assert one.placements == two.placements, f"{path}: {one.placements} became {two.placements}"
    assert one.shape == two.shape, f"{path}: {one.shape} became {two.shape}"
    assert one.stride() == two.stride(), f"{path}: global strides"
    assert one.requires_grad == two.requires_grad, f"{path}: requires_grad"
    assert isinstance(one, torch.nn.Parameter) == isinstance(two, torch.nn.Parameter), path
    _compare(one._local_tensor, two._local_tensor, f"{path}.local", first, second)


def _compare_sharded(one: Any, two: Any, path: str, first: _Walk, second: _Walk) -> None:
    assert one.size() == two.size(), f"{path}: {one.size()} became {two.size()}"
    shards, other_shards = one.local_shards(), two.local_shards()
    assert len(shards) == len(other_shards), f"{path}: {len(shards)} shards became {len(other_shards)}"
    for number, (a, b) in enumerate(zip(shards, other_shards, strict=True)):
        assert a.metadata.shard_offsets == b.metadata.shard_offsets, path
        assert a.metadata.shard_sizes == b.metadata.shard_sizes, path
        _compare_strided(a.tensor, b.tensor, f"{path}.shard{number}", first, second)


def _is_ndarray(value: object) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)
