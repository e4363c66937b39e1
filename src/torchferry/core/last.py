"""The last answer to a question, for those who are asked the same again and again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Last(Generic[T]):
    """The last answer of a function whose answer depends on nothing but what it was asked.

    >>> last = Last[int]()
    >>> [last.of(asked, lambda: len(asked)) for asked in ([1, 2], [1, 2], [3])]
    [2, 2, 1]
    """

    def __init__(self) -> None:
        self._kept: tuple[object, T] | None = None

    @property
    def answer(self) -> T | None:
        """The last answer, None if there is none."""
        return None if self._kept is None else self._kept[1]

    def of(self, asked: object, answer: Callable[[], T]) -> T:
        """Give the last answer again if the same was asked, and a new one if not.

        Neither may be changed afterwards. Equal items that are the same objects, as they nearly always are,
        are found equal at once.
        """
        if self._kept is None or self._kept[0] != asked:
            self._kept = asked, answer()
        return self._kept[1]
