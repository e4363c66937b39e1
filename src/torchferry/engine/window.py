"""Messages in flight with one peer: many at once, so that the link is never idle, but bounded in bytes.

Code that waits is a generator that yields the message it waits for. A thread runs it on a real link, and a
scheduler with its own clock runs it in the simulation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from torchferry.links.base import Pending

T = TypeVar("T")

Steps: TypeAlias = Generator[Pending, None, T]
"""Work that yields every message it waits for, and is resumed when that message completed or failed."""


class _Entry(NamedTuple, Generic[T]):
    pending: Pending
    nbytes: int
    in_place: bool
    item: T


class Window(Generic[T]):
    """A queue of messages in flight, each with an item that says what to do when it completes.

    Messages that are sent from or received into the tensors themselves take no extra memory, so up to
    `max_in_place_bytes` may be in flight, and of all others `max_bytes`.
    """

    def __init__(self, max_bytes: int, max_in_place_bytes: int = 0) -> None:
        self._max_bytes = max_bytes
        self._max_in_place_bytes = max_in_place_bytes
        self._entries: deque[_Entry[T]] = deque()
        self._staged_bytes = 0
        self._in_place_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def has_room(self, nbytes: int, *, in_place: bool = False) -> bool:
        """Return whether so many more bytes may be in flight. An empty window takes any message."""
        if not self._entries:
            return True
        if in_place:
            return self._in_place_bytes + self._staged_bytes + nbytes <= self._max_in_place_bytes
        return self._staged_bytes + nbytes <= self._max_bytes

    def add(self, pending: Pending, nbytes: int, item: T, *, in_place: bool = False) -> None:
        """Add a message that was just started."""
        self._entries.append(_Entry(pending, nbytes, in_place, item))
        if in_place:
            self._in_place_bytes += nbytes
        else:
            self._staged_bytes += nbytes

    def pop(self) -> Steps[T]:
        """Wait for the oldest message and return its item.

        Raises:
            LinkError: the message failed.
        """
        entry = self._entries[0]
        yield entry.pending
        self._entries.popleft()
        if entry.in_place:
            self._in_place_bytes -= entry.nbytes
        else:
            self._staged_bytes -= entry.nbytes
        return entry.item
