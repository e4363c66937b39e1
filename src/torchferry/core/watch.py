"""When to look after a peer, and when to give it up: all the timing rules of a transfer, as one function.

Time comes in as an argument, so the real engine and the simulation obey the same rules.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

PROBE_AFTER_S = 0.2
"""Kept waiting for so long, the link is asked whether the peer is still there. A backend that loses a peer in
the middle of a message does not say so by itself, but does when asked."""

GONE_AFTER_S = 0.1
"""A peer may leave when all it had to send is on its way. What has arrived is there to be waited for even so:
only who is kept waiting for so long after the peer was found gone waits in vain."""

GRACE_S = 0.15
"""How long after the deadline a wait may take to notice it itself, before it is given up from outside."""


class Verdict(Enum):
    """What to do about one peer now."""

    FINE = "fine"
    PROBE = "probe"
    GONE = "gone"
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


def look(rules: Rules, now_s: float, *, waits_s: float | None, probed_s: float, lost_s: float | None) -> Look:
    """Judge a peer from since when it keeps us waiting, when it was last probed, and when it was found gone.

    `waits_s` is None while it does not: there is work to do here, which is not the peer's fault.

    >>> look(Rules(deadline_s=10.0), now_s=10.5, waits_s=1.0, probed_s=10.4, lost_s=None).verdict
    <Verdict.LATE: 'late'>
    >>> look(Rules(deadline_s=10.0), now_s=3.0, waits_s=None, probed_s=0.0, lost_s=1.0).verdict
    <Verdict.FINE: 'fine'>
    """
    late_s = rules.deadline_s + GRACE_S
    if now_s >= late_s:
        return Look(Verdict.LATE, now_s)
    if waits_s is None:
        return Look(Verdict.FINE, min(late_s, now_s + PROBE_AFTER_S))
    ends = [late_s]
    if rules.stall_s is not None:
        if now_s >= waits_s + rules.stall_s:
            return Look(Verdict.STALLED, now_s)
        ends.append(waits_s + rules.stall_s)
    if lost_s is not None:
        gone_s = max(waits_s, lost_s) + GONE_AFTER_S
        return Look(Verdict.GONE, now_s) if now_s >= gone_s else Look(Verdict.FINE, min(*ends, gone_s))
    probe_s = max(waits_s, probed_s) + PROBE_AFTER_S
    if now_s >= probe_s:
        return Look(Verdict.PROBE, min(*ends, now_s + GONE_AFTER_S))
    return Look(Verdict.FINE, min(*ends, probe_s))
