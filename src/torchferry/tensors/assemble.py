"""Manifest to state: decode the values first, then make tensors over memory and put the tree together.

`prepare` checks all that the metadata can be checked for, before any byte of payload is taken. Afterwards
only what the payload says can be wrong: sparse indices that point nowhere.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

import torch

from torchferry.core.compare import PICKLED, Pair
from torchferry.core.manifest import VALUE, Manifest
from torchferry.core.showing import MOST_CHARACTERS
from torchferry.core.tree import Path, format_path, occurrences, rebuild
from torchferry.errors import BadManifest, FerryError, PickleRefused, StateError
from torchferry.tensors.branches import build_branch, check_branch
from torchferry.tensors.describe import Description
from torchferry.tensors.kinds import Site, check_form, kind_named
from torchferry.tensors.memory import Memory, check_dtype, check_room, new_memory, tensor_over
from torchferry.tensors.values import from_wire

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Prepared:
    """A manifest that can be built here, and its leaves without tensors, already decoded."""

    manifest: Manifest
    values: dict[int, object]


def prepare(manifest: Manifest, site: Site, *, only: Collection[int] | None = None) -> Prepared:
    """Check that this process can build what arrives, and decode all that is not payload.

    With `only`, of these leaves: the others are dropped, and the tree is not theirs, so that it does not
    matter whether they could be built.

    Raises:
        PeerError: a type, dtype, kind or value that can't be built here; names its path.
    """
    values: dict[int, object] = {}
    seen: set[int] = set()
    for path, number in occurrences(manifest):
        # A leaf may stand in a million places, and is looked at once.
        if number in seen or (only is not None and number not in only):
            continue
        seen.add(number)
        leaf = manifest.leaves[number]
        try:
            if leaf.kind == VALUE:
                values[number] = from_wire(leaf.traits)
            elif leaf.kind == PICKLED:
                values[number] = _unpickle(leaf.traits, site)
            else:
                specs = [manifest.tensors[part] for part in leaf.parts]
                for spec in specs:
                    check_dtype(spec)
                check_form(kind_named(leaf.kind), leaf, specs)
        except FerryError as error:
            raise _at(path, error) from None
    if only is None:
        for spec in manifest.tensors:
            # Those of no leaf are made, too.
            check_dtype(spec)
        for branch in manifest.branches:
            check_branch(branch)
    return Prepared(manifest, values)


def _at(path: Path, error: FerryError) -> FerryError:
    error.path = format_path(path)
    error.what = f"{error.path}: {error.what}"
    return error


def _unpickle(data: object, site: Site) -> object:
    if site.unpickle is None or not isinstance(data, bytes):
        raise PickleRefused(
            "this leaf is pickled, and loading it could run the sender's code. Where the sender is "
            "trusted, set allow_pickle=True on this side too"
        )
    return site.unpickle(data)


def allocate(manifest: Manifest) -> tuple[Memory, ...]:
    """Set aside fresh memory on the CPU for every storage.

    Raises:
        StateError: there is not enough.
    """
    total = sum(manifest.storages)
    check_room(total, "the incoming state")
    cpu = torch.device("cpu")
    try:
        return tuple(new_memory(nbytes, cpu) for nbytes in manifest.storages)
    except (RuntimeError, MemoryError) as error:
        raise StateError(f"no memory for the {total} bytes of the incoming state: {error}") from None


def assemble_fresh(prepared: Prepared, memories: Sequence[Memory], site: Site) -> object:
    """Build the state that arrived, in memory of its own.

    Raises:
        PeerError: a leaf can't be built out of what arrived; names its path.
    """
    manifest = prepared.manifest
    tensors = [_made("tensor", tensor_over, memories[spec.storage], spec) for spec in manifest.tensors]
    built: dict[int, object] = dict(prepared.values)
    places = occurrences(manifest)
    for path, number in places:
        if number not in built:
            leaf = manifest.leaves[number]
            parts = [tensors[part] for part in leaf.parts]
            try:
                built[number] = _made(leaf.kind, kind_named(leaf.kind).rebuild, leaf, parts, site)
            except FerryError as error:
                raise _at(path, error) from None
    return rebuild(manifest, (built[number] for _, number in places), build_branch)


def _made(what: str, make: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Make something out of what arrived. Whatever torch thinks of it, it is the peer that sent it."""
    try:
        return make(*args, **kwargs)
    except FerryError:
        raise
    except Exception as error:
        said = str(error)[:MOST_CHARACTERS]
        raise BadManifest(f"a {what} that can't be put together: {said}") from None


def assemble_in_place(
    prepared: Prepared, target: Description, pairs: Sequence[Pair], *, strict: bool
) -> object:
    """Build the state that arrived around the local tensors that took its bytes.

    With `strict` the tree is the incoming one. Otherwise it is the local one, in which every leaf that has
    arrived is replaced and every other is left as it was.

    Raises:
        PeerError: what was written can't be what it is said to be; names its path.
    """
    arrived: dict[object, object] = {}
    for pair in pairs:
        leaf = prepared.manifest.leaves[pair.incoming]
        if pair.incoming in prepared.values:
            arrived[pair.path] = prepared.values[pair.incoming]
        else:
            try:
                adopt = kind_named(leaf.kind).adopt
                arrived[pair.path] = _made(leaf.kind, adopt, leaf, target.values[pair.local])
            except FerryError as error:
                raise _at(pair.path, error) from None
    shape = prepared.manifest if strict else target.manifest
    values = (arrived[path] if path in arrived else target.values[leaf] for path, leaf in occurrences(shape))
    return rebuild(shape, values, build_branch)
