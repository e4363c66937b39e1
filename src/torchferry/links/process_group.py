"""A torch.distributed process group as a link. Peers are ranks in that group."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch

from torchferry.errors import LinkBroken, LinkError, LinkTimeout

T = TypeVar("T")

_LONGEST_WAIT_S = 365 * 24 * 3600.0
"""Backends count nanoseconds in 64 bits: a wait of 300 years would overflow, and end at once."""


class ProcessGroupLink:
    """Moves messages over any ProcessGroup, or what quacks like one."""

    def __init__(self, group: Any, device: torch.device) -> None:
        self._group = group
        self._device = device

    @property
    def device(self) -> torch.device:
        """The device that the group's backend works on."""
        return self._device

    def takes(self, device: torch.device) -> bool:
        """Any memory on the same type of device will do."""
        return device.type == self._device.type

    def send(self, buffer: torch.Tensor, peer: int, tag: int) -> Work:
        """Post a send.

        Raises:
            LinkBroken: the group can't reach that peer any more.
        """
        return Work(_translated(lambda: self._group.send([buffer], peer, tag), peer), peer, buffer)

    def recv(self, buffer: torch.Tensor, peer: int, tag: int) -> Work:
        """Post a receive.

        Raises:
            LinkBroken: the group can't reach that peer any more.
        """
        return Work(_translated(lambda: self._group.recv([buffer], peer, tag), peer), peer, buffer)


class Work:
    """A message under way on a process group. Keeps its buffer alive: gloo does not."""

    def __init__(self, work: Any, peer: int, buffer: torch.Tensor) -> None:
        self._work = work
        self._peer = peer
        self._buffer = buffer

    def wait(self, timeout_s: float) -> None:
        """Wait for the backend.

        Raises:
            LinkTimeout: it took longer than `timeout_s`.
            LinkBroken: the connection is gone.
        """
        timeout = timedelta(seconds=min(timeout_s, _LONGEST_WAIT_S))
        _translated(lambda: self._work.wait(timeout), self._peer)


def _translated(call: Callable[[], T], peer: int) -> T:
    try:
        return call()
    except LinkError:
        raise
    except (RuntimeError, OSError) as error:
        text = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        if "timed out" in text.lower() or "timeout" in text.lower():
            raise LinkTimeout(f"rank {peer} did not answer in time ({text})", peer=peer) from error
        raise LinkBroken(
            f"the connection to rank {peer} is gone ({text}); this process group can't be used with it "
            "any more: make a new one among the living",
            peer=peer,
        ) from error
