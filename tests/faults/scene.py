"""What the actors of a fault test do, each in its own process: a transfer, with a fault at an exact point.

Production code is not touched: the link's `send` and `recv` are patched, in the victim alone, to count its
messages and let something happen at one of them. `Sight` is what an actor reports of its transfer.
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
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from torchferry import PGTransport
from torchferry.links.base import PROBE_TAG
from torchferry.links.process_group import ProcessGroupLink

LAYERS = 8
LAYER_BYTES = 8 << 20
"""As much as one message carries, so that layer n is message n."""
PATHS = [f"model.layer{n}" for n in range(LAYERS)]

LENGTH, FRAME, FIRST_MESSAGE = 0, 1, 2
SEAL = FIRST_MESSAGE + LAYERS
"""The places of a transfer's messages in the order in which both sides post them."""


def message(number: int) -> int:
    """Give the place of the plan's message number `number`."""
    return FIRST_MESSAGE + number


def new_state(layer_bytes: int = LAYER_BYTES, seed: int = 0) -> dict[str, dict[str, torch.Tensor]]:
    """What is sent: no two elements alike, so that nothing can arrive in the wrong place unseen."""
    count = layer_bytes // 4
    first = 1 + seed * LAYERS * count
    layers = {
        f"layer{n}": torch.arange(count, dtype=torch.int32) + (first + n * count) for n in range(LAYERS)
    }
    return {"model": layers}


def old_state(layer_bytes: int = LAYER_BYTES) -> dict[str, dict[str, torch.Tensor]]:
    """What the receiver has before."""
    layers = {f"layer{n}": torch.full((layer_bytes // 4,), -1, dtype=torch.int32) for n in range(LAYERS)}
    return {"model": layers}


def fates_of(state: dict[str, dict[str, torch.Tensor]], layer_bytes: int) -> dict[str, str]:
    """Say of each path what it really holds: old, new, a mixture of both, or something else."""
    old, new = old_state(layer_bytes)["model"], new_state(layer_bytes)["model"]
    fates = {}
    for name, tensor in state["model"].items():
        if torch.equal(tensor, new[name]):
            fate = "new"
        elif torch.equal(tensor, old[name]):
            fate = "old"
        else:
            raw, was, is_new = (t.view(torch.uint8) for t in (tensor, old[name], new[name]))
            fate = "mixed" if bool(((raw == was) | (raw == is_new)).all()) else "neither"
        fates[f"model.{name}"] = fate
    return fates


class Boom(Exception):
    """What a callback raises."""


class Settled:
    """A message that can be waited for twice, which gloo's own can't."""

    def __init__(self, work: Any) -> None:
        self._work = work
        self._done = False

    def wait(self, timeout_s: float) -> None:
        """Wait, unless that is done already."""
        if not self._done:
            self._work.wait(timeout_s)
            self._done = True


Post = Callable[[torch.Tensor, int], Settled]
Meddle = Callable[[int, torch.Tensor, Post, list[Settled]], Any]
"""Called in the place of a post with the message's place, its buffer, what posts a buffer under a tag
shifted by so many places, and all that was posted before."""


@contextlib.contextmanager
def meddled(way: str, meddle: Meddle, peer: int | None = None) -> Iterator[None]:
    """Let `meddle` post the messages of this process, those to or from one peer if one is given."""
    original = getattr(ProcessGroupLink, way)
    posted: dict[int, list[Settled]] = {}

    def patched(link: ProcessGroupLink, buffer: torch.Tensor, to: int, tag: int) -> Any:
        if tag == PROBE_TAG or (peer is not None and to != peer):
            return original(link, buffer, to, tag)
        before = posted.setdefault(to, [])

        def post(what: torch.Tensor, shift: int = 0) -> Settled:
            return Settled(original(link, what, to, tag + shift))

        work = meddle(len(before), buffer, post, list(before))
        before.append(work)
        return work

    setattr(ProcessGroupLink, way, patched)
    try:
        yield
    finally:
        setattr(ProcessGroupLink, way, original)


def put_mark(path: str) -> None:
    """Write the time into a file; it is there whole or not at all. The clock is the whole machine's."""
    draft = f"{path}.{os.getpid()}"
    Path(draft).write_text(repr(time.monotonic()))
    os.rename(draft, path)


@dataclass(frozen=True)
class Fault:
    """What happens to a victim, and where: before the message in that place is posted.

    All earlier messages are complete then. But where there is to be a "cut", it happens just after this one
    was posted, with two others still under way. No place: when the call has returned.
    """

    kind: str
    place: int | None
    mark: str
    peer: int | None = None


@contextlib.contextmanager
def suffering(fault: Fault | None, way: str) -> Iterator[None]:
    """Let a fault happen to the transfer inside."""
    if fault is None:
        yield
        return
    broken_off = threading.Event()
    close = ProcessGroupLink.close

    def patched(link: ProcessGroupLink, peer: int) -> None:
        close(link, peer)
        broken_off.set()

    def meddle(place: int, buffer: torch.Tensor, post: Post, before: list[Settled]) -> Any:
        if place != fault.place:
            return post(buffer, 0)
        if fault.kind == "cut":
            # All but the last two: those are under way, and one of them is cut.
            for earlier in before[:-2]:
                earlier.wait(10.0)
            work = post(buffer, 0)
            happen(fault, broken_off)
            return work
        for earlier in before:
            earlier.wait(10.0)
        happen(fault, broken_off)
        return post(buffer, 0)

    was = signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
    ProcessGroupLink.close = patched  # type: ignore[method-assign, assignment]
    try:
        with meddled(way, meddle, fault.peer):
            yield
        if fault.place is None:
            happen(fault, broken_off)
    except SystemExit:
        # The harness would take it for an answer.
        os._exit(7)
    finally:
        ProcessGroupLink.close = close  # type: ignore[method-assign]
        signal.signal(signal.SIGTERM, was)


def happen(fault: Fault, broken_off: threading.Event) -> None:
    """Do it to this process."""
    put_mark(fault.mark)
    if fault.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.kind in ("stop", "pause", "cut"):
        # To this thread, which then does not take another step; to the process, it might.
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
    elif fault.kind == "exit":
        os._exit(9)
    elif fault.kind == "leave":
        # The handler runs in the main thread; this one stays where it is until that has given it up.
        os.kill(os.getpid(), signal.SIGTERM)
        broken_off.wait(10.0)
    else:
        raise Boom("a callback failed")


@dataclass(frozen=True)
class Part:
    """One actor's part: whom it forms a group with, what it does there, and what happens to it."""

    name: str
    ranks: tuple[int, ...]
    way: str
    timeout_s: float
    stall_s: float | None = None
    fault: Fault | None = None
    ended: str | None = None
    layer_bytes: int = LAYER_BYTES
    verify: bool = True
    narrow: bool = False


@dataclass(frozen=True)
class Sight:
    """What became of an actor's transfer, and of its state."""

    began_s: float
    ended_s: float
    error: BaseException | None
    cause: BaseException | None
    fates: dict[str, str]

    @property
    def seconds(self) -> float:
        """How long the call took."""
        return self.ended_s - self.began_s


@dataclass
class _Stage:
    """What an actor keeps for the next act."""

    part: Part
    transport: PGTransport
    target: dict[str, dict[str, torch.Tensor]]
    source: dict[str, dict[str, torch.Tensor]]


_stage: dict[str, _Stage] = {}
_kept: list[object] = []


def now() -> _Stage:
    """Give what is on the stage."""
    return _stage["now"]


def keep(group: object) -> None:
    """Hold on to the last few groups, for a group ends with its object."""
    _kept.append(group)
    del _kept[:-4]


def new_group(rank: int, ranks: tuple[int, ...], name: str, timeout_s: float = 30.0) -> dist.ProcessGroup:
    """Make a group among these ranks, under a name that no other has; nobody else need take part."""
    store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
    own, size = ranks.index(rank), len(ranks)
    gloo = dist.ProcessGroupGloo(store, own, size, timedelta(seconds=timeout_s))
    group = dist.ProcessGroup(store, own, size)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    return group


NARROW_BYTES = 64 << 10


def narrow_sockets() -> None:
    """Leave this process's connections little room, so that the kernel can't swallow a message whole."""
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(int(fd)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(fd))) as end:
                if end.family in (socket.AF_INET, socket.AF_INET6):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, NARROW_BYTES)
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, NARROW_BYTES)


def unique_name() -> str:
    """Make up a name for a group."""
    return uuid.uuid4().hex


def perform(rank: int, part: Part) -> Sight:
    """Make a group, play one's part in one transfer, and tell how it ended."""
    target, source = old_state(part.layer_bytes), new_state(part.layer_bytes)
    group = new_group(rank, part.ranks, part.name)
    if part.narrow:
        narrow_sockets()
    transport = PGTransport(
        group,
        part.timeout_s,
        "cpu",
        state_dict=lambda: target,
        stall_timeout=part.stall_s,
        verify=part.verify,
    )
    _stage["now"] = _Stage(part, transport, target, source)
    return act(rank, part.fault)


def act(rank: int, fault: Fault | None = None) -> Sight:
    """Transfer once, with what is on the stage."""
    stage = _stage["now"]
    part = stage.part
    error: BaseException | None = None
    # The sender's state stays as it is; the receiver's is checked against what it should be.
    began_s = time.monotonic()
    ended_s = began_s
    try:
        with suffering(fault, "send" if part.way == "send" else "recv"):
            try:
                if part.way == "send":
                    stage.transport.send_checkpoint(list(range(1, len(part.ranks))), stage.source)
                else:
                    stage.transport.recv_checkpoint(0)
            finally:
                ended_s = time.monotonic()
                if part.ended is not None:
                    put_mark(part.ended)
    except Exception as raised:
        error = raised
    cause = None if error is None else error.__cause__
    fates = fates_of(stage.target, part.layer_bytes) if part.way == "receive" else {}
    return Sight(began_s, ended_s, error, cause, fates)


@dataclass(frozen=True)
class Aftermath:
    """What a survivor finds when it goes on as if nothing had happened."""

    error: BaseException | None
    fates: dict[str, str]
    lanes_gone_s: float | None


def look_around(rank: int, patience_s: float) -> Aftermath:
    """Look at the state once more, wait for threads that were left behind, try the old group again."""
    stage = _stage["now"]
    fates = fates_of(stage.target, stage.part.layer_bytes) if stage.part.way == "receive" else {}
    gone_s = lanes_gone(patience_s)
    error: BaseException | None = None
    try:
        if stage.part.way == "send":
            stage.transport.send_checkpoint([1], stage.source)
        else:
            stage.transport.recv_checkpoint(0)
    except Exception as raised:
        error = raised
    return Aftermath(error, fates, gone_s)


def lanes_gone(patience_s: float) -> float | None:
    """Wait for lanes that were left behind; give the time at which the last was gone, or None."""
    limit_s = time.monotonic() + patience_s
    for thread in threading.enumerate():
        if thread.name.startswith("torchferry-lane"):
            thread.join(max(limit_s - time.monotonic(), 0.0))
            if thread.is_alive():
                return None
    return time.monotonic()


def go_on(rank: int, ranks: tuple[int, ...], name: str) -> bool:
    """Make a new group among the living, and transfer a state on it."""
    transport = PGTransport(new_group(rank, ranks, name), 5.0, "cpu")
    state = new_state(4096)
    if rank == ranks[0]:
        transport.send_checkpoint(list(range(1, len(ranks))), state)
        return True
    received = transport.recv_checkpoint(0)
    assert isinstance(received, dict)
    return fates_of(received, 4096) == dict.fromkeys(PATHS, "new")
