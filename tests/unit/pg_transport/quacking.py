"""A group that only quacks like one: `send`, `recv` and `rank`, inside one process.

Messages are copies in mailboxes, so a test can send and then receive in the same thread.
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

    def waiting(self) -> int:
        """Count the messages that nobody took."""
        return sum(len(box) for box in self.boxes.values())


class Group:
    """One rank's end. `received_into` lists the memory that messages were received into."""

    def __init__(self, mail: Mailboxes, rank: int) -> None:
        self._mail = mail
        self._rank = rank
        self.received_into: list[tuple[int, int]] = []

    def rank(self) -> int:
        return self._rank

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> Work:
        (tensor,) = tensors
        self._mail.boxes[self._rank, dst, tag].append(tensor.clone())
        return Work()

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int) -> Work:
        (tensor,) = tensors
        self.received_into.append((tensor.data_ptr(), tensor.nbytes))
        return Work(self._mail.boxes[src, self._rank, tag], tensor)


class SizedGroup(Group):
    """Also knows how many ranks there are, as a real group does."""

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


class Ends:
    """A sender, rank 0, and a receiver, rank 1. Keywords are those of the receiver's PGTransport."""

    def __init__(
        self, local: object = None, *, sender: dict[str, Any] | None = None, **receiver: Any
    ) -> None:
        self.mail = Mailboxes()
        self.group = Group(self.mail, 1)
        callback = None if local is None else lambda: local
        self.sender = PGTransport(Group(self.mail, 0), TIMEOUT_S, "cpu", **(sender or {}))
        self.receiver = PGTransport(self.group, TIMEOUT_S, "cpu", callback, **receiver)

    def transfer(self, state: object) -> Any:
        self.sender.send_checkpoint([1], state)
        return self.receiver.recv_checkpoint(0)
