"""A torch.distributed process group as a link. Peers are ranks in that group."""

import re
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from torchferry.errors import LinkBroken, LinkError, LinkTimeout
from torchferry.links.base import PROBE_TAG, Link, SharedState
from torchferry.torch_internals import backend_name, backend_of, backend_timeout

_MAX_WAIT_S = 365 * 24 * 3600.0
"""Backends count nanoseconds in 64 bits. A wait of 300 years would overflow, and end at once."""

_MIN_WAIT_S = 0.001
"""Backends take whole milliseconds, and 0 means the group's own timeout."""

_CLOSED_BY_TIMEOUT = "caused pair closure"
"""Gloo's message on every connection of this rank after any wait on the group timed out."""


class ProcessGroupLink(Link):
    """Moves messages over a ProcessGroup, or an object with its `send`, `recv` and `rank`."""

    def __init__(self, group: Any, device: torch.device) -> None:
        super().__init__(_shared_state(group, device))
        self._group = group
        self.device = device

    @property
    def rank(self) -> int | None:  # type: ignore[override]
        """This process's rank in the group; None if the group does not tell."""
        return _number(innermost(self._group), "rank")

    @property
    def size(self) -> int | None:  # type: ignore[override]
        """The number of ranks in the group; None if the group does not tell."""
        return _number(innermost(self._group), "size")

    @property
    def sends_short(self) -> bool:  # type: ignore[override]
        """Whether the backend is gloo, which accepts short messages. Other backends may not."""
        # Not cached: a wrapper may replace its group.
        return backend_name(backend_of(innermost(self._group), self.device)) == "gloo"

    @property
    def shares_memory(self) -> bool:  # type: ignore[override]
        """Whether the backend is gloo, with buffers on the CPU."""
        return self.sends_short and self.device.type == "cpu"

    def can_access(self, device: torch.device) -> bool:
        return device.type == self.device.type

    def send(self, buffer: torch.Tensor, peer: int, tag: int) -> "Work":
        return _start(self._group.send, buffer, peer, tag, "receive the message")

    def recv(self, buffer: torch.Tensor, peer: int, tag: int) -> "Work":
        return _start(self._group.recv, buffer, peer, tag, "send a message")

    def check_peer(self, peer: int) -> None:
        """Post a receive that is never answered. Gloo raises if the connection is gone.

        Gloo does not report a peer that died in the middle of a message in any other way. Each call keeps a
        few bytes until the group ends.
        """
        if self.sends_short:
            self._probe(peer)

    def close(self, peer: int) -> None:
        """Let a wait time out: gloo then closes every connection of this rank in the group.

        Gloo has no other way to end a pending wait or message.
        """
        if self.sends_short:
            with suppress(LinkError):
                self._probe(peer).wait(_MIN_WAIT_S)

    def _probe(self, peer: int) -> "Work":
        # Some wrappers swallow errors, so this call bypasses them.
        buffer = torch.empty(1, dtype=torch.uint8, device=self.device)
        return _start(innermost(self._group).recv, buffer, peer, PROBE_TAG, "answer")


@dataclass
class Work:
    """A message of a process group. It keeps the buffer alive, which gloo does not."""

    work: Any
    peer: int
    buffer: torch.Tensor
    expected: str  # what the peer has to do for it to complete

    def wait(self, timeout_s: float) -> None:
        timeout = timedelta(seconds=min(max(timeout_s, _MIN_WAIT_S), _MAX_WAIT_S))
        with _translated(self.peer, self.expected):
            self.work.wait(timeout)


def _start(operation: Callable[..., Any], buffer: torch.Tensor, peer: int, tag: int, expected: str) -> "Work":
    with _translated(peer, "answer"):
        return Work(operation([buffer], peer, tag), peer, buffer, expected)


@contextmanager
def _translated(peer: int, expected: str) -> Iterator[None]:
    """Turn the exceptions of the backend into torchferry's."""
    try:
        yield
    except LinkError:
        raise
    except (RuntimeError, OSError) as error:
        # Without its source files and general advice.
        text = re.sub(r"^\[/[^\]]*\]\s*", "", (str(error).strip().splitlines() or [repr(error)])[0])
        text = text.partition(". This is typically caused by")[0]
        if _CLOSED_BY_TIMEOUT in text:
            raise LinkBroken(
                f"this process has closed its connection to rank {peer}, because another wait on this group "
                f"timed out ({text}): create a new process group",
                peer=peer,
            ) from error
        if "timed out" in text.lower() or "timeout" in text.lower():
            raise LinkTimeout(f"rank {peer} did not {expected} in time ({text})", peer=peer) from error
        raise LinkBroken(
            f"the connection to rank {peer} is gone ({text}); this process group can't be used with it "
            f"any more: create a new process group without rank {peer}",
            peer=peer,
        ) from error


_shared: weakref.WeakKeyDictionary[object, SharedState] = weakref.WeakKeyDictionary()
_shared_lock = threading.Lock()


def _shared_state(group: Any, device: torch.device) -> SharedState:
    """Return the shared state for this group; unhashable groups get a new one each time.

    A ProcessGroup and its backend share one state, or their transfers would use the same tags.
    """
    lasting = _is_from_torch(group)
    try:
        with _shared_lock:
            if group not in _shared:
                backend = backend_of(group, device)
                same = [state for other, state in _shared.items() if backend_of(other, device) is backend]
                _shared[group] = same[0] if same else SharedState(lasting=lasting)
            return _shared[group]
    except TypeError:
        return SharedState(lasting=lasting)


def innermost(group: Any) -> Any:
    """Return the group behind wrappers such as torchft's.

    A wrapper is a ProcessGroup subclass outside torch with another ProcessGroup as its `parent` or `_pg`.
    """
    # A wrapper may wrap itself.
    for _ in range(16):
        if not isinstance(group, dist.ProcessGroup) or _is_from_torch(group):
            break
        try:
            inner = group.parent  # type: ignore[attr-defined]
        except (AttributeError, AssertionError):
            inner = getattr(group, "_pg", None)
        if not isinstance(inner, dist.ProcessGroup):
            break
        group = inner
    return group


def timeout_in(group: Any, device: torch.device) -> timedelta | None:
    """Return the timeout of the group behind wrappers; None if it does not know it."""
    return backend_timeout(backend_of(innermost(group), device))


def _is_from_torch(group: Any) -> bool:
    """Return whether a group is torch's own, and not a wrapper that may replace the group behind it."""
    return type(group).__module__.partition(".")[0] == "torch"


def _number(group: Any, name: str) -> int | None:
    # A wrapper that does not override rank and size has the placeholders that it passed to torch: 0 of 1.
    if isinstance(group, dist.ProcessGroup) and not _is_from_torch(group):
        inherited = getattr(type(group), name) is getattr(dist.ProcessGroup, name)
        if inherited and dist.ProcessGroup.size(group) == 1:
            return None
    method = getattr(group, name, None)
    value = method() if callable(method) else None
    return value if isinstance(value, int) else None
