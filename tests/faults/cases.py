"""The fault matrix: every fault, its victim, the point of the transfer, and the error that survivors raise.

test_matrix.py runs the cases; docs/faults.md lists them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from tests.faults.jobs import DIGEST_BLOCK, FRAME, LAYERS, LENGTH, message

FAULTS = {
    "kill": "SIGKILL",
    "os_exit": "`os._exit`",
    "sys_exit": "`sys.exit` in a signal handler",
    "raise": "an exception inside the transfer",
    "stop": "SIGSTOP",
    "pause": "SIGSTOP, then SIGCONT in time",
    "cut": "SIGKILL in the middle of a message",
}


class Point(NamedTuple):
    """The point at which a fault happens: just before a message is posted, or after the return."""

    name: str
    position: int | None


BEFORE_METADATA = Point("before metadata", LENGTH)
IN_METADATA = Point("in metadata", FRAME)
FIRST = Point("first message", message(0))
MIDDLE = Point("middle message", message(LAYERS // 2))
LAST = Point("last message", message(LAYERS - 1))
AFTER_LAST = Point("after the last message", DIGEST_BLOCK)
RETURNED = Point("after the call returned", None)
POINTS = [BEFORE_METADATA, IN_METADATA, FIRST, MIDDLE, LAST, AFTER_LAST, RETURNED]


@dataclass(frozen=True)
class Case:
    """One fault, and what the survivor sees: an error within a time limit, or the exact state.

    `runs_in` is "test", "test-all" or "faults": the smallest goal of the Makefile that runs the case. The
    payload goes over the "group" or through "memory", as `via` says.
    """

    fault: str
    victim: str
    point: Point
    receivers: int = 1
    runs_in: str = "faults"
    via: str = "group"

    @property
    def name(self) -> str:
        """The id of the test."""
        of_receivers = "" if self.receivers == 1 else f"-of-{self.receivers}"
        by_memory = "-by_memory" if self.via == "memory" else ""
        return f"{self.fault}-{self.victim}{of_receivers}-{self.point.name.replace(' ', '_')}{by_memory}"

    @property
    def survives(self) -> bool:
        """Whether the transfer succeeds despite the fault."""
        return self.fault == "pause" or self.point is RETURNED

    @property
    def errors(self) -> tuple[str, ...]:
        """The names of the errors that a survivor may raise; empty if the transfer succeeds.

        At the first message, timing decides whether the link already had the local tensors. The test checks
        that the error describes the local tensors correctly.
        """
        if self.survives:
            return ()
        plain, torn = (
            ("LinkTimeout", "TornAndLate") if self.fault == "stop" else ("LinkBroken", "TornAndBroken")
        )
        if self.victim == "receiver" or self.point in (BEFORE_METADATA, IN_METADATA):
            return (plain,)
        return (plain, torn) if self.point is FIRST and self.fault != "cut" else (torn,)

    @property
    def when(self) -> str:
        """The time limit for a survivor's error."""
        if self.survives:
            return "at the end"
        return "at the deadline, + 0.5 s at most" if self.fault == "stop" else "within 1 s"


def _points(fault: str) -> list[Point]:
    if fault == "cut":
        return [FIRST, MIDDLE, LAST]
    # After the return, no callback can raise and no transfer can be cancelled.
    return [point for point in POINTS if point is not RETURNED or fault not in ("raise", "sys_exit")]


_TEST = {
    ("kill", "sender", MIDDLE),
    ("kill", "receiver", LAST),
    ("os_exit", "receiver", FIRST),
    ("sys_exit", "sender", LAST),
    ("raise", "receiver", MIDDLE),
    ("stop", "sender", MIDDLE),
    ("pause", "receiver", LAST),
    ("cut", "receiver", MIDDLE),
}
_TEST_ALL = {
    ("kill", "sender", IN_METADATA),
    ("kill", "sender", RETURNED),
    ("kill", "receiver", BEFORE_METADATA),
    ("raise", "sender", AFTER_LAST),
    ("stop", "receiver", MIDDLE),
    ("pause", "sender", MIDDLE),
    ("cut", "sender", MIDDLE),
}


def _pair(fault: str, victim: str, point: Point) -> Case:
    key = (fault, victim, point)
    return Case(
        fault, victim, point, runs_in="test" if key in _TEST else "test-all" if key in _TEST_ALL else "faults"
    )


def _one_of_three(fault: str, point: Point) -> Case:
    runs_in = {("kill", MIDDLE): "test", ("stop", MIDDLE): "test-all", ("cut", MIDDLE): "test-all"}
    return Case(fault, "receiver", point, receivers=3, runs_in=runs_in.get((fault, point), "faults"))


PAIRS = [
    _pair(fault, victim, point)
    for fault in FAULTS
    for victim in ("sender", "receiver")
    for point in _points(fault)
]
ONE_OF_THREE = [_one_of_three(fault, point) for fault in FAULTS for point in _points(fault)]
SENDER_OF_THREE = [
    Case(fault, "sender", MIDDLE, receivers=3, runs_in="test" if fault == "kill" else "faults")
    for fault in FAULTS
    # An exception in the lane to one receiver is not a fault of the whole sender.
    if fault != "raise"
]


_MEMORY_TEST = {
    ("kill", "sender", MIDDLE),
    ("kill", "receiver", FIRST),
    ("sys_exit", "receiver", MIDDLE),
    ("raise", "sender", LAST),
    ("stop", "receiver", MIDDLE),
    ("cut", "sender", MIDDLE),
}


def through_memory(listed: list[Case]) -> list[Case]:
    """Return the same cases through memory: survivors see the same."""
    goals = {True: "test", False: "faults"}
    return [
        replace(
            case,
            via="memory",
            runs_in=goals[case.receivers == 1 and (case.fault, case.victim, case.point) in _MEMORY_TEST],
        )
        for case in listed
    ]
