"""All that describes a state, and none of its bytes.

Rules of this file:
- Plain data. Nothing here knows torch; dtypes are names, values outside msgpack's own are `Special`.
- Typed to the last field, so that what a peer sends is refused by its type before it is made, and what is
  made is a bounded multiple of what was sent.
- Flat. The tree is a list of branches that refer to each other by number, so nothing in the package
  recurses over what a peer sent, however deep it claims to be.
- A leaf names its tensors, a tensor names its storage, and that is all the aliasing there is: two leaves
  with the same tensor are one object, two tensors with the same storage share memory.

Extents are not listed: they follow from the tensors (`extents.extents_of`), so a manifest can't claim
extents that overlap, leave gaps, or belong to nobody.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

from msgspec import Meta, Raw, Struct

Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**63 - 1)]

Code: TypeAlias = Annotated[int, Meta(ge=0, le=127)]

KindName: TypeAlias = Annotated[str, Meta(min_length=4, max_length=32)]
"""Not shorter, so that a frame of the shortest leaves is not many times as large in memory."""


class Special(Struct, frozen=True, array_like=True, gc=False):
    """A value that msgpack lacks: a code that says what it is, and its encoding.

    The payload stays encoded so that a Special is hashable (it may be a dict key) and so that nothing is
    unpacked before somebody who knows the code, and so the type of what is in there, asks for it.
    """

    code: Code
    data: bytes

    def __repr__(self) -> str:
        return f"Special({self.code}, {self.data[:64]!r}{'…' if len(self.data) > 64 else ''})"


class Nested(Struct, frozen=True, array_like=True, gc=False):
    """A Special inside the payload of another, as it is found there.

    Its bytes stay where they are: nested in each other they would be copied as often as they are deep.
    """

    code: Code
    data: Raw


# Nothing in them has an inside that the decoder would make: any other list, or a map, is refused.
Value: TypeAlias = bool | int | float | str | Special | None
Item: TypeAlias = bool | int | float | str | Nested | None

FORM = 0
"""The code of a Special that is for the leaf's own kind to read."""


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


class Leaf(Struct, frozen=True, array_like=True, gc=False):
    """One value of the state.

    `fixed` is what an in-place target must have in common with it (placements, a sparse size, …);
    `traits` is what a fresh copy is given and an in-place target keeps as its own (requires_grad, mesh).
    For the kind "value", `traits` is the value itself. What is more than a scalar is packed in a Special.
    """

    kind: KindName
    parts: tuple[Count, ...] = ()
    fixed: Value = None
    traits: Value = None


class Branch(Struct, frozen=True, array_like=True, gc=False):
    """One container. A child c is the leaf c, or for c < 0 the branch ~c."""

    kind: KindName
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

PICKLED = "pickled"
"""The kind of a leaf outside the closed set: `traits` are a pickle, `fixed` is True if tensors are in it."""

OPAQUE = "opaque"
"""The kind of a local leaf that could not be described. Never on the wire.

`fixed` says why nothing can be written to it, and is None if it is a value like others; `traits` says what it
is."""
