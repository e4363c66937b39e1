"""Sources and receivers whose process forks, is killed, is interrupted, or exits without closing anything."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

import torchferry
from tests.support.children import Child, child, wait_until
from tests.support.http_peers import Asked, Server, forwarding
from torchferry.serving import Source

pytestmark = pytest.mark.usefixtures("_fork_server")

BIG = 1 << 26
"""Items of a state that takes a moment to fetch: 256 MiB."""


def _fork_a_sleeper() -> int:
    """Fork a child that does nothing, as a DataLoader's worker that waits for work."""
    pid = os.fork()
    if pid == 0:
        signal.pause()
        os._exit(0)
    return pid


@contextlib.contextmanager
def ended(pid: int) -> Iterator[None]:
    """End an orphan after the block. It must still live then."""
    try:
        yield
        os.kill(pid, 0)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _serve_and_fork(pipe: Connection, count: int) -> None:
    source = torchferry.serve({"w": torch.zeros(count)}, 1)
    pipe.send(source.address)
    pipe.recv()
    pipe.send(_fork_a_sleeper())
    pipe.recv()


def _wait_for_version_2(pipe: Connection, address: str) -> None:
    pipe.send("begins")
    try:
        torchferry.fetch(address, newer_than=1, timeout=60)
    except ConnectionError as error:
        pipe.send((time.monotonic(), str(error)))


def test_the_death_of_a_source_is_noticed_although_its_forked_child_lives() -> None:
    with child(_serve_and_fork, 10) as trainer:
        address = trainer.receive()
        with child(_wait_for_version_2, address) as follower:
            assert follower.receive() == "begins"
            # Its connection is there when the source forks.
            wait_until(lambda: _connections_to(address) > 0)
            trainer.send("fork")
            orphan = trainer.receive()
            with ended(orphan):
                killed_s = trainer.signal(signal.SIGKILL)
                noticed_s, reason = follower.receive()
                assert noticed_s - killed_s < 1.0
                assert "127.0.0.1" in reason
                # Its port is free as well. The kernel may close the listener after the connection.
                wait_until(lambda: _is_refused(address), 1.0)


def _is_refused(address: str) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", _port(address))) == errno.ECONNREFUSED


def _port(address: str) -> int:
    return int(address.split(":")[2].partition("/")[0])


def _connections_to(address: str, state: str = "01") -> int:
    """Count the connections to a port of loopback that are established, or in another state."""
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    wanted = f":{_port(address):04X}"
    return sum(
        remote.endswith(wanted) and found == state for _, _, remote, found, *_ in map(str.split, lines)
    )


def _fetch_and_fork(pipe: Connection, address: str) -> None:
    def on_progress(event: Any) -> None:
        if event.phase == "receive tensors" and event.bytes_moved:
            pipe.send(_fork_a_sleeper())
            signal.pause()

    torchferry.fetch(address, on_progress=on_progress)


def test_the_death_of_a_receiver_is_noticed_although_its_forked_child_lives() -> None:
    with (
        torchferry.serve({"w": torch.zeros(BIG)}, 1) as source,
        child(_fetch_and_fork, source.address) as receiver,
    ):
        orphan = receiver.receive()
        with ended(orphan):
            assert [reader.state for reader in source.status().readers] == ["reading"]
            receiver.signal(signal.SIGKILL)
            took_s = wait_until(lambda: [reader.state for reader in source.status().readers] == ["lost"])
            assert took_s < 1.0
            # So its memory can be used again.
            source.withdraw(timeout=1)


def test_the_forked_child_of_a_source_may_close_it_and_not_publish() -> None:
    with torchferry.serve({"w": torch.zeros(10)}, 1) as source:
        pid = os.fork()
        if pid == 0:
            try:
                with source:
                    with contextlib.suppress(torchferry.BadArgument):
                        source.publish({"w": torch.ones(10)}, 2)
                        os._exit(1)
                    assert source.status().versions == {}
                os._exit(0)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert torchferry.fetch(source.address).version == 1


def test_a_forked_child_may_fetch_from_its_parent() -> None:
    with torchferry.serve({"w": torch.arange(10)}, 1) as source:
        torchferry.fetch(source.address)
        pid = os.fork()
        if pid == 0:
            try:
                got = torchferry.fetch(source.address, timeout=10)
                os._exit(0 if got.state["w"].tolist() == list(range(10)) else 1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


SCRIPT = """
import sys, time, torch, torchferry
source = torchferry.serve({"w": torch.zeros(1 << 24)}, 1)
got = torchferry.fetch(source.address)
print(source.address, flush=True)
sys.stdin.readline()
print(time.monotonic(), flush=True)
"""


@pytest.mark.slow
def test_an_unclosed_source_does_not_delay_the_end_of_python() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        token = address.partition("#")[2]
        # A pending connection, an idle reader, and one that reads slowly.
        with contextlib.ExitStack() as stack:
            for start in ("", f"GET / HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n\r\n"):
                sock = stack.enter_context(socket.create_connection(("127.0.0.1", _port(address)), 5))
                sock.sendall(start.encode())
            process.stdin.write("\n")
            process.stdin.flush()
            ends_s = float(process.stdout.readline())
            assert process.wait(10) == 0
            # torch itself takes a part of this.
            assert time.monotonic() - ends_s < 1.0


def _fetch_until_interrupted(pipe: Connection, address: str, options: dict[str, Any]) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    pipe.send("begins")
    try:
        torchferry.fetch(address, timeout=60, **options)
    except KeyboardInterrupt:
        pipe.send(time.monotonic())
    pipe.recv()


def _interrupt(process: Child) -> float:
    """Send what Ctrl-C sends, and return how long the fetch took to end."""
    sent_s = process.signal(signal.SIGINT)
    ended_s: float = process.receive()
    return ended_s - sent_s


def test_ctrl_c_ends_a_wait_for_a_newer_version() -> None:
    with (
        torchferry.serve({"w": torch.zeros(10)}, 1) as source,
        child(_fetch_until_interrupted, source.address, {"newer_than": 1}) as follower,
    ):
        follower.receive()
        wait_until(lambda: _connections_to(source.address) > 0)
        assert _interrupt(follower) < 1.0
        assert torchferry.fetch(source.address).version == 1


def test_ctrl_c_ends_a_connection_to_a_source_that_does_not_answer() -> None:
    # The queue of this listener is full after a connection or two, so that connecting takes for ever.
    with socket.socket() as listener, contextlib.ExitStack() as stack:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        address = f"http://127.0.0.1:{listener.getsockname()[1]}/#{'t' * 32}"
        with contextlib.suppress(TimeoutError):
            while True:
                stack.enter_context(socket.create_connection(listener.getsockname(), 0.1))
        with child(_fetch_until_interrupted, address, {}) as receiver:
            receiver.receive()
            wait_until(lambda: _connections_to(address, "02") > 0)
            assert _interrupt(receiver) < 1.0


@pytest.mark.parametrize("path", ["leases", "manifest"])
def test_ctrl_c_ends_a_request_that_is_not_answered(path: str) -> None:
    with (
        torchferry.serve({"w": torch.zeros(10)}, 1) as source,
        _silent_at(source, path) as silent,
        child(_fetch_until_interrupted, silent.address, {}) as receiver,
    ):
        receiver.receive()
        wait_until(lambda: any(path in each.path for each in silent.asked))
        assert _interrupt(receiver) < 1.0


@pytest.mark.parametrize("options", [{}, {"verify": False}])
def test_ctrl_c_ends_a_transfer(options: dict[str, Any]) -> None:
    with (
        torchferry.serve({"w": torch.zeros(BIG // 4)}, 1) as source,
        _silent_at(source, "chunks", after=3) as silent,
        child(_fetch_until_interrupted, silent.address, options) as receiver,
    ):
        receiver.receive()
        wait_until(lambda: sum("chunks" in each.path for each in silent.asked) > 3)
        assert _interrupt(receiver) < 1.0
        # The source was told why.
        wait_until(lambda: [reader.state for reader in source.status().readers] == ["failed"])
        assert "KeyboardInterrupt" in source.status().readers[0].reason


@contextlib.contextmanager
def _silent_at(source: Source, part: str, after: int = 0) -> Iterator[Server]:
    """Forward requests to a source, until this part of the path was asked for more than `after` times."""
    asked_before = count(1)

    def change(asked: Asked, _status: int, _body: bytes) -> Iterator[bytes] | None:
        return silence() if part in asked.path and next(asked_before) > after else None

    def silence() -> Iterator[bytes]:
        over.wait()
        yield b""

    over = threading.Event()
    with forwarding(source.address, change) as server:
        try:
            yield server
        finally:
            over.set()


def test_a_fetch_leaves_no_socket_open() -> None:
    gc.collect()
    gc.disable()  # so that only what is closed is gone
    try:
        with torchferry.serve({"w": torch.zeros(10)}, 1) as source:
            before = _sockets()
            for _ in range(3):
                torchferry.fetch(source.address)
                for wrong in (source.address, source.address + "x"):
                    with pytest.raises(torchferry.FerryError):
                        torchferry.fetch(wrong, version=2)
            # Those of the source are closed by its threads.
            wait_until(lambda: _sockets() == before, 5.0)
    finally:
        gc.enable()


def _sockets() -> set[str]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.add(os.readlink(f"/proc/self/fd/{name}"))
    return {each for each in found if each.startswith("socket:")}


def test_the_longest_timeout_is_no_problem() -> None:
    with torchferry.serve({"w": torch.zeros(10)}, 1) as source:
        assert torchferry.fetch(source.address, timeout=timedelta.max).version == 1


_EXIT_DURING_A_FETCH = """
import sys, threading, torch, torchferry

begun = threading.Event()
# Strided, so that every chunk is copied by torch.
into = {"w": torch.zeros(2, 1 << 24).t()}

def run():
    while True:
        torchferry.fetch(sys.argv[1], into, compare=False, on_progress=note)

def note(event):
    if event.bytes_moved:
        begun.set()

threading.Thread(target=run, daemon=True).start()
assert begun.wait(60)
"""


def test_a_process_that_ends_during_a_fetch_of_a_daemon_thread_does_not_abort() -> None:
    with torchferry.serve({"w": torch.zeros(1 << 24, 2)}, 1) as source:
        for _ in range(4):
            ended = subprocess.run(
                [sys.executable, "-c", _EXIT_DURING_A_FETCH, source.address], capture_output=True, timeout=60
            )
            assert (ended.returncode, ended.stderr) == (0, b"")


_FORK_DURING_A_FETCH = """
import gc, os, sys, threading
import torchferry
from torchferry.engine.pull.sources import Sources

def hold(lock):
    lock.acquire()
    held.set()
    threading.Event().wait()

source, held = torchferry.serve({}, 1), threading.Event()
keywords = {"newer_than": 1, "timeout": 60}
threading.Thread(target=torchferry.fetch, args=(source.address,), kwargs=keywords, daemon=True).start()
while not (found := [each for each in gc.get_objects() if isinstance(each, Sources)]):
    pass
threading.Thread(target=hold, args=(found[0].changed,), daemon=True).start()
held.wait()
pid = os.fork()
if pid == 0:
    sys.exit(3)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
os._exit(0)
"""


def test_a_forked_child_ends_although_a_fetch_of_its_parent_held_a_lock() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _FORK_DURING_A_FETCH], stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        try:
            assert process.communicate(timeout=20)[0] == b"3\n"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
