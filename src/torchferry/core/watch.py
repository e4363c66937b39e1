"""When to probe a peer and when to give it up. Time is an argument, so simulations use the same rules."""

from enum import Enum
from typing import NamedTuple

PROBE_AFTER_S = 0.2
"""How long to wait for a peer before probing it.

Without a probe, a backend does not report a peer that died in the middle of a message.
"""

GONE_AFTER_S = 0.1
"""How long to wait for a peer that was found dead: its last message may still be on the way."""

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
    due = [(limits.deadline_s + GRACE_S, Action.GIVE_UP_LATE)]
    if waiting_since_s is not None and limits.stall_s is not None:
        due.append((waiting_since_s + limits.stall_s, Action.GIVE_UP_STALLED))
    if waiting_since_s is None:
        due.append((now_s + PROBE_AFTER_S, Action.NOTHING))
    elif lost_s is not None:
        due.append((max(waiting_since_s, lost_s) + GONE_AFTER_S, Action.GIVE_UP_DEAD))
    else:
        due.append((max(waiting_since_s, probed_s) + PROBE_AFTER_S, Action.PROBE))
    # If several actions are due, the first one is taken.
    action = next((action for at_s, action in due if now_s >= at_s), Action.NOTHING)
    if action is Action.PROBE:
        due[-1] = (now_s + GONE_AFTER_S, Action.GIVE_UP_DEAD)
    return action, min(at_s for at_s, _ in due)
