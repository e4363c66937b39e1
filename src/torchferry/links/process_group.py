"""A torch.distributed process group as a link. Peers are ranks in that group."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from torchferry.core.protocol import PROBE_TAG
from torchferry.errors import LinkBroken, LinkError, LinkTimeout
from torchferry.torch_internals import backend_name, backend_of

T = TypeVar("T")

_LONGEST_WAIT_S = 365 * 24 * 3600.0
"""Backends count nanoseconds in 64 bits: a wait of 300 years would overflow, and end at once."""

_CLOSED_HERE = "caused pair closure"
"""What gloo says of every connection of this rank once some wait on the group was let expire, whoever's it
was: a timeout, but not of this message, and not the peer's fault."""

_SHORTEST_WAIT_S = 0.001
"""A wait is told in whole milliseconds, and none of them means the group's own timeout."""


class ProcessGroupLink:
    """Moves messages over any ProcessGroup, or what quacks like one."""

    def __init__(self, group: Any, device: torch.device) -> None:
        self._group = group
        self._device = device

    @property
    def _is_gloo(self) -> bool:
        # Not cached: a wrapper may get another group.
        return backend_name(backend_of(innermost(self._group), self._device)) == "gloo"

    @property
    def device(self) -> torch.device:
        """The device that the group's backend works on."""
        return self._device

    def takes(self, device: torch.device) -> bool:
        """Any memory on the same type of device will do."""
        return device.type == self._device.type

    @property
    def sends_short(self) -> bool:
        """Gloo fills what there is; of others it is not known."""
        return self._is_gloo

    def send(self, buffer: torch.Tensor, peer: int, tag: int) -> Work:
        """Post a send.

        Raises:
            LinkBroken: the group can't reach that peer any more.
        """
        work = _translated(lambda: self._group.send([buffer], peer, tag), peer)
        return Work(work, peer, buffer, "take what it was sent")

    def recv(self, buffer: torch.Tensor, peer: int, tag: int) -> Work:
        """Post a receive.

        Raises:
            LinkBroken: the group can't reach that peer any more.
        """
        work = _translated(lambda: self._group.recv([buffer], peer, tag), peer)
        return Work(work, peer, buffer, "send anything")

    def probe(self, peer: int) -> None:
        """Ask gloo for one more message. It refuses if the connection is gone.

        By itself it keeps silent about a peer that dies in the middle of a message. The receive that is
        posted here is never answered, and costs some bytes until the group ends.

        Raises:
            LinkBroken: the connection is gone.
        """
        if self._is_gloo:
            self._probe(peer)

    def break_off(self, peer: int) -> None:
        """Let a wait time out: gloo then closes every connection of this rank in this group.

        It has no other way to end a wait from outside, or to stop a message that is under way.
        """
        if self._is_gloo:
            with suppress(LinkError):
                self._probe(peer).wait(_SHORTEST_WAIT_S)

    def _probe(self, peer: int) -> Work:
        # Bypass wrappers: some of them swallow or report errors.
        buffer = torch.empty(1, dtype=torch.uint8, device=self._device)
        work = _translated(lambda: innermost(self._group).recv([buffer], peer, PROBE_TAG), peer)
        return Work(work, peer, buffer, "answer")


class Work:
    """A message under way on a process group. Keeps its buffer alive: gloo does not.

    `wanted` is what the peer has to do for it.
    """

    def __init__(self, work: Any, peer: int, buffer: torch.Tensor, wanted: str) -> None:
        self._work = work
        self._peer = peer
        self._buffer = buffer
        self._wanted = wanted

    def wait(self, timeout_s: float) -> None:
        """Wait for the backend.

        Raises:
            LinkTimeout: it took longer than `timeout_s`.
            LinkBroken: the connection is gone.
        """
        timeout = timedelta(seconds=min(max(timeout_s, _SHORTEST_WAIT_S), _LONGEST_WAIT_S))
        _translated(lambda: self._work.wait(timeout), self._peer, self._wanted)


_MOST_WRAPPERS = 16


def innermost(group: Any) -> Any:
    """Return the group behind wrappers such as torchft's.

    A wrapper is a ProcessGroup subclass outside torch with another ProcessGroup as its `parent` or `_pg`.
    """
    for _ in range(_MOST_WRAPPERS):
        if not isinstance(group, dist.ProcessGroup) or _is_torchs(group):
            break
        try:
            inner = group.parent  # type: ignore[attr-defined]
        except (AttributeError, AssertionError):
            inner = getattr(group, "_pg", None)
        if not isinstance(inner, dist.ProcessGroup):
            break
        group = inner
    return group


def rank_in(group: Any) -> int | None:
    """Return this process's rank in a group; None if the group does not know it."""
    group = innermost(group)
    return None if _claims_nothing(group, "rank") else _number(group, "rank")


def size_of(group: Any) -> int | None:
    """Return the number of ranks of a group; None if the group does not know it."""
    group = innermost(group)
    return None if _claims_nothing(group, "size") else _number(group, "size")


def is_lasting(group: Any) -> bool:
    """Return whether a broken group stays broken, as torch's own groups do.

    A wrapper of another library may get a new group behind it.
    """
    return _is_torchs(group)


def _is_torchs(group: Any) -> bool:
    return type(group).__module__.partition(".")[0] == "torch"


def _claims_nothing(group: Any, name: str) -> bool:
    """Return whether a wrapper's rank or size is only the 0 of 1 that it passed to torch's base class.

    Wrappers pass that as a placeholder. A real group of one rank has no peers to send to.
    """
    if not isinstance(group, dist.ProcessGroup) or _is_torchs(group):
        return False
    is_base_s = getattr(type(group), name) is getattr(dist.ProcessGroup, name)
    return is_base_s and dist.ProcessGroup.size(group) == 1


def _number(group: Any, name: str) -> int | None:
    method = getattr(group, name, None)
    value = method() if callable(method) else None
    return value if isinstance(value, int) else None


def _translated(call: Callable[[], T], peer: int, wanted: str = "answer") -> T:
    try:
        return call()
    except LinkError:
        raise
    except (RuntimeError, OSError) as error:
        text = _said(error)
        if _CLOSED_HERE in text:
            raise LinkBroken(
                f"this process has closed its connection to rank {peer}, because something else that it "
                f"waited for on this group did not come in time ({text}): make a new group",
                peer=peer,
            ) from error
        if "timed out" in text.lower() or "timeout" in text.lower():
            raise LinkTimeout(f"rank {peer} did not {wanted} in time ({text})", peer=peer) from error
        raise LinkBroken(
            f"the connection to rank {peer} is gone ({text}); this process group can't be used with it "
            f"any more: create a new process group without rank {peer}",
            peer=peer,
        ) from error


def _said(error: Exception) -> str:
    """Give what a backend says, without its source files and good wishes."""
    lines = str(error).strip().splitlines() or [repr(error)]
    text = re.sub(r"^\[/[^\]]*\]\s*", "", lines[0])
    return text.partition(". This is typically caused by")[0]
