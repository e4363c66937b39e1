"""The connection that opened a lease: which requests it takes, and when another one is opened."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

import torchferry
from tests.support.proxy import Exchange, Proxy
from torchferry.core import pull
from torchferry.core.pull import LeaseRequest, Result
from torchferry.engine.pull.connections import Connections
from torchferry.engine.pull.remote import RemoteSource
from torchferry.errors import LinkTimeout
from torchferry.links.address import parse_address
from torchferry.links.http_client import HttpConnection

TIMEOUT_S = 5.0


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[HttpConnection]:
    """The connections that were opened, in order."""
    found: list[HttpConnection] = []
    original = Connections._add

    def add(self: Connections, connection: HttpConnection) -> None:
        found.append(connection)
        original(self, connection)

    monkeypatch.setattr(Connections, "_add", add)
    return found


@contextmanager
def leased(address: str) -> Iterator[RemoteSource]:
    """Open a lease on the current version of a source."""
    remote = RemoteSource(parse_address(address), None, 1 << 20)
    remote.grant = remote.open(LeaseRequest("state", "a receiver"), time.monotonic() + TIMEOUT_S)
    try:
        yield remote
    finally:
        remote.shut_down()


def is_open(connection: HttpConnection) -> bool:
    return connection._sock.fileno() >= 0


def test_a_single_source_has_one_connection_beside_that_for_chunks(opened: list[HttpConnection]) -> None:
    with torchferry.serve({"w": torch.arange(1 << 20)}, 1) as source:
        got = torchferry.fetch(source.address, via="tcp", timeout=20)
        assert got.report.confirmed
        assert len(opened) == 2
        assert not any(map(is_open, opened))


def test_a_late_answer_is_not_taken_for_another_and_the_lease_stays_open(
    opened: list[HttpConnection],
) -> None:
    late: list[str] = []

    def delay(exchange: Exchange) -> None:
        if exchange.step == "manifest" and not late:
            late.append(exchange.step)
            time.sleep(0.4)
        exchange.relay()

    with torchferry.serve({"w": torch.arange(1000)}, 1) as source, Proxy(source.address, delay) as proxy:
        with leased(proxy.address) as remote:
            with pytest.raises(LinkTimeout):
                remote.metadata(0.2, True)
            assert len(opened) == 1
            manifest, digests = remote.metadata(TIMEOUT_S, True)
            assert (len(opened), len(digests)) == (2, 1)
            assert b"w" in manifest
            assert is_open(opened[0]), "the lease outlasts the second connection"
            assert not is_open(opened[1])
            assert [reader.state for reader in source.status().readers] == ["reading"]
            assert remote.tell(Result("confirmed"), TIMEOUT_S)
            assert len(opened) == 3
        assert not is_open(opened[0])
        assert [reader.state for reader in source.status().readers] == ["confirmed"]


def test_a_connection_that_was_silent_for_long_takes_no_request(
    opened: list[HttpConnection], monkeypatch: pytest.MonkeyPatch
) -> None:
    with torchferry.serve({"w": torch.arange(1000)}, 1) as source, leased(source.address) as remote:
        remote.metadata(TIMEOUT_S, True)
        assert len(opened) == 1
        monkeypatch.setattr(pull, "ALIVE_S", 0.0)
        assert remote.tell(Result("confirmed"), TIMEOUT_S)
        assert len(opened) == 2


def test_a_renewed_lease_closes_the_connection_of_the_earlier_one(opened: list[HttpConnection]) -> None:
    wanted = LeaseRequest("state", "a receiver")
    with torchferry.serve({"w": torch.arange(1000)}, 1) as source, leased(source.address) as remote:
        earlier = remote.grant
        assert earlier is not None
        remote.renew(wanted, earlier, time.monotonic() + TIMEOUT_S)
        assert remote.grant is not earlier
        assert [is_open(each) for each in opened] == [False, True]
        # A thread that uses it closes it itself.
        ended = remote.grant
        with remote._connections.borrowed(TIMEOUT_S) as used:
            remote.renew(wanted, ended, time.monotonic() + TIMEOUT_S)  # type: ignore[arg-type]
            assert used is opened[1]
            assert [is_open(each) for each in opened] == [False, True, True]
        assert [is_open(each) for each in opened] == [False, False, True]


def test_a_connection_that_is_used_at_the_end_is_closed_by_its_thread(opened: list[HttpConnection]) -> None:
    with torchferry.serve({"w": torch.arange(1000)}, 1) as source, leased(source.address) as remote:
        with remote._connections.borrowed(TIMEOUT_S) as used:
            remote.shut_down()
            assert is_open(used)
        assert not is_open(used)


@pytest.mark.parametrize("step", ["manifest", "confirm"])
def test_a_connection_that_was_closed_while_it_was_idle_is_replaced(step: str) -> None:
    """As by a load balancer: it closes the receiver's connection, but not its own to the source."""
    dropped: list[Exchange] = []

    def drop(exchange: Exchange) -> None:
        if exchange.step == step and not dropped:
            dropped.append(exchange)
            exchange.drop_client()
        exchange.relay()

    with torchferry.serve({"w": torch.arange(1000)}, 1) as source, Proxy(source.address, drop) as proxy:
        got = torchferry.fetch(proxy.address, timeout=TIMEOUT_S)
        assert got.report.confirmed
        assert source.status().readers[0].state == "confirmed"
    assert len(dropped) == 1


def test_a_snapshot_gets_two_lanes_except_over_tls_on_two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    with torchferry.serve({"w": torch.ones(3)}, 1) as source, leased(source.address) as remote:
        assert remote.max_lanes == 2
        remote.address = replace(remote.address, secure=True)
        # Whether the source's memory can be used is known when a lane is connected.
        for via, lanes in (("", 1), ("tcp", 1), ("memory", 2)):
            remote.report.via = via
            assert remote.max_lanes == lanes
