"""Messages under way with one peer: many at once, so that the link is never idle, but only so many bytes.

What waits is a generator that yields the message it waits for. Whoever runs it decides how waiting is
done: a thread for a real link, a scheduler with a clock of its own in the simulation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from typing import NamedTuple, TypeAlias, TypeVar

from torchferry.links.base import Pending

T = TypeVar("T")

Steps: TypeAlias = Generator[Pending, None, T]
"""Work that yields every message it has to wait for, and is resumed when that is complete or has failed."""


class _Entry(NamedTuple):
    pending: Pending
    nbytes: int
    done: Callable[[], None] | None
    in_place: bool


class Window:
    """A queue of messages. Making room waits for the oldest.

    Messages that land where they belong take no memory, so more of them may be under way: up to
    `most_in_place_bytes` in all.
    """

    def __init__(
        self,
        most_bytes: int,
        most_in_place_bytes: int = 0,
    ) -> None:
        self._most_bytes = most_bytes
        self._most_in_place_bytes = most_in_place_bytes
        self._entries: deque[_Entry] = deque()
        self._nbytes = 0
        self._in_place_bytes = 0

    def __bool__(self) -> bool:
        return bool(self._entries)

    def make_room(self, nbytes: int, *, in_place: bool = False) -> Steps[None]:
        """Wait until so many bytes more may be under way.

        Raises:
            LinkError: a message failed.
        """
        while self._entries and not self._has_room(nbytes, in_place):
            yield from self.finish_oldest()

    def _has_room(self, nbytes: int, in_place: bool) -> bool:
        if in_place:
            return self._in_place_bytes + self._nbytes + nbytes <= self._most_in_place_bytes
        return self._nbytes + nbytes <= self._most_bytes

    def add(
        self,
        pending: Pending,
        nbytes: int,
        done: Callable[[], None] | None = None,
        *,
        in_place: bool = False,
    ) -> None:
        """Note a message that was just started; `done`, if there is one, is called once it is complete."""
        self._entries.append(_Entry(pending, nbytes, done, in_place))
        if in_place:
            self._in_place_bytes += nbytes
        else:
            self._nbytes += nbytes

    def finish(self) -> Steps[None]:
        """Wait for all that is under way.

        Raises:
            LinkError: a message failed.
        """
        while self._entries:
            yield from self.finish_oldest()

    def finish_oldest(self) -> Steps[None]:
        """Wait for the oldest message that is under way; there must be one.

        Raises:
            LinkError: it failed.
        """
        entry = self._entries[0]
        yield entry.pending
        self._entries.popleft()
        if entry.in_place:
            self._in_place_bytes -= entry.nbytes
        else:
            self._nbytes -= entry.nbytes
        if entry.done is not None:
            entry.done()
