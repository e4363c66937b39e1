"""The description of a state without its bytes: plain data, typed to the last field.

The decoder rejects wrong types before it allocates, so a decoded manifest is a bounded multiple of its frame.
Branches refer to each other by number, so no code recurses over a peer's tree. Two leaves with the same
tensor are one object; two tensors with the same storage share memory. Extents are computed from the tensors
(`extents.extents_of`), so a manifest cannot claim wrong ones.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

from msgspec import Meta, Raw, Struct

Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Code: TypeAlias = Annotated[int, Meta(ge=0, le=127)]
KindName: TypeAlias = Annotated[str, Meta(min_length=4, max_length=32)]
"""The minimum length limits how many leaves a frame of a given size can hold."""


class Special(Struct, frozen=True, array_like=True, gc=False):
    """A value that MessagePack lacks: a code for its type, and its encoding, which is hashable."""

    code: Code
    data: bytes

    def __repr__(self) -> str:
        return f"Special({self.code}, {self.data[:64]!r}{'…' if len(self.data) > 64 else ''})"


class Nested(Struct, frozen=True, array_like=True, gc=False):
    """A Special inside the data of another. Its data is not copied at each level of nesting."""

    code: Code
    data: Raw


# No type here is a container, so the decoder rejects lists and maps.
Value: TypeAlias = bool | int | float | str | Special | None
Item: TypeAlias = bool | int | float | str | Nested | None

FORM = 0
"""The code of a Special that only the leaf's kind can decode."""


class TensorSpec(Struct, frozen=True, array_like=True, gc=False):
    """A strided view of a storage. Strides count items, the offset counts bytes."""

    dtype: str
    itemsize: Count
    shape: tuple[Count, ...]
    stride: tuple[Count, ...]
    storage: Count
    offset: Count
    conj: bool = False
    neg: bool = False


class Leaf(Struct, frozen=True, array_like=True, gc=False):
    """One value of the state. `parts` are the numbers of its tensors.

    A local leaf must have the same `fixed` (placements, sparse size, …) but keeps its own `traits`
    (requires_grad, mesh, …). For the kind "value", `traits` is the value.
    """

    kind: KindName
    parts: tuple[Count, ...] = ()
    fixed: Value = None
    traits: Value = None


class Branch(Struct, frozen=True, array_like=True, gc=False):
    """One container. A child c >= 0 is leaf c; a child c < 0 is branch ~c."""

    kind: KindName
    children: tuple[int, ...]
    keys: tuple[Value, ...] | None = None
    extra: Value = None


class Manifest(Struct, frozen=True, array_like=True):
    """The description of a state. `storages` lists the size of each storage in bytes."""

    root: int
    branches: tuple[Branch, ...]
    leaves: tuple[Leaf, ...]
    tensors: tuple[TensorSpec, ...]
    storages: tuple[Count, ...]


MAX_DIMS = 128
"""The most dimensions a tensor may have."""

VALUE = "value"
"""The kind of a leaf without tensors."""
PICKLED = "pickled"
"""The kind of a pickled leaf: `traits` is the pickle, `fixed` is True if the object holds tensors."""
OPAQUE = "opaque"
"""The kind of a local leaf that cannot be sent. `traits` describes it. `fixed` says why it cannot be
overwritten, or is None if it can."""
