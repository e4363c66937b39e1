"""What a state's bits are: a digest of every leaf, and how to spoil a state so that an arrival shows."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import torch
import xxhash
from torch import Tensor

# Not a pattern that a builder, an allocator or a cleared page would leave behind.
_POISON = 0xA5

Portrait = dict[str, str]


def portray(state: object) -> Portrait:
    """Digest every leaf by its path: dtype, shape and every bit of a tensor, the repr of anything else.

    128 bits a leaf, so that two portraits are equal only if the states are, bit for bit. It is made
    without torchferry's own code, which is what is being tested.

    >>> portray({"a": 1, "b": [True, None]})
    {'a': '1', 'b.0': 'True', 'b.1': 'None'}
    """
    return {path: _digest(leaf) for path, leaf in leaves(state)}


def differences(sent: Portrait, arrived: Portrait) -> list[str]:
    """List the paths at which two portraits differ.

    >>> differences({"a": "1", "b": "2"}, {"a": "1", "b": "3", "c": "4"})
    ['b', 'c']
    """
    return [path for path in {**sent, **arrived} if sent.get(path) != arrived.get(path)]


def poison(state: object) -> None:
    """Overwrite the memory of every tensor, so that what is right afterwards must have arrived."""
    for memory in memories(state):
        memory.fill_(_POISON)


def memories(state: object) -> Iterator[Tensor]:
    """Give the bytes of each storage of a state, once."""
    seen = set()
    for _, leaf in leaves(state):
        if isinstance(leaf, Tensor) and (start := leaf.untyped_storage().data_ptr()) not in seen:
            seen.add(start)
            yield torch.empty(0, dtype=torch.uint8).set_(leaf.untyped_storage())


def leaves(state: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Walk the dicts, lists and tuples of a state.

    >>> list(leaves({"a": {"b": 1}, "c": (2, 3)}))
    [('a.b', 1), ('c.0', 2), ('c.1', 3)]
    """
    if isinstance(state, dict):
        children = [(str(key), value) for key, value in state.items()]
    elif isinstance(state, (list, tuple)):
        children = [(str(number), value) for number, value in enumerate(state)]
    else:
        yield path, state
        return
    for name, value in children:
        yield from leaves(value, f"{path}.{name}" if path else name)


def _digest(leaf: object) -> str:
    if not isinstance(leaf, Tensor):
        return repr(leaf)
    whole = leaf.detach().contiguous()
    # Not through numpy, which need not be installed.
    raw = (ctypes.c_char * whole.nbytes).from_address(whole.data_ptr()) if whole.nbytes else b""
    return f"{leaf.dtype} {tuple(leaf.shape)} {xxhash.xxh3_128_hexdigest(raw)}"
