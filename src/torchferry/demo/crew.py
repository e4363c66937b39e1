"""The worker processes: started, listened to, killed, and never left behind."""

from __future__ import annotations

import contextlib
import multiprocessing.connection
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Self

from torchferry.demo import messages, worker
from torchferry.demo.messages import Event, Order
from torchferry.demo.scenario import Seat
from torchferry.local import context_with

# How long a process that was killed may take to be gone.
_REAP_S = 10.0


@dataclass(frozen=True)
class Gone:
    """The process has ended. `exit_code` is negative for the signal that ended it."""

    exit_code: int | None


@dataclass(frozen=True, eq=False)
class Member:
    """One worker process. A replacement is another member with the same rank."""

    rank: int
    process: BaseProcess
    channel: Connection

    @property
    def pid(self) -> int:
        assert self.process.pid is not None, "a member is started before it is a member"
        return self.process.pid

    def order(self, order: Order) -> None:
        """Tell it something. If it is gone, nobody hears it, and `Crew.listen` will say so."""
        with contextlib.suppress(OSError):
            messages.send(self.channel, order)

    def kill(self) -> None:
        """SIGKILL: the worker gets no chance to say or save anything."""
        os.kill(self.pid, signal.SIGKILL)


class Crew:
    """The workers that are alive. A context manager: when it is left, none of them is.

    A worker also ends by itself as soon as its pipe to the coordinator breaks, so that not even a
    coordinator that is killed leaves one behind.
    """

    def __init__(self) -> None:
        self._members: list[Member] = []
        # The optimizers import torch._dynamo when the first of them is made.
        self._context = context_with(worker.__name__, "torch._dynamo")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for member in self._members:
            member.process.kill()
        for member in self._members:
            member.process.join(_REAP_S)
            member.channel.close()
        self._members.clear()

    def __iter__(self) -> Iterator[Member]:
        return iter(tuple(self._members))

    def start(self, seat: Seat) -> Member:
        """Start the worker that takes this seat."""
        ours, theirs = self._context.Pipe()
        # mypy's view of a context does not know that the contexts have processes.
        process: BaseProcess = self._context.Process(  # type: ignore[attr-defined]
            target=worker.main,
            args=(theirs, seat),
            name=f"torchferry-demo-{seat.rank}",
            daemon=True,
        )
        process.start()
        # Only the worker holds its end now; when it dies, ours is at its end.
        theirs.close()
        member = Member(seat.rank, process, ours)
        self._members.append(member)
        return member

    def order(self, order: Order) -> None:
        """Tell it to everyone."""
        for member in self:
            member.order(order)

    def listen(self, timeout_s: float | None = None) -> list[tuple[Member, Event | Gone]]:
        """What there is to hear, one thing from each who has something to say; [] on a timeout."""
        by_channel = {member.channel: member for member in self._members}
        ready = multiprocessing.connection.wait(list(by_channel), timeout_s)
        return [(member, self._hear(member)) for channel, member in by_channel.items() if channel in ready]

    def _hear(self, member: Member) -> Event | Gone:
        try:
            return messages.receive_event(member.channel)
        except (EOFError, OSError):
            member.process.join(_REAP_S)
            member.channel.close()
            self._members.remove(member)
            return Gone(member.process.exitcode)
