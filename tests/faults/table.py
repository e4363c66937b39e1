"""Renders docs/faults.md from the fault tests: the cases of the matrix, and the other promises."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from types import ModuleType

from tests.faults import (
    cases,
    pull_cases,
    test_leaks,
    test_local_work,
    test_matrix,
    test_promises,
    test_pull_matrix,
    test_relays,
)
from tests.faults.cases import Case
from tests.faults.promise import Promise
from tests.faults.pull_cases import PullCase

PAGE = Path(__file__).parents[2] / "docs" / "faults.md"

OPENING = """\
# Behaviour on faults

`scripts/fault_table.py` writes this page from the tests in `tests/faults`, which run every case with real
processes. The last part is about `serve` and `fetch`, the rest about `PGTransport` on gloo. A test checks
that the page is up to date. `make test` runs one case of each kind of fault and a test of each promise;
`make faults` runs everything.

These rules hold for every transfer of `PGTransport`:

- One deadline covers a transfer. While the call waits for a peer, it raises a `TimeoutError` at most 0.5 s
  after the deadline. Local work before the first byte (the `state_dict` function, describing, comparing) and
  after the last byte (assembling the state) is not interrupted; the deadline is checked after each step.
- If the process of a peer ends while this process waits for it, the call raises a `ConnectionError` within
  1 s, between messages or in the middle of one. Once `send_checkpoint` has returned, the sender's process may
  exit: the receiver still completes.
- The `TimeoutError` and the `ConnectionError` name the peer and the phase. Once tensors are being
  transferred, they also name the path, the bytes done and the bytes in total.
- If local tensors were changed, the error is `TargetTorn` or one of its subclasses, `TornAndLate` and
  `TornAndBroken`. It lists the paths that are whole, torn and untouched; the tests compare the lists with the
  tensors. After Ctrl-C, a note on the `KeyboardInterrupt` says the same. Once the error is raised, no more
  bytes are written.
- If a transfer fails while messages are still pending, the next call on its group raises `GroupBroken`:
  create a new group of the surviving ranks. If the sender refuses to send its state, if a receiver rejects
  it, or if bytes of tensors arrive damaged, the group stays usable. Damaged metadata breaks the group.
- All of this holds whether the payload goes over the group or, on one machine, through memory. Memory leaves
  no messages pending, but a failed transfer breaks its group all the same: failures are handled alike on one
  machine and on several. With an offer of memory, a receiver that rejects a state does not get its bytes.
- If a peer ends in the middle of a message, gloo may block a thread that can't be interrupted. It ends at the
  transfer's deadline. No other thread is left.
- If a backend other than gloo can't detect that a peer is gone, the deadline still applies.
"""


def render() -> str:
    """Return the whole page."""
    return "\n".join([OPENING, *_matrix(), *_promises(), *_pull()])


def _matrix() -> Iterator[str]:
    yield "## Faults at every point of a transfer\n"
    yield (
        "The state has 64 MiB in eight messages, and is received in place. A fault happens just before a "
        'message is posted,\nwhen all earlier messages are complete. "Before metadata" is before the length '
        'of the metadata, "in metadata" is\nbetween the length and the metadata, and "after the last '
        'message" is before the digests. Faults "in the middle of a\nmessage" and "after the call '
        'returned" happen at other points. The survivor is the process at the other end.\nEvery case runs '
        "twice, with the payload over the group and through memory, and has the same result.\n"
    )
    count = len(cases.PAIRS)
    yield from _faults(
        f"Two processes: {count} cases", cases.PAIRS, "test_a_fault_of_one_side_raises_an_error_on_the_other"
    )
    count = len(cases.ONE_OF_THREE)
    yield from _faults(
        f"Three receivers, a fault of one receiver: {count} cases",
        cases.ONE_OF_THREE,
        "test_a_fault_of_one_receiver_does_not_affect_the_others",
        note='The other two receivers get the exact state. Unless the table says "none", the sender raises\n'
        "`SendFailed` (`SendLate` or `SendBroken`): `delivered` lists the other two ranks, and `failed` has\n"
        "the error below for the victim.",
    )
    count = len(cases.SENDER_OF_THREE)
    yield from _faults(
        f"Three receivers, a fault of the sender: {count} cases",
        cases.SENDER_OF_THREE,
        "test_a_fault_of_the_sender_raises_an_error_on_every_receiver",
        note="Each receiver raises this error, or has the exact state if it was already complete.",
    )


def _faults(title: str, listed: list[Case], test: str, note: str = "") -> Iterator[str]:
    assert hasattr(test_matrix, test), f"there is no {test}"
    yield f"### {title}\n"
    yield f"{note}{' ' if note else ''}Test: `test_matrix.py::{test}`.\n"
    yield "| fault | victim | point | error of the survivor | time |"
    yield "| --- | --- | --- | --- | --- |"
    for (fault, victim, errors, when), alike in groupby(
        listed, lambda case: (case.fault, case.victim, _errors(case), case.when)
    ):
        points = "; ".join(case.point.name for case in alike)
        yield f"| {cases.FAULTS[fault]} | {victim} | {points} | {errors} | {when} |"
    yield ""


def _errors(case: Case) -> str:
    return " or ".join(f"`{name}`" for name in case.errors) or "none: the transfer succeeds"


def _promises() -> Iterator[str]:
    yield "## Everything else\n"
    yield (
        "The last column has the numbers of the defects of torch's PGTransport that the test covers (see\n"
        "`tests/defects/test_rows.py`).\n"
    )
    yield "| situation | promise | test | defects |"
    yield "| --- | --- | --- | --- |"
    for module in (test_promises, test_local_work, test_relays, test_leaks):
        for name, promise in _promises_in(module):
            file = module.__name__.rpartition(".")[2]
            rows = ", ".join(map(str, promise.rows))
            yield f"| {promise.when} | {promise.then} | `{file}.py::{name}` | {rows} |"
    yield ""


def _promises_in(module: ModuleType) -> Iterator[tuple[str, Promise]]:
    for name, test in vars(module).items():
        if name.startswith("test_"):
            promise = getattr(test, "promise", None)
            assert isinstance(promise, Promise), f"{name} has no @promises"
            yield name, promise


PULL = """\
## Faults at every step of a fetch

The state has 16 MiB in 16 chunks, and is fetched in place. A proxy between the receiver and each source
injects the fault when a source is first asked at the step: before the source has the request (connect,
confirm), or in the middle of the response (manifest, digests) or of the chunk (first, middle and last
chunk). Faults of the receiver's messages damage the request, those of the source's messages damage the
response. Where allocations of the receiver fail, it fetches into fresh tensors.

On one machine, chunks come through memory, and the other steps over TCP all the same. There the proxy stands
on the Unix socket, and the step is the request for the range that has the chunk: the response has no bytes of
it, only the memory that the receiver copies them from. A response is cut in its head or in its body. Wrong
bytes are in the memory.

In every case, the tests also check that

- the error is a `FerryError` and the builtin that fits, and describes the local tensors correctly;
- the receiver has no thread and no descriptor left afterwards, and neither have the sources;
- every lease has ended;
- the next fetch, from the same sources and into the same tensors, returns the exact state;
- `report.confirmed` is true only if the sources know it. If the confirmation is lost, there is one warning.
"""


def _pull() -> Iterator[str]:
    yield PULL
    yield from _pull_faults(
        "One source",
        pull_cases.PULLS[1],
        "test_a_fault_with_one_source_ends_in_a_typed_error_or_the_exact_state",
    )
    yield from _pull_faults(
        "Two sources, of which the other lives",
        pull_cases.PULLS[2],
        "test_a_fault_of_one_of_two_sources_does_not_fail_the_fetch",
    )
    yield from _pull_faults(
        "One source, over memory",
        pull_cases.PULLS_OVER_MEMORY[1],
        "test_a_fault_with_one_source_ends_in_a_typed_error_or_the_exact_state",
    )
    yield from _pull_faults(
        "Two sources, of which the other lives, over memory",
        pull_cases.PULLS_OVER_MEMORY[2],
        "test_a_fault_of_one_of_two_sources_does_not_fail_the_fetch",
    )


def _pull_faults(title: str, listed: list[PullCase], test: str) -> Iterator[str]:
    assert hasattr(test_pull_matrix, test), f"there is no {test}"
    yield f"### {title}: {len(listed)} cases\n"
    yield f"Test: `test_pull_matrix.py::{test}`.\n"
    yield "| fault | victim | step | error of the fetch | time |"
    yield "| --- | --- | --- | --- | --- |"
    for (fault, victim, outcome, when), alike in groupby(
        listed, lambda case: (case.fault, case.victim, _pull_outcome(case), case.when)
    ):
        steps = "; ".join(case.step for case in alike)
        yield f"| {pull_cases.FAULTS[fault]} | {victim} | {steps} | {outcome} | {when} |"
    yield ""


def _pull_outcome(case: PullCase) -> str:
    if case.kills_receiver:
        return "none: its process ends; the sources serve others"
    named = [f"`{name}`" for name in case.errors if name]
    if "" not in case.errors:
        return " or ".join(named)
    return " or ".join([*named, "none: the fetch succeeds"])
