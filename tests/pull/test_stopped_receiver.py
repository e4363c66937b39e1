"""A receiver that is stopped in the middle of a fetch, and continues."""

from __future__ import annotations

import os
import signal
import socket
import time
from functools import partial
from typing import Any
from unittest import mock

import pytest

import torchferry
from tests.faults.controller import (
    wait_until,
    wait_until_blocked_in_send,
    wait_until_idle,
    wait_until_stopped,
)
from tests.support.proxy import Exchange, Proxy
from tests.support.pull import MIB, FetchResult, Resources, fetch_into, is_idle, serve_state
from tests.support.solo import Solos
from torchferry.core.schedule import OVERDUE_S
from torchferry.links import sockets
from torchferry.links.sockets import prepare

LAYER_BYTES = 32 * MIB
TIMEOUT_S = 1.0
STALL_S = 2.0
RECEIVE_BUFFER_BYTES = 256 << 10


def limit_receive_buffer(sock: socket.socket, lost_s: int) -> None:
    """Let the kernel receive little while the process is stopped.

    Otherwise it may receive all that was requested, and the source does not wait.
    """
    prepare(sock, lost_s)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)


def fetch_and_stop(addresses: list[str], **options: Any) -> FetchResult:
    """Fetch, and stop this process once, as soon as it has received something."""
    stopped: list[torchferry.ProgressEvent] = []

    def stop(event: torchferry.ProgressEvent) -> None:
        if event.bytes_moved and not stopped:
            stopped.append(event)
            signal.raise_signal(signal.SIGSTOP)

    with mock.patch.object(sockets, "prepare", limit_receive_buffer):
        return fetch_into(addresses, LAYER_BYTES, via="tcp", on_progress=stop, **options)


@pytest.mark.slow
@pytest.mark.parametrize("attempt", range(3))
def test_a_receiver_that_was_stopped_past_its_deadline_leaves_no_thread_in_the_source(
    solos: Solos, attempt: int
) -> None:
    # The source waits to send while nothing is read. Unless the receiver resets the connection, the source
    # may find only after a minute that nobody will read any more.
    source, receiver = solos.get("source-0"), solos.get("receiver")
    address = source.run(serve_state, LAYER_BYTES)
    baseline = source.run(Resources.now)
    receiver.start(partial(fetch_and_stop, [address], timeout=TIMEOUT_S))
    wait_until_stopped(receiver.pid)
    stopped_s = time.monotonic()
    wait_until_blocked_in_send(source.pid)
    wait_until(lambda: time.monotonic() > stopped_s + 3 * TIMEOUT_S, "the deadline passes")
    receiver.signal(signal.SIGCONT)
    result: FetchResult = receiver.answer()
    assert isinstance(result.error, TimeoutError)
    assert result.left == ""
    assert source.run(is_idle, baseline) == ""


def fetch_and_stop_sources(
    addresses: list[str], pids: list[int], callback_s: float = 0.0, **options: Any
) -> FetchResult:
    """Fetch, and stop sources when something was received. Each call of `on_progress` takes `callback_s`."""

    def stop(event: torchferry.ProgressEvent) -> None:
        if event.bytes_moved:
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            pids.clear()
        time.sleep(callback_s)

    return fetch_into(addresses, LAYER_BYTES, via="tcp", on_progress=stop, **options)


@pytest.mark.slow
def test_a_receiver_that_was_stopped_does_not_blame_its_sources(solos: Solos) -> None:
    sources, receiver = [solos.get("source-0"), solos.get("source-1")], solos.get("receiver")
    addresses = [source.run(serve_state, LAYER_BYTES) for source in sources]
    pids = [source.pid for source in sources]
    receiver.start(partial(fetch_and_stop_sources, addresses, pids, stall_timeout=STALL_S, timeout=20.0))
    # The receiver waits for the sources when it is stopped, and still when it continues.
    for pid in pids:
        wait_until_stopped(pid)
    wait_until_idle(receiver.pid)
    receiver.signal(signal.SIGSTOP)
    wait_until_stopped(receiver.pid)
    stopped_s = time.monotonic()
    wait_until(lambda: time.monotonic() > stopped_s + STALL_S + OVERDUE_S, "every limit passes")
    receiver.signal(signal.SIGCONT)
    continued_s = time.monotonic()
    wait_until(lambda: time.monotonic() > continued_s + OVERDUE_S / 2, "the receiver checks its limits")
    for source in sources:
        source.signal(signal.SIGCONT)
    result: FetchResult = receiver.answer()
    assert result.error is None
    assert result.report is not None
    assert [each.failures for each in result.report.sources.values()] == [[], []]
    assert set(result.contents.values()) == {"new"}


@pytest.mark.slow
@pytest.mark.parametrize("callback_s", [0.0, 0.3])
def test_a_slow_on_progress_does_not_delay_the_end_of_a_stalled_fetch(
    solos: Solos, callback_s: float
) -> None:
    source, receiver = solos.get("source-0"), solos.get("receiver")
    address = source.run(serve_state, LAYER_BYTES)

    def on_exchange(exchange: Exchange) -> None:
        if exchange.chunks and 0 not in exchange.chunks:
            wait_until_stopped(source.pid)
        exchange.relay()

    try:
        with Proxy(address, on_exchange) as proxy:
            job = partial(fetch_and_stop_sources, stall_timeout=STALL_S, timeout=20.0)
            result: FetchResult = receiver.run(job, [proxy.address], [source.pid], callback_s)
    finally:
        source.signal(signal.SIGCONT)
    assert isinstance(result.error, TimeoutError), result.error
    assert "no bytes arrived for 2 s" in str(result.error)
    assert result.seconds < 8.0, "long before the deadline"


@pytest.mark.slow
def test_a_slow_on_progress_does_not_delay_the_change_to_another_source(solos: Solos) -> None:
    sources, receiver = [solos.get("source-0"), solos.get("source-1")], solos.get("receiver")
    addresses = [source.run(serve_state, LAYER_BYTES) for source in sources]
    try:
        job = partial(fetch_and_stop_sources, timeout=20.0)
        result: FetchResult = receiver.run(job, addresses, [sources[0].pid], 0.05)
    finally:
        sources[0].signal(signal.SIGCONT)
    assert result.error is None
    assert result.seconds < 8.0, "long before the deadline"
