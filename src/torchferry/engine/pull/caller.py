"""The thread that calls `fetch`: it waits while other threads work, and reports progress."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from typing import TypeVar

import torch

from torchferry.engine.pull.receiving import EVENT_BYTES, EVENT_S, Receiving
from torchferry.engine.pull.sources import Sources
from torchferry.errors import LinkTimeout

T = TypeVar("T")

_STOPPED_S = 0.5
"""If a wait ends so much later than it should, this process was stopped. A busy machine delays it by less."""


@dataclass(frozen=True)
class ProgressEvent:
    """How far a fetch is. `peer` is the source that delivered last, as host and port."""

    bytes_moved: int
    bytes_total: int
    phase: str
    peer: str | None


class Caller:
    """Waits in the calling thread, and calls `on_progress` meanwhile with how far the fetch is.

    The fetch sets `phase`, and `receiving` as soon as it receives. `error` is what `on_progress` raised.
    """

    def __init__(self, sources: Sources, on_progress: Callable[[ProgressEvent], object] | None) -> None:
        self.phase = ""
        self.receiving: Receiving | None = None
        self.error: BaseException | None = None
        self._sources = sources
        self._on_progress = on_progress
        self._reported_bytes = 0

    def stop_reporting(self) -> None:
        """Call `on_progress` no more."""
        self._on_progress = None

    def run(self, work: Callable[..., T], *args: object, until_s: float = inf, finish: bool = False) -> T:
        """Run `work` in a thread, and report progress meanwhile; raises LinkTimeout at `until_s`.

        With `finish`, an exception in the calling thread is raised when the work is done, or before it began.
        Without `on_progress`, `until_s` and `finish`, no thread is needed.
        """
        if self._on_progress is None and until_s == inf and not finish:
            return work(*args)
        results: list[T] = []
        errors: list[BaseException] = []
        is_inference = torch.is_inference_mode_enabled()  # of this thread
        ended = threading.Event()
        turn = threading.RLock()  # whoever takes it first decides whether the work begins

        def run() -> None:
            if not turn.acquire(blocking=False):
                return
            try:
                with torch.inference_mode(is_inference):
                    results.append(work(*args))
            except BaseException as error:
                errors.append(error)
            ended.set()
            with self._sources.changed:
                self._sources.changed.notify_all()

        began_s = time.monotonic()
        try:
            # Ctrl-C may arrive while the thread is being started, and works already.
            self._sources.start(run)
            self.wait(ended.is_set, until_s)
        except BaseException:
            while finish:
                with suppress(KeyboardInterrupt):  # a second one
                    if turn.acquire(blocking=False) or ended.wait():
                        break
            raise
        if errors:
            raise errors.pop()  # a reference to it here would be a cycle
        if not results:
            raise LinkTimeout(f"this took longer than {until_s - began_s:.3g} s: {self.phase}")
        return results[0]

    def wait(self, is_done: Callable[[], bool], until_s: float) -> float:
        """Wait until something is done, or until a time, and report progress meanwhile.

        Return how long this process was stopped meanwhile, as far as that is known.
        """
        stopped_s = 0.0
        while True:
            with self._sources.changed:
                began_s = time.monotonic()
                wait_s = min(until_s - began_s, EVENT_S)
                if not is_done() and wait_s > 0:
                    self._sources.changed.wait(wait_s)
                    late_s = time.monotonic() - began_s - wait_s
                    stopped_s += late_s if late_s > _STOPPED_S else 0.0
                done = is_done()
            self._report()
            if done or time.monotonic() >= until_s:
                return stopped_s

    def _report(self) -> None:
        """Call `on_progress`, once for every EVENT_BYTES, or once if there were fewer."""
        moved, total, peer = 0, 0, None
        if self.receiving is not None:
            moved, total, peer = (
                self.receiving.moved_bytes,
                self.receiving.total_bytes,
                self.receiving.last_peer,
            )
        while self._on_progress is not None:
            self._reported_bytes = min(moved, self._reported_bytes + EVENT_BYTES)
            try:
                self._on_progress(ProgressEvent(self._reported_bytes, total, self.phase, peer))
            except BaseException as error:
                self.error = error
                raise
            if self._reported_bytes >= moved:
                return
