"""Receives the bundles of a sync: a fetch for each, all at the same time, from all ranks that hold it.

Nothing is written before every bundle was compared with the local state. With `atomic`, nothing is written
before every byte of every bundle was verified.
"""

import os
import socket
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from msgspec import structs

from torchferry.core.compare import Rule, compare
from torchferry.core.manifest import Manifest
from torchferry.core.pull import LeaseRequest
from torchferry.core.report import FetchReport, merge_reports
from torchferry.core.tree import Path, format_path, occurrences, rebuild_places
from torchferry.engine.loading import Loading
from torchferry.engine.pull.fetch import Fetched, FetchOptions, fetch_state
from torchferry.engine.pull.reshare import Resharing
from torchferry.engine.workspace import Workspace
from torchferry.errors import (
    FerryError,
    StateError,
    StateMismatch,
    TargetTorn,
    torn_after,
    what_of,
)
from torchferry.links.address import Address
from torchferry.tensors.assemble import container_builders
from torchferry.tensors.describe import Description
from torchferry.tensors.kinds import RebuildContext, kind_named, part_of, properties_of
from torchferry.tensors.memory import CPU, DTYPES

_JOIN_S = 1.0
"""How long an interrupted call waits for its threads to stop."""


class IncomingBundle(NamedTuple):
    """A bundle to receive: its name, its sources and its paths. `reshare` if other ranks receive it too."""

    name: str
    addresses: Sequence[Address]
    paths: Sequence[Path]
    reshare: bool


class _Cancelled(FerryError):
    """Another bundle failed, or the user interrupted the call."""


def bundle_keys(paths: Sequence[Path]) -> list[str]:
    """Return the keys of a bundle's state: the paths as text. A number makes paths of equal text differ.

    >>> bundle_keys([("a", "b"), ("a.b",)])
    ['a.b', 'a.b (1)']
    """
    keys: dict[str, None] = {}
    for path in paths:
        key = format_path(path)
        while key in keys:
            key = f"{key} ({len(keys)})"
        keys[key] = None
    return list(keys)


class _BundleFetches:
    """The fetches of all bundles, into the `local` values. `results` has what each returned or raised."""

    def __init__(
        self,
        bundles: Sequence[IncomingBundle],
        local: Mapping[Path, Any],
        version: int,
        timeout_s: float,
        context: RebuildContext,
    ) -> None:
        self.bundles, self._local = bundles, local
        self.results: dict[int, Fetched | BaseException] = {}
        self._version, self._timeout_s, self._context = version, timeout_s, context
        self._barrier = threading.Barrier(max(len(bundles), 1))
        self._is_over = False
        self._workspace = Workspace(CPU)

    def run(self, *, atomic: bool) -> None:
        """Receive all bundles; raises one error if any fails."""
        numbers = range(len(self.bundles))
        threads = [threading.Thread(target=self._receive, args=(n, atomic), daemon=True) for n in numbers]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        except BaseException:
            self._cancel()
            for thread in filter(threading.Thread.is_alive, threads):
                # An atomic write is not interrupted, however often the user presses Ctrl-C.
                while atomic and thread.is_alive():
                    with suppress(KeyboardInterrupt):
                        thread.join()
                thread.join(_JOIN_S)
            raise
        if not self.is_complete:
            failure = self.error()
            try:
                raise failure from failure.__cause__
            finally:
                del failure  # it refers to this frame

    @property
    def is_complete(self) -> bool:
        """Whether every bundle was received."""
        return len(self._fetched()) == len(self.bundles)

    def _fetched(self) -> list[Fetched]:
        return [each for _, each in sorted(self.results.items()) if isinstance(each, Fetched)]

    def values(self) -> dict[Path, Any]:
        """Return all values that were received, by path."""
        pairs = zip(self.bundles, self._fetched(), strict=True)
        return {
            path: fetched.state[key]
            for bundle, fetched in pairs
            for key, path in zip(bundle_keys(bundle.paths), bundle.paths, strict=True)
        }

    def report(self) -> FetchReport:
        """Return one report for all."""
        return merge_reports([fetched.report for fetched in self._fetched()])

    def _cancel(self) -> None:
        self._is_over = True
        self._barrier.abort()

    def _raise_if_over(self, _: object) -> None:
        if self._is_over:
            raise _Cancelled("another part of the sync failed")

    def _wait_for_others(self) -> None:
        try:
            self._barrier.wait(self._timeout_s)
        except threading.BrokenBarrierError:
            raise _Cancelled("another part of the sync failed") from None

    def _receive(self, number: int, atomic: bool) -> None:
        bundle = self.bundles[number]
        keyed = zip(bundle_keys(bundle.paths), bundle.paths, strict=True)
        local = {key: self._local[path] for key, path in keyed if path in self._local}
        options = FetchOptions(
            wanted=LeaseRequest(bundle.name, f"{socket.gethostname()}:{os.getpid()}", self._version),
            timeout_s=self._timeout_s,
            local_state=(lambda: local) if local else None,
            extra="fresh",
            atomic=atomic,
            reshare=Resharing() if bundle.reshare else None,
            context=self._context,
            on_progress=self._raise_if_over,
            gate=self._wait_for_others,
        )
        try:
            self.results[number] = fetch_state(bundle.addresses, options, self._workspace)
        except BaseException as error:
            self.results[number] = error
            self._cancel()

    @property
    def has_written(self) -> bool:
        """Whether a fetch has written something, as far as is known."""
        is_known = len(self.results) == len(self.bundles)
        return not is_known or any(
            isinstance(each, (Fetched, TargetTorn)) or bool(getattr(each, "__notes__", ()))
            for each in self.results.values()
        )

    def error(self) -> BaseException:
        """Return one error for all fetches: what failed first, and what it did to the local state."""
        errors = [each for each in self.results.values() if isinstance(each, BaseException)]
        causes = [each.__cause__ or each if isinstance(each, TargetTorn) else each for each in errors]
        failures = [each for each in causes if not isinstance(each, _Cancelled)] or causes
        lists: dict[str, list[str]] = {"whole": [], "torn": [], "untouched": []}
        for number, bundle in enumerate(self.bundles):
            found, paths = self.results.get(number), list(map(format_path, bundle.paths))
            if isinstance(found, TargetTorn):
                # Its paths are keys of the bundle's state, where quotes are around brackets.
                shown = {
                    format_path((key,)): path
                    for key, path in zip(bundle_keys(bundle.paths), paths, strict=True)
                }
                for name, listed in lists.items():
                    listed += map(shown.__getitem__, getattr(found, name))
            else:
                # The error of a cancelled fetch has a note if the fetch had written something.
                is_torn = found is None or bool(getattr(found, "__notes__", ()))
                lists["whole" if isinstance(found, Fetched) else "torn" if is_torn else "untouched"] += paths
        failure = failures[0] if failures else _Cancelled("interrupted")
        if not lists["whole"] and not lists["torn"]:
            return failure
        return torn_after(failure, **lists)


def receive_bundles(
    local: Description,
    tree: Manifest,
    bundles: Sequence[IncomingBundle],
    version: int,
    timeout_s: float,
    *,
    atomic: bool,
) -> tuple[Any, FetchReport]:
    """Receive all bundles into the local state, load its objects, and return the state and a report.

    The result has the containers of `tree`. A path that is in no bundle keeps its local value.
    Raises what a fetch raises. If something was written already, TargetTorn lists the paths of all bundles,
    unless the earlier state was restored.
    """
    own = {path: local.values[leaf] for path, leaf in occurrences(local.manifest)}
    loading = Loading(local, tree)
    places = _compare(local, tree, loading)
    # Fresh DTensors get the mesh of the local ones. The mesh of the source may have other ranks.
    meshes = {
        id(mesh): mesh for each in own.values() if (mesh := getattr(each, "device_mesh", None)) is not None
    }
    context = RebuildContext(mesh=next(iter(meshes.values())) if len(meshes) == 1 else None)
    if atomic and loading.objects:
        loading.back_up({part for leaf in places.values() for part in local.manifest.leaves[leaf].parts})
    known = {path: local.values[leaf] for path, leaf in places.items()}
    receiving = _BundleFetches(bundles, known, version, timeout_s, context)
    builders = container_builders(tree)
    try:
        receiving.run(atomic=atomic)
        received = receiving.values()
        have = {**own, **received}
        leaves = [
            have[path] if path in have else _empty_shard(tree, leaf, local, context)
            for path, leaf in occurrences(tree)
        ]
        state = rebuild_places(
            tree, leaves, lambda number, children: builders[number](children), loading.place
        )
        loading.load()
    except BaseException as error:
        explained: BaseException = error
        if receiving.is_complete or (loading.can_undo and receiving.has_written):
            explained = _explain(error, receiving, loading)
        elif not isinstance(error, FerryError):
            explained = receiving.error()
        if explained is error:
            raise
        if isinstance(error, Exception):
            raise explained from error
        error.add_note(str(explained))
        raise
    report = receiving.report()
    return state, replace(
        report,
        extra_bytes=report.extra_bytes + loading.extra_bytes,
        fresh=tuple(format_path(path) for path in received if path not in known),
        loaded=tuple(map(format_path, loading.objects)),
    )


def _empty_shard(tree: Manifest, number: int, local: Description, context: RebuildContext) -> object:
    """Create a shard without elements, such as that of a moment, where the parameter has no row either."""
    leaf, ours = tree.leaves[number], local.manifest
    wanted = part_of(leaf)
    assert wanted is not None, "all that is not received is a shard without elements"
    by_layout = {part.layout: each for each in ours.leaves if (part := part_of(each))}
    shape = ours.tensors[by_layout[wanted.layout].parts[0]].shape
    empty = torch.empty(shape, dtype=DTYPES[tree.tensors[leaf.parts[0]].dtype], device=CPU)
    return kind_named(leaf.kind).rebuild(leaf, [empty], context)


def _compare(local: Description, tree: Manifest, loading: Loading) -> dict[Path, int]:
    """Return the local leaves that are written, by path; raises StateMismatch if something does not fit."""
    ours = dict(occurrences(local.manifest))
    leaves, tensors = list(tree.leaves), list(tree.tensors)
    for path, number in occurrences(tree):
        if path in ours and part_of(leaves[number]) and part_of(own := local.manifest.leaves[ours[path]]):
            # The tree may describe the shard of another rank. The bundles have the shard of this rank.
            parts = range(len(tensors), len(tensors) + len(own.parts))
            leaves[number] = structs.replace(own, parts=tuple(parts))
            tensors += [local.manifest.tensors[part] for part in own.parts]
    incoming = structs.replace(tree, leaves=tuple(leaves), tensors=tuple(tensors))

    def rule_of(path: Path) -> Rule | None:
        # The state is built like that of the source, so a module can't keep what only this rank has.
        rule = loading.rules(path)
        return "required" if rule == "fixed" else rule

    found = compare(incoming, local.manifest, properties_of, strict=False, extra="fresh", rules=rule_of)
    mismatches = [*found.mismatches, *loading.mismatches(strict=True, extra="fresh")]
    if mismatches:
        raise StateMismatch(mismatches, hints=found.hints)
    return ours if found.identical else {pair.path: pair.local for pair in found.pairs}


def _explain(error: BaseException, receiving: _BundleFetches, loading: Loading) -> FerryError:
    """Restore the objects' earlier state, if there is a copy; return an error that lists what is torn."""
    cause = error.__cause__ or error if isinstance(error, TargetTorn) else error
    failure = cause if isinstance(cause, FerryError) else StateError(what_of(cause))
    restored, outcome = loading.recover([path for bundle in receiving.bundles for path in bundle.paths])
    if restored:
        failure = failure.with_context(more=f"; {restored}")
    return failure if outcome is None else torn_after(failure, **outcome._asdict())
