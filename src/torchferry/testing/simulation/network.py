"""The simulated link: messages meet their receives by tag, take their time, and may come to harm.

It behaves as gloo was seen to: a buffer is read when it is sent and not when it is posted; a peer that dies
is reported to those who wait for a message of which nothing has come yet, and to nobody who waits for one
that was cut in the middle; asking for one more message tells; and breaking off ends all there is.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from torchferry.core.watch import Limits
from torchferry.engine.lanes import Lane, deadline_passed
from torchferry.errors import FerryError, LinkBroken
from torchferry.links.base import FRAME_TAG, LENGTH_TAG, Link
from torchferry.testing.simulation.world import Process, World

_NOTICE_S = 0.01


class Harm(NamedTuple):
    """What happens to the n-th message that meets its receive."""

    message: int
    kind: str


class Op:
    """A send or a receive that was posted."""

    def __init__(self, owner: int, peer: int, buffer: torch.Tensor) -> None:
        self.owner = owner
        self.peer = peer
        self.buffer = buffer
        self.over = False
        self.under_way = False
        self.counts = False
        self.error: FerryError | None = None

    def wait(self, timeout_s: float) -> None:
        """Not called: the simulation's runner looks at `over` instead."""
        raise NotImplementedError


class Network:
    """All links of one world."""

    def __init__(self, world: World, harms: Sequence[Harm], delay_s: Callable[[], float]) -> None:
        self.most_under_way: defaultdict[int, int] = defaultdict(int)
        self.met = 0
        self._world = world
        self._harms = {harm.message: harm.kind for harm in harms}
        self._delay_s = delay_s
        self._waiting: defaultdict[tuple[int, int, int, str], deque[Op]] = defaultdict(deque)
        self._open: list[Op] = []
        self._closed: set[frozenset[int]] = set()

    def link(self, rank: int) -> SimulatedLink:
        """Give the link of one rank."""
        return SimulatedLink(self, rank)

    def post(self, op: Op, tag: int, way: str) -> None:
        """Post a send or a receive; if its other half is there, the message is on its way."""
        self.check(op.owner, op.peer)
        self._open.append(op)
        if tag not in (LENGTH_TAG, FRAME_TAG):
            op.counts = True
            posted = sum(each.buffer.nbytes for each in self._open if each.owner == op.owner and each.counts)
            self.most_under_way[op.owner] = max(self.most_under_way[op.owner], posted)
        sender, receiver = (op.owner, op.peer) if way == "send" else (op.peer, op.owner)
        other = "recv" if way == "send" else "send"
        partners = self._waiting[sender, receiver, tag, other]
        if partners:
            partner = partners.popleft()
            self._meet(op, partner) if way == "send" else self._meet(partner, op)
        else:
            self._waiting[sender, receiver, tag, way].append(op)

    def check(self, rank: int, peer: int) -> None:
        """Refuse a connection that is gone.

        Raises:
            LinkBroken: it is.
        """
        if frozenset({rank, peer}) in self._closed or (
            self._world.is_gone(peer)
            and self._world.now_s >= (self._world.processes[peer].killed_s or 0) + _NOTICE_S
        ):
            raise LinkBroken(f"the connection to rank {peer} is gone", peer=peer)

    def kill(self, rank: int) -> None:
        """Kill a process, and tell those who can be told."""
        self._world.kill(rank)
        self._world.at(self._world.now_s + _NOTICE_S, lambda: self._tell(rank))

    def close(self, rank: int) -> None:
        """Close every connection of a rank."""
        for peer in self._world.processes:
            self._closed.add(frozenset({rank, peer}))
        self._tell(rank, also_owner=True)

    def _tell(self, rank: int, *, also_owner: bool = False) -> None:
        for op in self._open:
            if op.over or rank not in (op.owner, op.peer):
                continue
            if (op.owner == rank and also_owner) or (op.peer == rank and not op.under_way):
                self._finish(op, LinkBroken(f"connection with rank {rank} closed", peer=op.peer))

    def _meet(self, send: Op, recv: Op) -> None:
        kind = self._harms.get(self.met)
        self.met += 1
        if kind == "lose":
            send.under_way = recv.under_way = True
            return
        start_s = self._world.now_s + self._delay_s()
        end_s = start_s + self._delay_s()
        self._world.at(start_s, lambda: self._begin(send, recv, kind, end_s))

    def _begin(self, send: Op, recv: Op, kind: str | None, end_s: float) -> None:
        if send.over or recv.over or self._world.is_gone(send.owner) or self._world.is_gone(recv.owner):
            return
        send.under_way = recv.under_way = True
        data = _harmed(send.buffer.detach().clone(), kind, self._world)
        # Half of it is there at once: what a peer that dies now leaves behind.
        _fill(recv.buffer, data[: data.numel() // 2])
        self._world.at(end_s, lambda: self._end(send, recv, data))

    def _end(self, send: Op, recv: Op, data: torch.Tensor) -> None:
        if self._world.is_gone(send.owner) or self._world.is_gone(recv.owner) or recv.over or send.over:
            return
        self._finish(send, None)
        if data.nbytes > recv.buffer.nbytes:
            self._finish(recv, LinkBroken("a message longer than its receive", peer=recv.peer))
            return
        _fill(recv.buffer, data)
        self._finish(recv, None)

    def _finish(self, op: Op, error: FerryError | None) -> None:
        op.over, op.error = True, error
        self._open = [each for each in self._open if not each.over]
        self._world.processes[op.owner].wake()


def _fill(buffer: torch.Tensor, data: torch.Tensor) -> None:
    raw = buffer.view(torch.uint8)
    nbytes = min(raw.numel(), data.numel())
    raw[:nbytes] = data[:nbytes]


def _harmed(data: torch.Tensor, kind: str | None, world: World) -> torch.Tensor:
    data = data.view(torch.uint8)
    if kind == "flip":
        data[world.chance.randrange(data.numel())] ^= 1 << world.chance.randrange(8)
    elif kind == "truncate":
        data = data[: world.chance.randrange(data.numel())]
    elif kind == "extend":
        data = torch.cat([data, torch.ones(8, dtype=torch.uint8, device="cpu")])
    elif kind == "stale":
        # A message of the same size from another attempt, as a state that has trained on would send.
        data = data.roll(1) + 1
    return data


class SimulatedLink(Link):
    """One rank's end of the network."""

    sends_short = True

    def __init__(self, network: Network, rank: int) -> None:
        super().__init__()
        self._network = network
        self.rank = rank

    def can_access(self, device: torch.device) -> bool:
        """Return whether memory is on the CPU."""
        return device.type == "cpu"

    def send(self, buffer: torch.Tensor, peer: int, tag: int) -> Op:
        """Post a send.

        Raises:
            LinkBroken: the connection is gone.
        """
        op = Op(self.rank, peer, buffer)
        self._network.post(op, tag, "send")
        return op

    def recv(self, buffer: torch.Tensor, peer: int, tag: int) -> Op:
        """Post a receive.

        Raises:
            LinkBroken: the connection is gone.
        """
        op = Op(self.rank, peer, buffer)
        self._network.post(op, tag, "recv")
        return op

    def check_peer(self, peer: int) -> None:
        """Check the connection to a peer.

        Raises:
            LinkBroken: it is gone.
        """
        self._network.check(self.rank, peer)

    def close(self, peer: int) -> None:
        """Close every connection of this rank, as gloo does."""
        self._network.close(self.rank)


class SimulatedRunner:
    """Takes the steps of a simulated process's lanes, by the world's clock."""

    def __init__(self, world: World, process: Callable[[], Process]) -> None:
        self._world = world
        self._process = process
        self._at: dict[int, tuple[Lane[Any], Op, Limits]] = {}

    def now_s(self) -> float:
        """Give the world's time."""
        return self._world.now_s

    def start(self, lane: Lane[Any], limits: Limits) -> None:
        """Take the first step."""
        self._advance(lane, limits, lambda: next(lane.steps))

    def sleep(self, lanes: Sequence[Lane[Any]], until_s: float) -> None:
        """Take steps as messages complete, until a lane is over or the time has come."""
        while True:
            while self._takes_steps():
                pass
            if any(lane.over for lane in lanes) or self._world.now_s >= until_s:
                return
            deadlines = [limits.deadline_s for _, _, limits in self._at.values()]
            self._process().wait(min([until_s, *(d for d in deadlines if d > self._world.now_s)]))

    def end(self, lanes: Sequence[Lane[Any]]) -> None:
        """Nothing is left behind here."""

    def _takes_steps(self) -> bool:
        """Let every lane go on that can; say whether any did, for that may let others."""
        before = {number: op for number, (_, op, _) in self._at.items()}
        for lane, op, limits in list(self._at.values()):
            self._go_on(lane, op, limits)
        return {number: op for number, (_, op, _) in self._at.items()} != before

    def _go_on(self, lane: Lane[Any], op: Op, limits: Limits) -> None:
        # A lane that was given up goes on, too, as its thread would: to find that out, and say farewell.
        if op.over and op.error is None:
            self._advance(lane, limits, lambda: next(lane.steps))
        elif op.over or self._world.now_s >= limits.deadline_s:
            error = op.error or deadline_passed(lane.progress.peer)
            self._advance(lane, limits, lambda: lane.steps.throw(error))

    def _advance(self, lane: Lane[Any], limits: Limits, step: Callable[[], Any]) -> None:
        try:
            op = step()
        except StopIteration as stop:
            self._at.pop(id(lane), None)
            lane.settle(stop.value, None)
        except Exception as error:
            self._at.pop(id(lane), None)
            lane.settle(None, error)
        else:
            self._at[id(lane)] = (lane, op, limits)
            lane.progress.waiting_since_s = self._world.now_s
            if op.over:
                self._go_on(lane, op, limits)
