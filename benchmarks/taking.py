"""One take: all ranks of a case start together, each times itself, and what arrived is checked afterwards."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from benchmarks import gauges
from benchmarks.assembly import Assembly
from benchmarks.portrait import Portrait, differences, poison, portray
from benchmarks.results import Take
from benchmarks.systems.base import SENDER, Session
from benchmarks.works import Case

T = TypeVar("T")

_SHOWN = 3


class Part(msgspec.Struct, frozen=True):
    """What one rank has to say of a take: how it went here, or what went wrong."""

    seconds: float = 0.0
    wire_bytes: int | None = None
    peak_bytes: int | None = None
    phases_s: dict[str, float] = {}
    problem: str | None = None


def take(assembly: Assembly, rank: int, case: Case, session: Session, expected: Portrait) -> list[Part]:
    """Transfer once, and return what every rank has to say of it, in the order of ranks.

    Raises:
        RuntimeError: a rank is gone.
    """
    if session.target is not None:
        poison(session.target)
    gc.collect()
    assembly.wait()
    part = _part(rank, case, session, expected)
    return [msgspec.json.decode(one, type=Part) for one in assembly.share(msgspec.json.encode(part))]


def combine(case: Case, parts: Sequence[Part], *, wired: bool) -> Take:
    """Make one take of what the ranks say: it is over when the last one that counts is done."""
    counted = [parts[rank].seconds for rank in case.timed or range(len(parts))]
    wires = [part.wire_bytes for part in parts[1:] if part.wire_bytes is not None]
    peaks = [part.peak_bytes for part in parts if part.peak_bytes is not None]
    phases = {"send": parts[SENDER].phases_s, "receive": parts[1].phases_s}
    return Take(
        seconds=max(counted),
        wire_bytes=max(wires) if wired and wires else None,
        peak_bytes=max(peaks) if peaks else None,
        phases_s={side: seconds for side, seconds in phases.items() if seconds},
    )


def problem_of(parts: Sequence[Part]) -> str | None:
    """What went wrong, on the first rank that has something to say, None if all went well."""
    return next(
        (f"rank {rank}: {part.problem}" for rank, part in enumerate(parts) if part.problem is not None), None
    )


def attempt(act: Callable[[], T]) -> tuple[T | None, str | None]:
    """Do something that a system does: what it returns, or else what it raised, in words.

    >>> attempt(lambda: 1 // 0)
    (None, 'ZeroDivisionError: integer division or modulo by zero')
    """
    try:
        return act(), None
    except Exception as error:
        return None, f"{type(error).__name__}: {brief(str(error))}"


def _part(rank: int, case: Case, session: Session, expected: Portrait) -> Part:
    """Do this rank's part. Whatever a system raises is a result like any other."""
    start_bytes = gauges.reset_peak()
    received = gauges.received_bytes()
    if case.asleep_s and rank == case.receivers:
        time.sleep(case.asleep_s)
    start_s = time.perf_counter()
    arrived, problem = attempt(session.send if rank == SENDER else session.receive)
    seconds = time.perf_counter() - start_s
    if problem is not None:
        return Part(problem=problem)
    wire_bytes = gauges.received_between(received, gauges.received_bytes())
    peak_bytes = gauges.peak_since(start_bytes)
    if rank != SENDER:
        problem = _difference(expected, arrived)
    return Part(seconds, wire_bytes, peak_bytes, session.phases(), problem)


def _difference(expected: Portrait, arrived: object) -> str | None:
    wrong = differences(expected, portray(arrived))
    if not wrong:
        return None
    shown = ", ".join(wrong[:_SHOWN])
    more = f" and {len(wrong) - _SHOWN:,} more" if len(wrong) > _SHOWN else ""
    return f"what arrived is not what was sent: {shown}{more}"


def brief(message: str) -> str:
    """The first line of an error, and not too much of it.

    >>> brief("Connection closed by peer\\nmore")
    'Connection closed by peer'
    """
    line = message.strip().partition("\n")[0]
    return line if len(line) <= 200 else f"{line[:199]}…"
