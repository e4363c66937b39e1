"""The parent's side of a fault test: wait for timestamps and stopped processes, and check results."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from tests.faults.jobs import PATHS, CallbackError, TransferResult
from torchferry.errors import FerryError, TargetTorn

POLL_S = 0.005


def wait_until(holds: Callable[[], bool], failure: str, patience_s: float = 15.0) -> None:
    """Poll until `holds()` is true.

    Raises:
        AssertionError: `patience_s` passed. The message is `failure`.
    """
    limit_s = time.monotonic() + patience_s
    while not holds():
        assert time.monotonic() < limit_s, f"after {patience_s} s: {failure}"
        time.sleep(POLL_S)


def wait_for_timestamp(path: Path) -> float:
    """Wait for the file that a worker writes with `write_timestamp`, and return its time."""
    wait_until(path.exists, f"no worker wrote the timestamp {path.name}")
    return float(path.read_text())


def wait_until_stopped(pid: int) -> None:
    """Wait until /proc shows a process as stopped."""
    stat = Path(f"/proc/{pid}/stat")
    wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", f"process {pid} did not stop")


def wait_until_idle(pid: int) -> None:
    """Wait until a process has used no CPU time for a while."""
    samples: list[list[str]] = []

    def is_idle() -> bool:
        samples.append(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13])
        return len(samples) > 20 and samples[-20:] == [samples[-1]] * 20

    wait_until(is_idle, f"process {pid} is busy")


def wait_until_blocked_in_send(pid: int) -> None:
    """Wait until a process has unsent bytes that no peer reads: it is in the middle of a message."""
    samples: list[int] = []

    def is_blocked() -> bool:
        samples.append(unsent_bytes(pid))
        return len(samples) > 3 and samples[-1] > 0 and len(set(samples[-3:])) == 1

    wait_until(is_blocked, f"process {pid} is not in the middle of a message")


def unsent_bytes(pid: int) -> int:
    """Count the bytes in the send queues of a process's TCP connections."""
    own = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            own.add(str(link.readlink()))
    queued = 0
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if f"socket:[{fields[9]}]" in own:
                queued += int(fields[4].partition(":")[0], 16)
    return queued


def assert_error_matches_state(result: TransferResult) -> None:
    """Check that the error describes the local state correctly."""
    error, contents = result.error, result.contents
    assert isinstance(error, (FerryError, CallbackError)), error
    if isinstance(error, TargetTorn):
        assert sorted([*error.whole, *error.torn, *error.untouched]) == sorted(PATHS)
        assert error.whole or error.torn, "TargetTorn, but no path is whole or torn"
        assert {contents[path] for path in error.whole} <= {"new"}
        assert {contents[path] for path in error.untouched} <= {"old"}
        assert "neither" not in contents.values()
    else:
        assert contents == dict.fromkeys(PATHS, "old"), (
            f"the state was changed, but the error is not TargetTorn: {error}"
        )
