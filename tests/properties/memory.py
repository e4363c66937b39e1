"""What a state's leaves are in memory, byte by byte, computed the slow and obvious way.

It shares nothing with the package: addresses are those of the process, and a byte is one of them.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Addresses = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]
Path = tuple[Any, ...]

_SIGN_BYTE = 0x80


def leaves_of(state: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """List the tensors and arrays of a state with their paths."""
    if isinstance(state, torch.Tensor | np.ndarray):
        yield path, state
    elif isinstance(state, dict):
        for key, child in state.items():
            yield from leaves_of(child, (*path, key))
    elif isinstance(state, tuple) and hasattr(state, "_fields"):
        for name, child in zip(state._fields, state, strict=True):
            yield from leaves_of(child, (*path, name))
    elif isinstance(state, list | tuple | deque):
        for number, child in enumerate(state):
            yield from leaves_of(child, (*path, number))
    elif dataclasses.is_dataclass(state):
        for field in dataclasses.fields(state):
            yield from leaves_of(getattr(state, field.name), (*path, field.name))


def parts_of(leaf: Any) -> list[Any]:
    """Give the strided tensors, or the array, that hold a leaf's bytes."""
    if isinstance(leaf, np.ndarray) or leaf.layout is torch.strided:
        return [leaf]
    data = leaf.detach()
    if data.layout is torch.sparse_coo:
        return [data._indices(), data._values()]
    if data.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [data.crow_indices(), data.col_indices(), data.values()]
    return [data.ccol_indices(), data.row_indices(), data.values()]


def addresses_of(part: Any) -> Addresses:
    """Give the address of every byte of every item, in order; the last dimension is the item's bytes."""
    if isinstance(part, np.ndarray):
        start, size, strides = part.__array_interface__["data"][0], part.itemsize, part.strides
    else:
        # A conjugate lies where the tensor lies that it is the conjugate of.
        size = part.itemsize
        start = part.untyped_storage().data_ptr() + int(part.storage_offset()) * size
        strides = tuple(step * size for step in part.stride())
    found = np.full((1,) * len(part.shape), start, np.int64)
    for axis, (count, step) in enumerate(zip(part.shape, strides, strict=True)):
        steps = np.arange(count, dtype=np.int64) * step
        found = found + steps.reshape((1,) * axis + (count,) + (1,) * (len(part.shape) - axis - 1))
    return found[..., None] + np.arange(size, dtype=np.int64)


def used_bytes(state: Any) -> set[int]:
    """Give the addresses of all bytes that some leaf of the state uses."""
    return {
        int(address)
        for _, leaf in leaves_of(state)
        for part in parts_of(leaf)
        for address in addresses_of(part).ravel()
    }


def sharing(state: Any) -> list[list[int]]:
    """Say which bytes of which leaves are the same byte, and which leaves are the same object.

    Two states in which this is equal share memory in the same way.
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
    """Give the bits of an item that a conj or neg bit turns round, as a mask over its bytes."""
    size = part.itemsize
    mask = np.zeros(size, np.uint8)
    if isinstance(part, np.ndarray):
        return mask
    # Little-endian, so that the sign is in the last byte of a number.
    if part.is_complex():
        mask[size // 2 - 1] ^= _SIGN_BYTE * part.is_neg()
        mask[size - 1] ^= _SIGN_BYTE * (part.is_neg() ^ part.is_conj())
    else:
        mask[size - 1] ^= _SIGN_BYTE * part.is_neg()
    return mask


def logical_bytes(leaf: Any) -> list[bytes]:
    """Give the bytes of a leaf's values, as if no conj or neg bit were set, part by part."""
    return [(_stored_bytes(part) ^ sign_flips(part)).tobytes() for part in parts_of(leaf)]


def _stored_bytes(part: Any) -> Bytes:
    if isinstance(part, np.ndarray):
        flat = np.frombuffer(part.tobytes(), np.uint8)
        return flat.reshape(*part.shape, part.itemsize)
    whole = torch.empty(0, dtype=torch.uint8).set_(part.untyped_storage()).numpy()
    return np.asarray(whole[addresses_of(part) - part.untyped_storage().data_ptr()], np.uint8)


def contents(pools: tuple[torch.Tensor, ...]) -> dict[int, int]:
    """Give the value of every byte of some memory by its address."""
    return {pool.data_ptr() + at: value for pool in pools for at, value in enumerate(pool.tolist())}
