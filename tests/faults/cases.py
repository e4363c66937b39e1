"""The matrix of faults: what happens to whom at which point, and what the others must then see.

Declared once, for the tests that play the cases and for docs/faults.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from tests.faults.scene import FRAME, LAYERS, LENGTH, SEAL, message

FAULTS = {
    "kill": "SIGKILL",
    "exit": "`os._exit`",
    "leave": "`sys.exit` in a signal handler",
    "raise": "an exception in a callback",
    "stop": "SIGSTOP",
    "pause": "SIGSTOP, then SIGCONT in time",
    "cut": "SIGKILL in the middle of a message",
}


class Point(NamedTuple):
    """Where in a transfer a fault happens: just before this message is posted, or after the return."""

    name: str
    place: int | None


BEFORE_METADATA = Point("before metadata", LENGTH)
IN_METADATA = Point("in metadata", FRAME)
FIRST = Point("first message", message(0))
MIDDLE = Point("middle message", message(LAYERS // 2))
LAST = Point("last message", message(LAYERS - 1))
AFTER_LAST = Point("after the last message", SEAL)
RETURNED = Point("after the call returned", None)
POINTS = [BEFORE_METADATA, IN_METADATA, FIRST, MIDDLE, LAST, AFTER_LAST, RETURNED]


@dataclass(frozen=True)
class Case:
    """One fault, and what the survivor sees: an error, and when, or the state as it should be."""

    fault: str
    victim: str
    point: Point
    receivers: int = 1
    quick: bool = False

    @property
    def name(self) -> str:
        """The case as a name for a test."""
        crowd = "" if self.receivers == 1 else f"-of-{self.receivers}"
        return f"{self.fault}-{self.victim}{crowd}-{self.point.name.replace(' ', '_')}"

    @property
    def survives(self) -> bool:
        """Whether the transfer succeeds all the same."""
        return self.fault == "pause" or self.point is RETURNED

    @property
    def errors(self) -> tuple[str, ...]:
        """What a lone survivor, or a receiver whose sender is the victim, may raise; none if it succeeds.

        With the first message, whether the local tensors were already lent to the link is a matter of
        who is faster: the error tells, and the test checks that it tells the truth.
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
        """When a survivor knows."""
        if self.survives:
            return "in the end"
        return "at the deadline, + 0.5 s at most" if self.fault == "stop" else "within 1 s"


def _points(fault: str) -> list[Point]:
    if fault == "cut":
        return [FIRST, MIDDLE, LAST]
    # After the return there is nothing left that could raise or be given up.
    return [point for point in POINTS if point is not RETURNED or fault not in ("raise", "leave")]


_QUICK = {
    ("kill", "sender", IN_METADATA),
    ("kill", "sender", MIDDLE),
    ("kill", "sender", RETURNED),
    ("kill", "receiver", BEFORE_METADATA),
    ("kill", "receiver", LAST),
    ("exit", "receiver", FIRST),
    ("leave", "sender", LAST),
    ("raise", "sender", AFTER_LAST),
    ("raise", "receiver", MIDDLE),
    ("stop", "sender", MIDDLE),
    ("stop", "receiver", MIDDLE),
    ("pause", "sender", MIDDLE),
    ("pause", "receiver", LAST),
    ("cut", "sender", MIDDLE),
    ("cut", "receiver", MIDDLE),
}
_QUICK_OF_THREE = {("kill", MIDDLE), ("stop", MIDDLE), ("cut", MIDDLE)}

PAIRS = [
    Case(fault, victim, point, quick=(fault, victim, point) in _QUICK)
    for fault in FAULTS
    for victim in ("sender", "receiver")
    for point in _points(fault)
]
ONE_OF_THREE = [
    Case(fault, "receiver", point, receivers=3, quick=(fault, point) in _QUICK_OF_THREE)
    for fault in FAULTS
    for point in _points(fault)
]
SENDER_OF_THREE = [
    Case(fault, "sender", MIDDLE, receivers=3, quick=fault == "kill")
    for fault in FAULTS
    # An exception in the lane to one of them is no fault of the sender's as a whole.
    if fault != "raise"
]
