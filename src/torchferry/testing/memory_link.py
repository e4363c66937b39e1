"""A link inside one process: messages are copies in mailboxes.

A send is complete at once, so a test can push a state and then pull it in the same thread. It counts what
goes over it, and can be told to take no memory but its own, which is how an accelerator's link behaves
towards memory on the host.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque

import torch

from torchferry.errors import LinkBroken, LinkTimeout
from torchferry.links.base import Pending

_Address = tuple[int, int, int]


class MemoryNetwork:
    """Mailboxes between any number of ranks, and a count of what was put into them."""

    def __init__(self) -> None:
        self.messages = 0
        self.nbytes = 0
        self._boxes: defaultdict[_Address, deque[torch.Tensor]] = defaultdict(deque)
        self._changed = threading.Condition()
        self._gone: set[int] = set()

    def link(self, rank: int, *, own_buffers: bool = False) -> MemoryLink:
        """Give the link of one rank. With `own_buffers` it takes no memory but what is staged."""
        return MemoryLink(self, rank, own_buffers=own_buffers)

    def close(self, rank: int) -> None:
        """Let a rank be gone: whoever waits for it, or sends to it, is told."""
        with self._changed:
            self._gone.add(rank)
            self._changed.notify_all()

    def _check(self, rank: int) -> None:
        with self._changed:
            if rank in self._gone:
                raise LinkBroken(f"rank {rank} is gone", peer=rank)

    def _put(self, address: _Address, buffer: torch.Tensor) -> None:
        with self._changed:
            if address[1] in self._gone:
                raise LinkBroken(f"rank {address[1]} is gone", peer=address[1])
            self._boxes[address].append(buffer.clone())
            self.messages += 1
            self.nbytes += buffer.nbytes
            self._changed.notify_all()

    def _get(self, address: _Address, timeout_s: float) -> torch.Tensor:
        with self._changed:
            self._changed.wait_for(lambda: bool(self._boxes[address]) or address[0] in self._gone, timeout_s)
            if self._boxes[address]:
                return self._boxes[address].popleft()
            if address[0] in self._gone:
                raise LinkBroken(f"rank {address[0]} is gone", peer=address[0])
            raise LinkTimeout(f"nothing came from rank {address[0]} in time", peer=address[0])


class MemoryLink:
    """One rank's end of a MemoryNetwork."""

    def __init__(self, network: MemoryNetwork, rank: int, *, own_buffers: bool = False) -> None:
        self._network = network
        self._rank = rank
        self._own_buffers = own_buffers

    @property
    def device(self) -> torch.device:
        """The CPU."""
        return torch.device("cpu")

    def takes(self, device: torch.device) -> bool:
        """Memory of the CPU, unless it insists on its own."""
        return device.type == "cpu" and not self._own_buffers

    @property
    def sends_short(self) -> bool:
        """Sizes must agree."""
        return False

    def send(self, buffer: torch.Tensor, peer: int, tag: int) -> Pending:
        """Put a copy into the peer's mailbox.

        Raises:
            LinkBroken: the peer is gone.
        """
        self._network._put((self._rank, peer, tag), buffer)
        return Sent()

    def recv(self, buffer: torch.Tensor, peer: int, tag: int) -> Pending:
        """Wait, once asked to, for a message of exactly the buffer's size."""
        return Receipt(self._network, (peer, self._rank, tag), buffer)

    def probe(self, peer: int) -> None:
        """Ask the network whether the peer is gone.

        Raises:
            LinkBroken: it is.
        """
        self._network._check(peer)

    def break_off(self, peer: int) -> None:
        """Leave the network: whoever waits for this rank is told."""
        self._network.close(self._rank)


class Sent:
    """A message that is in its mailbox already."""

    def wait(self, timeout_s: float) -> None:
        """Return at once."""


class Receipt:
    """A message that may have to be waited for."""

    def __init__(self, network: MemoryNetwork, address: _Address, buffer: torch.Tensor) -> None:
        self._network = network
        self._address = address
        self._buffer = buffer

    def wait(self, timeout_s: float) -> None:
        """Wait for the message and copy it into the buffer.

        Raises:
            LinkTimeout: nothing came in time.
            LinkBroken: the sender is gone, or its message has another size.
        """
        message = self._network._get(self._address, timeout_s)
        if message.nbytes != self._buffer.nbytes:
            raise LinkBroken(
                f"a message of {message.nbytes} bytes came where {self._buffer.nbytes} were expected",
                peer=self._address[0],
            )
        self._buffer.copy_(message)
