"""Messages under way: many at once, so that the link is never idle, but only so many bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from torchferry.core.plan import WINDOW_BYTES
from torchferry.engine.phases import Phases
from torchferry.links.base import Pending


class _Entry(NamedTuple):
    pending: Sequence[Pending]
    nbytes: int
    done: Callable[[], None]


class Window:
    """A queue of messages. Adding one waits for the oldest until there is room."""

    def __init__(self, phases: Phases, most_bytes: int = WINDOW_BYTES) -> None:
        self._phases = phases
        self._most_bytes = most_bytes
        self._entries: deque[_Entry] = deque()
        self._nbytes = 0

    def make_room(self, nbytes: int) -> None:
        """Wait until so many bytes more may be under way.

        Raises:
            LinkError: a message failed, or the deadline passed.
        """
        while self._entries and self._nbytes + nbytes > self._most_bytes:
            self._finish_oldest()

    def add(self, pending: Sequence[Pending], nbytes: int, done: Callable[[], None]) -> None:
        """Note a message that was just started; `done` is called once it is complete."""
        self._entries.append(_Entry(pending, nbytes, done))
        self._nbytes += nbytes

    def finish(self) -> None:
        """Wait for all that is under way.

        Raises:
            LinkError: a message failed, or the deadline passed.
        """
        while self._entries:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        entry = self._entries.popleft()
        for pending in entry.pending:
            pending.wait(self._phases.left_s())
        self._nbytes -= entry.nbytes
        entry.done()


class Staging:
    """Buffers for what can't be sent or received where it lies. Used again and again."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[torch.Tensor] = []

    def take(self, nbytes: int) -> torch.Tensor:
        """Give a flat buffer of exactly this size."""
        fitting = [index for index, buffer in enumerate(self._free) if buffer.numel() >= nbytes]
        if fitting:
            # The smallest, so that a small message does not hold on to the memory of a large one.
            return self._free.pop(min(fitting, key=lambda index: self._free[index].numel()))[:nbytes]
        # All that are free are too small. Kept, they would add up: each message a little larger than the
        # one before would need a new buffer.
        self._free.clear()
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def give_back(self, buffer: torch.Tensor) -> None:
        """Return a buffer that nothing uses any more."""
        whole = buffer.untyped_storage()
        self._free.append(torch.empty(0, dtype=torch.uint8, device=self._device).set_(whole))
