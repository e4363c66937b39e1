"""Local values that can't be written in place, and the reason that the error gives."""

from __future__ import annotations

import gc
import re
import types
from bisect import bisect_left
from collections.abc import Sequence

import torch
from torch.nn.parameter import is_lazy

from torchferry.errors import Unsendable
from torchferry.tensors import numpy_bridge, registry
from torchferry.tensors.memory import CPU, Memory

READ_ONLY = "in read-only memory: receive into a copy of it"

_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes})

_MOST_OBJECTS = 1 << 22
"""An object that refers to more objects than this, besides numbers and texts, is assumed to hold tensors."""

_NOT_LOOKED_INTO = (
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.CodeType,
    types.FrameType,
    str,
    bytes,
)


def why_not_written(value: object, error: Unsendable) -> str | None:
    """Return why a local value can't be written in place; None if it is a value without tensors.

    `error` is why it could not be described.
    """
    if isinstance(value, torch.Tensor):
        return _why_no_tensor(value)
    name = registry.name_of(type(value))
    if numpy_bridge.is_array_type(type(value)):
        return f"an array of the class {name}, which can't be written in place"
    if not holds_tensors(value):
        return None
    if isinstance(value, (dict, list, tuple)):
        return f"a {name} with tensors that can't be described: {error.what}"
    return f"a {name} that holds tensors: put those themselves into the state, as its state_dict() does"


def _why_no_tensor(tensor: torch.Tensor) -> str:
    if is_lazy(tensor):
        return "a lazy parameter without a shape: run a forward first"
    if tensor.device.type == "meta":
        return "a tensor on the meta device: call `to_empty()` first"
    if tensor.is_quantized:
        return f"a quantized tensor ({tensor.dtype}), which can't be written in place"
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return f"a tensor of the class {registry.name_of(type(tensor))}, which can't be written in place"
    return f"a tensor that is not plain memory ({tensor.layout}), which can't be written in place"


def holds_tensors(value: object) -> bool:
    """Return whether an object refers to a tensor or array, directly or through other objects.

    References from classes, modules and functions don't count: they belong to the program, not to the state.
    """
    seen: set[int] = set()
    found = [value]
    while found:
        each = found.pop()
        # By type, because `isinstance` asks an object for its `__class__`, which may be a property.
        if issubclass(type(each), torch.Tensor) or numpy_bridge.is_array_type(type(each)):
            return True
        if id(each) in seen or issubclass(type(each), _NOT_LOOKED_INTO):
            continue
        seen.add(id(each))
        if len(seen) > _MOST_OBJECTS:
            return True
        found += [inner for inner in gc.get_referents(each) if type(inner) not in _ATOMS]
    return False


def read_only(memories: Sequence[Memory]) -> list[int]:
    """List the memories, by number, that lie in read-only pages. Empty on systems without /proc."""
    spans = sorted(
        (memory.storage.data_ptr() + memory.base, number)
        for number, memory in enumerate(memories)
        if memory.device is CPU and memory.storage.nbytes() > memory.base
    )
    starts = [start for start, _ in spans]
    found = []
    for low, high in _read_only_ranges():
        # The memories that start in this range, and the last one before it, which may reach into it.
        first = bisect_left(starts, low)
        for start, number in spans[max(first - 1, 0) : bisect_left(starts, high)]:
            memory = memories[number]
            if start - memory.base + memory.storage.nbytes() > low:
                found.append(number)
    return found


_RANGE = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) r-", re.MULTILINE)


def _read_only_ranges() -> list[tuple[int, int]]:
    """List the address ranges of this process that are mapped read-only."""
    try:
        with open("/proc/self/maps", "rb") as maps:
            lines = maps.read()
    except OSError:
        return []
    return [(int(low, 16), int(high, 16)) for low, high in _RANGE.findall(lines)]
