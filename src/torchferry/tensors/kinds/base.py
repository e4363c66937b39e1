"""What a kind of leaf is: one entry that says how it is described and how it is rebuilt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, TypeVar

import msgspec
import torch
from msgspec import Struct
from msgspec.msgpack import Decoder
from torch.distributed.device_mesh import DeviceMesh

from torchferry.core.codec import pack
from torchferry.core.manifest import FORM, Leaf, Special, TensorSpec, Value
from torchferry.core.text import MAX_CHARACTERS, show, show_name
from torchferry.errors import BadManifest, FerryError

Part = Callable[[torch.Tensor], int]
"""Enters a strided tensor into the manifest, if it can travel, and gives its number."""


@dataclass(frozen=True)
class Site:
    """What the receiving process brings to rebuilding: things that can't be on the wire."""

    mesh: DeviceMesh | None = None
    unpickle: Callable[[bytes], object] | None = None


class Misfit(NamedTuple):
    """Why a leaf can't be rebuilt in this process: the property, its value at the sender, its value here."""

    what: str
    incoming: str
    local: str


S = TypeVar("S", bound=Struct)


class Form(Struct, frozen=True, forbid_unknown_fields=True):
    """What a Leaf has as `fixed` or `traits`, if it is more than a scalar: a record of its kind's own."""


def packed(form: Form) -> Special:
    """Give a form as a Leaf has it. Equal forms are equal so, too."""
    return Special(FORM, pack(form))


def read(form: type[S], value: Value) -> S:
    """Read a form of a Leaf.

    Raises:
        TypeError: it is no form at all.
        msgspec.DecodeError: it is not this form.
    """
    if type(value) is not Special or value.code != FORM:
        raise TypeError(f"{show(value)} in the place of a form")
    decoder: Decoder[S] = _decoder(form)
    return decoder.decode(value.data)


@cache
def _decoder(form: type[Struct]) -> Decoder[Any]:
    return Decoder(form)


def _keep(leaf: Leaf, local: Any) -> Any:
    return local


def look_dense(leaf: Leaf, specs: Sequence[TensorSpec]) -> dict[str, str]:
    """Return the dtypes and shapes of a leaf's tensors."""
    return {
        "dtype": ", ".join(dict.fromkeys(show_name(spec.dtype) for spec in specs)),
        "shape": ", ".join(str(list(spec.shape)) for spec in specs),
    }


def _fits_anywhere(leaf: Leaf, site: Site) -> None:
    """For kinds that any process can rebuild."""


def _nothing_more(leaf: Leaf, specs: Sequence[TensorSpec]) -> None:
    """For kinds of which any leaf of the right form is sound."""


class Kind(NamedTuple):
    """One kind of leaf.

    `describe` enters the tensors that hold the value's bytes and says the rest in a Leaf; `rebuild` makes
    a fresh value out of tensors; `adopt` finishes a local value whose tensors were written in place.
    If `describe` raises, what it has entered is taken back.

    `fixed` and `traits` are the types of what a Leaf of this kind has there, a Form or a scalar, and `parts`
    is the number of its tensors, None if that varies: what a peer sends is held to them before anything else
    is done. `check` then raises whatever it likes, if the numbers in it can't be, or would take for ever to
    rebuild.

    `look` returns the properties that are compared of two leaves of this kind, as text by name; dtype and
    shape are among them. `misfit` returns why a leaf can't be rebuilt in this process, if so.
    """

    name: str
    describe: Callable[[Any, Part], Leaf]
    rebuild: Callable[[Leaf, list[torch.Tensor], Site], object]
    parts: int | None
    fixed: Any
    traits: Any
    adopt: Callable[[Leaf, Any], object] = _keep
    check: Callable[[Leaf, Sequence[TensorSpec]], None] = _nothing_more
    look: Callable[[Leaf, Sequence[TensorSpec]], dict[str, str]] = look_dense
    misfit: Callable[[Leaf, Site], Misfit | None] = _fits_anywhere


def check_form(kind: Kind, leaf: Leaf, specs: Sequence[TensorSpec]) -> None:
    """Check that a leaf from a peer, with the tensors it names, has what its kind needs.

    Raises:
        BadManifest: it has not.
    """
    if kind.parts is not None and len(leaf.parts) != kind.parts:
        raise BadManifest(f"a {kind.name} of {len(leaf.parts)} tensors, not {kind.parts}")
    try:
        _hold_to(kind.fixed, leaf.fixed)
        _hold_to(kind.traits, leaf.traits)
        kind.check(leaf, specs)
    except FerryError:
        raise
    except Exception as error:
        raise BadManifest(f"a malformed {kind.name}: {str(error)[:MAX_CHARACTERS]}") from None


def _hold_to(form: Any, value: Value) -> None:
    if isinstance(form, type) and issubclass(form, Form):
        read(form, value)
    else:
        msgspec.convert(value, form)
