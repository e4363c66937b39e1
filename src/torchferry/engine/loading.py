"""Gives received state dicts to the objects of a local state, and undoes that if an object refuses one."""

import copy
import logging
from collections.abc import Collection, Iterable, Iterator

import torch

from torchferry.core.compare import Extra
from torchferry.core.extents import Extent
from torchferry.core.manifest import Manifest
from torchferry.core.outcome import Outcome
from torchferry.core.tree import Path, format_path, walk
from torchferry.errors import Mismatch, StateError
from torchferry.tensors.describe import Description
from torchferry.tensors.memory import new_block, run_of
from torchferry.tensors.objects import entries_of_modules, find_contradictions, rules_of
from torchferry.tensors.rng import RNG

logger = logging.getLogger(__name__)


class Loading:
    """The state dicts that are received for the objects of a local state.

    `objects` has the objects that get one, by path, and `rules` says how their entries are compared.
    `started` has the paths of those whose `load_state_dict` was called; the last one may have failed.
    """

    def __init__(self, local: Description, incoming: Manifest) -> None:
        received = {path for path, _ in walk(incoming) if path in local.objects}
        self.objects = {path: read for path, read in local.objects.items() if path in received}
        ours = dict(entries_of_modules(self.objects, local.manifest))
        theirs = entries_of_modules(self.objects, incoming)
        shared = {path for path, _ in theirs if path in ours}
        self.rules = rules_of(self.objects, shared)
        # Empty containers have no leaves to compare.
        self._only_local = [path for path, is_empty in ours.items() if is_empty and path not in shared]
        self._only_incoming = [path for path, is_empty in theirs if is_empty and path not in shared]
        self.started: list[Path] = []
        self.extra_bytes = 0
        self._local, self._incoming = local, incoming
        self._received: dict[Path, object] = {}
        self.kept: Collection[Path] = ()  # local paths that are not received
        self._written: Collection[int] = ()  # the tensors whose bytes were copied
        self._earlier: dict[Path, object] = {}
        self._earlier_bytes: list[tuple[torch.Tensor, torch.Tensor]] = []

    def mismatches(self, *, strict: bool, extra: Extra) -> Iterator[Mismatch]:
        """Find what does not fit although all leaves may: objects and entries that only one state has."""
        for first, path in find_contradictions(self.objects, self._incoming):
            what = f"this is the same object as at {format_path(first)}, but the peer has different states"
            yield Mismatch(format_path(path), what, "two state dicts", "one object")
        for path in self._only_incoming if extra != "drop" else ():
            yield Mismatch(format_path(path), "no such path here", "an empty container", "nothing")
        for path in self._only_local if strict else ():
            yield Mismatch(format_path(path), "the peer has no such path", "nothing", "an empty container")
        for path in self._local.objects if strict else ():
            if not is_below(path, self.objects):
                what = "the peer has no state dict for this object"
                cls = type(self._local.objects[path].value).__qualname__
                yield Mismatch(format_path(path), what, "nothing", f"a {cls}")

    def place(self, path: Path, built: object) -> object:
        """Keep what was built at the path of an object, and return the object in its place."""
        if path not in self._local.objects:
            # What is kept of a module on the meta device stays there: the new tensor was never written.
            read = self.objects.get(path[:-1]) if path in self.kept else None
            return built if read is None or read.earlier is None else read.earlier[path[-1]]
        self._received[path] = built
        return self._local.objects[path].value

    def load(self) -> None:
        """Give each object its state dict; raises StateError, with what the object raised as its cause."""
        # Generators last: another object may draw random numbers while it is loaded.
        for path, read in sorted(self.objects.items(), key=lambda each: isinstance(each[1].value, RNG)):
            # An object at two paths is loaded once.
            if all(read is not self.objects[other] for other in self.started):
                self.started.append(path)
                try:
                    read.load(self._received[path])
                except Exception as error:
                    what = f"load_state_dict of {self._show(path)} raised {type(error).__name__}: {error}"
                    raise StateError(what, path=format_path(path)) from error
                if names := ", ".join(read.names_on_meta()):
                    logger.warning(
                        "%s was loaded, but these tensors are still on the meta device: %s",
                        self._show(path),
                        names,
                    )

    # With atomic=True.

    @property
    def can_undo(self) -> bool:
        """Whether there is a copy of the earlier state."""
        return bool(self._earlier)

    def back_up(self, written: Collection[int]) -> None:
        """Copy the bytes that will be written, and the state dicts; raises StateError if memory is short."""
        local, manifest = self._local, self._local.manifest
        self._written = written
        for storage in sorted({manifest.tensors[number].storage for number in written}):
            run = run_of(local.memories[storage], Extent(storage, 0, manifest.storages[storage]))
            self._earlier_bytes.append((run, new_block(run.nbytes, "the copy of objects").copy_(run)))
        # The tensors whose bytes were copied are not copied again, and neither are objects in state dicts.
        kept = [read.value for read in local.objects.values()]
        leaves = zip(local.values, manifest.leaves, strict=True)
        kept += [value for value, leaf in leaves if leaf.parts and set(leaf.parts) <= set(written)]
        memo = {id(value): value for value in kept}
        for path, read in self.objects.items():
            try:
                self._earlier[path] = read.earlier or copy.deepcopy(read.state, memo)
            except Exception as error:
                raised = f"{self._show(path)} raised {type(error).__name__}: {error}"
                what = f"atomic=True needs a copy, but copying the state dict of {raised}"
                raise StateError(what, path=format_path(path)) from error
        self.extra_bytes = sum(manifest.storages)

    def recover(self, paths: Iterable[Path]) -> tuple[str, Outcome | None]:
        """Restore the earlier state, if there is a copy, after a failure when all `paths` were written.

        Return a text about it, and which paths are whole, torn and untouched; None if all are restored.
        """
        if not self.can_undo:
            whole = [*filter(self._is_loaded, paths), *self.started[:-1]]
            torn = [path for path in self.objects if not self._is_loaded(path)]
            return "", Outcome(tuple(map(format_path, whole)), tuple(map(format_path, torn)), ())
        failed, restored = self._undo()
        if not failed:
            return restored, None
        untouched = [path for path in paths if not is_below(path, failed)]
        return restored, Outcome((), tuple(map(format_path, failed)), tuple(map(format_path, untouched)))

    def _undo(self) -> tuple[list[Path], str]:
        """Restore the earlier state; return the objects that raised, and a text that says all this."""
        for run, earlier in self._earlier_bytes:
            run.copy_(earlier)
        self._local.increment_versions(self._written)
        failures: dict[Path, str] = {}
        generators = [path for path, read in self.objects.items() if isinstance(read.value, RNG)]
        for path in dict.fromkeys([*self.started, *generators]):
            try:
                self.objects[path].load(self._earlier[path])
            except Exception as error:
                failures[path] = f"{self._show(path)} raised {type(error).__name__}: {error}"
        exceptions = f", except that {', '.join(failures.values())}" if failures else ""
        return [*failures], f"the earlier state was restored{exceptions}"

    def _is_loaded(self, path: Path) -> bool:
        """Return whether a path is in no object, or only in objects that were loaded before one failed."""
        done = [self.objects[each] for each in self.started[:-1]]
        return not is_below(path, [each for each, read in self.objects.items() if read not in done])

    def _show(self, path: Path) -> str:
        return f"{format_path(path)} ({type(self.objects[path].value).__qualname__})"


def is_below(path: Path, others: Collection[Path]) -> bool:
    """Return whether a path is in `others`, or below a path that is."""
    return any(path[:depth] in others for depth in range(len(path) + 1))
