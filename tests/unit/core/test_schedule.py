"""Which chunks a lane asks for, when a lane is overdue, and that every needed chunk lands exactly once."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.sizes import examples
from torchferry.core.schedule import (
    MIN_REQUEST_S,
    OVERDUE_S,
    PEER_S,
    REQUEST_BYTES,
    REQUEST_S,
    RESHARE_REQUEST_BYTES,
    RESHARE_REQUEST_S,
    Backoff,
    Schedule,
)

MIB = 1 << 20


def test_a_range_is_limited_in_bytes_and_has_consecutive_chunks() -> None:
    schedule = Schedule([MIB] * 100, [*range(20), *range(50, 100)])
    assert schedule.take(0, 1, 0.0) == range(8)
    assert schedule.take(1, 1, 0.0) == range(8, 16)
    assert schedule.take(2, 1, 0.0) == range(16, 20), "the next needed chunk is not the next chunk"
    assert schedule.take(3, 1, 0.0) == range(50, 58)


def test_a_chunk_above_the_limit_is_asked_for_alone() -> None:
    schedule = Schedule([2 * REQUEST_BYTES, 1, 2 * REQUEST_BYTES], range(3))
    assert [schedule.take(lane, 1, 0.0) for lane in range(3)] == [range(1), range(1, 2), range(2, 3)]


def test_towards_the_end_lanes_ask_for_less_so_that_they_finish_together() -> None:
    schedule = Schedule([MIB] * 16, range(16))
    assert [len(schedule.take(lane, 4, 0.0)) for lane in range(2)] == [4, 3]


def test_nothing_is_needed_from_the_start_if_all_chunks_are_there() -> None:
    schedule = Schedule([1, 2, 3], [])
    assert schedule.is_done
    assert not schedule.has_more
    assert schedule.take(0, 1, 0.0) == range(0)


def test_a_lane_may_be_asked_ahead_and_delivers_in_order() -> None:
    schedule = Schedule([1] * 32, range(32))
    assert schedule.take(0, 4, 0.0) == range(8)
    assert schedule.take(0, 4, 0.0) == range(8, 14)
    with pytest.raises(AssertionError, match="in the order"):
        schedule.landed(0, [1], 0.0)
    for chunk in range(14):
        schedule.landed(0, [chunk], 0.0)
    assert schedule.take(0, 4, 0.0) == range(14, 18)


def test_what_a_lane_was_asked_for_ahead_is_needed_again_if_it_is_given_up() -> None:
    schedule = Schedule([1] * 32, range(32))
    assert schedule.take(0, 4, 0.0) == range(8)
    assert schedule.take(0, 4, 0.0) == range(8, 14)
    schedule.landed(0, [0], 0.0)
    schedule.take_back(0)
    assert schedule.take(1, 4, 0.0) == range(1, 8), "a quarter of the 31 chunks that are left"


def test_a_receiver_that_reshares_asks_only_for_what_arrives_soon() -> None:
    schedule = Schedule([MIB] * 100, range(100), RESHARE_REQUEST_BYTES, RESHARE_REQUEST_S)
    assert schedule.take(0, 1, 0.0) == range(2), "it is not known how fast the lane is"
    schedule.landed(0, [0], RESHARE_REQUEST_S / 3)
    assert len(schedule.take(0, 1, 0.0)) == 3


def test_time_in_which_this_process_did_not_run_does_not_count() -> None:
    schedule = Schedule([MIB] * 4, range(4), 0)
    schedule.take(0, 4, 0.0)
    schedule.take(1, 4, 0.0, PEER_S)
    assert schedule.overdue(5.0) == [0, 1]
    schedule.skip(4.99, 5.0)
    assert schedule.overdue(5.0) == []
    assert schedule.overdue(4.99 + PEER_S) == [1]
    assert schedule.overdue(5.0 + OVERDUE_S) == [0, 1]


def test_a_chunk_that_landed_since_this_process_continued_does_not_begin_in_the_future() -> None:
    schedule = Schedule([MIB] * 8, range(8))
    schedule.take(0, 1, 0.0)
    schedule.landed(0, [0], 10.0)
    schedule.skip(9.0, 10.5)
    schedule.landed(0, [1], 10.6)
    assert schedule.overdue(11.6) == [0], "it was heard from at 10.6"
    assert schedule.overdue(11.5) == []


def test_a_peer_that_sends_too_slowly_is_not_silent() -> None:
    schedule = Schedule([MIB] * 2, range(2), 0)
    schedule.take(0, 1, 0.0, PEER_S)
    assert schedule.overdue(PEER_S) == [0]
    assert schedule.is_silent(0, PEER_S)
    schedule.heard(0, OVERDUE_S)
    assert schedule.overdue(OVERDUE_S) == [0]
    assert not schedule.is_silent(0, OVERDUE_S)


def test_a_fast_lane_asks_for_as_much_as_it_delivers_in_a_moment() -> None:
    schedule = Schedule([MIB] * 1000, range(1000))
    assert schedule.take(0, 1, 0.0) == range(8)
    for chunk in range(8):
        schedule.landed(0, [chunk], REQUEST_S * (chunk + 1) / 32.5)
    assert len(schedule.take(0, 1, 1.0)) == 32
    schedule.landed(0, [8], 1.0 + REQUEST_S)
    assert len(schedule.take(0, 1, 1.0)) == 8, "it has become slower"


def test_a_slow_lane_asks_for_less_than_a_fast_one() -> None:
    schedule = Schedule([MIB] * 1000, range(1000))
    for lane, factor in ((0, 1), (1, 20)):
        for number, chunk in enumerate(schedule.take(lane, 4, 0.0), 1):
            schedule.landed(lane, [chunk], REQUEST_S / 100 * factor * number)
    assert len(schedule.take(0, 4, 1.0)) == 100
    assert len(schedule.take(1, 4, 1.0)) == 8, "REQUEST_BYTES, which it delivers in more than REQUEST_S"
    assert len(schedule.take(2, 4, 1.0)) == 8, "it is not known how fast it is"


def test_the_last_requests_take_long_enough_to_be_worth_it() -> None:
    schedule = Schedule([MIB] * 1000, range(1000))
    for chunk in schedule.take(0, 4, 0.0):
        schedule.landed(0, [chunk], MIN_REQUEST_S / 10 * (chunk + 1))
    sizes = []
    while schedule.has_more:
        sizes.append(len(schedule.take(0, 4, 1.0)))
    assert sizes[:2] == [100, 100], "what takes REQUEST_S"
    assert min(sizes[:-1]) == 10, "what takes MIN_REQUEST_S"


def test_what_a_lane_did_not_deliver_is_needed_again_and_first() -> None:
    schedule = Schedule([1] * 64, range(64))
    assert schedule.take(0, 4, 0.0) == range(16)
    schedule.landed(0, [0], 0.0)
    schedule.take_back(0)
    assert not schedule.is_done
    assert schedule.take(1, 1, 0.0).start == 1


def test_a_lane_that_was_given_up_can_not_deliver() -> None:
    schedule = Schedule([1, 1], range(2))
    schedule.take(0, 1, 0.0)
    schedule.take_back(0)
    with pytest.raises(KeyError):
        schedule.landed(0, [0], 0.0)


def test_a_silent_lane_is_overdue_after_a_second() -> None:
    schedule = Schedule([1, 1], range(2))
    schedule.take(7, 1, 10.0)
    assert schedule.overdue(9.9 + OVERDUE_S) == []
    assert schedule.overdue(10.0 + OVERDUE_S) == [7]
    schedule.heard(7, 10.5)
    assert schedule.overdue(10.4 + OVERDUE_S) == []
    assert schedule.overdue(10.5 + OVERDUE_S) == [7]
    assert schedule.why_overdue(7, 10.5 + OVERDUE_S) == "no bytes for 1 s"
    schedule.heard(7, 3.0)
    assert schedule.overdue(10.4 + OVERDUE_S) == [], "an older time changes nothing"


def test_a_lane_that_is_never_silent_but_far_slower_than_usual_is_overdue() -> None:
    schedule = Schedule([1] * 8, range(8))
    schedule.take(0, 1, 0.0)
    schedule.landed(0, [0], 0.1)
    for tenth in range(2, 15):
        schedule.heard(0, tenth / 10)
        assert schedule.overdue(tenth / 10) == []
    schedule.heard(0, 1.51)
    assert schedule.overdue(1.51) == [0], "four times 0.1 s, and a second"
    assert schedule.why_overdue(0, 1.51) == "its next chunk took 1.4 s"


def test_a_lane_that_holds_up_the_end_is_overdue() -> None:
    schedule = Schedule([1 << 20] * 16, range(16))
    assert schedule.take(0, 4, 0.0) == range(4)
    for chunk in range(4):
        schedule.landed(0, [chunk], 0.01 * (chunk + 1))
    while schedule.has_more:
        schedule.take(1, 1, 0.1)
    # It is far slower than the other lane, but never silent, and no chunk takes 1 s.
    for number, chunk in enumerate(range(4, 16)):
        if schedule.overdue(0.5 * number):
            assert schedule.why_overdue(1, 0.5 * number).startswith("the others waited for its last chunks")
            break
        schedule.landed(1, [chunk], 0.5 * number)
    assert 1.0 < 0.5 * number <= 2.0, "12 chunks take the other lane 0.12 s, and four times that is allowed"


def test_a_lane_that_is_as_fast_as_the_others_does_not_hold_up_the_end() -> None:
    schedule = Schedule([1 << 20] * 16, range(16))
    schedule.take(0, 4, 0.0)
    for chunk in range(4):
        schedule.landed(0, [chunk], 0.5 * (chunk + 1))
    while schedule.has_more:
        schedule.take(1, 1, 0.0)
    for number, chunk in enumerate(range(4, 16), 1):
        assert schedule.overdue(0.5 * number) == []
        schedule.landed(1, [chunk], 0.5 * number)
    assert schedule.is_done


def test_no_lane_is_slow_before_the_first_chunk_has_landed() -> None:
    schedule = Schedule([1] * 4, range(4))
    schedule.take(0, 1, 0.0)
    for second in range(100):
        schedule.heard(0, float(second))
        assert schedule.overdue(second + 0.5) == []


def test_another_receiver_that_trickles_from_the_start_is_overdue_after_a_second() -> None:
    schedule = Schedule([1] * 4, range(4))
    schedule.take(0, 1, 0.0, peer_s=0.3)
    for tenth in range(10):
        schedule.heard(0, tenth / 10)
        assert schedule.overdue(tenth / 10) == []
    assert schedule.overdue(OVERDUE_S) == [0]


def test_another_receiver_that_delivers_may_be_silent_only_for_a_moment() -> None:
    schedule = Schedule([1] * 8, range(8))
    schedule.take(0, 1, 0.0, peer_s=0.3)
    schedule.landed(0, [0], 0.01)
    assert schedule.overdue(0.30) == []
    assert schedule.overdue(0.32) == [0]


def test_another_receiver_that_sends_nothing_at_all_is_overdue_after_a_moment() -> None:
    schedule = Schedule([1] * 4, range(4))
    schedule.take(0, 1, 0.0, peer_s=0.3)
    assert schedule.overdue(0.29) == []
    assert schedule.overdue(0.31) == [0]


def test_another_receiver_that_is_alive_may_wait_for_its_own_source() -> None:
    schedule = Schedule([1] * 16, range(16))
    schedule.take(0, 1, 0.0, peer_s=0.3)
    schedule.landed(0, [0], 0.2)
    late_s = 0.2 + 4 * 0.2 + OVERDUE_S  # a chunk usually takes 0.2 s
    for now_s in (0.4, 0.6, 0.8, 1.0, 1.2, 1.4, 1.6, 1.8):
        schedule.heard(0, now_s)
        assert schedule.overdue(now_s + 0.19) == []
    schedule.heard(0, late_s)
    assert schedule.overdue(late_s + 0.01) == [0]


def test_another_receiver_that_was_asked_late_whether_it_is_alive_has_time_to_answer() -> None:
    schedule = Schedule([1] * 4, range(4))
    schedule.take(0, 1, 0.0, PEER_S)
    # The calling thread was busy in `on_progress`.
    schedule.heard(0, 0.0, alive_asked_s=0.2)
    assert schedule.overdue(0.2 + 0.4 * PEER_S) == []
    assert schedule.overdue(0.2 + 0.6 * PEER_S) == [0]
    schedule.heard(0, 0.21, alive_asked_s=0.2)
    assert schedule.overdue(0.21 + 0.9 * PEER_S) == []


def test_chunks_that_land_at_once_share_the_time_that_they_took() -> None:
    schedule = Schedule([1] * 16, range(16))
    schedule.take(0, 1, 0.0)
    schedule.landed(0, range(4), 2.0)
    schedule.heard(0, 4.9)
    assert schedule.overdue(4.9) == [], "0.5 s each: four times that, and one second, after 2.0"
    assert schedule.overdue(5.0) == [0]


def test_chunks_that_land_after_this_process_was_stopped_did_not_take_less_than_no_time() -> None:
    schedule = Schedule([1] * 16, range(16))
    schedule.take(0, 4, 0.0)
    schedule.take(1, 4, 0.0)
    # The process continues at 10.0. The calling thread runs first, then the lane that copied a group.
    schedule.skip(10.0, 10.0)
    schedule.landed(0, range(1), 10.0)
    assert schedule.overdue(10.9) == []
    assert schedule.overdue(11.0) == [0, 1]


def test_an_idle_lane_is_never_overdue() -> None:
    schedule = Schedule([1, 1], range(2))
    schedule.take(0, 4, 0.0)
    schedule.landed(0, [0], 0.1)
    schedule.heard(0, 0.2)
    schedule.heard(5, 0.2)
    assert schedule.overdue(100.0) == []


def test_a_source_that_is_late_again_and_again_rests_longer_until_it_delivers() -> None:
    backoff = Backoff()
    for rest_s in (1.0, 2.0, 4.0):
        backoff.overdue(100.0)
        assert backoff.is_active(99.9 + rest_s)
        assert not backoff.is_active(100.0 + rest_s)
    backoff.landed(0)
    backoff.overdue(200.0)
    assert not backoff.is_active(201.0)


def test_a_source_is_given_up_at_its_fourth_failure_in_a_row() -> None:
    backoff = Backoff()
    assert [backoff.failed(0) for _ in range(3)] == [False, False, False]
    backoff.landed(0)
    assert [backoff.failed(0) for _ in range(4)] == [False, False, False, True]


@examples(300)
@given(st.data())
def test_every_needed_chunk_lands_exactly_once_whatever_lanes_do(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.sampled_from([1, 1000, MIB, 3 * MIB, REQUEST_BYTES + 1]), max_size=40))
    needed = sorted(data.draw(st.sets(st.sampled_from(range(len(sizes)))))) if sizes else []
    schedule = Schedule(sizes, needed)
    asked: dict[int, list[int]] = {}
    landed: Counter[int] = Counter()
    now_s = 0.0
    while not schedule.is_done:
        now_s += data.draw(st.sampled_from([0.0, 0.01, 0.5, 3.0]))
        late = set(schedule.overdue(now_s))
        assert late <= asked.keys()
        assert late or now_s < OVERDUE_S or not asked or any(lane not in late for lane in asked)
        lane = data.draw(st.integers(0, 3))
        if lane not in asked or data.draw(st.integers(0, 3)) == 0:
            chunks = list(schedule.take(lane, 8, now_s))
            assert sum(sizes[chunk] for chunk in chunks[1:]) <= max(REQUEST_BYTES, sum(sizes) // 4)
            assert not {*chunks} & {chunk for others in asked.values() for chunk in others}
            if chunks:
                asked.setdefault(lane, []).extend(chunks)
        elif data.draw(st.integers(0, 4)) == 0:
            schedule.take_back(lane)
            del asked[lane]
        else:
            chunk = asked[lane].pop(0)
            landed[chunk] += 1
            schedule.landed(lane, [chunk], now_s)
            if not asked[lane]:
                del asked[lane]
        left = sum(sizes[chunk] for chunk in needed if not landed[chunk])
        assert schedule.has_more == (left > sum(sizes[c] for chunks in asked.values() for c in chunks))
    assert landed == Counter(needed)
    assert not asked
