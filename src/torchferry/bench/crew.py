"""The processes of a run on this machine: started, listened to, and never left behind."""

from __future__ import annotations

import contextlib
import multiprocessing.connection
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch.distributed as dist

from torchferry.bench import worker
from torchferry.bench.run import TAKE_TIMEOUT_S, Plan, Tell
from torchferry.bench.worker import Crashed, Finished, Seat
from torchferry.local import context_with

# How long a process that was killed may take to be gone.
_REAP_S = 10.0
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
    """Take one word of a member; True if it was its last."""
    try:
        word = worker.hear(member.channel)
    except (EOFError, OSError):
        member.process.join(_REAP_S)
        others = [one for one in waiting.values() if one is not member]
        raise BenchFailed(
            f"the process of rank {member.rank} ended with exit code {member.process.exitcode}"
            + "".join([*_muttered(member), *_last_words(others)])
        ) from None
    match word:
        case Finished():
            return True
        case Crashed(report):
            raise BenchFailed(f"rank {member.rank} failed:\n{report}")
        case _:
            tell(word)
            return False


def _muttered(member: _Member) -> list[str]:
    """The end of what a process has printed, which may say why it ended."""
    with contextlib.suppress(OSError):
        printed = member.seat.muttering.read_text(errors="replace").splitlines()
        return [f"\n  it printed: {line}" for line in printed[-_SHOWN_LINES:]]
    return []


def _last_words(members: list[_Member]) -> Iterator[str]:
    deadline_s = time.monotonic() + _LAST_WORDS_S
    for member in members:
        while member.channel.poll(max(0.0, deadline_s - time.monotonic())):
            try:
                word = worker.hear(member.channel)
            except (EOFError, OSError):
                break
            if isinstance(word, Crashed):
                yield f"\nrank {member.rank} says: {word.report.strip().splitlines()[-1]}"


@contextlib.contextmanager
def _members(plan: Plan, ranks: int, folder: Path) -> Iterator[list[_Member]]:
    context = context_with(worker.__name__)
    # Port 0: whatever is free. It must live as long as the run.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    members: list[_Member] = []
    try:
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            seat = Seat(rank, ranks, store.port, str(folder))
            # mypy's view of a context does not know that the contexts have processes.
            process: BaseProcess = context.Process(  # type: ignore[attr-defined]
                target=worker.main,
                args=(theirs, seat, plan),
                name=f"torchferry-bench-{rank}",
                daemon=True,
            )
            process.start()
            # Only the worker holds its end now; when it dies, ours is at its end.
            theirs.close()
            members.append(_Member(seat, process, ours))
        yield members
    finally:
        for member in members:
            member.process.kill()
        for member in members:
            member.process.join(_REAP_S)
            member.channel.close()
