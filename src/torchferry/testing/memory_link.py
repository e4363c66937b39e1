"""A link inside one process: messages are copies in mailboxes.

A send completes at once, so a test can send a state and then receive it in the same thread. The link counts
its messages. It can refuse memory that is not its own, as the link of an accelerator refuses host memory.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque

import torch

from torchferry.errors import LinkBroken, LinkTimeout
from torchferry.links.base import Link, Pending, SharedState

_Address = tuple[int, int, int]


class MemoryNetwork:
    """Mailboxes between any number of ranks, and a count of their messages."""

    def __init__(self) -> None:
        self.messages = 0
        self.nbytes = 0
        self._boxes: dict[_Address, deque[torch.Tensor]] = {}
        self._shared: defaultdict[int, SharedState] = defaultdict(SharedState)
        self._changed = threading.Condition()
        self._gone: set[int] = set()

    def link(self, rank: int, *, own_buffers: bool = False) -> MemoryLink:
        """Return the link of one rank. With `own_buffers` it takes only staging buffers."""
        return MemoryLink(self, rank, own_buffers=own_buffers)

    def close(self, rank: int) -> None:
        """Remove a rank. Sends to it and its own receives fail; messages that it has sent still arrive."""
        with self._changed:
            self._gone.add(rank)
            self._changed.notify_all()

    def check(self, rank: int) -> None:
        """Check that a rank was not removed.

        Raises:
            LinkBroken: it was.
        """
        with self._changed:
            if rank in self._gone:
                raise LinkBroken(f"rank {rank} is gone", peer=rank)

    def put(self, address: _Address, buffer: torch.Tensor) -> None:
        """Put a copy of a message into a mailbox.

        Raises:
            LinkBroken: the receiver was removed.
        """
        self.check(address[1])
        with self._changed:
            self._boxes.setdefault(address, deque()).append(buffer.clone())
            self.messages += 1
            self.nbytes += buffer.nbytes
            self._changed.notify_all()

    def get(self, address: _Address, timeout_s: float) -> torch.Tensor:
        """Take a message from a mailbox.

        Raises:
            LinkTimeout: no message came in time.
            LinkBroken: the receiver was removed, or the sender was and has left no message.
        """
        sender, receiver, _ = address
        with self._changed:
            self._changed.wait_for(
                lambda: address in self._boxes or sender in self._gone or receiver in self._gone, timeout_s
            )
            if receiver in self._gone:
                raise LinkBroken(f"rank {receiver} has closed its link", peer=sender)
            if address in self._boxes:
                message = self._boxes[address].popleft()
                if not self._boxes[address]:
                    del self._boxes[address]
                return message
        self.check(sender)
        raise LinkTimeout(f"nothing came from rank {sender} in time", peer=sender)


class MemoryLink(Link):
    """One rank's end of a MemoryNetwork."""

    rank: int

    def __init__(self, network: MemoryNetwork, rank: int, *, own_buffers: bool = False) -> None:
        super().__init__(network._shared[rank])
        self._network = network
        self.rank = rank
        self._own_buffers = own_buffers

    def can_access(self, device: torch.device) -> bool:
        """Return whether memory is on the CPU; False for any if the link takes only staging buffers."""
        return device.type == "cpu" and not self._own_buffers

    def send(self, buffer: torch.Tensor, peer: int, tag: int) -> Pending:
        """Put a copy into the peer's mailbox.

        Raises:
            LinkBroken: the peer is gone.
        """
        self._network.put((self.rank, peer, tag), buffer)
        return CompletedSend()

    def recv(self, buffer: torch.Tensor, peer: int, tag: int) -> Pending:
        """Return a message that is taken from the mailbox when it is waited for."""
        return PendingReceive(self._network, (peer, self.rank, tag), buffer)

    def check_peer(self, peer: int) -> None:
        """Check that the peer is in the network.

        Raises:
            LinkBroken: it was removed.
        """
        self._network.check(peer)

    def close(self, peer: int) -> None:
        """Leave the network."""
        self._network.close(self.rank)


class CompletedSend:
    """A message that is in its mailbox."""

    def wait(self, timeout_s: float) -> None:
        """Return at once."""


class PendingReceive:
    """A message that a receive waits for."""

    def __init__(self, network: MemoryNetwork, address: _Address, buffer: torch.Tensor) -> None:
        self._network = network
        self._address = address
        self._buffer = buffer

    def wait(self, timeout_s: float) -> None:
        """Wait for the message and copy it into the buffer.

        Raises:
            LinkTimeout: no message came in time.
            LinkBroken: this rank is gone, or the sender is and left no message, or the size is wrong.
        """
        message = self._network.get(self._address, timeout_s)
        if message.nbytes != self._buffer.nbytes:
            raise LinkBroken(
                f"a message has {message.nbytes} bytes, its buffer {self._buffer.nbytes}",
                peer=self._address[0],
            )
        self._buffer.copy_(message)
