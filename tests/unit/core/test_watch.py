"""When a peer is probed, given up, or left alone: every rule of `core.watch`, at its limits."""

from __future__ import annotations

import pytest

from torchferry.core.watch import GONE_AFTER_S, GRACE_S, PROBE_AFTER_S, Action, Limits, next_action

DEADLINE_S = 100.0
LATE_S = DEADLINE_S + GRACE_S
WITHOUT_STALL = Limits(DEADLINE_S)
WITH_STALL = Limits(DEADLINE_S, stall_s=5.0)
A_LITTLE_S = 1e-6


def act(
    limits: Limits,
    now_s: float,
    waiting_since_s: float | None,
    probed_s: float = 0.0,
    lost_s: float | None = None,
) -> tuple[Action, float]:
    return next_action(limits, now_s, waiting_since_s=waiting_since_s, probed_s=probed_s, lost_s=lost_s)


@pytest.mark.parametrize(
    ("now_s", "probed_s", "expected"),
    [
        (10.1, 0.0, (Action.NOTHING, 10.0 + PROBE_AFTER_S)),
        (10.0 + PROBE_AFTER_S, 0.0, (Action.PROBE, 10.0 + PROBE_AFTER_S + GONE_AFTER_S)),
        (10.5, 10.4, (Action.NOTHING, 10.4 + PROBE_AFTER_S)),
    ],
    ids=["after a short wait", "after a long wait", "after a probe"],
)
def test_a_peer_that_keeps_a_lane_waiting_is_probed(
    now_s: float, probed_s: float, expected: tuple[Action, float]
) -> None:
    assert act(WITHOUT_STALL, now_s, waiting_since_s=10.0, probed_s=probed_s) == expected


@pytest.mark.parametrize(
    ("waiting_since_s", "lost_s"), [(10.0, 12.0), (12.0, 10.0)], ids=["lost during the wait", "before"]
)
def test_a_dead_peer_is_only_given_up_if_the_wait_goes_on(waiting_since_s: float, lost_s: float) -> None:
    gone_s = 12.0 + GONE_AFTER_S
    before = act(WITHOUT_STALL, gone_s - A_LITTLE_S, waiting_since_s, lost_s=lost_s)
    assert before == (Action.NOTHING, gone_s)
    assert act(WITHOUT_STALL, gone_s, waiting_since_s, lost_s=lost_s)[0] is Action.GIVE_UP_DEAD


@pytest.mark.parametrize("limits", [WITHOUT_STALL, WITH_STALL], ids=["without stall", "with stall"])
@pytest.mark.parametrize("lost_s", [None, 1.0], ids=["alive", "dead"])
def test_a_peer_that_nobody_waits_for_is_left_alone_until_the_deadline(
    limits: Limits, lost_s: float | None
) -> None:
    assert act(limits, 50.0, None, lost_s=lost_s) == (Action.NOTHING, 50.0 + PROBE_AFTER_S)
    assert act(limits, LATE_S - A_LITTLE_S, None, lost_s=lost_s) == (Action.NOTHING, LATE_S)
    assert act(limits, LATE_S, None, lost_s=lost_s)[0] is Action.GIVE_UP_LATE


def test_a_stalled_peer_is_given_up_at_the_stall_timeout() -> None:
    assert act(WITH_STALL, 14.9, waiting_since_s=10.0, probed_s=14.85) == (Action.NOTHING, 15.0)
    assert act(WITH_STALL, 15.0, waiting_since_s=10.0, probed_s=14.9)[0] is Action.GIVE_UP_STALLED
    assert act(WITHOUT_STALL, 15.0, waiting_since_s=10.0, probed_s=14.9)[0] is Action.NOTHING


@pytest.mark.parametrize("lost_s", [None, 99.0], ids=["alive", "dead"])
def test_the_deadline_comes_first_and_leaves_a_wait_time_to_end_by_itself(lost_s: float | None) -> None:
    assert act(WITH_STALL, DEADLINE_S, waiting_since_s=99.9, probed_s=99.9)[0] is Action.NOTHING
    assert act(WITH_STALL, LATE_S, waiting_since_s=1.0, lost_s=lost_s)[0] is Action.GIVE_UP_LATE
