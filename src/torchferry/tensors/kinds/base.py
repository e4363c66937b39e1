"""The interface of a kind of leaf: one `Kind` describes, checks, compares and rebuilds its leaves.

A `Leaf` has two fields that belong to its kind. `fixed` is what an in-place target must have in common with
the incoming leaf. `traits` is what only a fresh leaf gets. Each is None, a scalar, or a record: a `Form`,
packed into a Special.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, Self, TypeAlias

import msgspec
import torch
from msgspec import Meta
from torch.distributed.device_mesh import DeviceMesh

from torchferry.core.assignment import Part
from torchferry.core.codec import encode_value
from torchferry.core.manifest import FORM, MAX_DIMS, Count, Leaf, Special, TensorSpec, Value
from torchferry.core.text import MAX_CHARACTERS, show, show_name
from torchferry.errors import BadManifest, FerryError

AddTensor: TypeAlias = Callable[[torch.Tensor], int]
"""Adds a strided tensor to the manifest and returns its number; raises Unsendable if it can't be sent."""

Misfit: TypeAlias = tuple[str, str, str]
"""Why a leaf can't be rebuilt in this process: the property, its value at the sender, its value here."""

Dims: TypeAlias = Annotated[tuple[Count, ...], Meta(max_length=MAX_DIMS)]


@dataclass(frozen=True)
class RebuildContext:
    """What the receiving process contributes to rebuilding, because it can't be sent."""

    mesh: DeviceMesh | None = None
    unpickle: Callable[[bytes], object] | None = None


class Form(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The base of the records that a kind puts into `Leaf.fixed` and `Leaf.traits`."""

    def packed(self) -> Special:
        """Return the form as a Leaf has it. Equal forms become equal Specials."""
        return Special(FORM, encode_value(self))

    @classmethod
    def read(cls, value: Value) -> Self:
        """Read the form from a Leaf; raise TypeError or msgspec.DecodeError if the value is not this form."""
        if type(value) is not Special or value.code != FORM:
            raise TypeError(f"expected {cls.__name__}, got {show(value)}")
        return msgspec.msgpack.decode(value.data, type=cls)


def dense_properties(leaf: Leaf, specs: Sequence[TensorSpec]) -> dict[str, str]:
    """Return the dtypes and shapes of a leaf's tensors."""
    return {
        "dtype": ", ".join(dict.fromkeys(show_name(spec.dtype) for spec in specs)),
        "shape": ", ".join(str(list(spec.shape)) for spec in specs),
    }


class Kind(NamedTuple):
    """One kind of leaf.

    - `describe` adds the tensors that hold the value's bytes, and returns the Leaf. If it raises, the caller
      removes the tensors that it added.
    - `rebuild` creates a fresh value from received tensors.
    - `tensor_count` (None if it varies), `fixed` and `traits` are the number of tensors and the types of the
      two fields. A leaf from a peer is checked against them first.
    - `check` then raises any exception if the leaf is impossible, or too expensive to rebuild.
    - `properties` returns the properties that are compared, as text by name, with dtype and shape.
    - `finish_in_place` completes a local value after its tensors, which it gets too, were overwritten.
    - `misfit` returns why a leaf can't be rebuilt in this process, None if it can.
    - `part`, of a kind that is sharded, returns which part of the tensor a leaf holds, or which one another
      rank, given by its global number, holds.
    """

    name: str
    describe: Callable[[Any, AddTensor], Leaf]
    rebuild: Callable[[Leaf, list[torch.Tensor], RebuildContext], object]
    tensor_count: int | None
    fixed: Any
    traits: Any
    check: Callable[[Leaf, Sequence[TensorSpec]], None]
    properties: Callable[[Leaf, Sequence[TensorSpec]], dict[str, str]] = dense_properties
    finish_in_place: Callable[[Leaf, Any, Sequence[torch.Tensor]], object] = lambda leaf, local, parts: local
    misfit: Callable[[Leaf, RebuildContext], Misfit | None] = lambda leaf, context: None
    part: Callable[[Leaf, int | None], Part] | None = None


def check_form(kind: Kind, leaf: Leaf, specs: Sequence[TensorSpec]) -> None:
    """Check a leaf from a peer, with the tensors that it names; raises BadManifest if it is malformed."""
    if kind.tensor_count not in (None, len(leaf.parts)):
        raise BadManifest(f"a {kind.name} has {len(leaf.parts)} tensors, expected {kind.tensor_count}")
    try:
        for expected, value in ((kind.fixed, leaf.fixed), (kind.traits, leaf.traits)):
            if isinstance(expected, type) and issubclass(expected, Form):
                expected.read(value)
            else:
                msgspec.convert(value, expected)
        kind.check(leaf, specs)
    except FerryError:
        raise
    except Exception as error:
        raise BadManifest(f"a malformed {kind.name}: {str(error)[:MAX_CHARACTERS]}") from None
