"""A fetch from several sources: who delivers what, and what a slow, dead or different source costs."""

from __future__ import annotations

import contextlib
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

import torchferry
from tests.faults.controller import wait_until_stopped
from tests.support.proxy import BlackHole, Exchange, Proxy
from tests.support.pull import (
    LAYERS,
    MIB,
    PATHS,
    FetchResult,
    Resources,
    fetch_into,
    is_idle,
    serve_state,
)
from tests.support.solo import Solo, Solos
from torchferry.core.report import FetchReport, SourceReport
from torchferry.engine.pull import receiving
from torchferry.errors import LinkStalled, LinkTimeout, SourcesLost, TornAndBroken, TornAndLate
from torchferry.links.address import parse_address

LAYER_BYTES = 2 * MIB
TOTAL_BYTES = LAYERS * LAYER_BYTES
NEW = dict.fromkeys(PATHS, "new")


@contextlib.contextmanager
def two_sources(solos: Solos, version: int = 7, seed: int = 0) -> Iterator[list[Proxy]]:
    """Proxies to two sources, each its own process. The second serves this version and state."""
    addresses = [
        solos.get("source-0").run(serve_state, LAYER_BYTES),
        solos.get("source-1").run(serve_state, LAYER_BYTES, version, seed),
    ]
    with Proxy(addresses[0]) as first, Proxy(addresses[1]) as second:
        yield [first, second]


@pytest.fixture
def proxies(solos: Solos) -> Iterator[list[Proxy]]:
    """Proxies to two sources that serve equal states."""
    with two_sources(solos) as found:
        yield found


@pytest.fixture
def receiver(solos: Solos) -> Solo:
    return solos.get("receiver")


def fetched(receiver: Solo, proxies: list[Proxy], **options: Any) -> FetchResult:
    addresses = [proxy.address for proxy in proxies]
    return receiver.run(partial(fetch_into, addresses, LAYER_BYTES, **{"timeout": 10.0, **options}))


def report_of(result: FetchResult) -> FetchReport:
    assert result.error is None, result.error
    assert result.contents == NEW
    assert result.left == ""
    assert result.report is not None
    return result.report


def by_source(result: FetchResult, proxies: list[Proxy]) -> list[SourceReport]:
    sources = report_of(result).sources
    return [sources[proxy.peer] for proxy in proxies]


class Once:
    """Does something at the first exchange of which `is_the_one` is true, and relays all others."""

    def __init__(self, is_the_one: Callable[[Exchange], bool], act: Callable[[Exchange], None]) -> None:
        self._is_the_one, self._act = is_the_one, act
        self._lock = threading.Lock()
        self.happened = threading.Event()
        self.happened_s = 0.0

    def __call__(self, exchange: Exchange) -> None:
        with self._lock:
            acts = self._is_the_one(exchange) and not self.happened.is_set()
            if acts:
                self.happened_s = time.monotonic()
                self.happened.set()
        self._act(exchange) if acts else exchange.relay()


def is_for_chunks(exchange: Exchange) -> bool:
    return exchange.step == "chunks"


def relay_half_a_chunk(exchange: Exchange) -> None:
    exchange.send_request(exchange.request)
    exchange.receive_head()
    exchange.send_head(exchange.head)
    exchange.relay_body(MIB // 2)


def test_all_sources_of_an_equal_state_deliver_chunks(proxies: list[Proxy], receiver: Solo) -> None:
    result = fetched(receiver, proxies)
    reports = by_source(result, proxies)
    assert all(report.chunks > 0 and not report.failures for report in reports)
    assert sum(report.bytes for report in reports) == report_of(result).bytes_moved == TOTAL_BYTES
    assert report_of(result).confirmed


def test_a_source_of_views_of_one_buffer_and_one_of_their_clones_deliver_chunks(
    receiver: Solo, solos: Solos
) -> None:
    addresses = [
        solos.get(f"source-{n}").run(partial(serve_state, LAYER_BYTES, flat=is_flat))
        for n, is_flat in enumerate([True, False])
    ]
    for listed in (addresses, addresses[::-1]):
        with Proxy(listed[0]) as first, Proxy(listed[1]) as second:
            result = fetched(receiver, [first, second])
            reports = by_source(result, [first, second])
        assert all(report.chunks > 0 and not report.failures for report in reports)
        assert sum(report.bytes for report in reports) == TOTAL_BYTES


def test_a_faster_source_delivers_more(proxies: list[Proxy], receiver: Solo) -> None:
    proxies[0].rate = 10 * MIB
    slow, fast = by_source(fetched(receiver, proxies), proxies)
    assert 0 < slow.bytes < TOTAL_BYTES // 3
    assert fast.bytes == TOTAL_BYTES - slow.bytes


def test_a_source_that_dies_costs_only_its_unfinished_chunks(
    proxies: list[Proxy], receiver: Solo, solos: Solos
) -> None:
    source = solos.get("source-0")

    def die(exchange: Exchange) -> None:
        relay_half_a_chunk(exchange)
        source.signal(signal.SIGKILL)
        source.join()
        proxies[0].refuse()
        exchange.end()

    proxies[0].on_exchange = died = Once(is_for_chunks, die)
    result = fetched(receiver, proxies)
    dead, living = by_source(result, proxies)
    assert result.ended_s - died.happened_s < 1.0
    assert dead.failures
    # The other source did not deliver again what the dead one had delivered.
    assert dead.bytes + living.bytes == report_of(result).bytes_moved == TOTAL_BYTES


def test_a_chunk_that_is_overdue_is_asked_for_elsewhere_after_its_connection_was_closed(
    proxies: list[Proxy], receiver: Solo
) -> None:
    closed_s: list[float] = []
    asked: list[tuple[float, range]] = []

    def stall(exchange: Exchange) -> None:
        relay_half_a_chunk(exchange)
        try:
            exchange.hold()
        finally:
            closed_s.append(time.monotonic())
            held.append(exchange.chunks)

    def note(exchange: Exchange) -> None:
        asked.append((time.monotonic(), exchange.chunks))
        exchange.relay()

    held: list[range] = []
    proxies[0].on_exchange = stalled = Once(is_for_chunks, stall)
    proxies[1].on_exchange = note
    result = fetched(receiver, proxies)
    slow, _ = by_source(result, proxies)
    [failure] = slow.failures
    # The half that arrived may already have taken longer than a whole chunk should.
    why = r"no bytes for|its next chunk took"
    assert re.fullmatch(rf"the connection was too slow, so it was closed: ({why}) 1(\.\d)? s", failure)
    assert 0.9 < closed_s[0] - stalled.happened_s < 1.5
    again = [when_s for when_s, chunks in asked if held[0].start in chunks]
    # The kernel may tell the proxy of the end a moment later.
    assert again
    assert min(again) > closed_s[0] - 0.05
    assert result.seconds < 2.5


@pytest.mark.slow
def test_a_source_that_trickles_does_not_hold_up_the_fetch(proxies: list[Proxy], receiver: Solo) -> None:
    proxies[0].rate = 2000.0
    result = fetched(receiver, proxies)
    trickle, other = by_source(result, proxies)
    assert (trickle.bytes, other.bytes) == (0, TOTAL_BYTES)
    assert result.seconds < 5.0


@pytest.mark.slow
def test_a_source_that_is_stopped_and_continues_while_the_other_is_dead_still_delivers(
    proxies: list[Proxy], receiver: Solo, solos: Solos
) -> None:
    # The source answers the first request for the manifest after the receiver gave that request up.
    source = solos.get("source-0")
    proxies[1].refuse()

    def pause(exchange: Exchange) -> None:
        exchange.send_request(exchange.request)
        exchange.receive_head()
        exchange.send_head(exchange.head)
        source.signal(signal.SIGSTOP)
        wait_until_stopped(source.pid)
        threading.Timer(1.3, source.signal, [signal.SIGCONT]).start()
        with contextlib.suppress(Exception):
            exchange.hold(resumed)
        exchange.relay_body()

    resumed = threading.Event()
    threading.Timer(1.3, resumed.set).start()
    proxies[0].on_exchange = Once(lambda exchange: exchange.step == "manifest", pause)
    result = fetched(receiver, proxies)
    paused, refused = by_source(result, proxies)
    assert paused.bytes == TOTAL_BYTES
    assert refused.failures == ["Connection refused"]


def test_a_trickling_manifest_does_not_outlast_the_deadline(proxies: list[Proxy], receiver: Solo) -> None:
    proxies[0].rate = 50.0
    result = fetched(receiver, proxies[:1], timeout=0.5)
    assert isinstance(result.error, LinkTimeout)
    assert result.seconds < 1.0
    assert result.left == ""


@pytest.mark.slow  # The fetch tries for 5 s to confirm.
def test_a_source_that_can_not_be_connected_to_any_more_keeps_no_chunks(
    proxies: list[Proxy], receiver: Solo
) -> None:
    # It granted a lease, and then takes no more connections. The one that it has still works.
    def vanish(exchange: Exchange) -> None:
        proxies[0].vanish()
        exchange.relay()

    proxies[0].on_exchange = Once(lambda exchange: exchange.step == "connect", vanish)
    result = fetched(receiver, list(reversed(proxies)))
    gone, living = by_source(result, proxies)
    assert (gone.bytes, living.bytes) == (0, TOTAL_BYTES)
    assert report_of(result).confirmed
    assert report_of(result).phases_s["receive tensors"] < 2.5


@pytest.mark.parametrize("limit", ["stall_timeout", pytest.param("timeout", marks=pytest.mark.slow)])
def test_the_last_source_is_given_up_only_at_a_limit(
    proxies: list[Proxy], receiver: Solo, limit: str
) -> None:
    """It takes connections, but sends nothing. The lane that was silent first connects again."""
    proxies[1].refuse()
    lanes = iter([0.0, 0.4])
    sent_s: list[float] = []

    def stall(exchange: Exchange) -> None:
        if is_for_chunks(exchange):
            if (wait_s := next(lanes, None)) is not None:
                proxies[0].closed.wait(wait_s)
                relay_half_a_chunk(exchange)
                sent_s.append(time.monotonic())
            exchange.hold()
        exchange.relay()

    proxies[0].on_exchange = stall
    limits = {"timeout": 10.0, limit: 1.3}
    result = fetched(receiver, proxies, **limits)
    assert isinstance(result.error, TornAndLate)
    assert isinstance(result.cause, LinkStalled if limit == "stall_timeout" else LinkTimeout)
    began_s = max(sent_s) - 0.1 if limit == "stall_timeout" else result.started_s
    assert 1.3 <= result.ended_s - began_s < 1.3 + 0.5
    assert result.left == ""


def test_sources_in_backoff_are_asked_at_once_when_no_other_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    # Two sources stall. When both are in backoff, for longer than the test, the third is lost.
    monkeypatch.setattr(receiving, "OVERDUE_S", 60.0)
    closed = [threading.Event(), threading.Event()]

    def stall(exchange: Exchange, closes: threading.Event) -> None:
        relay_half_a_chunk(exchange)
        try:
            exchange.hold()
        finally:
            closes.set()

    state = {"w": torch.arange(4 * MIB)}
    lost_s: list[float] = []
    with torchferry.serve(state, 1) as source, contextlib.ExitStack() as stack:
        proxies = [stack.enter_context(Proxy(source.address)) for _ in range(3)]
        for proxy, closes in zip(proxies, closed, strict=False):
            proxy.on_exchange = Once(is_for_chunks, partial(stall, closes=closes))

        def serve_until_both_are_left(exchange: Exchange) -> None:
            if not is_for_chunks(exchange):
                exchange.relay()
                return
            # Its last byte comes half a second later than those of the others.
            closed[0].wait(0.5)
            relay_half_a_chunk(exchange)
            for closes in closed:
                exchange.hold(closes)
            lost_s.append(time.monotonic())
            proxies[2].refuse()
            exchange.reset()

        proxies[2].on_exchange = serve_until_both_are_left
        got = torchferry.fetch([proxy.address for proxy in proxies], via="tcp", timeout=20)
        assert time.monotonic() - lost_s[0] < 5.0
    assert torch.equal(got.state["w"], state["w"])
    left = [got.report.sources[proxy.peer] for proxy in proxies[:2]]
    assert all(len(each.failures) == 1 and each.chunks > 0 for each in left)


def test_a_refused_connection_is_not_tried_again(proxies: list[Proxy], receiver: Solo, solos: Solos) -> None:
    for proxy in proxies:
        proxy.refuse()
    result = fetched(receiver, proxies)
    assert isinstance(result.error, SourcesLost)
    assert result.error.reasons == {proxy.peer: "Connection refused" for proxy in proxies}
    assert result.seconds < 0.5
    assert result.contents == dict.fromkeys(PATHS, "old")


def test_all_sources_that_die_are_named_with_their_reasons(
    proxies: list[Proxy], receiver: Solo, solos: Solos
) -> None:
    def die(exchange: Exchange) -> None:
        relay_half_a_chunk(exchange)
        for number, proxy in enumerate(proxies):
            proxy.refuse()
            solos.discard(f"source-{number}")
        exchange.end()

    proxies[0].on_exchange = died = Once(is_for_chunks, die)
    result = fetched(receiver, proxies)
    assert isinstance(result.error, TornAndBroken)
    assert all(proxy.peer in str(result.error) for proxy in proxies)
    assert result.ended_s - died.happened_s < 1.5


def test_the_highest_version_that_answers_within_a_second_is_taken(receiver: Solo, solos: Solos) -> None:
    with two_sources(solos, version=8, seed=1) as proxies:
        proxies[1].on_exchange = Once(lambda _: True, partial(relay_after, 0.3))
        result = fetched(receiver, proxies, seed=1)
    old, new = by_source(result, proxies)
    assert result.version == 8
    assert (old.bytes, new.bytes) == (0, TOTAL_BYTES)
    assert old.failures == ["not used: it serves version 7, not 8"]


@pytest.mark.slow
def test_a_version_that_answers_after_more_than_a_second_is_not_waited_for(
    receiver: Solo, solos: Solos
) -> None:
    with two_sources(solos, version=8, seed=1) as proxies:
        proxies[1].on_exchange = Once(lambda _: True, Exchange.hold)
        result = fetched(receiver, proxies)
    assert by_source(result, proxies)[0].bytes == TOTAL_BYTES
    assert result.version == 7
    assert 1.0 <= result.seconds < 2.0


def relay_after(delay_s: float, exchange: Exchange) -> None:
    """Relay an exchange after a delay: a slow network."""
    threading.Event().wait(delay_s)
    exchange.relay()


@pytest.mark.parametrize("first", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_of_differing_states_of_one_version_that_of_the_first_address_is_fetched(
    receiver: Solo, solos: Solos, first: int
) -> None:
    with two_sources(solos, seed=1) as proxies:
        listed = [proxies[first], proxies[1 - first]]
        # The other address answers first.
        listed[0].on_exchange = Once(lambda _: True, partial(relay_after, 0.3))
        result = fetched(receiver, listed, seed=first)
    chosen, other = by_source(result, listed)
    assert (chosen.bytes, other.bytes) == (TOTAL_BYTES, 0)
    (failure,) = other.failures
    assert failure.startswith("not used: its version 7 holds another state than that of the chosen source")
    # It is told that it is not used.
    assert {exchange.step for exchange in listed[1].requests} <= {"connect", "confirm"}


@pytest.mark.parametrize("seed", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_source_that_was_restarted_is_used_again_only_if_it_serves_the_same_state(
    proxies: list[Proxy], receiver: Solo, solos: Solos, seed: int
) -> None:
    # The second process takes the place of the first at its address, with the same version number.
    restarted = solos.get("source-1").run(serve_state, LAYER_BYTES, 7, seed, proxies[0].target.token)

    def restart(exchange: Exchange) -> None:
        relay_half_a_chunk(exchange)
        proxies[0].target = parse_address(restarted)
        solos.discard("source-0")
        exchange.end()

    proxies[0].on_exchange = Once(is_for_chunks, restart)
    result = fetched(receiver, proxies[:1])
    if seed == 0:
        assert report_of(result).confirmed
        return
    assert isinstance(result.error, TornAndBroken)
    assert "another state" in str(result.error)
    # Nothing of the other state was written.
    assert set(result.contents.values()) <= {"old", "new", "mixed"}
    assert {result.contents[path] for path in result.error.untouched} <= {"old"}
    assert {result.contents[path] for path in result.error.whole} <= {"new"}


def test_a_black_hole_holds_a_fetch_up_for_about_a_second_and_leaves_no_thread(
    proxies: list[Proxy], receiver: Solo
) -> None:
    with BlackHole() as hole:
        addresses = [hole.address, *(proxy.address for proxy in proxies)]
        result = receiver.run(partial(fetch_into, addresses, LAYER_BYTES, timeout=20.0))
    assert report_of(result).confirmed
    assert result.seconds < 1.6


@pytest.mark.slow
def test_sources_keep_nothing_after_a_fetch(proxies: list[Proxy], receiver: Solo, solos: Solos) -> None:
    sources = [solos.get(f"source-{n}") for n in range(2)]
    baselines = [source.run(Resources.now) for source in sources]
    for _ in range(5):
        report_of(fetched(receiver, proxies))
    for source, baseline in zip(sources, baselines, strict=True):
        assert source.run(is_idle, baseline) == ""
