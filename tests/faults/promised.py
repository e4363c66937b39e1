"""Says of a fault test what it shows, where scripts/fault_table.py finds it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Promise:
    """What happens, what is then promised, and which defects of torch's PGTransport it stands for, by row."""

    when: str
    then: str
    rows: tuple[int, ...] = ()


def shows(when: str, then: str, rows: tuple[int, ...] = ()) -> Callable[[F], F]:
    """Note what a test shows."""

    def note(test: F) -> F:
        test.promise = Promise(when, then, rows)  # type: ignore[attr-defined]
        return test

    return note
