"""When a peer is asked after, given up, or left alone: every rule of `core.watch`, at its edges."""

from __future__ import annotations

import pytest

from torchferry.core.watch import GONE_AFTER_S, GRACE_S, PROBE_AFTER_S, Look, Rules, Verdict, look

DEADLINE_S = 100.0
LATE_S = DEADLINE_S + GRACE_S
PATIENT = Rules(DEADLINE_S)
STRICT = Rules(DEADLINE_S, stall_s=5.0)
A_LITTLE_S = 1e-6


def seen(
    rules: Rules, now_s: float, waits_s: float | None, probed_s: float = 0.0, lost_s: float | None = None
) -> Look:
    return look(rules, now_s, waits_s=waits_s, probed_s=probed_s, lost_s=lost_s)


@pytest.mark.parametrize(
    ("now_s", "probed_s", "expected"),
    [
        (10.1, 0.0, Look(Verdict.FINE, 10.0 + PROBE_AFTER_S)),
        (10.0 + PROBE_AFTER_S, 0.0, Look(Verdict.PROBE, 10.0 + PROBE_AFTER_S + GONE_AFTER_S)),
        (10.5, 10.4, Look(Verdict.FINE, 10.4 + PROBE_AFTER_S)),
    ],
    ids=["not waited for long", "waited for long enough", "asked after just now"],
)
def test_a_peer_that_keeps_us_waiting_is_asked_after(now_s: float, probed_s: float, expected: Look) -> None:
    assert seen(PATIENT, now_s, waits_s=10.0, probed_s=probed_s) == expected


@pytest.mark.parametrize(
    ("waits_s", "lost_s"), [(10.0, 12.0), (12.0, 10.0)], ids=["found gone while waiting", "waited for after"]
)
def test_a_peer_that_is_gone_is_given_up_only_by_who_goes_on_waiting(waits_s: float, lost_s: float) -> None:
    gone_s = 12.0 + GONE_AFTER_S
    assert seen(PATIENT, gone_s - A_LITTLE_S, waits_s, lost_s=lost_s) == Look(Verdict.FINE, gone_s)
    assert seen(PATIENT, gone_s, waits_s, lost_s=lost_s).verdict is Verdict.GONE


@pytest.mark.parametrize("rules", [PATIENT, STRICT], ids=["patient", "with a stall"])
@pytest.mark.parametrize("lost_s", [None, 1.0], ids=["there", "gone"])
def test_a_peer_that_does_not_keep_us_waiting_is_left_alone_until_the_deadline(
    rules: Rules, lost_s: float | None
) -> None:
    assert seen(rules, 50.0, None, lost_s=lost_s) == Look(Verdict.FINE, 50.0 + PROBE_AFTER_S)
    assert seen(rules, LATE_S - A_LITTLE_S, None, lost_s=lost_s) == Look(Verdict.FINE, LATE_S)
    assert seen(rules, LATE_S, None, lost_s=lost_s).verdict is Verdict.LATE


def test_a_peer_stalls_after_so_long_and_is_looked_at_just_then() -> None:
    assert seen(STRICT, 14.9, waits_s=10.0, probed_s=14.85) == Look(Verdict.FINE, 15.0)
    assert seen(STRICT, 15.0, waits_s=10.0, probed_s=14.9).verdict is Verdict.STALLED
    assert seen(PATIENT, 15.0, waits_s=10.0, probed_s=14.9).verdict is Verdict.FINE


@pytest.mark.parametrize("lost_s", [None, 99.0], ids=["there", "gone"])
def test_the_deadline_comes_before_all_else_and_leaves_a_wait_some_time_to_notice(
    lost_s: float | None,
) -> None:
    assert seen(STRICT, DEADLINE_S, waits_s=99.9, probed_s=99.9).verdict is Verdict.FINE
    assert seen(STRICT, LATE_S, waits_s=1.0, lost_s=lost_s).verdict is Verdict.LATE
