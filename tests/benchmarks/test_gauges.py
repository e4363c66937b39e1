"""What the kernel counts: bytes by TCP, and memory at its peak."""

from __future__ import annotations

import socket
import sys

import pytest

from benchmarks import gauges

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="read from /proc")


def test_bytes_that_come_in_by_tcp_are_counted() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as one,
    ):
        other, _ = server.accept()
        with other:
            before = gauges.received_bytes()
            one.sendall(bytes(100_000))
            left = 100_000
            while left:
                left -= len(other.recv(left))
            assert gauges.received_between(before, gauges.received_bytes()) == 100_000


def test_memory_is_counted_at_its_peak_and_not_at_its_end() -> None:
    start = gauges.reset_peak()
    held = bytearray(b"\x01") * (50 * 2**20)
    del held
    peak = gauges.peak_since(start)
    assert peak is not None
    assert 45 * 2**20 < peak < 120 * 2**20


def test_memory_in_use_before_is_not_counted() -> None:
    held = bytearray(b"\x01") * (50 * 2**20)
    peak = gauges.peak_since(gauges.reset_peak())
    assert peak is not None
    assert peak < 20 * 2**20
    del held


def test_what_can_not_be_measured_is_said_so() -> None:
    assert gauges.received_between(None, {1: 2}) is None
    assert gauges.peak_since(None) is None
