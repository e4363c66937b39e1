"""torchferry's `serve` and `fetch`, and `publish` alone.

A system that fetches publishes the state when its session is opened. So the time of a transfer is the time of
`fetch` on the receiver, from call to return. A system that publishes does so in every round: that is the
sender's part, and the receiver waits for the new version and fetches it.

Receivers pass `compare=False`: the target was overwritten before the round, so a comparison would only take
time. If the case says that the receiver has the state already, they pass `compare=True`.
"""

from __future__ import annotations

import inspect
import os
import signal
from functools import partial
from typing import Any

from benchmarks.systems.session import Session, Setup, System
from benchmarks.workloads import (
    FETCH_MEMORY,
    FETCH_MEMORY_LIVE,
    FETCH_MEMORY_UNVERIFIED,
    FETCH_RESHARE,
    FETCH_TCP,
    FETCH_TCP_UNVERIFIED,
    PUBLISH,
    PUBLISH_LIVE_MEMORY,
    PUBLISH_LIVE_TCP,
    Case,
)
from torchferry import ProgressEvent, Source, fetch


def _open_fetch(setup: Setup, *, snapshot: bool = True, **options: Any) -> Session:
    source, addresses = _start(setup, snapshot=snapshot)
    if source is not None:
        return Session(_nothing, _nothing, setup.source, close=source.close)
    options |= {"into": setup.target, "compare": setup.case.unchanged, "timeout": setup.timeout_s}
    if setup.case.killed and setup.rank == setup.case.last:
        return Session(_nothing, partial(_receive_half, addresses, options), target=setup.target)
    phases_s: dict[str, float] = {}

    def receive() -> object:
        nonlocal phases_s
        got = fetch(addresses, **options)
        phases_s = got.report.phases_s
        if setup.case.unchanged and got.report.bytes_moved:
            raise AssertionError(f"{got.report.bytes_moved:,} bytes were moved, although nothing had changed")
        return got.state

    return Session(_nothing, receive, target=setup.target, phases=lambda: dict(phases_s))


def _receive_half(addresses: list[str], options: dict[str, Any]) -> None:
    """Fetch in a process of its own, which is killed when it has half of the state.

    Raises:
        AssertionError: the process exited by itself.
    """
    # This process must live: it is a rank of the benchmark.
    pid = os.fork()
    if pid == 0:
        try:
            fetch(addresses, on_progress=_die_half_way, **options)
            # A state of a few MiB may arrive without an event in between.
            os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code != -signal.SIGKILL:
        raise AssertionError(f"the process to be killed half-way exited with code {code}")


def _die_half_way(event: ProgressEvent) -> None:
    if 2 * event.bytes_moved >= event.bytes_total > 0:
        os.kill(os.getpid(), signal.SIGKILL)


def _open_publish(setup: Setup, *, snapshot: bool, **options: Any) -> Session:
    source, addresses = _start(setup, snapshot=snapshot)
    options |= {"into": setup.target, "compare": False, "timeout": setup.timeout_s}
    version = 0

    def publish() -> None:
        nonlocal version
        assert source is not None, "only sources publish"
        version += 1
        source.publish(setup.source, version, snapshot=snapshot)

    def receive() -> object:
        nonlocal version
        got = fetch(addresses, newer_than=version, **options)
        version = got.version
        return got.state

    close = _nothing if source is None else source.close
    return Session(publish, receive, setup.source, setup.target, close=close)


def _start(setup: Setup, *, snapshot: bool) -> tuple[Source | None, list[str]]:
    """Start a source if this rank is one, and publish version 0; return it with the addresses of all."""
    source = Source(setup.host) if setup.sends else None
    # Before the state is published: if that fails on one rank, no other rank waits for it here.
    addresses = setup.share(source.address if source is not None else "")[: setup.case.sources]
    if source is not None:
        try:
            source.publish(setup.source, version=0, snapshot=snapshot)
        except BaseException:
            source.close()
            raise
    return source, addresses


def _nothing() -> None:
    """What a rank does whose part of the transfer takes place elsewhere."""


def _several_hosts(case: Case, one_host: bool) -> str | None:
    return None if one_host else "the ranks are on several hosts, which share no memory"


def _no_reshare(case: Case, one_host: bool) -> str | None:
    has_it = "reshare" in inspect.signature(fetch).parameters
    return None if has_it else "not available: fetch has no parameter reshare"


# Connections are closed after each fetch, so that their bytes can't be counted.
_over_tcp = partial(System, kind="torchferry", wired=False)
_in_memory = partial(_over_tcp, refuses=_several_hosts)
_fetch_memory = partial(_open_fetch, via="memory")
_fetch_tcp = partial(_open_fetch, via="tcp")
_publish_live = partial(_open_publish, snapshot=False)
SYSTEMS = (
    _in_memory(FETCH_MEMORY, "torchferry's fetch, memory", open=_fetch_memory),
    _in_memory(
        FETCH_MEMORY_UNVERIFIED,
        "torchferry's fetch, memory, verify=False",
        open=partial(_fetch_memory, verify=False),
    ),
    _in_memory(
        FETCH_MEMORY_LIVE,
        "torchferry's fetch, memory, snapshot=False",
        open=partial(_fetch_memory, snapshot=False),
    ),
    _over_tcp(FETCH_TCP, "torchferry's fetch, TCP", open=_fetch_tcp),
    _over_tcp(
        FETCH_TCP_UNVERIFIED, "torchferry's fetch, TCP, verify=False", open=partial(_fetch_tcp, verify=False)
    ),
    _over_tcp(
        FETCH_RESHARE,
        "torchferry's fetch, TCP, reshare=True",
        open=partial(_fetch_tcp, reshare=True),
        refuses=_no_reshare,
    ),
    _in_memory(PUBLISH, "torchferry's publish", open=partial(_open_publish, snapshot=True, via="memory")),
    _in_memory(
        PUBLISH_LIVE_MEMORY,
        "torchferry's publish + fetch, memory, snapshot=False",
        open=partial(_publish_live, via="memory"),
    ),
    _over_tcp(
        PUBLISH_LIVE_TCP,
        "torchferry's publish + fetch, TCP, snapshot=False",
        open=partial(_publish_live, via="tcp"),
    ),
)
