"""Links in memory that behave like gloo in one respect, or like a user's program."""

from __future__ import annotations

from typing import Any

import torch

from torchferry.links.base import Pending
from torchferry.testing import MemoryLink, MemoryNetwork
from torchferry.testing.memory_link import PendingReceive


class ShortLink(MemoryLink):
    """Accepts a message that is shorter than its buffer, as gloo does, unless `sends_short` is False."""

    def __init__(self, network: MemoryNetwork, rank: int, sends_short: bool = True) -> None:
        super().__init__(network, rank)
        self.sends_short = sends_short

    def recv(self, buffer: torch.Tensor, peer: int, tag: int) -> Pending:
        return _ShortReceive(self._network, (peer, self.rank, tag), buffer)


class _ShortReceive(PendingReceive):
    def wait(self, timeout_s: float) -> None:
        message = self._network.get(self._address, timeout_s)
        self._buffer.view(torch.uint8)[: message.nbytes] = message.view(torch.uint8)


class FreeingLink(ShortLink):
    """Frees a tensor's memory after the first message to or from it completed, as sharded training does."""

    def __init__(self, network: MemoryNetwork, rank: int, tensor: torch.Tensor) -> None:
        super().__init__(network, rank)
        self._tensor = tensor

    def recv(self, buffer: torch.Tensor, peer: int, tag: int) -> Pending:
        return self._freeing(super().recv(buffer, peer, tag), buffer)

    def send(self, buffer: torch.Tensor, peer: int, tag: int) -> Pending:
        return self._freeing(super().send(buffer, peer, tag), buffer)

    def _freeing(self, pending: Any, buffer: torch.Tensor) -> Pending:
        storage = self._tensor.untyped_storage()
        if buffer.untyped_storage().data_ptr() != storage.data_ptr():
            return pending  # type: ignore[no-any-return]

        class Freeing:
            def wait(self, timeout_s: float) -> None:
                pending.wait(timeout_s)
                storage.resize_(0)

        return Freeing()
