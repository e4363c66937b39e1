"""A pytest plugin that puts torchferry's transports in the place of torchft's, for torchft's own tests.

    TRANSPORT=Transport python -m pytest -p tests.torchft.substitution --pyargs torchft.manager_integ_test

TRANSPORT is the name of a class in torchferry.torchft, or "torchft" to compare with its own. SNAPSHOT=1 is
for DiLoCo. `make test-torchft` runs all tests that concern a transport.
"""

from __future__ import annotations

import functools
import gc
import os
from datetime import timedelta
from typing import Any

import torchft.checkpointing.http_transport
import torchft.checkpointing.pg_transport
from torchft.manager import Manager

import torchferry.torchft


class InPlaceOfHttp(torchferry.torchft.Transport):
    """Has the constructor of torchft's HTTPTransport."""

    def __init__(self, timeout: timedelta, num_chunks: int) -> None:
        super().__init__(timeout)


received: list[str] = []


def counting(transport: Any) -> Any:
    """Count what a transport receives, to show that the tests used it."""
    receive = transport.recv_checkpoint

    def recv_checkpoint(*args: Any, **options: Any) -> Any:
        state = receive(*args, **options)
        received.append(type(transport).__name__)
        return state

    transport.recv_checkpoint = recv_checkpoint
    return transport


def pytest_runtest_setup() -> None:
    """Collect garbage before each test.

    A full collection takes up to half a second here, and delays the replica in whose thread it runs. If that
    happens in test_streaming_diloco_upscale, the other two finish alone, and the third finds no quorum.
    """
    gc.collect()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say how many checkpoints the Managers of the tests received."""
    terminalreporter.write_line(f"{len(received)} checkpoints were received with torchferry {set(received)}")


def new_transport(pg: Any, timeout: timedelta = timedelta(seconds=60)) -> Any:
    """Create the transport of a Manager that was given none."""
    if os.environ["TRANSPORT"] == "PGTransport":
        return torchferry.torchft.PGTransport(pg, timeout, "cpu")
    return torchferry.torchft.Transport(timeout, snapshot=os.environ.get("SNAPSHOT") == "1")


def substitute() -> None:
    """Replace both transports, and the default of every Manager."""
    torchft.checkpointing.http_transport.HTTPTransport = InPlaceOfHttp
    torchft.checkpointing.pg_transport.PGTransport = torchferry.torchft.PGTransport
    original = Manager.__init__

    @functools.wraps(original)
    def init(self: Any, pg: Any, *args: Any, **options: Any) -> None:
        timeout = {"timeout": options["timeout"]} if "timeout" in options else {}
        # The tests have fixed ports, which another run on this machine may use.
        options["port"] = 0
        if not options.get("checkpoint_transport") and os.environ["TRANSPORT"] != "torchft":
            options["checkpoint_transport"] = counting(new_transport(pg, **timeout))
        original(self, pg, *args, **options)

    Manager.__init__ = init


substitute()
