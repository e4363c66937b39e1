"""A receiver that is stopped in the middle of a fetch, and continues after its deadline."""

from __future__ import annotations

import signal
import time
from functools import partial

import pytest

import torchferry
from tests.faults.controller import wait_until, wait_until_blocked_in_send, wait_until_stopped
from tests.support.pull import MIB, FetchResult, Resources, fetch_into, is_idle, serve_state
from tests.support.solo import Solos

LAYER_BYTES = 32 * MIB
TIMEOUT_S = 1.0


def fetch_and_stop(address: str) -> FetchResult:
    """Fetch, and stop this process once, as soon as it has received something."""
    stopped: list[torchferry.ProgressEvent] = []

    def stop(event: torchferry.ProgressEvent) -> None:
        if event.bytes_moved and not stopped:
            stopped.append(event)
            signal.raise_signal(signal.SIGSTOP)

    return fetch_into([address], LAYER_BYTES, via="tcp", timeout=TIMEOUT_S, on_progress=stop)


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
    receiver.start(partial(fetch_and_stop, address))
    wait_until_stopped(receiver.pid)
    stopped_s = time.monotonic()
    wait_until_blocked_in_send(source.pid)
    wait_until(lambda: time.monotonic() > stopped_s + 3 * TIMEOUT_S, "the deadline passes")
    receiver.signal(signal.SIGCONT)
    result: FetchResult = receiver.answer()
    assert isinstance(result.error, TimeoutError)
    assert result.left == ""
    assert source.run(is_idle, baseline) == ""
