"""Finds local values that can't be overwritten in place, and explains why."""

from __future__ import annotations

import gc
import re
from bisect import bisect_right
from collections.abc import Sequence
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType

import torch
from torch.nn.parameter import is_lazy

from torchferry.errors import Unsendable
from torchferry.tensors import registry
from torchferry.tensors.kinds.ndarray import numpy_class
from torchferry.tensors.memory import CPU, Memory

READ_ONLY = "in read-only memory: receive into a copy of it"

_MAX_OBJECTS = 1 << 22
"""A value with more objects than this, not counting numbers and strings, is assumed to hold tensors."""

_NUMBERS_AND_TEXTS = frozenset({type(None), bool, int, float, complex, str, bytes})
_SKIPPED_TYPES = (type, ModuleType, FunctionType, BuiltinFunctionType, CodeType, FrameType, str, bytes)

_READ_ONLY_RANGE = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) r-", re.MULTILINE)


def why_not_written(value: object, error: Unsendable) -> str | None:
    """Return why the tensors in a local value can't be overwritten, or None if it has no tensors."""
    name = registry.name_of(type(value))
    if isinstance(value, torch.Tensor):
        if is_lazy(value):
            return "a lazy parameter without a shape: run a forward first"
        if value.device.type == "meta":
            return "a tensor on the meta device: call `to_empty()` first"
        if value.is_quantized:
            return f"a quantized tensor ({value.dtype}), which can't be overwritten in place"
        return f"a tensor of the class {name} ({value.layout}), which can't be overwritten in place"
    if isinstance(value, numpy_class("ndarray")):
        return f"an array of the class {name}, which can't be overwritten in place"
    if not holds_tensors(value):
        return None
    if isinstance(value, (dict, list, tuple)):
        return f"a {name} with tensors that can't be described: {error.what}"
    return f"a {name} that holds tensors: put the tensors themselves into the state, as its state_dict() does"


def holds_tensors(value: object) -> bool:
    """Return whether an object refers to a tensor or array, directly or through other objects.

    References from classes, modules and functions don't count: they belong to the program, not to the state.
    """
    seen: set[int] = set()
    pending = [value]
    while pending:
        item = pending.pop()
        # `isinstance` would read `__class__`, which may be a property that raises.
        cls = type(item)
        if issubclass(cls, torch.Tensor) or issubclass(cls, numpy_class("ndarray")):
            return True
        if id(item) in seen or issubclass(cls, _SKIPPED_TYPES):
            continue
        seen.add(id(item))
        if len(seen) > _MAX_OBJECTS:
            return True
        pending += [inner for inner in gc.get_referents(item) if type(inner) not in _NUMBERS_AND_TEXTS]
    return False


def find_read_only(memories: Sequence[Memory]) -> list[int]:
    """List the numbers of the memories in read-only pages. Empty on systems without /proc."""
    try:
        with open("/proc/self/maps", "rb") as maps:
            ranges = [(int(low, 16), int(high, 16)) for low, high in _READ_ONLY_RANGE.findall(maps.read())]
    except OSError:
        return []
    ends = [high for _, high in ranges]
    found = []
    for number, memory in enumerate(memories):
        if memory.device is CPU and memory.storage.nbytes() > memory.base:
            address = memory.storage.data_ptr()
            # The first range that ends after the memory starts.
            nearest = bisect_right(ends, address + memory.base)
            if nearest < len(ranges) and ranges[nearest][0] < address + memory.storage.nbytes():
                found.append(number)
    return found
