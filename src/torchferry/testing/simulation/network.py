"""The simulated link: sends and receives are matched by tag, and messages are delayed or damaged.

It behaves like gloo: a buffer is read when its bytes are sent and not when the send is posted. Shortly
after a peer dies, the waits for messages that have not started fail, and so does every new send or receive.
The wait for a message that was cut in the middle goes on. Closing ends all waits of the rank that closes.
For its peers, it is like the death of that rank.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from torchferry.engine.push.lanes import Lane, Runner, deadline_passed
from torchferry.engine.push.relay import Until
from torchferry.errors import FerryError, LinkBroken
from torchferry.links.base import FRAME_TAG, LENGTH_TAG, Link
from torchferry.testing.simulation.world import Process, World

_NOTICE_S = 0.01


class Damage(NamedTuple):
    """The damage to the n-th message that is matched with its receive."""

    message: int
    kind: str


class Op:
    """A send or a receive that was posted."""

    def __init__(self, owner: int, peer: int, buffer: torch.Tensor) -> None:
        self.owner = owner
        self.peer = peer
        self.buffer = buffer
        self.over = False
        self.in_flight = False
        self.counts = False
        self.error: FerryError | None = None

    def wait(self, timeout_s: float) -> None:
        """Not called: the simulated runner polls `over` instead."""
        raise NotImplementedError


class Network:
    """The network between the processes of one world."""

    def __init__(self, world: World, damages: Sequence[Damage], delay_s: Callable[[], float]) -> None:
        self.max_in_flight_bytes: defaultdict[int, int] = defaultdict(int)
        self.matched = 0
        self._world = world
        self._damages = {damage.message: damage.kind for damage in damages}
        self._delay_s = delay_s
        self._waiting: defaultdict[tuple[int, int, int, str], deque[Op]] = defaultdict(deque)
        self._open: list[Op] = []
        self._closed: set[frozenset[int]] = set()

    def link(self, rank: int) -> SimulatedLink:
        """Return the link of one rank."""
        return SimulatedLink(self, rank)

    def post(self, op: Op, tag: int, direction: str) -> None:
        """Post a send or a receive; the message starts if its counterpart is already posted."""
        self.check(op.owner, op.peer)
        self._open.append(op)
        if tag not in (LENGTH_TAG, FRAME_TAG):
            op.counts = True
            posted = sum(each.buffer.nbytes for each in self._open if each.owner == op.owner and each.counts)
            self.max_in_flight_bytes[op.owner] = max(self.max_in_flight_bytes[op.owner], posted)
        sender, receiver = (op.owner, op.peer) if direction == "send" else (op.peer, op.owner)
        other = "recv" if direction == "send" else "send"
        partners = self._waiting[sender, receiver, tag, other]
        if partners:
            partner = partners.popleft()
            self._match(op, partner) if direction == "send" else self._match(partner, op)
        else:
            self._waiting[sender, receiver, tag, direction].append(op)

    def check(self, rank: int, peer: int) -> None:
        """Check the connection between two ranks.

        Raises:
            LinkBroken: the connection is gone.
        """
        if frozenset({rank, peer}) in self._closed or (
            self._world.is_gone(peer)
            and self._world.now_s >= (self._world.processes[peer].killed_s or 0) + _NOTICE_S
        ):
            raise LinkBroken(f"the connection to rank {peer} is gone", peer=peer)

    def kill(self, rank: int) -> None:
        """Kill a process; after a short time, fail the waits of its peers."""
        self._world.kill(rank)
        self._world.at(self._world.now_s + _NOTICE_S, lambda: self._fail_waits(rank))

    def close(self, rank: int) -> None:
        """Close every connection of a rank."""
        for peer in self._world.processes:
            self._closed.add(frozenset({rank, peer}))
        self._fail_waits(rank, also_owner=True)

    def _fail_waits(self, rank: int, *, also_owner: bool = False) -> None:
        for op in self._open:
            if op.over or rank not in (op.owner, op.peer):
                continue
            if (op.owner == rank and also_owner) or (op.peer == rank and not op.in_flight):
                self._finish(op, LinkBroken(f"connection with rank {rank} closed", peer=op.peer))

    def _match(self, send: Op, recv: Op) -> None:
        kind = self._damages.get(self.matched)
        self.matched += 1
        if kind == "lose":
            send.in_flight = recv.in_flight = True
            return
        start_s = self._world.now_s + self._delay_s()
        end_s = start_s + self._delay_s()
        self._world.at(start_s, lambda: self._begin(send, recv, kind, end_s))

    def _begin(self, send: Op, recv: Op, kind: str | None, end_s: float) -> None:
        if send.over or recv.over or self._world.is_gone(send.owner) or self._world.is_gone(recv.owner):
            return
        send.in_flight = recv.in_flight = True
        data = _damaged(send.buffer.detach().clone(), kind, self._world)
        # Half of the message arrives at once: a peer that dies now leaves it incomplete.
        _fill(recv.buffer, data[: data.numel() // 2])
        self._world.at(end_s, lambda: self._end(send, recv, data))

    def _end(self, send: Op, recv: Op, data: torch.Tensor) -> None:
        if self._world.is_gone(send.owner) or self._world.is_gone(recv.owner) or recv.over or send.over:
            return
        self._finish(send, None)
        if data.nbytes > recv.buffer.nbytes:
            self._finish(recv, LinkBroken("the message is longer than its receive buffer", peer=recv.peer))
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


def _damaged(data: torch.Tensor, kind: str | None, world: World) -> torch.Tensor:
    data = data.view(torch.uint8)
    if kind == "flip":
        data[world.chance.randrange(data.numel())] ^= 1 << world.chance.randrange(8)
    elif kind == "truncate":
        data = data[: world.chance.randrange(data.numel())]
    elif kind == "extend":
        data = torch.cat([data, torch.ones(8, dtype=torch.uint8, device="cpu")])
    elif kind == "stale":
        # A message of the same size, with the bytes of another state.
        data = data.roll(1) + 1
    return data


class SimulatedLink(Link):
    """The link of one rank."""

    rank: int
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


class SimulatedRunner(Runner):
    """Runs the steps of a simulated process's lanes by the world's clock."""

    def __init__(self, world: World, process: Callable[[], Process]) -> None:
        super().__init__()
        self._world = world
        self._process = process
        self._pending: dict[int, tuple[Lane[Any], Op | Until, float]] = {}

    def now_s(self) -> float:
        """Return the simulated time."""
        return self._world.now_s

    def start(self, lane: Lane[Any], deadline_s: float) -> None:
        """Run the first step."""
        self._advance(lane, deadline_s)

    def sleep(self, lanes: Sequence[Lane[Any]], until_s: float) -> None:
        """Run steps as messages complete, until a lane is over or `until_s` is reached."""
        while True:
            while self._run_ready_lanes():
                pass
            if any(lane.over for lane in lanes) or self._world.now_s >= until_s:
                return
            deadlines = [deadline_s for _, _, deadline_s in self._pending.values()]
            self._process().wait(min([until_s, *(d for d in deadlines if d > self._world.now_s)]))

    def end(self) -> None:
        """Do nothing: there are no threads to end."""

    def _run_ready_lanes(self) -> bool:
        """Continue every lane that can run; return whether any did, because that may unblock others."""
        before = {number: op for number, (_, op, _) in self._pending.items()}
        for lane, op, deadline_s in list(self._pending.values()):
            self._continue(lane, op, deadline_s)
        return {number: op for number, (_, op, _) in self._pending.items()} != before

    def _continue(self, lane: Lane[Any], pending: Op | Until, deadline_s: float) -> None:
        # A cancelled lane continues too, as its thread would: it sends an abort and ends.
        if isinstance(pending, Until):
            is_over, failure = pending.holds(), None
        else:
            is_over, failure = pending.over, pending.error
        if is_over:
            self._advance(lane, deadline_s, failure)
        elif self._world.now_s >= deadline_s:
            self._advance(lane, deadline_s, deadline_passed(lane.progress.peer))

    def _advance(self, lane: Lane[Any], deadline_s: float, failure: FerryError | None = None) -> None:
        pending = lane.step(failure)
        if pending is None:
            self._pending.pop(id(lane), None)
            return
        assert isinstance(pending, (Op, Until)), "a simulated lane waits for the simulated network"
        self._pending[id(lane)] = (lane, pending, deadline_s)
        lane.progress.waiting_since_s = self._world.now_s
        if pending.holds() if isinstance(pending, Until) else pending.over:
            self._continue(lane, pending, deadline_s)
