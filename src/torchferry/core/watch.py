"""When to look after a peer, and when to give it up: all the timing rules of a transfer, as one function.

Time comes in as an argument, so the real engine and the simulation obey the same rules.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

PROBE_AFTER_S = 0.2
"""No message completed for so long, and the link is asked whether the peer is still there. A backend that
loses a peer in the middle of a message does not say so by itself, but does when asked."""

GRACE_S = 0.15
"""How long after the deadline a wait may take to notice it itself, before it is given up from outside."""


class Verdict(Enum):
    """What to do about one peer now."""

    FINE = "fine"
    PROBE = "probe"
    STALLED = "stalled"
    LATE = "late"


class Rules(NamedTuple):
    """The limits of one transfer."""

    deadline_s: float
    stall_s: float | None = None


class Look(NamedTuple):
    """A verdict, and when to look again at the latest."""

    verdict: Verdict
    again_s: float


def look(rules: Rules, now_s: float, moved_s: float, probed_s: float) -> Look:
    """Judge a peer from when its last message was completed and when it was last probed.

    >>> look(Rules(deadline_s=10.0), now_s=10.5, moved_s=1.0, probed_s=10.4).verdict
    <Verdict.LATE: 'late'>
    """
    late_s = rules.deadline_s + GRACE_S
    if now_s >= late_s:
        return Look(Verdict.LATE, now_s)
    ends = [late_s]
    if rules.stall_s is not None:
        if now_s >= moved_s + rules.stall_s:
            return Look(Verdict.STALLED, now_s)
        ends.append(moved_s + rules.stall_s)
    probe_s = max(moved_s, probed_s) + PROBE_AFTER_S
    if now_s >= probe_s:
        return Look(Verdict.PROBE, min(*ends, now_s + PROBE_AFTER_S))
    return Look(Verdict.FINE, min(*ends, probe_s))
