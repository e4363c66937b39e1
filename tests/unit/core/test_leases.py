"""The leases of a source: who reads which version, which versions may be freed, and what status says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    precondition,
    rule,
)

from tests.support.sizes import examples
from torchferry.core.leases import MAX_ENTRIES, Lease, Leases
from torchferry.core.pull import LEASE_S, MAX_PEERS, LeaseRequest, LeaseState, Peer, Result
from torchferry.errors import BadArgument, LinkBroken, NoSuchVersion


@dataclass(eq=False)
class Memory:
    """A version in memory."""

    version: int
    nbytes: int = 100
    is_copy: bool = True
    is_abandoned: bool = False


def serving(*versions: int, name: str = "state") -> Leases[Memory]:
    leases: Leases[Memory] = Leases()
    for version in versions:
        leases.make_current(name, Memory(version))
    return leases


def lease_on(
    leases: Leases[Memory], lease_id: str = "a", connection: int = 1, now_s: float = 0.0, name: str = "state"
) -> Lease[Memory]:
    lease = leases.grant(LeaseRequest(name, "reader"), lease_id, connection, now_s)
    assert lease is not None
    return lease


def unused(leases: Leases[Memory]) -> list[int]:
    return [memory.version for memory in leases.take_unused()]


def reshared_by(leases: Leases[Memory], number: int, port: int, name: str = "state") -> Lease[Memory]:
    """Open a lease for a receiver at 10.0.0.<number>, which serves what it has at a port."""
    request = LeaseRequest(name, "reader", port=port)
    lease = leases.grant(request, f"{number}", number, 0.0, f"10.0.0.{number}")
    assert lease is not None
    return lease


def test_receivers_are_sent_to_those_that_began_before_them_the_last_first() -> None:
    leases = serving(7)
    first, second, third = (reshared_by(leases, number, 80) for number in (1, 2, 3))
    assert leases.peers(first) == ()
    assert leases.peers(second) == (Peer("10.0.0.1", 80),)
    assert leases.peers(third) == (Peer("10.0.0.2", 80), Peer("10.0.0.1", 80))


def test_receivers_are_not_sent_to_those_that_do_not_serve_or_are_local() -> None:
    leases = serving(7)
    reshared_by(leases, 1, 0)
    leases.grant(LeaseRequest("state", "local", port=80), "local", 2, 0.0)
    assert leases.peers(reshared_by(leases, 3, 80)) == ()


def test_receivers_are_not_sent_to_readers_of_another_version_or_name() -> None:
    leases = serving(7)
    reshared_by(leases, 1, 80)
    leases.make_current("other", Memory(8))
    reshared_by(leases, 2, 80, "other")
    leases.make_current("state", Memory(8))
    assert leases.peers(reshared_by(leases, 3, 80)) == ()


@pytest.mark.parametrize("ending", ["confirmed", "failed", "disconnected", "silent", "dropped"])
def test_receivers_are_not_sent_to_those_whose_lease_has_ended(ending: str) -> None:
    leases = serving(7)
    gone = reshared_by(leases, 1, 80)
    if ending == "disconnected":
        leases.disconnected(1, 1.0)
    elif ending == "silent":
        leases.expire(LEASE_S + 1)
    elif ending == "dropped":
        leases.drop(gone, "dropped", 1.0)
    else:
        leases.finish(gone, Result("confirmed" if ending == "confirmed" else "failed"), 1.0)
    assert leases.peers(reshared_by(leases, 2, 80)) == ()


def test_a_grant_names_the_last_eight() -> None:
    leases = serving(7)
    last = [reshared_by(leases, number, 80) for number in range(1, 21)][-1]
    assert leases.peers(last) == tuple(Peer(f"10.0.0.{n}", 80) for n in range(19, 19 - MAX_PEERS, -1))


def test_the_newest_version_is_granted() -> None:
    assert lease_on(serving(3, 7)).held.version == 7


def test_the_requested_version_is_granted_or_named_as_missing() -> None:
    leases = serving(7)
    found = leases.grant(LeaseRequest("state", "reader", version=7), "a", 1, 0.0)
    assert found is not None
    assert found.held.version == 7
    with pytest.raises(NoSuchVersion, match="has version 7 of 'state', not version 8"):
        leases.grant(LeaseRequest("state", "reader", version=8), "b", 1, 0.0)


def test_an_unknown_name_is_answered_with_the_names_that_are_served() -> None:
    with pytest.raises(NoSuchVersion, match="no 'weights'; it serves 'state'"):
        serving(7).grant(LeaseRequest("weights", "reader"), "a", 1, 0.0)
    with pytest.raises(NoSuchVersion, match="it serves nothing"):
        serving().grant(LeaseRequest("weights", "reader"), "a", 1, 0.0)


@pytest.mark.parametrize("newer_than", [7, 8])
def test_nothing_is_granted_before_there_is_a_newer_version(newer_than: int) -> None:
    request = LeaseRequest("state", "reader", newer_than=newer_than)
    assert serving(7).grant(request, "a", 1, 0.0) is None
    assert serving().grant(request, "a", 1, 0.0) is None
    found = serving(9).grant(request, "a", 1, 0.0)
    assert found is not None
    assert found.held.version == 9


def test_a_closed_source_grants_nothing_not_even_a_wait() -> None:
    leases = serving(7)
    leases.is_closed = True
    for request in (LeaseRequest("state", "reader"), LeaseRequest("state", "reader", newer_than=7)):
        with pytest.raises(LinkBroken, match="closed"):
            leases.grant(request, "a", 1, 0.0)
    with pytest.raises(BadArgument, match="closed"):
        leases.make_current("state", Memory(8))


@pytest.mark.parametrize("version", [7, 6])
def test_versions_of_a_name_must_grow_until_it_is_withdrawn(version: int) -> None:
    leases = serving(7)
    with pytest.raises(BadArgument, match="not above the current version 7"):
        leases.make_current("state", Memory(version))
    leases.make_current("other", Memory(version))
    leases.withdraw("state")
    leases.make_current("state", Memory(version))
    assert leases.current["state"].version == version


def test_a_version_is_freed_when_it_is_replaced_and_nobody_reads_it() -> None:
    leases = serving(1)
    assert unused(leases) == []
    leases.make_current("state", Memory(2))
    assert unused(leases) == [1]
    assert unused(leases) == [], "it is given out once"
    leases.withdraw("state")
    assert unused(leases) == [2]


def test_a_leased_version_is_kept_until_the_lease_ends() -> None:
    leases = serving(1)
    lease = lease_on(leases)
    leases.make_current("state", Memory(2))
    assert unused(leases) == []
    leases.finish(lease, Result("confirmed"), 1.0)
    assert unused(leases) == [1]


def test_a_version_is_kept_while_a_thread_sends_it_although_its_lease_has_ended() -> None:
    leases = serving(1)
    lease = lease_on(leases)
    assert leases.pin(lease)
    assert leases.pin(lease)
    leases.make_current("state", Memory(2))
    leases.drop(lease, "its memory is needed", 1.0)
    assert not leases.sent(lease, 10, 1.0), "the thread is told to stop"
    leases.unpin(lease)
    assert unused(leases) == []
    assert leases.reading(lambda each: each.held.version == 1) == [lease]
    leases.unpin(lease)
    assert leases.reading(lambda _: True) == []
    assert unused(leases) == [1]


def test_no_send_begins_after_the_end_of_a_lease() -> None:
    leases = serving(1)
    lease = lease_on(leases)
    leases.finish(lease, Result("failed", "no memory"), 1.0)
    assert not leases.pin(lease)
    assert leases.reading(lambda _: True) == []


def test_a_lease_ends_with_its_last_connection() -> None:
    leases = serving(1)
    lease = lease_on(leases, connection=1)
    other = lease_on(leases, "b", connection=2)
    assert leases.find("a", 3, 0.0) is lease
    leases.disconnected(1, 1.0)
    assert lease.is_open
    leases.disconnected(3, 2.0)
    assert lease.machine.state is LeaseState.LOST
    assert other.is_open
    assert leases.find("a", 4, 3.0) is None
    assert leases.why_ended("a") == "the lease has ended: the receiver's last connection was closed"


@pytest.mark.parametrize("sign", ["request", "bytes"])
def test_a_silent_lease_expires_and_every_sign_of_its_reader_delays_that(sign: str) -> None:
    leases = serving(1)
    lease = lease_on(leases, now_s=100.0)
    assert leases.expire(100.0 + LEASE_S) == []
    if sign == "request":
        leases.find("a", 1, 110.0)
    else:
        leases.sent(lease, 1, 110.0)
    assert leases.expire(110.0 + LEASE_S) == []
    assert leases.expire(110.1 + LEASE_S) == [lease]
    assert lease.machine.state is LeaseState.LOST
    assert leases.expire(1e9) == []
    assert leases.why_ended("a") == "the lease has ended: the receiver was silent for 30 s"


@pytest.mark.parametrize("outcome", ["confirmed", "refused", "failed"])
def test_the_result_of_a_reader_ends_its_lease_and_only_the_first_counts(
    outcome: Literal["confirmed", "refused", "failed"],
) -> None:
    leases = serving(1)
    lease = lease_on(leases)
    leases.finish(lease, Result(outcome, "w:\nshape"), 2.0)
    leases.finish(lease, Result("confirmed"), 3.0)
    leases.drop(lease, "too late", 4.0)
    (reader,) = leases.readers(9.0)
    assert (reader.state, reader.reason, reader.seconds) == (outcome, "w: shape", 2.0)
    assert leases.confirmed("state", 1) == (outcome == "confirmed")


def test_confirmations_are_counted_by_name_and_version_and_again_for_a_version_that_is_served_again() -> None:
    leases = serving(1)
    for lease_id in "ab":
        leases.finish(lease_on(leases, lease_id), Result("confirmed"), 1.0)
    assert leases.confirmed("state", 1) == 2
    assert leases.confirmed("state", 2) == leases.confirmed("other", 1) == 0
    leases.make_current("state", Memory(2))
    assert leases.confirmed("state", 1) == 2
    leases.withdraw("state")
    leases.make_current("state", Memory(1))
    assert leases.confirmed("state", 1) == 0


def test_status_keeps_the_last_entries_only() -> None:
    leases = serving(1)
    for number in range(MAX_ENTRIES + 5):
        lease = leases.grant(LeaseRequest("state", f"reader {number}"), str(number), 1, float(number))
        assert lease is not None
        leases.finish(lease, Result("confirmed"), float(number))
    still_open = leases.grant(LeaseRequest("state", "the last"), "z", 1, 1e6)
    assert still_open is not None
    readers = leases.readers(1e6)
    assert len(readers) == MAX_ENTRIES + 1
    assert (readers[0].receiver, readers[-1].receiver) == ("reader 5", "the last")
    assert leases.why_ended("0") == "unknown lease"
    assert leases.why_ended("6") == "the lease has ended: the receiver reported a result"


def test_the_name_of_a_receiver_is_shown_on_one_line() -> None:
    leases = serving(1)
    lease = leases.grant(LeaseRequest("state", "host\nERROR forged"), "a", 1, 0.0)
    assert lease is not None
    leases.sent(lease, 50, 1.0)
    (reader,) = leases.readers(2.0)
    assert str(reader) == (r"'host\nERROR forged': state version 1, reading (50 of 100 bytes sent in 2.0 s)")


class AnySequence(RuleBasedStateMachine):
    """Whatever happens in whatever order, memory that is read is not freed, and nothing is kept for ever."""

    open_leases: Bundle[Lease[Memory]] = Bundle("open_leases")
    sends: Bundle[Lease[Memory]] = Bundle("sends")

    def __init__(self) -> None:
        super().__init__()
        self.leases: Leases[Memory] = Leases()
        self.now_s = 0.0
        self.granted: list[Lease[Memory]] = []
        self.sending: list[Lease[Memory]] = []
        self.made: list[Memory] = []
        self.freed: list[Memory] = []

    @rule(name=st.sampled_from("ab"), is_copy=st.booleans())
    def publish(self, name: str, is_copy: bool) -> None:
        memory = Memory(len(self.made), is_copy=is_copy)
        self.leases.make_current(name, memory)
        self.made.append(memory)

    @rule(name=st.sampled_from("ab"))
    def withdraw(self, name: str) -> None:
        self.leases.withdraw(name)

    @precondition(lambda self: self.leases.current)
    @rule(target=open_leases, connection=st.integers(1, 4), data=st.data())
    def grant(self, connection: int, data: st.DataObject) -> Lease[Memory]:
        name = data.draw(st.sampled_from(sorted(self.leases.current)))
        lease = lease_on(self.leases, str(len(self.granted)), connection, self.now_s, name)
        assert lease.held is self.leases.current[name]
        self.granted.append(lease)
        return lease

    @rule(target=sends, lease=open_leases)
    def pin(self, lease: Lease[Memory]) -> Lease[Memory] | MultipleResults[Lease[Memory]]:
        if self.leases.pin(lease):
            self.sending.append(lease)
            return lease
        assert not lease.is_open
        return multiple()

    @rule(lease=consumes(sends), nbytes=st.integers(0, 9))
    def unpin(self, lease: Lease[Memory], nbytes: int) -> None:
        assert self.leases.sent(lease, nbytes, self.now_s) == lease.is_open
        self.sending.remove(lease)
        self.leases.unpin(lease)

    @rule(lease=open_leases, connection=st.integers(1, 4))
    def find(self, lease: Lease[Memory], connection: int) -> None:
        assert (self.leases.find(lease.id, connection, self.now_s) is lease) == lease.is_open

    @rule(lease=open_leases, outcome=st.sampled_from(["confirmed", "refused", "failed"]))
    def finish(self, lease: Lease[Memory], outcome: Literal["confirmed", "refused", "failed"]) -> None:
        self.leases.finish(lease, Result(outcome), self.now_s)

    @rule(connection=st.integers(1, 4))
    def disconnect(self, connection: int) -> None:
        self.leases.disconnected(connection, self.now_s)
        assert not any(lease.is_open and lease.connections <= {connection} for lease in self.granted)

    @rule(seconds=st.sampled_from([1.0, LEASE_S / 2, LEASE_S + 1]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.leases.expire(self.now_s)
        assert all(lease.heard_s + LEASE_S >= self.now_s for lease in self.granted if lease.is_open)

    @rule()
    def free(self) -> None:
        self.freed += self.leases.take_unused()

    @invariant()
    def memory_is_kept_as_long_as_it_is_read_and_no_longer(self) -> None:
        is_open = [lease for lease in self.granted if lease.is_open]
        read = {lease.held for lease in (*is_open, *self.sending)}
        kept = read | {*self.leases.current.values()}
        assert kept.isdisjoint(self.freed)
        assert len(self.freed) == len({*self.freed}), "freed once"
        assert {lease.held for lease in self.leases.reading(lambda _: True)} == read
        self.freed += self.leases.take_unused()
        assert {*self.made} - kept == {*self.freed}


TestAnySequence = AnySequence.TestCase
TestAnySequence.settings = examples(200)


def test_an_open_reader_is_listed_however_many_fetches_have_ended_since() -> None:
    leases = serving(7)
    oldest = leases.grant(LeaseRequest("state", "oldest"), "oldest", 1, 0.0)
    assert oldest is not None
    for number in range(MAX_ENTRIES + 5):
        lease = leases.grant(LeaseRequest("state", "reader"), f"{number}", 2, 1.0)
        assert lease is not None
        leases.finish(lease, Result("confirmed"), 1.0)
    readers = leases.readers(2.0)
    assert (len(readers), readers[0].receiver) == (MAX_ENTRIES + 1, "oldest")


def test_a_receiver_that_reads_twice_at_once_is_missing_until_both_have_confirmed() -> None:
    leases = serving(7)
    first, second = (leases.grant(LeaseRequest("state", "host:1"), lease, 1, 0.0) for lease in "ab")
    assert first is not None
    assert second is not None
    leases.finish(first, Result("confirmed"), 1.0)
    assert [reader.state for reader in leases.missing("state", 7, 2.0)] == ["reading"]
    leases.finish(second, Result("confirmed"), 3.0)
    assert leases.missing("state", 7, 4.0) == []
