"""What a kind of leaf is: one entry that says how it is described and how it is rebuilt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import torch
from torch.distributed.device_mesh import DeviceMesh

from torchferry.core.manifest import Leaf, TensorSpec
from torchferry.core.showing import MOST_CHARACTERS
from torchferry.errors import BadManifest, FerryError

Part = Callable[[torch.Tensor], int]
"""Enters a strided tensor into the manifest, if it can travel, and gives its number."""


@dataclass(frozen=True)
class Site:
    """What the receiving process brings to rebuilding: things that can't be on the wire."""

    mesh: DeviceMesh | None = None
    unpickle: Callable[[bytes], object] | None = None


def _keep(leaf: Leaf, local: Any) -> Any:
    return local


def _nothing_more(leaf: Leaf, specs: Sequence[TensorSpec]) -> None:
    """For kinds of which any leaf of the right form is sound."""


class Kind(NamedTuple):
    """One kind of leaf.

    `describe` enters the tensors that hold the value's bytes and says the rest in a Leaf; `rebuild` makes
    a fresh value out of tensors; `adopt` finishes a local value whose tensors were written in place.
    If `describe` raises, what it has entered is taken back.

    `fixed` and `traits` are the types of what a Leaf of this kind has there, and `parts` is the number of
    its tensors, None if that varies: what a peer sends is held to them before anything else is done. `check`
    then raises whatever it likes, if the numbers in it can't be, or would take for ever to rebuild.
    """

    name: str
    describe: Callable[[Any, Part], Leaf]
    rebuild: Callable[[Leaf, list[torch.Tensor], Site], object]
    parts: int | None
    fixed: Any
    traits: Any
    adopt: Callable[[Leaf, Any], object] = _keep
    check: Callable[[Leaf, Sequence[TensorSpec]], None] = _nothing_more


def check_form(kind: Kind, leaf: Leaf, specs: Sequence[TensorSpec]) -> None:
    """Check that a leaf from a peer, with the tensors it names, has what its kind needs.

    Raises:
        BadManifest: it has not.
    """
    if kind.parts is not None and len(leaf.parts) != kind.parts:
        raise BadManifest(f"a {kind.name} of {len(leaf.parts)} tensors, not {kind.parts}")
    try:
        msgspec.convert(leaf.fixed, kind.fixed)
        msgspec.convert(leaf.traits, kind.traits)
        kind.check(leaf, specs)
    except FerryError:
        raise
    except Exception as error:
        raise BadManifest(f"a malformed {kind.name}: {str(error)[:MOST_CHARACTERS]}") from None
