"""Receives the bundles of a sync: a fetch for each, all at the same time, from all ranks that hold it.

Nothing is written before every bundle was compared with the local state. With `atomic`, nothing is written
before every byte of every bundle was verified.
"""

import os
import socket
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torchferry.core.compare import Extra
from torchferry.core.pull import LeaseRequest
from torchferry.core.push import MAX_METADATA_BYTES
from torchferry.core.report import FetchReport, merge_reports
from torchferry.core.tree import Path, format_path
from torchferry.engine.fetch import Fetched, FetchOptions, fetch_state
from torchferry.engine.reshare import Resharing
from torchferry.engine.workspace import Workspace
from torchferry.errors import FerryError, StateMismatch, TargetTorn, TornAndBroken, TornAndLate
from torchferry.links.address import Address
from torchferry.tensors.kinds import RebuildContext
from torchferry.tensors.memory import CPU

_LINGER_S = 10.0
_JOIN_S = 1.0
"""How long an interrupted call waits for its threads to stop."""


class IncomingBundle(NamedTuple):
    """A bundle to receive: its name, who serves it, and its paths with the local values, if there are any."""

    name: str
    addresses: Sequence[Address]
    paths: Sequence[Path]
    local: Mapping[Path, Any]
    reshare: bool


class _Cancelled(FerryError):
    """Another bundle failed, or the user interrupted the call."""


def bundle_keys(paths: Sequence[Path]) -> list[str]:
    """Return the keys of a bundle's state: the paths as text. Those of equal text are told apart by number.

    >>> bundle_keys([("a", "b"), ("a.b",)])
    ['a.b', 'a.b (1)']
    """
    keys: dict[str, None] = {}
    for path in paths:
        text = format_path(path)
        keys[text if text not in keys else f"{text} ({len(keys)})"] = None
    return list(keys)


class _Receiving:
    """All fetches of one call. `results` has what each returned or raised."""

    def __init__(
        self, bundles: Sequence[IncomingBundle], version: int, timeout_s: float, context: RebuildContext
    ) -> None:
        self.bundles = bundles
        self.results: dict[int, Fetched | BaseException] = {}
        self._version, self._timeout_s, self._context = version, timeout_s, context
        self._barrier = threading.Barrier(max(len(bundles), 1))
        self._is_over = False
        self._workspace = Workspace(CPU)

    def run(self, *, atomic: bool) -> None:
        numbers = range(len(self.bundles))
        threads = [threading.Thread(target=self._receive, args=(n, atomic), daemon=True) for n in numbers]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        except BaseException as error:
            self._cancel()
            for thread in threads:
                thread.join(_JOIN_S)
            error.add_note(str(self.error()))
            raise

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
        local = {key: bundle.local[path] for key, path in keyed if path in bundle.local}
        extra: Extra = "fresh"
        options = FetchOptions(
            wanted=LeaseRequest(bundle.name, f"{socket.gethostname()}:{os.getpid()}", self._version),
            timeout_s=self._timeout_s,
            max_metadata_bytes=MAX_METADATA_BYTES,
            local_state=(lambda: local) if local else None,
            strict=True,
            extra=extra,
            compare="auto",
            atomic=atomic,
            verify=True,
            stall_s=None,
            via=None,
            reshare=Resharing() if bundle.reshare else None,
            linger_s=_LINGER_S,
            tls=None,
            context=self._context,
            on_progress=self._raise_if_over,
            gate=self._wait_for_others,
        )
        try:
            self.results[number] = fetch_state(bundle.addresses, options, self._workspace)
        except BaseException as error:
            self.results[number] = error
            self._cancel()

    def error(self) -> BaseException:
        """Return one error for all fetches: what failed first, and what it did to the local state."""
        errors = [each for each in self.results.values() if isinstance(each, BaseException)]
        causes = [each.__cause__ or each if isinstance(each, TargetTorn) else each for each in errors]
        failures = [each for each in causes if not isinstance(each, _Cancelled)] or causes
        mismatches = [each for each in failures if isinstance(each, StateMismatch)]
        if len(mismatches) > 1:
            hints = dict.fromkeys(hint for each in mismatches for hint in each.hints)
            return StateMismatch([each for one in mismatches for each in one.mismatches], hints=list(hints))
        if len(self.bundles) == 1 and errors:
            return errors[0]
        whole: list[str] = []
        torn: list[str] = []
        untouched: list[str] = []
        for number, bundle in enumerate(self.bundles):
            found, paths = self.results.get(number), bundle_keys(bundle.paths)
            if isinstance(found, TargetTorn):
                whole += found.whole
                torn += found.torn
                untouched += found.untouched
            elif isinstance(found, Fetched):
                whole += paths
            else:
                # One that was cancelled has a note if it had written.
                is_torn = found is None or bool(getattr(found, "__notes__", ()))
                (torn if is_torn else untouched).extend(paths)
        failure = failures[0] if failures else _Cancelled("interrupted")
        if not whole and not torn:
            return failure
        late, broken = (isinstance(failure, each) for each in (TimeoutError, ConnectionError))
        error_class = TornAndLate if late else TornAndBroken if broken else TargetTorn
        combined = error_class(failure, whole=whole, torn=torn, untouched=untouched)
        combined.__cause__ = failure
        return combined


def receive_bundles(
    bundles: Sequence[IncomingBundle],
    version: int,
    timeout_s: float,
    context: RebuildContext,
    *,
    atomic: bool,
) -> tuple[dict[Path, Any], FetchReport]:
    """Receive all bundles into their local values, or into fresh tensors; return all values and a report.

    Raises what a fetch raises. If other bundles were written already, TargetTorn lists the paths of all.
    """
    receiving = _Receiving(bundles, version, timeout_s, context)
    receiving.run(atomic=atomic)
    fetched = [each for _, each in sorted(receiving.results.items()) if isinstance(each, Fetched)]
    if len(fetched) < len(bundles):
        error = receiving.error()
        try:
            raise error from error.__cause__
        finally:
            del error, receiving  # they refer to this frame
    values: dict[Path, Any] = {}
    for bundle, each in zip(bundles, fetched, strict=True):
        values |= {
            path: each.state[key] for key, path in zip(bundle_keys(bundle.paths), bundle.paths, strict=True)
        }
    reports = [each.report for each in fetched]
    if len(reports) == 1:
        return values, reports[0]
    nothing = FetchReport(version, "", 0, 0, 0, 0, {}, {}, verified=True, confirmed=True)
    return values, merge_reports(reports) if reports else replace(nothing)
