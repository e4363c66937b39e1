"""Two connections to one source: the fetch goes on with one of them if the other fails."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

import torchferry
from tests.support.proxy import Exchange, Proxy
from torchferry.engine.pull.receiving import Receiving
from torchferry.engine.pull.sources import Sources
from torchferry.errors import StateError

STATE = {"w": torch.arange(3 << 20)}  # 24 MiB
RATE = 20e6
"""Bytes per second of a connection: so few that both connections deliver chunks."""


@contextmanager
def proxied(on_other_connections: Callable[[Exchange], None]) -> Iterator[Proxy]:
    """Serve STATE through a proxy. A function gets all connections that ask for chunks, but the first."""
    connections: list[socket.socket] = []

    def answer(exchange: Exchange) -> None:
        if exchange.step == "chunks":
            connections.append(exchange.connection)
            if exchange.connection is not connections[0]:
                on_other_connections(exchange)
                return
        exchange.relay()

    with torchferry.serve(STATE, version=1) as source, Proxy(source.address, answer, RATE) as proxy:
        yield proxy
        assert len({id(each) for each in connections}) > 1, "a second connection asked for chunks"


def test_a_lane_whose_connections_break_ends_alone() -> None:
    with proxied(Exchange.reset) as proxy:
        got = torchferry.fetch(proxy.address, timeout=20)
    assert torch.equal(got.state["w"], STATE["w"])
    assert got.report.sources[proxy.peer].failures


def test_a_silent_connection_is_replaced_although_there_is_no_other_source() -> None:
    held: list[Exchange] = []

    def hold_once(exchange: Exchange) -> None:
        held.append(exchange)
        if len(held) == 1:
            exchange.hold()
        exchange.relay()

    with proxied(hold_once) as proxy:
        got = torchferry.fetch(proxy.address, timeout=20)
    assert torch.equal(got.state["w"], STATE["w"])
    assert any("no bytes for" in each for each in got.report.sources[proxy.peer].failures)


def test_one_lane_is_enough_if_no_thread_can_be_started_for_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refused: list[object] = []
    original = Sources.start

    def start(self: Sources, work: Callable[..., object], *args: object) -> object:
        if getattr(work, "__func__", None) is Receiving._deliver and args[0].number == 1:  # type: ignore[attr-defined]
            refused.append(args[0])
            raise StateError("a thread can't be started")
        return original(self, work, *args)

    monkeypatch.setattr(Sources, "start", start)
    with torchferry.serve(STATE, version=1) as source:
        got = torchferry.fetch(source.address, timeout=20)
    assert len(refused) == 1
    assert torch.equal(got.state["w"], STATE["w"])
