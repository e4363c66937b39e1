"""Writes docs/faults.md from the fault tests themselves: their cases, and what they say that they show."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from types import ModuleType

from tests.faults import cases, test_leaks, test_matrix, test_own_work, test_promises, test_relays
from tests.faults.cases import Case
from tests.faults.promised import Promise

PAGE = Path(__file__).parents[2] / "docs" / "faults.md"

OPENING = """\
# What happens when things go wrong

This page is written by `scripts/fault_table.py` from the tests in `tests/faults`, which play every case with
real processes on gloo; a test sees to it that it is up to date. `make test` plays some of the matrix and all
of the rest, `make faults` plays everything.

What always holds:

- One deadline covers a transfer. Past it, the error is a `TimeoutError`, at most 0.5 s late. Only what this
  process itself does before the first byte moves (your own `state_dict` function, describing, comparing), and
  when all has arrived (putting the state together), is not interrupted: the deadline is looked at between.
- A peer that keeps this process waiting and is gone is found within 1 s, between messages or in the middle of
  one. The error is a `ConnectionError`. One that leaves when all it had to send is on its way is not missed.
- Both name the peer and the phase; once tensors move, also the path and how many bytes are done of how many.
- An error that is not `TargetTorn` means that no local tensor was changed. `TargetTorn` says which paths are
  whole, torn and untouched, and the tests compare that with what the tensors really hold. Once the error
  is raised, nothing more is written.
- After a failure, the next call on that group raises `GroupBroken` and says to make a new one; a new group
  among the living works. Where a receiver merely refuses, the group stays good.
- A thread that gloo holds in the middle of a cut message can't be woken; it ends at the transfer's deadline.
  No other is left behind.
- Where a backend other than gloo can't tell that a peer is gone, the deadline still holds.
"""


def render() -> str:
    """Give the whole page."""
    return "\n".join([OPENING, *_matrix(), *_promises()])


def _matrix() -> Iterator[str]:
    yield "## Faults at every point of a transfer\n"
    yield (
        "64 MiB in eight messages, received in place. A point is just before that message is posted, all "
        "earlier ones\nbeing complete. The survivor is the process at the other end.\n"
    )
    count = len(cases.PAIRS)
    yield from _faults(
        f"Two processes: {count} cases", cases.PAIRS, "test_a_fault_of_one_side_is_told_to_the_other"
    )
    count = len(cases.ONE_OF_THREE)
    yield from _faults(
        f"Three receivers, one of them the victim: {count} cases",
        cases.ONE_OF_THREE,
        "test_a_fault_of_one_receiver_leaves_the_others_whole",
        note="The other two finish, with the exact state. The sender raises `SendFailed`, as `SendLate` or\n"
        "`SendBroken`, with `delivered` and, for the victim, the error below.",
    )
    count = len(cases.SENDER_OF_THREE)
    yield from _faults(
        f"Three receivers, the sender the victim: {count} cases",
        cases.SENDER_OF_THREE,
        "test_a_fault_of_the_sender_is_told_to_every_receiver",
        note="Each receiver sees this, or has the exact state if it was through already.",
    )


def _faults(title: str, played: list[Case], test: str, note: str = "") -> Iterator[str]:
    assert hasattr(test_matrix, test), f"there is no {test}"
    yield f"### {title}\n"
    yield f"{note}{' ' if note else ''}Shown by `test_matrix.py::{test}`.\n"
    yield "| what happens | to the | at | the survivor sees | when |"
    yield "| --- | --- | --- | --- | --- |"
    for (fault, victim, sees, when), alike in groupby(
        played, lambda case: (case.fault, case.victim, _sees(case), case.when)
    ):
        points = "; ".join(case.point.name for case in alike)
        yield f"| {cases.FAULTS[fault]} | {victim} | {points} | {sees} | {when} |"
    yield ""


def _sees(case: Case) -> str:
    return " or ".join(f"`{name}`" for name in case.errors) or "nothing: the transfer succeeds"


def _promises() -> Iterator[str]:
    yield "## Everything else\n"
    yield "The last column has the rows of what torch's PGTransport gets wrong for which the test stands.\n"
    yield "| when | what is promised | shown by | rows |"
    yield "| --- | --- | --- | --- |"
    for module in (test_promises, test_own_work, test_relays, test_leaks):
        for name, promise in _shown(module):
            file = module.__name__.rpartition(".")[2]
            rows = ", ".join(map(str, promise.rows))
            yield f"| {promise.when} | {promise.then} | `{file}.py::{name}` | {rows} |"
    yield ""


def _shown(module: ModuleType) -> Iterator[tuple[str, Promise]]:
    for name, test in vars(module).items():
        if name.startswith("test_"):
            promise = getattr(test, "promise", None)
            assert isinstance(promise, Promise), f"{name} does not say what it shows"
            yield name, promise
