"""The bytes of a state's leaves in memory, computed in the slow and obvious way.

It uses no code of the package. An address is an address of the process.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
from collections import deque
from collections.abc import Iterable, Iterator
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Addresses = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]
Path = tuple[Any, ...]

_SIGN_BYTE = 0x80


def _walk(state: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    children: Iterable[tuple[Any, Any]]
    if isinstance(state, dict | MappingProxyType):
        children = state.items()
    elif isinstance(state, argparse.Namespace | SimpleNamespace):
        children = vars(state).items()
    elif isinstance(state, tuple) and hasattr(state, "_fields"):
        children = zip(state._fields, state, strict=True)
    elif isinstance(state, list | tuple | deque) and not isinstance(state, torch.Size):
        children = enumerate(state)
    elif dataclasses.is_dataclass(state):
        children = [(field.name, getattr(state, field.name)) for field in dataclasses.fields(state)]
    else:
        yield path, state
        return
    for key, child in children:
        yield from _walk(child, (*path, key))


def leaves_of(state: Any) -> list[tuple[Path, Any]]:
    """List the tensors and arrays of a state with their paths."""
    return [(path, leaf) for path, leaf in _walk(state, ()) if isinstance(leaf, torch.Tensor | np.ndarray)]


def values_of(state: Any) -> list[tuple[Path, Any]]:
    """List all other leaves with their paths."""
    return [
        (path, leaf) for path, leaf in _walk(state, ()) if not isinstance(leaf, torch.Tensor | np.ndarray)
    ]


def parts_of(leaf: Any) -> list[Any]:
    """Return the strided tensors, or the array, that have a leaf's bytes."""
    if hasattr(leaf, "__tensor_flatten__"):
        return [part for name in leaf.__tensor_flatten__()[0] for part in parts_of(getattr(leaf, name))]
    if isinstance(leaf, torch.Tensor) and leaf.is_quantized:
        return [leaf, leaf.q_per_channel_scales(), leaf.q_per_channel_zero_points()]
    if isinstance(leaf, np.ndarray) or leaf.layout is torch.strided:
        return [leaf]
    data = leaf.detach()
    if data.layout is torch.sparse_coo:
        return [data._indices(), data._values()]
    if data.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [data.crow_indices(), data.col_indices(), data.values()]
    return [data.ccol_indices(), data.row_indices(), data.values()]


def addresses_of(part: Any) -> Addresses:
    """Return the address of every byte of every item, in order; the last dimension has an item's bytes."""
    if isinstance(part, np.ndarray):
        start, size, strides = part.__array_interface__["data"][0], part.itemsize, part.strides
    else:
        # A conjugate view has the memory of its tensor.
        size = part.itemsize
        start = part.untyped_storage().data_ptr() + int(part.storage_offset()) * size
        strides = tuple(step * size for step in part.stride())
    found = np.full((1,) * len(part.shape), start, np.int64)
    for axis, (count, step) in enumerate(zip(part.shape, strides, strict=True)):
        steps = np.arange(count, dtype=np.int64) * step
        found = found + steps.reshape((1,) * axis + (count,) + (1,) * (len(part.shape) - axis - 1))
    return found[..., None] + np.arange(size, dtype=np.int64)


def used_bytes(state: Any) -> set[int]:
    """Return the addresses of all bytes that a leaf of the state uses."""
    return {
        int(address)
        for _, leaf in leaves_of(state)
        for part in parts_of(leaf)
        for address in addresses_of(part).ravel()
    }


def sharing(state: Any) -> list[list[int]]:
    """Number the distinct bytes and the distinct leaf objects of a state.

    Two states with an equal result share memory in the same way.
    """
    bytes_seen: dict[int, int] = {}
    objects_seen: dict[int, int] = {}
    found = []
    for _, leaf in leaves_of(state):
        found.append([objects_seen.setdefault(id(leaf), len(objects_seen))])
        for part in parts_of(leaf):
            addresses = addresses_of(part).ravel().tolist()
            found.append([bytes_seen.setdefault(address, len(bytes_seen)) for address in addresses])
    return found


def sign_flips(part: Any) -> Bytes:
    """Return the bits of an item that a conj or neg bit inverts, as a mask over its bytes."""
    size = part.itemsize
    mask = np.zeros(size, np.uint8)
    if isinstance(part, np.ndarray):
        return mask
    # Numbers are little-endian: the sign is in the last byte.
    if part.is_complex():
        mask[size // 2 - 1] ^= _SIGN_BYTE * part.is_neg()
        mask[size - 1] ^= _SIGN_BYTE * (part.is_neg() ^ part.is_conj())
    else:
        mask[size - 1] ^= _SIGN_BYTE * part.is_neg()
    return mask


def logical_bytes(leaf: Any) -> list[bytes]:
    """Return the bytes of a leaf's values with conj and neg bits resolved, part by part."""
    return [(_stored_bytes(part) ^ sign_flips(part)).tobytes() for part in parts_of(leaf)]


def _stored_bytes(part: Any) -> Bytes:
    addresses = addresses_of(part)
    if not addresses.size:
        return np.zeros(addresses.shape, np.uint8)
    # Read from memory: numpy's conversions to bytes skip the padding between fields.
    low, high = int(addresses.min()), int(addresses.max()) + 1
    span = np.frombuffer(ctypes.string_at(low, high - low), np.uint8)
    return np.asarray(span[addresses - low], np.uint8)


def contents(pools: Iterable[torch.Tensor]) -> dict[int, int]:
    """Return the value of every byte of the pools by its address."""
    return {pool.data_ptr() + at: value for pool in pools for at, value in enumerate(pool.tolist())}


def unused_contents(state: Any, pools: Iterable[torch.Tensor]) -> dict[int, int]:
    """Return the value of every byte of the pools that no leaf of the state uses."""
    used = used_bytes(state)
    return {address: value for address, value in contents(pools).items() if address not in used}


def writes_clash(source: Any, target: Any) -> bool:
    """Return whether two different bytes of the source are written to one byte of the target."""
    written: dict[int, tuple[int, int]] = {}
    for (_, leaf), (_, local) in zip(leaves_of(source), leaves_of(target), strict=True):
        for source_part, target_part in zip(parts_of(leaf), parts_of(local), strict=True):
            origin = addresses_of(source_part)
            flips = np.broadcast_to(sign_flips(source_part) ^ sign_flips(target_part), origin.shape)
            comes_from = zip(origin.ravel().tolist(), flips.ravel().tolist(), strict=True)
            for address, write in zip(addresses_of(target_part).ravel().tolist(), comes_from, strict=True):
                if written.setdefault(address, write) != write:
                    return True
    return False
