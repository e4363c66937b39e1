"""What the processes of the tests of serve and fetch run: one serves a state, another fetches it."""

from __future__ import annotations

import contextlib
import logging
import resource
import signal
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import torchferry
from torchferry import Source
from torchferry.core.report import FetchReport

LAYERS = 8
PATHS = [f"model.layer{n}" for n in range(LAYERS)]
MIB = 1 << 20

State = dict[str, dict[str, torch.Tensor]]


def new_state(layer_bytes: int, seed: int = 0) -> State:
    """Return a state of eight layers. No two of its elements are equal, nor those of other small seeds."""
    count = layer_bytes // 4
    first = 1 + seed * LAYERS * count
    return {
        "model": {
            f"layer{n}": torch.arange(count, dtype=torch.int32) + (first + n * count) for n in range(LAYERS)
        }
    }


def in_one_buffer(state: State) -> State:
    """Return an equal state of views of one buffer, the last one first, at odd offsets."""
    layers = state["model"]
    flat = torch.empty(sum(tensor.numel() + 5 for tensor in layers.values()), dtype=torch.int32)
    views: dict[str, torch.Tensor] = {}
    end = flat.numel()
    for name, tensor in layers.items():
        end -= tensor.numel() + (5 if len(views) % 2 else 1)
        views[name] = flat[end : end + tensor.numel()].copy_(tensor)
    return {"model": views}


def old_state(layer_bytes: int) -> State:
    """Return what a receiver has before it fetches."""
    return {
        "model": {f"layer{n}": torch.full((layer_bytes // 4,), -1, dtype=torch.int32) for n in range(LAYERS)}
    }


def contents_by_path(state: State, layer_bytes: int, seed: int = 0) -> dict[str, str]:
    """Return what each path holds: "old", "new", "mixed" (bytes of both) or "neither"."""
    old, new = old_state(layer_bytes)["model"], new_state(layer_bytes, seed)["model"]
    contents = {}
    for name, tensor in state["model"].items():
        if torch.equal(tensor, new[name]):
            content = "new"
        elif torch.equal(tensor, old[name]):
            content = "old"
        else:
            raw, was, is_new = (t.view(torch.uint8) for t in (tensor, old[name], new[name]))
            content = "mixed" if bool(((raw == was) | (raw == is_new)).all()) else "neither"
        contents[f"model.{name}"] = content
    return contents


# In a source.

_sources: list[Source] = []


def serve_state(
    layer_bytes: int, version: int = 7, seed: int = 0, token: str | None = None, *, flat: bool = False
) -> str:
    """Serve a state instead of any that was served before, and return the address."""
    close_source()
    state = new_state(layer_bytes, seed)
    _sources.append(torchferry.serve(in_one_buffer(state) if flat else state, version, token=token))
    return _sources[-1].address


def close_source() -> None:
    """Close the source, if there is one."""
    while _sources:
        _sources.pop().close(0.01)


def reader_states() -> list[str]:
    """Return the states of all readers that the source has seen."""
    return [reader.state for reader in _sources[-1].status().readers]


def bytes_sent() -> int:
    """Return how much the source has sent to all readers."""
    return sum(reader.bytes_sent for reader in _sources[-1].status().readers)


def is_idle(baseline: Resources) -> str:
    """Wait until no reader is connected any more; return what is left besides the source's own thread."""
    return baseline.wait_for_return()


# In a receiver.


@dataclass(frozen=True)
class Resources:
    """The threads of torchferry, the descriptors, and the mappings of shared memory of this process."""

    threads: frozenset[str]
    descriptors: int
    mappings: int

    @classmethod
    def now(cls) -> Resources:
        """Look at this process."""
        names = {thread.name for thread in threading.enumerate()}
        return cls(
            frozenset(name for name in names if name.startswith("torchferry")),
            len(list(Path("/proc/self/fd").iterdir())),
            Path("/proc/self/maps").read_text().count("memfd:torchferry"),
        )

    def wait_for_return(self, patience_s: float = 1.5) -> str:
        """Wait until this process has no more than this; return what it has more, or nothing."""
        limit_s = time.monotonic() + patience_s
        while True:
            now = Resources.now()
            more = sorted(now.threads - self.threads)
            descriptors, mappings = now.descriptors - self.descriptors, now.mappings - self.mappings
            if not more and descriptors <= 0 and mappings <= 0:
                return ""
            if time.monotonic() > limit_s:
                return f"threads {more}, {descriptors} more descriptors, {mappings} more mappings"
            time.sleep(0.01)


@dataclass(frozen=True)
class FetchResult:
    """How a fetch ended, what the local state holds afterwards by path, and what is left in the process."""

    started_s: float
    ended_s: float
    error: BaseException | None
    cause: BaseException | None
    notes: list[str]
    contents: dict[str, str]
    left: str
    version: int | None = None
    report: FetchReport | None = None
    warnings: list[str] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """The duration of the call."""
        return self.ended_s - self.started_s


class _Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


_target: dict[str, State] = {}


def reset_target(layer_bytes: int, state: State | None = None) -> None:
    """Give this receiver other tensors to fetch into, by default with old values."""
    _target["state"] = state or old_state(layer_bytes)


def change_target(path: str, index: int) -> None:
    """Change one element of the tensors that this receiver fetches into."""
    _target["state"]["model"][path][index] = -7


def target_contents(layer_bytes: int, seed: int = 0) -> dict[str, str]:
    """Return what the tensors of this receiver hold now."""
    return contents_by_path(_target["state"], layer_bytes, seed)


def fetch_into(
    addresses: list[str],
    layer_bytes: int,
    *,
    fresh: bool = False,
    keep: bool = False,
    seed: int = 0,
    interruptible: bool = False,
    **options: Any,
) -> FetchResult:
    """Fetch into new tensors that hold old values, into the same as before (`keep`), or `fresh`.

    With `interruptible`, SIGINT raises KeyboardInterrupt.
    """
    if not keep:
        reset_target(layer_bytes)
    local = None if fresh else _target["state"]
    error: BaseException | None = None
    got: Any = None
    heard = _Warnings()
    logger = logging.getLogger("torchferry")
    logger.addHandler(heard)
    before = Resources.now()
    started_s = time.monotonic()
    try:
        with _interrupts(interruptible):
            try:
                got = torchferry.fetch(addresses, local, **options)
            except SystemExit:
                raise
            except BaseException as raised:
                error = None if interruptible and _came_after_the_end(raised) else raised
    except KeyboardInterrupt:
        assert interruptible  # it came when the fetch had ended
    ended_s = time.monotonic()
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    logger.removeHandler(heard)
    state = got.state if fresh and got is not None else _target["state"]
    contents = contents_by_path(state, layer_bytes, seed)
    if not fresh and target_contents(layer_bytes, seed) != contents:
        contents = dict.fromkeys(PATHS, "written after the end")
    return FetchResult(
        started_s,
        ended_s,
        error,
        None if error is None else error.__cause__,
        [] if error is None else list(getattr(error, "__notes__", [])),
        contents,
        before.wait_for_return(),
        None if got is None else got.version,
        None if got is None else got.report,
        heard.texts,
    )


def _came_after_the_end(error: BaseException) -> bool:
    """Return whether Ctrl-C came when the fetch was complete, but had not returned to its caller yet."""
    running = {"_Fetch.run", "_Fetch.stop", "_Fetch.explain", "_stop_after"}
    frames = [frame.f_code.co_qualname for frame, _ in traceback.walk_tb(error.__traceback__)]
    return isinstance(error, KeyboardInterrupt) and not running.intersection(frames)


@contextlib.contextmanager
def _interrupts(enabled: bool) -> Iterator[None]:
    if not enabled:
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        # One more interrupt may come right here.
        while signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            with contextlib.suppress(KeyboardInterrupt):
                signal.signal(signal.SIGINT, signal.SIG_IGN)
