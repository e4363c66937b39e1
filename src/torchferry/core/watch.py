"""When to probe a peer and when to give it up. Time is an argument, so simulations use the same rules."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

PROBE_AFTER_S = 0.2
"""The wait before a probe. Without one, a backend does not report a peer that was lost inside a message."""

GONE_AFTER_S = 0.1
"""The wait after a peer was found dead: it may exit while its last message is on the way."""

GRACE_S = 0.15
"""The time after the deadline in which a wait may end by itself, before the lane is cancelled."""


class Action(Enum):
    """What to do about one peer now."""

    NOTHING = "nothing"
    PROBE = "probe"
    GIVE_UP_DEAD = "give up, dead"
    GIVE_UP_STALLED = "give up, stalled"
    GIVE_UP_LATE = "give up, late"


class Limits(NamedTuple):
    """The time limits of one transfer."""

    deadline_s: float
    stall_s: float | None = None


def next_action(
    limits: Limits, now_s: float, *, waiting_since_s: float | None, probed_s: float, lost_s: float | None
) -> tuple[Action, float]:
    """Return what to do about a peer, and when to ask again at the latest.

    `waiting_since_s` is None while this process does not wait for the peer. `probed_s` is the time of the
    last probe, and `lost_s` the time of the probe that found the peer dead.

    >>> next_action(Limits(10.0), now_s=10.5, waiting_since_s=1.0, probed_s=10.4, lost_s=None)[0]
    <Action.GIVE_UP_LATE: 'give up, late'>
    >>> next_action(Limits(10.0), now_s=3.0, waiting_since_s=None, probed_s=0.0, lost_s=1.0)[0]
    <Action.NOTHING: 'nothing'>
    """
    late_s = limits.deadline_s + GRACE_S
    if now_s >= late_s:
        return Action.GIVE_UP_LATE, now_s
    if waiting_since_s is None:
        return Action.NOTHING, min(late_s, now_s + PROBE_AFTER_S)
    ends_s = late_s
    if limits.stall_s is not None:
        stalled_s = waiting_since_s + limits.stall_s
        if now_s >= stalled_s:
            return Action.GIVE_UP_STALLED, now_s
        ends_s = min(ends_s, stalled_s)
    if lost_s is not None:
        gone_s = max(waiting_since_s, lost_s) + GONE_AFTER_S
        if now_s >= gone_s:
            return Action.GIVE_UP_DEAD, now_s
        return Action.NOTHING, min(ends_s, gone_s)
    probe_s = max(waiting_since_s, probed_s) + PROBE_AFTER_S
    if now_s >= probe_s:
        return Action.PROBE, min(ends_s, now_s + GONE_AFTER_S)
    return Action.NOTHING, min(ends_s, probe_s)
