"""The processes of a run on this machine: started, listened to, and never left behind."""

from __future__ import annotations

import contextlib
import multiprocessing.connection
import signal
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch.distributed as dist

from benchmarks import worker
from benchmarks.processes import context_with, processes
from benchmarks.run import TAKE_TIMEOUT_S, Plan, Tell
from benchmarks.worker import Crashed, Finished, Seat

# How long a process that was killed may take to be gone.
# Longer than anything that is measured may take: a run in which nobody says anything for so long hangs.
_SILENCE_S = 2 * TAKE_TIMEOUT_S + 120.0
# After one rank has failed, the others may have more to say of it than that it is gone.
_LAST_WORDS_S = 1.0
_SHOWN_LINES = 5


class BenchFailed(Exception):
    """A run that could not be brought to its end."""


@dataclass(frozen=True)
class _Member:
    seat: Seat
    process: BaseProcess
    channel: Connection

    @property
    def rank(self) -> int:
        return self.seat.rank


def run_here(plan: Plan, ranks: int, tell: Tell) -> None:
    """Run the plan in so many processes of this machine; all of them are gone afterwards.

    Raises:
        BenchFailed: one of them ended early, or all were silent for too long.
    """
    with shared_folder() as folder, _members(plan, ranks, folder) as members:
        waiting = {member.channel: member for member in members}
        while waiting:
            ready = multiprocessing.connection.wait(list(waiting), _SILENCE_S)
            if not ready:
                raise BenchFailed(f"no process said anything for {_SILENCE_S:.0f} s: the run hangs")
            for channel in ready:
                assert isinstance(channel, Connection), "only channels are waited for"
                if _listen(waiting[channel], waiting, tell):
                    del waiting[channel]


@contextlib.contextmanager
def shared_folder() -> Iterator[Path]:
    """A folder in memory for those who go through files; where there is no tmpfs, one on disk."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(
        prefix="torchferry-bench-", dir=memory if memory.is_dir() else None
    ) as folder:
        yield Path(folder)


def _listen(member: _Member, waiting: dict[Connection, _Member], tell: Tell) -> bool:
    """Take one word of a member; True if it was its last.

    Raises:
        BenchFailed: something is wrong with it, or it is gone.
    """
    try:
        word = worker.hear(member.channel)
    except (EOFError, OSError):
        raise BenchFailed(_inquest(waiting.values())) from None
    match word:
        case Finished():
            return True
        case Crashed():
            raise BenchFailed(_inquest(waiting.values(), {member.rank: word}))
        case _:
            tell(word)
            return False


def _inquest(members: Iterable[_Member], known: dict[int, Crashed] | None = None) -> str:
    """What has become of the members. Who was killed comes first: the others failed because of it."""
    crashes = dict(known or {})
    deadline_s = time.monotonic() + _LAST_WORDS_S
    killed, failed = [], []
    for member in members:
        word = crashes.get(member.rank) or _last_word(member, deadline_s)
        member.process.join(max(0.0, deadline_s - time.monotonic()))
        code = member.process.exitcode
        if word is not None:
            failed.append((member.rank, word.report.strip()))
        elif code is not None:
            how = (
                f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            )
            killed += [f"the process of rank {member.rank} {how}", *_muttered(member)]
    if failed and not killed:
        # Then it is the benchmark itself that is at fault, and where matters.
        return "\n".join(f"rank {rank} failed:\n{report}" for rank, report in failed)
    brief = [f"rank {rank} failed: {report.splitlines()[-1]}" for rank, report in failed]
    return "\n".join([*killed, *brief]) or "a process is gone, and nobody says why"


def _muttered(member: _Member) -> list[str]:
    """The end of what a process has printed, which may say why it ended."""
    with contextlib.suppress(OSError):
        printed = member.seat.muttering.read_text(errors="replace").splitlines()
        return [f"  it printed: {line}" for line in printed[-_SHOWN_LINES:]]
    return []


def _last_word(member: _Member, deadline_s: float) -> Crashed | None:
    """What a member says of its own end, if it can."""
    with contextlib.suppress(EOFError, OSError):
        while member.channel.poll(max(0.0, deadline_s - time.monotonic())):
            word = worker.hear(member.channel)
            if isinstance(word, Crashed):
                return word
    return None


@contextlib.contextmanager
def _members(plan: Plan, ranks: int, folder: Path) -> Iterator[list[_Member]]:
    # Port 0: whatever is free. It must live as long as the run.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    seats = [Seat(rank, ranks, store.port, str(folder)) for rank in range(ranks)]
    context = context_with(worker.__name__)
    orders = [(seat, plan) for seat in seats]
    with processes(context, worker.main, orders, "torchferry-bench") as started:
        yield [_Member(seat, *one) for seat, one in zip(seats, started, strict=True)]
