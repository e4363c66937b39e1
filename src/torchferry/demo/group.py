"""A worker's process group: formed anew in each generation, and left when it is broken.

A collective on gloo can't be cancelled. When a peer dies, most of those who wait for it get an
error in some 10 to 50 ms, but one that was in the middle of a message may hear nothing and stay
blocked to the group's timeout. So no all-reduce is waited for here: its end is reported to a
callback, and a worker that learns of the death in another way leaves the blocked group behind and
joins the next one.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from torchferry.demo.scenario import Seat
from torchferry.local import stay_on_this_machine

TIMEOUT = timedelta(seconds=30)


@dataclass(frozen=True)
class Settled:
    """A collective has ended: with `error`, or with None for success."""

    ticket: int
    error: str | None


class Group:
    """The default process group of this process, one generation after another."""

    def __init__(self, seat: Seat) -> None:
        self._seat = seat
        self._store = dist.TCPStore("127.0.0.1", seat.store_port, is_master=False, timeout=TIMEOUT)
        self._tickets = itertools.count()
        # Groups with a collective that is still blocked: to destroy one would block as well.
        self._abandoned: list[object] = []
        stay_on_this_machine()

    @property
    def world(self) -> dist.ProcessGroup:
        """The group as torch knows it."""
        world = dist.group.WORLD
        assert world is not None, "form() comes first"
        return world

    def form(self, generation: int) -> None:
        """Meet the other workers in a new group. The one before, if any, is left.

        Every generation has its own prefix in the store: gloo can't use one twice.

        Raises:
            RuntimeError: not all of them came within the timeout.
        """
        self.leave()
        store = dist.PrefixStore(f"generation-{generation}", self._store)
        dist.init_process_group(
            "gloo", store=store, rank=self._seat.rank, world_size=self._seat.size, timeout=TIMEOUT
        )

    def start_sum(self, tensor: Tensor, settled: Callable[[Settled], None]) -> int:
        """Start an all-reduce of `tensor`, in place; `settled` hears of its end, on gloo's thread.

        Returns the ticket by which to know it. Until then the tensor is gloo's to write to, and if
        the group is abandoned it remains so.
        """
        ticket = next(self._tickets)
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None, "this process is not a member of its own group"
        work.get_future().add_done_callback(lambda future: settled(Settled(ticket, _error_of(future))))
        return ticket

    def gather(self, number: int) -> list[int]:
        """Every worker's number, by rank."""
        numbers = [torch.empty(1, dtype=torch.int64) for _ in range(self._seat.size)]
        dist.all_gather(numbers, torch.tensor([number]))
        return [int(gathered.item()) for gathered in numbers]

    def leave(self) -> None:
        """Close the connections of this group. Peers who still wait for this one get an error."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def abandon(self) -> None:
        """Leave a group whose collective is still blocked, without waiting for it."""
        self._abandoned.append(self.world)
        self.leave()


def _error_of(future: torch.futures.Future[list[Tensor]]) -> str | None:
    try:
        future.value()
    except RuntimeError as error:
        return brief(str(error))
    return None


def brief(message: str) -> str:
    """The first sentence of one of gloo's errors, without its place in gloo's source.

    >>> brief("[/third_party/gloo/pair.cc:553] Connection closed by peer [127.0.0.1]:22. Bye! ")
    'Connection closed by peer [127.0.0.1]:22'
    """
    return re.sub(r"^\[[^\]]*\]\s*", "", message).split(". ")[0]
