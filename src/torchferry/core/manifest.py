"""The description of a state without its bytes: plain data with a type for every field.

The decoder checks types before it allocates, so the size of a decoded manifest is limited by that of its
frame. Branches refer to each other by number, so no code recurses over a peer's tree. Two leaves with the
same tensor are one object. Two tensors with the same storage share memory.
"""

from typing import Annotated, TypeAlias

from msgspec import Meta, Raw, Struct

Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Code: TypeAlias = Annotated[int, Meta(ge=0, le=127)]
KindName: TypeAlias = Annotated[str, Meta(min_length=4, max_length=32)]
"""The minimum length limits how many leaves a frame of a given size can hold."""


class Special(Struct, frozen=True, array_like=True, gc=False):
    """A value that MessagePack lacks: a code for its type, and its encoding."""

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

    To be overwritten, a local leaf must have the same `fixed` (placements, sparse size, …). It keeps its own
    `traits` (requires_grad, mesh, …).
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


MAX_DIMS = 128  # of a tensor

# The kinds of leaves without tensors.
VALUE = "value"  # `traits` is the value
PICKLED = "pickled"  # `traits` is the pickle, `fixed` is True if the object holds tensors
# A local leaf that can't be sent: `traits` describes it, `fixed` is None, or why it can't be overwritten.
OPAQUE = "opaque"

# A value whose bytes are payload: `traits` has its type. A local value is replaced, never overwritten.
BUFFER = "buffer"
