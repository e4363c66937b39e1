"""Fetches in the simulation, for many seeds; and mutations of their rules, which it must detect."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.sizes import count
from torchferry.core import pull
from torchferry.core.leases import Lease, Leases
from torchferry.core.pull import LeaseRequest, Result
from torchferry.core.schedule import Backoff, Schedule
from torchferry.testing.simulation import CheckFailed, simulate_pull

SEEDS = count("SEEDS", full=2000, quick=500)
FIRST_SEED = int(os.environ.get("FIRST_SEED", "0"))
SEEDS_OF_A_MUTATION = 400
FIRST_SEED_OF = {
    "bytes_that_are_sent_do_not_keep_a_lease": 6600,
    "an_overdue_source_is_asked_again_at_once": 1000,
}
"""The first seed for a mutation that few seeds detect."""


def run_seeds(first: int, seeds: int) -> Counter[str]:
    endings: Counter[str] = Counter()
    for seed in range(first, first + seeds):
        endings += simulate_pull(seed)
    return endings


def test_all_checks_hold_for_every_seed() -> None:
    endings = run_seeds(FIRST_SEED, SEEDS)
    print(f"\n{SEEDS} seeds of fetches from {FIRST_SEED}:")
    for ending, times in endings.most_common():
        print(f"  {times:7}  {ending}")
    if SEEDS >= 500:
        # Every kind of ending occurred.
        for fetch in ("done", "refused", "killed", "failed: no source", "failed: no source left"):
            assert endings[f"fetch: {fetch}"] > 0
        for lease in ("confirmed", "refused", "failed", "lost", "dropped"):
            assert endings[f"lease: {lease}"] > 0


@pytest.mark.parametrize("seed", [0, 7, 263])
def test_a_seed_replays_exactly(seed: int) -> None:
    assert simulate_pull(seed) == simulate_pull(seed)


Mutate = Callable[[pytest.MonkeyPatch], None]


def versions_are_freed_while_they_are_leased(monkeypatch: pytest.MonkeyPatch) -> None:
    def take_unused(self: Leases[Any]) -> list[Any]:
        sending = {lease.held for lease in self._pins}
        unused = [held for held in self._replaced if held not in sending]
        self._replaced = [held for held in self._replaced if held in sending]
        return unused

    monkeypatch.setattr(Leases, "take_unused", take_unused)


def versions_are_freed_while_a_thread_sends_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def reading(self: Leases[Any], concerns: Callable[[Lease[Any]], bool]) -> list[Lease[Any]]:
        return [lease for lease in self._open.values() if concerns(lease)]

    monkeypatch.setattr(Leases, "reading", reading)


def receivers_are_sent_to_readers_of_other_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    def peers(self: Leases[Any], lease: Lease[Any]) -> tuple[Any, ...]:
        return tuple(other.peer for other in self._open.values() if other is not lease)[::-1]

    monkeypatch.setattr(Leases, "peers", peers)


def receivers_are_sent_to_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    def peers(self: Leases[Any], lease: Lease[Any]) -> tuple[Any, ...]:
        return tuple(other.peer for other in self._open.values() if other.held is lease.held)[::-1]

    monkeypatch.setattr(Leases, "peers", peers)


def a_send_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Leases, "unpin", lambda self, lease: None)


def a_replaced_version_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Leases, "withdraw", lambda self, name: self.current.pop(name, None))


def silent_leases_do_not_expire(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Leases, "expire", lambda self, now_s: [])


def bytes_that_are_sent_do_not_keep_a_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    def sent(self: Leases[Any], lease: Lease[Any], nbytes: int, now_s: float) -> bool:
        return lease.is_open

    monkeypatch.setattr(Leases, "sent", sent)


def a_lease_outlives_its_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Leases, "disconnected", lambda self, connection, now_s: None)


def a_lease_ends_with_any_of_its_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Leases.disconnected

    def disconnected(self: Leases[Any], connection: int, now_s: float) -> None:
        for lease in self._open.values():
            if connection in lease.connections:
                lease.connections.clear()
        original(self, connection, now_s)

    monkeypatch.setattr(Leases, "disconnected", disconnected)


def a_version_that_is_not_newer_is_granted(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Leases.grant

    def grant(self: Leases[Any], request: LeaseRequest, *more: Any) -> Lease[Any] | None:
        if request.newer_than is not None:
            request = LeaseRequest(request.name, request.receiver, newer_than=request.newer_than - 1)
        return original(self, request, *more)

    monkeypatch.setattr(Leases, "grant", grant)


def a_failed_fetch_counts_as_confirmed(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Leases.finish

    def finish(self: Leases[Any], lease: Lease[Any], result: Result, now_s: float) -> None:
        original(self, lease, Result("confirmed"), now_s)

    monkeypatch.setattr(Leases, "finish", finish)


def chunks_of_a_lost_lane_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Schedule, "take_back", lambda self, lane: self._asked.pop(lane, None))


def chunks_of_a_lost_lane_stay_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Schedule, "take_back", lambda self, lane: None)


def all_chunks_of_a_lost_lane_are_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Schedule.take
    taken: dict[tuple[Schedule, int], range] = {}

    def take(self: Schedule, lane: int, lanes: int, now_s: float) -> range:
        taken[self, lane] = original(self, lane, lanes, now_s)
        return taken[self, lane]

    def take_back(self: Schedule, lane: int) -> None:
        if self._asked.pop(lane, None) is not None:
            self._needed.appendleft(taken[self, lane])

    monkeypatch.setattr(Schedule, "take", take)
    monkeypatch.setattr(Schedule, "take_back", take_back)


def two_lanes_get_the_same_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Schedule.take

    def take(self: Schedule, lane: int, lanes: int, now_s: float) -> range:
        chunks = original(self, lane, lanes, now_s)
        if lanes > 1 and len(chunks) > 1:
            self._needed.appendleft(range(chunks.stop - 1, chunks.stop))
        return chunks

    monkeypatch.setattr(Schedule, "take", take)


def a_fetch_is_done_when_the_last_chunk_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Schedule, "is_done", property(lambda self: not self._needed))


def silent_lanes_are_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Schedule, "overdue", lambda self, now_s: [])


def a_source_is_given_up_at_its_first_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Backoff, "failed", lambda self, lane: True)


def a_source_is_never_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Backoff, "failed", lambda self, lane: False)


def an_overdue_source_is_asked_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Backoff, "is_active", lambda self, now_s: False)


def the_oldest_version_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(grants: Any) -> Any:
        return min((each for each in grants if each is not None), key=lambda each: each.version, default=None)

    monkeypatch.setattr(pull, "choose", choose)


def the_last_of_equal_versions_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    original = pull.choose
    monkeypatch.setattr(pull, "choose", lambda grants: original(grants[::-1]))


def without(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = pull.why_not_mixed

    def why_not_mixed(grant: Any, chosen: Any) -> str:
        reason = original(grant, chosen)
        return "" if part in reason else reason

    monkeypatch.setattr(pull, "why_not_mixed", why_not_mixed)


def sources_of_other_versions_are_mixed_in(monkeypatch: pytest.MonkeyPatch) -> None:
    without("it serves version", monkeypatch)


def sources_of_other_roots_are_mixed_in(monkeypatch: pytest.MonkeyPatch) -> None:
    without("another state", monkeypatch)


def no_source_is_like_another(monkeypatch: pytest.MonkeyPatch) -> None:
    def why_not_mixed(grant: Any, chosen: Any) -> str:
        return "" if grant is chosen else "it is another source"

    monkeypatch.setattr(pull, "why_not_mixed", why_not_mixed)


def a_fetch_does_not_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every change of state is checked against the table."""
    monkeypatch.setattr(pull.FetchState.MANIFEST, "following", ("receiving",))


MUTATIONS: list[Mutate] = [
    versions_are_freed_while_they_are_leased,
    versions_are_freed_while_a_thread_sends_them,
    receivers_are_sent_to_readers_of_other_versions,
    receivers_are_sent_to_themselves,
    a_send_never_ends,
    a_replaced_version_is_forgotten,
    silent_leases_do_not_expire,
    bytes_that_are_sent_do_not_keep_a_lease,
    a_lease_outlives_its_connections,
    a_lease_ends_with_any_of_its_connections,
    a_version_that_is_not_newer_is_granted,
    a_failed_fetch_counts_as_confirmed,
    chunks_of_a_lost_lane_are_forgotten,
    chunks_of_a_lost_lane_stay_with_it,
    all_chunks_of_a_lost_lane_are_asked_for_again,
    two_lanes_get_the_same_chunk,
    a_fetch_is_done_when_the_last_chunk_is_asked_for,
    silent_lanes_are_not_found,
    a_source_is_given_up_at_its_first_failure,
    a_source_is_never_given_up,
    an_overdue_source_is_asked_again_at_once,
    the_oldest_version_is_chosen,
    the_last_of_equal_versions_is_chosen,
    sources_of_other_versions_are_mixed_in,
    sources_of_other_roots_are_mixed_in,
    no_source_is_like_another,
    a_fetch_does_not_compare,
]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_the_simulation_detects_a_mutation(mutation: Mutate, monkeypatch: pytest.MonkeyPatch) -> None:
    mutation(monkeypatch)
    with pytest.raises(CheckFailed, match="seed"):
        run_seeds(FIRST_SEED_OF.get(mutation.__name__, 0), SEEDS_OF_A_MUTATION)
