"""All that describes a state, and none of its bytes.

Rules of this file:
- Plain data. Nothing here knows torch; dtypes are names, values outside msgpack's own are `Special`.
- Flat. The tree is a list of branches that refer to each other by number, so nothing in the package
  recurses over what a peer sent, however deep it claims to be.
- A leaf names its tensors, a tensor names its storage, and that is all the aliasing there is: two leaves
  with the same tensor are one object, two tensors with the same storage share memory.

Extents are not listed: they follow from the tensors (`extents.extents_of`), so a manifest can't claim
extents that overlap, leave gaps, or belong to nobody.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

from msgspec import Meta, Struct

# What msgpack has by itself (None, bool, int in 64 bits, float, str, bytes, list, dict) and Special.
Value: TypeAlias = Any

Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class Special:
    """A value that msgpack lacks: a code that says what it is, and its encoding.

    The payload stays encoded so that a Special is hashable (it may be a dict key) and so that nothing is
    unpacked before somebody who knows the code asks for it. A class of its own making, because msgspec
    has an encoding for every sort of record, and this one must be an extension.
    """

    __slots__ = ("code", "data")

    def __init__(self, code: int, data: bytes | memoryview) -> None:
        self.code = code
        self.data = data

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Special) and (self.code, self.data) == (other.code, other.data)

    def __hash__(self) -> int:
        return hash((self.code, self.data))

    def __repr__(self) -> str:
        return f"Special({self.code}, {bytes(self.data[:64])!r}{'…' if len(self.data) > 64 else ''})"


class TensorSpec(Struct, frozen=True, array_like=True, gc=False):
    """A strided view of one storage. Strides count items, the offset counts bytes."""

    dtype: str
    itemsize: Count
    shape: tuple[Count, ...]
    stride: tuple[Count, ...]
    storage: Count
    offset: Count
    conj: bool = False
    neg: bool = False


class Leaf(Struct, frozen=True, array_like=True):
    """One value of the state.

    `fixed` is what an in-place target must have in common with it (placements, a sparse size, …);
    `traits` is what a fresh copy is given and an in-place target keeps as its own (requires_grad, mesh).
    For the kind "value", `traits` is the value itself.
    """

    kind: str
    parts: tuple[Count, ...] = ()
    fixed: Value = None
    traits: Value = None


class Branch(Struct, frozen=True, array_like=True):
    """One container. A child c is the leaf c, or for c < 0 the branch ~c."""

    kind: str
    children: tuple[int, ...]
    keys: tuple[Value, ...] | None = None
    extra: Value = None


class Manifest(Struct, frozen=True, array_like=True):
    """A state, described. `storages` holds each storage's size in bytes."""

    root: int
    branches: tuple[Branch, ...]
    leaves: tuple[Leaf, ...]
    tensors: tuple[TensorSpec, ...]
    storages: tuple[Count, ...]


MAX_DIMS = 128
"""The most dimensions of a tensor: more than any has, and few enough to work on one after the other."""

VALUE = "value"
"""The kind of a leaf that has no tensors: its `traits` are the value."""

OPAQUE = "opaque"
"""The kind of a local leaf that could not be described. Never on the wire."""
