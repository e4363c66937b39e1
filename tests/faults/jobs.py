"""The jobs that the workers of a fault test run: a transfer, with a fault at an exact message.

The package is not changed: the victim's process patches the link's `send` and `recv` to count its messages
and to trigger the fault at one of them. A job returns a `TransferResult`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import stat
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from torchferry import PGTransport
from torchferry.links.base import FIRST_ANSWER_TAG, PROBE_TAG
from torchferry.links.memory_channel import MemoryChannel
from torchferry.links.process_group import ProcessGroupLink

LAYERS = 8
LAYER_BYTES = 8 << 20
"""The payload of one message, so that layer n is message n."""
PATHS = [f"model.layer{n}" for n in range(LAYERS)]

LENGTH, FRAME, FIRST_MESSAGE = 0, 1, 2
DIGEST_BLOCK = FIRST_MESSAGE + LAYERS
"""The positions of a transfer's messages in the order in which both sides post them."""


def message(number: int) -> int:
    """Return the position of message `number` of the plan."""
    return FIRST_MESSAGE + number


def new_state(layer_bytes: int = LAYER_BYTES, seed: int = 0) -> dict[str, dict[str, torch.Tensor]]:
    """Return the sender's state. No two elements are equal, so that a mispositiond element is noticed."""
    count = layer_bytes // 4
    first = 1 + seed * LAYERS * count
    layers = {
        f"layer{n}": torch.arange(count, dtype=torch.int32) + (first + n * count) for n in range(LAYERS)
    }
    return {"model": layers}


def old_state(layer_bytes: int = LAYER_BYTES) -> dict[str, dict[str, torch.Tensor]]:
    """Return the receiver's state before the transfer."""
    layers = {f"layer{n}": torch.full((layer_bytes // 4,), -1, dtype=torch.int32) for n in range(LAYERS)}
    return {"model": layers}


def contents_by_path(state: dict[str, dict[str, torch.Tensor]], layer_bytes: int) -> dict[str, str]:
    """Return what each path holds: "old", "new", "mixed" (bytes of both) or "neither"."""
    old, new = old_state(layer_bytes)["model"], new_state(layer_bytes)["model"]
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


class CallbackError(Exception):
    """An exception that a callback raises."""


class RepeatableWork:
    """A work whose `wait` may be called twice. The second `wait` of a gloo work fails."""

    def __init__(self, work: Any) -> None:
        self._work = work
        self._done = False

    def wait(self, timeout_s: float) -> None:
        """Wait for the message, unless it is already complete."""
        if not self._done:
            self._work.wait(timeout_s)
            self._done = True


class DelayedWork(RepeatableWork):
    """A message that is posted `pause_s` after the wait for it began."""

    def __init__(self, post: Post, buffer: torch.Tensor, pause_s: float) -> None:
        super().__init__(None)
        self._post = partial(post, buffer)
        self._pause_s = pause_s

    def wait(self, timeout_s: float) -> None:
        """Post the message after the pause, and wait for it."""
        if self._work is None:
            time.sleep(self._pause_s)
            self._work = self._post()
        super().wait(timeout_s)


Post = Callable[[torch.Tensor], RepeatableWork]
Interceptor = Callable[[int, torch.Tensor, Post, list[RepeatableWork]], Any]
"""Called instead of the link's `send` or `recv`: with the message's position, its buffer, a function that
posts a buffer under the message's tag, and the works of all earlier messages."""


@contextlib.contextmanager
def intercepted(method: str, intercept: Interceptor, peer: int | None = None) -> Iterator[None]:
    """Replace `send` or `recv` of the link by `intercept`, for messages to or from `peer`, or for all.

    Messages through memory are intercepted too. Probes and answers are not.
    """
    over_group, through_memory = getattr(ProcessGroupLink, method), getattr(MemoryChannel, method)
    posted: dict[int, list[RepeatableWork]] = {}

    def call(to: int, buffer: torch.Tensor, original: Callable[[torch.Tensor], Any]) -> Any:
        if peer is not None and to != peer:
            return original(buffer)
        before = posted.setdefault(to, [])
        work = intercept(len(before), buffer, lambda given: RepeatableWork(original(given)), list(before))
        before.append(work)
        return work

    def link_method(link: ProcessGroupLink, buffer: torch.Tensor, to: int, tag: int) -> Any:
        if tag == PROBE_TAG or tag >= FIRST_ANSWER_TAG:
            return over_group(link, buffer, to, tag)
        return call(to, buffer, lambda given: over_group(link, given, to, tag))

    def channel_method(channel: MemoryChannel, buffer: torch.Tensor, hasher: Any = None) -> Any:
        def post(given: torch.Tensor) -> Any:
            if hasher is None or given is buffer:
                return through_memory(channel, given, hasher)
            # The bytes are replaced after they were hashed.
            hasher.update(buffer.numpy())
            return through_memory(channel, given)

        return call(channel.peer, buffer, post)

    def abort_method(channel: MemoryChannel, failed_rank: int, expected: Any) -> list[Any]:
        # Over the group, an abort takes the place of a message, so it is intercepted like one.
        nothing = torch.empty(0, dtype=torch.uint8)
        return [call(channel.peer, nothing, lambda _: send_abort(channel, failed_rank, expected)[0])]

    send_abort = MemoryChannel.send_abort
    setattr(ProcessGroupLink, method, link_method)
    setattr(MemoryChannel, method, channel_method)
    if method == "send":
        MemoryChannel.send_abort = abort_method  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        MemoryChannel.send_abort = send_abort  # type: ignore[method-assign]
        setattr(ProcessGroupLink, method, over_group)
        setattr(MemoryChannel, method, through_memory)


def write_timestamp(path: str) -> None:
    """Write the time into a file, atomically. All processes of the machine share the clock."""
    draft = f"{path}.{os.getpid()}"
    Path(draft).write_text(repr(time.monotonic()))
    os.rename(draft, path)


@dataclass(frozen=True)
class Fault:
    """A fault of the victim: its kind, and the position of the message before which it happens.

    All earlier messages are complete at that time. A "cut" happens just after the message was posted, while
    two earlier messages are still in flight. At position None, the fault happens after the call returned.
    """

    kind: str
    position: int | None
    timestamp_file: str
    peer: int | None = None


@contextlib.contextmanager
def injected(fault: Fault | None, method: str) -> Iterator[None]:
    """Inject a fault into the transfer that runs inside."""
    if fault is None:
        yield
        return
    link_closed = threading.Event()
    close = ProcessGroupLink.close

    def patched(link: ProcessGroupLink, peer: int) -> None:
        close(link, peer)
        link_closed.set()

    def intercept(position: int, buffer: torch.Tensor, post: Post, before: list[RepeatableWork]) -> Any:
        if position != fault.position:
            return post(buffer)
        if fault.kind == "cut":
            # The last two messages stay in flight, and one of them is cut.
            for earlier in before[:-2]:
                earlier.wait(10.0)
            work = post(buffer)
            trigger(fault, link_closed)
            return work
        for earlier in before:
            earlier.wait(10.0)
        trigger(fault, link_closed)
        return post(buffer)

    previous_handler = signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
    ProcessGroupLink.close = patched  # type: ignore[method-assign, assignment]
    try:
        with intercepted(method, intercept, fault.peer):
            yield
        if fault.position is None:
            trigger(fault, link_closed)
    except SystemExit:
        # A worker reports SystemExit as an error of the job, but this process must end.
        os._exit(7)
    finally:
        ProcessGroupLink.close = close  # type: ignore[method-assign]
        signal.signal(signal.SIGTERM, previous_handler)


def trigger(fault: Fault, link_closed: threading.Event) -> None:
    """Trigger the fault in this process."""
    write_timestamp(fault.timestamp_file)
    if fault.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.kind in ("stop", "pause", "cut"):
        # Directed at this thread, the signal stops it at once. Directed at the process, it may stop later.
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
    elif fault.kind == "os_exit":
        os._exit(9)
    elif fault.kind == "sys_exit":
        # The handler runs in the main thread. This lane blocks until the main thread has closed the link.
        os.kill(os.getpid(), signal.SIGTERM)
        link_closed.wait(10.0)
    else:
        raise CallbackError("a callback failed")


@dataclass(frozen=True)
class Role:
    """One worker's role: the ranks of its group, whether it sends or receives, and the fault to inject."""

    name: str
    ranks: tuple[int, ...]
    direction: str
    timeout_s: float
    stall_s: float | None = None
    fault: Fault | None = None
    end_timestamp_file: str | None = None
    layer_bytes: int = LAYER_BYTES
    verify: bool = True
    small_socket_buffers: bool = False
    same_host: bool = False


@dataclass(frozen=True)
class TransferResult:
    """How a worker's transfer ended, what its state holds afterwards, by path, and how the bytes went."""

    started_s: float
    ended_s: float
    error: BaseException | None
    cause: BaseException | None
    contents: dict[str, str]
    via: str

    @property
    def seconds(self) -> float:
        """The duration of the call."""
        return self.ended_s - self.started_s


@dataclass
class _Session:
    """The transport and the states that a worker keeps for its next job."""

    role: Role
    transport: PGTransport
    target: dict[str, dict[str, torch.Tensor]]
    source: dict[str, dict[str, torch.Tensor]]


_sessions: dict[str, _Session] = {}
_kept: list[object] = []


def current_session() -> _Session:
    """Return the session of the last `run_transfer` in this worker."""
    return _sessions["current"]


def keep_alive(group: object) -> None:
    """Keep references to the last four groups: a group ends when its object is collected."""
    _kept.append(group)
    del _kept[:-4]


def new_group(rank: int, ranks: tuple[int, ...], name: str, timeout_s: float = 30.0) -> dist.ProcessGroup:
    """Create a group of these ranks under a unique name. Other ranks need not take part."""
    store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
    own, size = ranks.index(rank), len(ranks)
    gloo = dist.ProcessGroupGloo(store, own, size, timedelta(seconds=timeout_s))
    group = dist.ProcessGroup(store, own, size)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    return group


SOCKET_BUFFER_BYTES = 64 << 10


def shrink_socket_buffers() -> None:
    """Shrink the socket buffers of this process, so that the kernel can't buffer a whole message."""
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(int(fd)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(fd))) as end:
                if end.family in (socket.AF_INET, socket.AF_INET6):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)


def unique_name() -> str:
    """Return a unique name for a group."""
    return uuid.uuid4().hex


def run_transfer(rank: int, role: Role) -> TransferResult:
    """Create a group, send or receive once, and return the result."""
    target, source = old_state(role.layer_bytes), new_state(role.layer_bytes)
    group = new_group(rank, role.ranks, role.name)
    if role.small_socket_buffers:
        shrink_socket_buffers()
    transport = PGTransport(
        group,
        role.timeout_s,
        "cpu",
        state_dict=lambda: target,
        stall_timeout=role.stall_s,
        verify=role.verify,
        same_host=role.same_host,
    )
    _sessions["current"] = _Session(role, transport, target, source)
    return transfer_again(rank, role.fault)


def transfer_again(rank: int, fault: Fault | None = None) -> TransferResult:
    """Send or receive once with the current session's transport and state."""
    session = current_session()
    role = session.role
    error: BaseException | None = None
    started_s = time.monotonic()
    ended_s = started_s
    try:
        with injected(fault, "send" if role.direction == "send" else "recv"):
            try:
                if role.direction == "send":
                    session.transport.send_checkpoint(list(range(1, len(role.ranks))), session.source)
                else:
                    session.transport.recv_checkpoint(0)
            finally:
                ended_s = time.monotonic()
                if role.end_timestamp_file is not None:
                    write_timestamp(role.end_timestamp_file)
    except Exception as raised:
        error = raised
    cause = None if error is None else error.__cause__
    contents = contents_by_path(session.target, role.layer_bytes) if role.direction == "receive" else {}
    report = session.transport.last_report
    via = report.via if report is not None else ""
    return TransferResult(started_s, ended_s, error, cause, contents, via)


@dataclass(frozen=True)
class AfterFailure:
    """A survivor after a failure: the error of its next call, its state, the time when its lanes ended."""

    error: BaseException | None
    contents: dict[str, str]
    lanes_ended_s: float | None


def inspect_after_failure(rank: int, patience_s: float) -> AfterFailure:
    """Read the state again, wait for the lanes to end, and use the old group once more."""
    session = current_session()
    contents = (
        contents_by_path(session.target, session.role.layer_bytes)
        if session.role.direction == "receive"
        else {}
    )
    gone_s = wait_for_lanes(patience_s)
    error: BaseException | None = None
    try:
        if session.role.direction == "send":
            session.transport.send_checkpoint([1], session.source)
        else:
            session.transport.recv_checkpoint(0)
    except Exception as raised:
        error = raised
    return AfterFailure(error, contents, gone_s)


def wait_for_lanes(patience_s: float) -> float | None:
    """Wait until all lane threads have ended. Return the time of that, or None if `patience_s` passed."""
    limit_s = time.monotonic() + patience_s
    for thread in threading.enumerate():
        if thread.name.startswith("torchferry-lane"):
            thread.join(max(limit_s - time.monotonic(), 0.0))
            if thread.is_alive():
                return None
    return time.monotonic()


def transfer_on_new_group(rank: int, ranks: tuple[int, ...], name: str) -> bool:
    """Create a new group of the surviving ranks, and transfer a state on it."""
    transport = PGTransport(new_group(rank, ranks, name), 5.0, "cpu")
    state = new_state(4096)
    if rank == ranks[0]:
        transport.send_checkpoint(list(range(1, len(ranks))), state)
        return True
    received = transport.recv_checkpoint(0)
    assert isinstance(received, dict)
    return contents_by_path(received, 4096) == dict.fromkeys(PATHS, "new")
