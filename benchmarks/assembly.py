"""The ranks of a run, and how they agree outside of what is measured."""

from __future__ import annotations

import ctypes
import socket
from datetime import timedelta

import torch
import torch.distributed as dist

# Ranks that a case has no use for wait this long for the next; one that dies is noticed at once all the same.
PATIENCE = timedelta(hours=2)


class Assembly:
    """The first few of the ranks: all of them, or as many as a case needs.

    Every rank of the run makes it, at the same time, member or not: torch names groups by how many a process
    has made, so that all must have made as many. `data` is for the systems that are measured, and may break.
    What is agreed goes over another group, which none of them knows.
    """

    def __init__(self, ranks: int, take_timeout_s: float) -> None:
        self.ranks = ranks
        self._take_timeout = timedelta(seconds=take_timeout_s)
        self._council = _new_group(ranks, PATIENCE)
        self._data = _new_group(ranks, self._take_timeout)

    @property
    def data(self) -> dist.ProcessGroup:
        return _as_member(self._data)

    def wait(self) -> None:
        """Go on when all are here.

        Raises:
            RuntimeError: one of them is gone.
        """
        dist.barrier(group=_as_member(self._council))

    def share(self, own: bytes) -> list[bytes]:
        """Give everyone's bytes to everyone, in the order of ranks.

        Raises:
            RuntimeError: one of them is gone.
        """
        return share(own, _as_member(self._council), self.ranks)

    def renew(self) -> None:
        """Replace the group for data, in which something has failed; every rank of the run does so at once.

        The old one is not destroyed: that would wait for what is blocked in it.
        """
        self._data = _new_group(self.ranks, self._take_timeout)


def share(own: bytes, group: dist.ProcessGroup, ranks: int) -> list[bytes]:
    """Give everyone's bytes to everyone in a group.

    torch's own way to do so goes through pickle.
    """
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(ranks)]
    dist.all_gather(lengths, torch.tensor([len(own)]), group=group)
    longest = max(int(length.item()) for length in lengths)
    padded = torch.zeros(max(longest, 1), dtype=torch.uint8)
    if own:
        padded[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
    everyone = [torch.empty_like(padded) for _ in range(ranks)]
    dist.all_gather(everyone, padded, group=group)
    return [
        ctypes.string_at(one.data_ptr(), int(length.item()))
        for one, length in zip(everyone, lengths, strict=True)
    ]


def host() -> bytes:
    """A name for this machine."""
    return socket.gethostname().encode()


def _new_group(ranks: int, timeout: timedelta) -> object:
    return dist.new_group(list(range(ranks)), timeout=timeout, backend="gloo")


def _as_member(group: object) -> dist.ProcessGroup:
    assert isinstance(group, dist.ProcessGroup), "only the members of an assembly use it"
    return group
