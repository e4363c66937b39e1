"""The kernel's counters: bytes received over TCP, and peak memory."""

from __future__ import annotations

import socket
import sys

import pytest

from benchmarks import machine

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="read from /proc")


def test_bytes_received_over_tcp_are_counted() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as one,
    ):
        other, _ = server.accept()
        with other:
            before = machine.received_bytes()
            one.sendall(bytes(100_000))
            left = 100_000
            while left:
                left -= len(other.recv(left))
            assert machine.received_between(before, machine.received_bytes()) == 100_000


def test_freed_memory_counts_for_the_peak() -> None:
    start = machine.reset_peak()
    held = bytearray(b"\x01") * (50 * 2**20)
    del held
    peak = machine.peak_since(start)
    assert peak is not None
    assert 45 * 2**20 < peak < 120 * 2**20


def test_memory_in_use_before_does_not_count() -> None:
    held = bytearray(b"\x01") * (50 * 2**20)
    peak = machine.peak_since(machine.reset_peak())
    assert peak is not None
    assert peak < 20 * 2**20
    del held


def test_unknown_counters_are_none() -> None:
    assert machine.received_between(None, {1: 2}) is None
    assert machine.peak_since(None) is None
