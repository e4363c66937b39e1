"""A fake process group with only `send`, `recv` and `rank`, for ranks of one process.

Messages are copied to mailboxes, so a test can send and then receive in the same thread.
"""

from __future__ import annotations

from collections import defaultdict, deque
from datetime import timedelta
from typing import Any

import torch

from torchferry import PGTransport

TIMEOUT_S = 10.0


class Mailboxes:
    def __init__(self) -> None:
        self.boxes: defaultdict[tuple[int, int, int], deque[torch.Tensor]] = defaultdict(deque)

    def unread(self) -> int:
        """Count the messages that were sent but not received."""
        return sum(len(box) for box in self.boxes.values())


class Group:
    """The group as one rank sees it. `received_into` lists the memory that messages were received into."""

    def __init__(self, mailboxes: Mailboxes, rank: int) -> None:
        self._mailboxes = mailboxes
        self._rank = rank
        self.received_into: list[tuple[int, int]] = []

    def rank(self) -> int:
        return self._rank

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> Work:
        (tensor,) = tensors
        self._mailboxes.boxes[self._rank, dst, tag].append(tensor.clone())
        return Work()

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int) -> Work:
        (tensor,) = tensors
        self.received_into.append((tensor.data_ptr(), tensor.nbytes))
        return Work(self._mailboxes.boxes[src, self._rank, tag], tensor)


class SizedGroup(Group):
    """A fake group that has `size`, as a real group does."""

    def size(self) -> int:
        return 4


class Work:
    def __init__(self, box: deque[torch.Tensor] | None = None, buffer: torch.Tensor | None = None) -> None:
        self._box = box
        self._buffer = buffer

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._box is not None and self._buffer is not None:
            if not self._box:
                raise RuntimeError("Timed out waiting for recv operation to complete")
            self._buffer.copy_(self._box.popleft().view(self._buffer.dtype))
        return True


class TransportPair:
    """The transports of a sender, rank 0, and a receiver, rank 1. Other keywords are the receiver's."""

    def __init__(
        self, local: object = None, *, sender: dict[str, Any] | None = None, **receiver: Any
    ) -> None:
        self.mailboxes = Mailboxes()
        self.group = Group(self.mailboxes, 1)
        callback = None if local is None else lambda: local
        self.sender = PGTransport(Group(self.mailboxes, 0), TIMEOUT_S, "cpu", **(sender or {}))
        self.receiver = PGTransport(self.group, TIMEOUT_S, "cpu", callback, **receiver)

    def transfer(self, state: object) -> Any:
        self.sender.send_checkpoint([1], state)
        return self.receiver.recv_checkpoint(0)
