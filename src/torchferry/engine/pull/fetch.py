"""A fetch from start to end: open leases, compare, receive what differs, write it, and confirm.

Threads talk to the sources (`sources`, `receiving`). The calling thread decides and watches: it chooses the
version, compares, reports progress, and ends everything at the deadline.
"""

import logging
import os
import ssl
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from math import inf
from typing import Any, Literal

from torchferry.core.codec import EncodedManifest
from torchferry.core.compare import Extra
from torchferry.core.machine import Machine
from torchferry.core.outcome import Outcome
from torchferry.core.plan import Plan
from torchferry.core.pull import FetchState, Grant, LeaseRequest, Result
from torchferry.core.push import MAX_METADATA_BYTES
from torchferry.core.report import FetchReport
from torchferry.core.schedule import OVERDUE_S
from torchferry.core.text import show_error
from torchferry.core.tree import format_path
from torchferry.engine import metadata
from torchferry.engine.deadlines import left_s
from torchferry.engine.loading import Loading
from torchferry.engine.phases import Phases
from torchferry.engine.pull.caller import Caller, ProgressEvent
from torchferry.engine.pull.differing import differing_chunks
from torchferry.engine.pull.history import history
from torchferry.engine.pull.landing import Landing
from torchferry.engine.pull.receiving import Receiving
from torchferry.engine.pull.remote import TOO_SLOW, RemoteSource, Via
from torchferry.engine.pull.reshare import Resharing
from torchferry.engine.pull.sources import Sources
from torchferry.engine.sink import Sink, with_outcome
from torchferry.engine.target import Target, target_in_new_memory, target_in_place
from torchferry.engine.workspace import Workspace
from torchferry.errors import (
    BadManifest,
    FerryError,
    LinkError,
    LinkStalled,
    LinkTimeout,
    PeerError,
    PeerGaveUp,
    StateError,
    StateMismatch,
)
from torchferry.links.address import Address
from torchferry.tensors.describe import Description, describe_target
from torchferry.tensors.kinds import RebuildContext
from torchferry.tensors.objects import read_objects

logger = logging.getLogger(__name__)

_CONFIRM_S = 5.0
"""How long a fetch tries to confirm that it is complete at most. Its deadline may be earlier."""

_FAILED_S = 0.25
"""How long a failed fetch tries to tell the sources why it failed."""

_REFUSED_S = 2.0
"""How long a fetch that refused a state tries to tell the sources why, also over round trips of 0.2 s."""


@dataclass(frozen=True)
class FetchOptions:
    """The checked arguments of `torchferry.fetch`. `local_state` returns the state to write to.

    `gate` is called twice: before the first chunk is requested, and when all chunks have arrived, before
    those that `atomic` holds back are written. If it raises, the fetch fails.
    """

    wanted: LeaseRequest
    timeout_s: float
    local_state: Callable[[], object] | None
    max_metadata_bytes: int = MAX_METADATA_BYTES
    strict: bool = True
    extra: Extra = "error"
    compare: bool | Literal["auto"] = "auto"
    atomic: bool = False
    verify: bool = True
    stall_s: float | None = None
    via: Via | None = None
    reshare: Resharing | None = None
    linger_s: float = 10.0
    tls: ssl.SSLContext | None = None
    context: RebuildContext = field(default_factory=RebuildContext)
    on_progress: Callable[[ProgressEvent], object] | None = None
    gate: Callable[[], object] = lambda: None


@dataclass(frozen=True)
class Fetched:
    """A fetched state, its version, and a report of what was moved."""

    state: Any
    version: int
    report: FetchReport


def fetch_state(addresses: Sequence[Address], options: FetchOptions, workspace: Workspace) -> Fetched:
    """Fetch a state from all sources that serve the same version, into fresh tensors or a local state.

    Raises what `torchferry.fetch` documents.
    """
    fetch = _Fetch(addresses, options, workspace)
    try:
        fetched = fetch.run()
        fetch.stop()
        if options.reshare is not None:
            options.reshare.finish(options.linger_s)
        return fetched
    except BaseException as error:
        explained = _stop_after(fetch, error)
        try:
            if explained is error:
                raise
            raise explained from explained.__cause__
        finally:
            del explained  # it refers to this frame
    finally:
        fetch.forget_errors()


def _stop_after(fetch: "_Fetch", error: BaseException) -> BaseException:
    """Stop a fetch that failed, however often the user presses Ctrl-C meanwhile; explain the last error."""
    is_told = False
    while True:
        try:
            fetch.stop(None if is_told else fetch.result_of(error))
            if fetch.options.reshare is not None:
                fetch.options.reshare.stop()
            return fetch.explain(error)
        except KeyboardInterrupt as again:
            error, is_told = again, True


class _Fetch(Phases):
    """One fetch, from the description of the local state to the report."""

    def __init__(self, addresses: Sequence[Address], options: FetchOptions, workspace: Workspace) -> None:
        super().__init__(f"fetch {os.urandom(4).hex()}")
        self.options = options
        self._workspace = workspace
        self._deadline_s = time.monotonic() + options.timeout_s
        self._machine = Machine(FetchState.CONNECTING)
        self._enter_phase("connect" if options.wanted.newer_than is None else "wait")
        self._sources = Sources(
            self._name,
            addresses,
            options.wanted,
            options.tls,
            options.max_metadata_bytes,
            options.via,
            None if options.reshare is None else options.reshare.listen_at,
        )
        self._receiving: Receiving | None = None
        self._sink: Sink | None = None
        self._caller = Caller(self._sources, options.on_progress)
        self._caller.phase = self._phase
        self._is_committed = False
        self._outcome: Outcome | None = None

    def run(self) -> Fetched:
        options = self.options
        self._sources.open_all(options.timeout_s)
        # `run` uses a thread if there is progress to report, a time limit, or work that must finish.
        local = None
        if options.local_state is not None:
            state = options.local_state()
            local = self._caller.run(describe_target, state, read_objects(state, is_target=True))
        grant = self._choose()
        self._enter(FetchState.MANIFEST)
        grant, encoded, digests = self._read_metadata(grant)
        self._enter(FetchState.COMPARING)
        plan = self._caller.run(self._plan, encoded, digests, grant)
        target = self._caller.run(self._target, encoded, plan, local)
        self._sink = sink = target.sink
        needed = self._caller.run(
            differing_chunks, sink, digests, options.compare, self._workspace.staging, self._deadline_s
        )
        options.gate()
        landing = Landing(sink, needed, self._workspace.staging, atomic=options.atomic and local is not None)
        if options.reshare is not None:
            options.reshare.start(options.wanted.name, grant, encoded, plan, digests, landing)
            self._sources.add_peers(grant, options.tls)
        if options.atomic and target.loading is not None and target.loading.objects:
            target.loading.back_up(sink.written)
        self._enter(FetchState.RECEIVING)
        try:
            self._receive(plan, needed, digests, landing)
            # If this fails, it is not known which tensors are complete.
            sink.unmark_whole()
            # Ctrl-C must not interrupt writes to local tensors.
            state = self._caller.run(target.assemble, finish=local is not None)
            if target.loading is not None:
                # In this thread, because `load_state_dict` is the user's code.
                target.loading.load()
            sink.mark_written_as_whole()
        except BaseException as error:
            restored = "" if target.loading is None else self._undo(sink, target.loading)
            if restored and isinstance(error, FerryError):
                raise error.with_context(more=f"; {restored}") from error.__cause__
            if restored:
                error.add_note(restored)
            raise
        finally:
            if local is not None:
                history.note(local)
        self._enter(FetchState.CONFIRMING)
        confirmed = self._confirm(grant)
        self._enter(FetchState.DONE)
        report = self._report(grant, plan, target, landing, confirmed=confirmed)
        logger.info("%s: %s", self._name, report)
        return Fetched(state, grant.version, report)

    def _enter(self, state: FetchState) -> None:
        self._machine.advance(state)
        self._enter_phase(state.phase or self._phase)
        self._caller.phase = self._phase

    # The steps.

    def _choose(self) -> Grant:
        """Wait for the answers of the sources, and choose the version to fetch."""
        wanted, stall_s = self.options.wanted, self.options.stall_s
        until_s = self._deadline_s
        if stall_s is not None and wanted.newer_than is None:
            until_s = min(until_s, time.monotonic() + stall_s)
        self._caller.wait(self._sources.is_settled, until_s)
        grant = self._sources.choose()
        if grant is None:
            raise self._why_none(until_s)
        logger.debug("%s: version %d, root %s", self._name, grant.version, grant.root)
        if wanted.newer_than is not None and wanted.version is None:
            self._deadline_s = time.monotonic() + self.options.timeout_s
        return grant

    def _why_none(self, until_s: float) -> FerryError:
        error = self._sources.why_none(is_late=time.monotonic() >= until_s)
        is_stalled = isinstance(error, LinkTimeout) and until_s < self._deadline_s
        return LinkStalled(error.what) if is_stalled else error

    def _read_metadata(self, grant: Grant) -> tuple[Grant, EncodedManifest, tuple[int, ...]]:
        """Read the manifest and the digests from the first source that delivers them.

        If no source delivers those of the chosen version, choose a version of the remaining sources.
        """
        sources, heard_s, stall_s = self._sources, time.monotonic(), self.options.stall_s
        for attempt in count():
            for source in sources.serving():
                # With several sources, do not wait long for one: another may be faster.
                patience_s = OVERDUE_S * 2**attempt if len(sources.all) > 1 else inf
                if found := self._metadata_of(source, min(patience_s, left_s(self._deadline_s))):
                    sources.is_final = True
                    # Both sides must plan with the chunk sizes of this source.
                    return source.grant or grant, *found
                heard_s = max(heard_s, source.heard_s)
                if stall_s is not None and time.monotonic() >= heard_s + stall_s:
                    raise LinkStalled(f"no metadata arrived for {stall_s:g} s", peer=source.peer)
            if not sources.serving():
                until_s = min(self._deadline_s, time.monotonic() + (stall_s or inf))
                self._caller.wait(lambda: sources.choose() is not None or not sources.unanswered, until_s)
                grant = sources.choose() or grant
                if not sources.serving():
                    raise self._why_none(until_s)
            if not left_s(self._deadline_s):
                raise self._why_none(self._deadline_s)
        raise AssertionError("unreachable")

    def _metadata_of(
        self, source: RemoteSource, patience_s: float
    ) -> tuple[EncodedManifest, tuple[int, ...]] | None:
        """Read the manifest and the digests from one source; None if it fails, or takes longer than this."""
        until_s = time.monotonic() + patience_s
        silent_s = min(patience_s, self.options.stall_s or inf)
        is_only = len(self._sources.all) == 1
        try:
            manifest, digests = self._caller.run(source.metadata, silent_s, is_only, until_s=until_s)
            return self._caller.run(metadata.decode_manifest, manifest, self._workspace.cache), digests
        except LinkTimeout as error:
            source.shut_down_readers(f"{TOO_SLOW}: no metadata within {patience_s:.2g} s")
            self._sources.set_back(source)
            source.report.failures.append(error.what)
        except (LinkError, PeerError) as error:
            self._sources.lose(source, error)
        return None

    def _plan(self, encoded: EncodedManifest, digests: Sequence[int], grant: Grant) -> Plan:
        cache, chunk_bytes, pack_bytes = self._workspace.cache, grant.chunk_bytes, grant.pack_bytes
        if pack_bytes > chunk_bytes:
            raise BadManifest(f"pack_bytes is {pack_bytes}, more than chunk_bytes, which is {chunk_bytes}")
        plan = metadata.plan_incoming(encoded, cache, chunk_bytes, pack_bytes, digests)
        if (len(plan.chunks), plan.payload_bytes) != (grant.chunks, grant.payload_bytes):
            raise BadManifest(
                f"the source announces {grant.chunks} chunks of {grant.payload_bytes} bytes, but its "
                f"manifest has {len(plan.chunks)} chunks of {plan.payload_bytes} bytes"
            )
        return plan

    def _target(self, encoded: EncodedManifest, plan: Plan, local: Description | None) -> Target:
        options, cache = self.options, self._workspace.cache
        if local is None:
            return target_in_new_memory(encoded, plan, options.context, cache)
        return target_in_place(
            encoded, plan, local, options.context, cache, strict=options.strict, extra=options.extra
        )

    def _receive(self, plan: Plan, needed: Sequence[int], digests: Sequence[int], landing: Landing) -> None:
        """Receive the chunks that are needed, and write them."""
        options = self.options
        in_order = options.reshare is not None
        expected = digests if options.verify else ()
        self._receiving = self._caller.receiving = receiving = Receiving(
            self._sources, plan, needed, expected, landing, self._deadline_s, in_order=in_order
        )
        try:
            while not receiving.is_done:
                receiving.check(options.stall_s)
                until_s = time.monotonic() + receiving.check_every_s
                if lost_s := self._caller.wait(lambda: receiving.needs_check, until_s):
                    receiving.skip(lost_s)
            receiving.check(options.stall_s)
            options.gate()
            self._enter(FetchState.ASSEMBLING)
            if landing.extra_bytes:
                if not options.verify:
                    self._caller.run(self._raise_if_changed, needed)
                # From here on local tensors are written. Ctrl-C takes effect after the write.
                self._is_committed = True
                self._caller.stop_reporting()
                # In a thread, so that Ctrl-C does not interrupt the write.
                self._caller.run(landing.apply, finish=True)
        finally:
            receiving.stop()
            # Version counters tell autograd, and sources of these tensors, that they changed.
            if landing.sink.has_written:
                landing.sink.increment_versions()

    def _raise_if_changed(self, needed: Sequence[int]) -> None:
        """Raise PeerGaveUp if a live state changed: unverified chunks may mix old and new values."""
        for source in self._sources.live():
            # The source looks for changes once more, now that it has read all chunks. Any chunk will do.
            source.report_damage(needed[0], left_s(self._deadline_s))

    def _undo(self, sink: Sink, loading: Loading) -> str:
        """Restore the earlier state, if there is a copy. Return a text that says so, and set `_outcome`."""
        if not loading.started and not (loading.can_undo and sink.has_written):
            return ""
        restored, self._outcome = loading.recover(sink.paths())
        if self._outcome is None:
            self._sink = None
        return restored

    def _confirm(self, grant: Grant) -> bool:
        """Tell the given sources that are in use that the fetch is complete; return whether all acknowledged.

        Raises PeerGaveUp if nothing was verified, and a live state changed or its source can't be asked.
        """
        # Peers, which are other receivers, need not know.
        in_use = [source for source in self._sources.serving() if not source.is_peer]
        # A source that is known to be too slow is told, but not waited for.
        wait_for = [source for source in in_use if not source.backoff.is_active(time.monotonic())] or in_use
        result = Result("confirmed", verified=self.options.verify)
        until_s = min(self._deadline_s, time.monotonic() + _CONFIRM_S)
        silent = self._caller.run(self._sources.tell, in_use, result, until_s, wait_for)
        unsure = [source for source in self._sources.live() if source in silent or source not in in_use]
        if unsure and not self.options.verify and not self._is_committed:
            shown = ", ".join(source.peer for source in unsure)
            raise PeerGaveUp(f"nothing was verified, and {shown} can't say whether its state changed")
        if in_use and not silent:
            return True
        given = [source for source in self._sources.all if not source.is_peer]
        lost = ", ".join(source.peer for source in silent or given)
        logger.warning("%s: version %d is complete, but %s was not told", self._name, grant.version, lost)
        return False

    def _report(
        self, grant: Grant, plan: Plan, target: Target, landing: Landing, *, confirmed: bool
    ) -> FetchReport:
        assert self._receiving is not None, "a fetch that is done has received what it needs"
        return FetchReport(
            version=grant.version,
            root=grant.root,
            bytes_total=plan.payload_bytes,
            bytes_moved=self._receiving.moved_bytes,
            bytes_skipped=plan.payload_bytes - self._receiving.total_bytes,
            extra_bytes=landing.extra_bytes + (0 if target.loading is None else target.loading.extra_bytes),
            phases_s=self._finish_phase(),
            sources={source.peer: source.report for source in self._sources.all},
            verified=self.options.verify,
            confirmed=confirmed,
            dropped=target.dropped,
            fresh=target.fresh,
            kept=target.kept,
            loaded=() if target.loading is None else tuple(map(format_path, target.loading.objects)),
        )

    # The end.

    def stop(self, result: Result | None = None) -> None:
        """End everything. Tell the sources the result, if there is one."""
        self._sources.is_over = True
        if result is not None:
            granted = [source for source in self._sources.all if source.grant is not None]
            with suppress(FerryError):
                patience_s = _REFUSED_S if result.outcome == "refused" else _FAILED_S
                self._sources.tell(granted, result, time.monotonic() + patience_s)
        self._sources.shut_down()

    def forget_errors(self) -> None:
        """Drop all errors. They refer to frames that hold the fetched state: a cycle would keep it alive."""
        self._caller.error = None
        self._sources.forget_errors()
        if self._receiving is not None:
            self._receiving.failure = None

    def result_of(self, error: BaseException) -> Result:
        """Return what to tell the sources about a fetch that failed."""
        reason = show_error(error)
        if self._machine.state is FetchState.COMPARING and isinstance(error, (StateMismatch, PeerError)):
            self._machine.advance(FetchState.REFUSED)
            return Result("refused", reason)
        return Result("failed", reason)

    def explain(self, error: BaseException) -> BaseException:
        """Return an error with its context, and with what it did to the local state."""
        self._finish_phase("failed")
        if isinstance(error, MemoryError):
            error = StateError("there is not enough memory for the fetch")
        if isinstance(error, FerryError):
            is_late = isinstance(error, LinkTimeout) and not left_s(self._deadline_s)
            more = f". The timeout was {float(f'{self.options.timeout_s:.3g}'):g} s" if is_late else ""
            error = error.with_context(phase=self._phase, more=more)
        if self._sink is None or self._sink.local is None:
            return error
        if isinstance(error, PeerGaveUp) and not self.options.verify:
            self._sink.unmark_whole()
        keep = error is self._caller.error
        return with_outcome(error, self._sink, peer=None, phase=self._phase, keep=keep, outcome=self._outcome)
