"""What a fault test does from outside: wait for marks and for processes that stop, judge what was seen."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from tests.faults.scene import PATHS, Boom, Sight
from torchferry.errors import FerryError, TargetTorn

POLL_S = 0.005


def wait_until(holds: Callable[[], bool], what: str, patience_s: float = 15.0) -> None:
    """Wait until something holds.

    Raises:
        AssertionError: it does not come about.
    """
    limit_s = time.monotonic() + patience_s
    while not holds():
        assert time.monotonic() < limit_s, f"in vain: {what}"
        time.sleep(POLL_S)


def wait_for_mark(path: Path) -> float:
    """Wait for the file that an actor writes at some moment, and give that moment."""
    wait_until(path.exists, f"no actor left a mark in {path.name}")
    return float(path.read_text())


def wait_until_stopped(pid: int) -> None:
    """Wait until a process is stopped, as /proc has it."""
    stat = Path(f"/proc/{pid}/stat")
    wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", f"process {pid} does not stop")


def wait_until_stuck(pid: int) -> None:
    """Wait until a process has bytes to send that nobody takes: it is in the middle of a message."""
    seen: list[int] = []

    def stuck() -> bool:
        seen.append(unsent_bytes(pid))
        return len(seen) > 3 and seen[-1] > 0 and len(set(seen[-3:])) == 1

    wait_until(stuck, f"process {pid} is not in the middle of a message")


def unsent_bytes(pid: int) -> int:
    """Count what lies in the send queues of a process's TCP connections."""
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


def assert_truthful(sight: Sight) -> None:
    """Check that what an error says of the local state is so."""
    error, fates = sight.error, sight.fates
    assert isinstance(error, (FerryError, Boom)), error
    if isinstance(error, TargetTorn):
        assert sorted([*error.whole, *error.torn, *error.untouched]) == sorted(PATHS)
        assert error.whole or error.torn, "a state of which nothing was written is not torn"
        assert {fates[path] for path in error.whole} <= {"new"}
        assert {fates[path] for path in error.untouched} <= {"old"}
        assert "neither" not in fates.values()
    else:
        assert fates == dict.fromkeys(PATHS, "old"), f"not said to be torn: {error}"
