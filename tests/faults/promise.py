"""The promise that a fault test verifies. scripts/fault_table.py lists all of them in docs/faults.md."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Promise:
    """A situation, the promised behaviour, and the rows of the defects of torch's PGTransport it covers."""

    when: str
    then: str
    rows: tuple[int, ...] = ()


def promises(when: str, then: str, rows: tuple[int, ...] = ()) -> Callable[[F], F]:
    """Attach a promise to a test."""

    def attach(test: F) -> F:
        test.promise = Promise(when, then, rows)  # type: ignore[attr-defined]
        return test

    return attach
