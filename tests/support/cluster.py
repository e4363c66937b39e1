"""A cluster of real processes that have joined one gloo group, for tests to run functions in.

Starting a torch process costs seconds, so the workers persist: a test asks for `pair`, `quad` or
`octet` (tests/conftest.py) and gets workers that earlier tests have used.

    def add_one(rank: int, amount: int) -> int:
        return rank + amount

    def test_every_rank_answers(pair: Cluster) -> None:
        assert pair.run(add_one, 1) == [1, 2]

Rules:

- A worker runs a function of a module, called with the rank and plain arguments. Arguments and results
  are pickled to bytes: nothing goes through torch's shared memory, so nothing leaks. Aliases between
  tensors are lost; compare them in the worker.
- Every wait of the parent has a deadline, and a worker that dies is reported at once. A worker
  whose parent dies exits by itself.
- A group in which an operation timed out can't be used again. A cluster that is broken, by a failed run
  or by a test that sets `cluster.broken = True`, starts its next run with new workers.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import torch.distributed as dist

from tests.support.worker import SHOW_STACKS, STOP, Answer, Call, Failure
from tests.support.worker import main as worker_main

T = TypeVar("T")
Job = tuple[Callable[..., Any], tuple[Any, ...]]

HOST = "127.0.0.1"
START_TIMEOUT_S = 120.0
LEAVE_TIMEOUT_S = 5.0
# The time for the other ranks to report their errors once one rank has failed.
GRACE_S = 1.0


class ClusterError(Exception):
    """An error of the worker of `rank`.

    ClusterError
    ├── RemoteError       the function raised
    ├── WorkerDied        the process ended
    └── WorkerHung        no answer before the deadline
    """

    def __init__(self, message: str, *, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


class RemoteError(ClusterError):
    """The function raised: `original` is the exception if it can be pickled, `type_name` its type."""

    def __init__(self, rank: int, failure: Failure) -> None:
        super().__init__(f"rank {rank} raised {failure.type_name}: {failure.message}", rank=rank)
        self.type_name = failure.type_name
        self.message = failure.message
        self.remote_traceback = failure.traceback_text
        self.original: BaseException | None = (
            None if failure.pickled is None else pickle.loads(failure.pickled)
        )
        self.add_note(f"In the worker of rank {rank}:\n{failure.traceback_text}")


class WorkerDied(ClusterError):
    """The process ended: `exitcode` as multiprocessing gives it, negative for a signal."""

    def __init__(self, rank: int, exitcode: int | None) -> None:
        if exitcode is not None and exitcode < 0:
            how = f"was killed by {signal.Signals(-exitcode).name}"
        else:
            how = f"exited with code {exitcode}"
        super().__init__(f"the worker of rank {rank} {how}", rank=rank)
        self.exitcode = exitcode


class WorkerHung(ClusterError):
    """No answer came before the deadline; `stacks` shows where the worker was."""

    def __init__(self, rank: int, waited_s: float, stacks: str) -> None:
        super().__init__(f"rank {rank} did not answer within {waited_s:.1f} s", rank=rank)
        self.stacks = stacks
        self.add_note(f"In the worker of rank {rank}:\n{stacks}")


@dataclass(frozen=True)
class Outcome:
    """The result of one rank's call: a value or an error. A rank without a job has neither."""

    rank: int
    value: Any = None
    error: ClusterError | None = None


class Cluster:
    """`world_size` workers that persist from run to run, with a gloo group as their default group.

    They start with the first run. `timeout_s` is the deadline of a run, `group_timeout_s` that of
    the group itself, shorter so that a collective which hangs is reported from where it hangs.
    `start_method` is multiprocessing's: "spawn", or "forkserver", whose workers start at once.
    """

    def __init__(
        self,
        world_size: int,
        *,
        timeout_s: float = 60.0,
        group_timeout_s: float = 30.0,
        start_method: str = "spawn",
    ) -> None:
        self.world_size = world_size
        self.start_method = start_method
        self.timeout_s = timeout_s
        self.group_timeout_s = group_timeout_s
        self.broken = False
        self._workers: list[_Worker] = []
        self._store: dist.TCPStore | None = None
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._pending: Pending | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """The workers' process ids in rank order; none before the first run."""
        return [w.pid for w in self._workers]

    def run(self, fn: Callable[..., T], *args: Any, timeout_s: float | None = None) -> list[T]:
        """Call `fn(rank, *args)` in all workers at once and return the results in rank order.

        Raises:
            ClusterError: see `Pending.results`.
        """
        return self.run_each([(fn, args)] * self.world_size, timeout_s=timeout_s)

    def run_each(self, jobs: Sequence[Job | None], *, timeout_s: float | None = None) -> list[Any]:
        """Call a different `(fn, args)` in each worker, by rank; a worker with None does nothing.

        Raises:
            ClusterError: see `Pending.results`.
        """
        return self.start(jobs, timeout_s=timeout_s).results()

    def start(self, jobs: Sequence[Job | None], *, timeout_s: float | None = None) -> Pending:
        """Start the jobs and return at once, so that the test can kill a worker, for example.

        A cluster that is broken, or lost a worker that has a job, gets new workers first.

        Raises:
            ClusterError: the workers could not be started, or one died meanwhile.
            RuntimeError: another run is under way.
            TypeError: a function or an argument can't be pickled.
            ValueError: there are not as many jobs as ranks.
        """
        if len(jobs) != self.world_size:
            raise ValueError(f"{len(jobs)} jobs for {self.world_size} ranks")
        requests = {rank: _request(job) for rank, job in enumerate(jobs) if job is not None}
        if self._pending is not None and not self.broken:
            raise RuntimeError("a run is under way: wait for its results first")
        if self.broken or not self._workers or any(not self._workers[r].alive for r in requests):
            self.close()
            self._start_workers()
        asked = [self._workers[rank] for rank in requests]
        for worker in asked:
            # The death of a worker is detected when its answer is due.
            with contextlib.suppress(OSError):
                worker.conn.send_bytes(requests[worker.rank])
        self._pending = Pending(self, asked, self.timeout_s if timeout_s is None else timeout_s)
        return self._pending

    def kill(self, rank: int, how: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to a worker. The group may be broken by it: see `broken`."""
        worker = self._workers[rank]
        # The pid of a dead worker may belong to another process.
        if worker.alive:
            os.kill(worker.pid, how)

    def mark_if_broken(self) -> None:
        """Mark the cluster as broken if a worker is lost or a run is unfinished. Called between tests."""
        if self._pending is not None or not all(w.alive for w in self._workers):
            self.broken = True

    def close(self) -> None:
        """End all workers, by STOP if the cluster is not broken, and check that they are gone.

        Raises:
            ClusterError: a worker survived SIGKILL.
        """
        workers, self._workers = self._workers, []
        ask_first = not self.broken and self._pending is None
        self._pending, self._store, self.broken = None, None, False
        for worker in workers:
            with contextlib.suppress(OSError):
                worker.conn.send_bytes(STOP)
        _end(workers, (None, signal.SIGTERM, signal.SIGKILL) if ask_first else (signal.SIGKILL,))
        for worker in workers:
            worker.conn.close()
            worker.process.close()
        if self._scratch is not None:
            self._scratch.cleanup()
            self._scratch = None

    def _start_workers(self) -> None:
        self._store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        self._scratch = tempfile.TemporaryDirectory(prefix="torchferry-cluster-")
        self._workers = [
            _start_worker(self, rank, self._store.port, Path(self._scratch.name))
            for rank in range(self.world_size)
        ]
        try:
            Pending(self, self._workers, START_TIMEOUT_S).results()
        except ClusterError as error:
            self.close()
            error.add_note("The error happened while the cluster started.")
            raise


class Pending:
    """A run under way. `results` and `outcomes` wait for it until its deadline."""

    def __init__(self, cluster: Cluster, workers: list[_Worker], timeout_s: float) -> None:
        self._cluster = cluster
        self._asked = workers
        self._started = time.monotonic()
        self._deadline = self._started + timeout_s
        self._outcomes: dict[int, Outcome] = {}
        self._errors: list[ClusterError] = []

    def results(self) -> list[Any]:
        """The values in rank order, None for a rank without a job.

        Raises:
            ClusterError: of the rank that failed first, with the others' errors as notes. The
                cluster is broken then, because the failed call may have left messages in the group.
        """
        self._collect(patient=False)
        if self._errors:
            self._cluster.broken = True
            first, *others = self._errors
            for other in others:
                first.add_note("\n".join([f"And {other}", *getattr(other, "__notes__", [])]))
            raise first from getattr(first, "original", None)
        return [outcome.value for outcome in self._by_rank()]

    def outcomes(self) -> list[Outcome]:
        """The outcome of every rank, for tests in which some ranks fail or die.

        The cluster counts as broken only if a rank did not answer. A test that breaks the group
        in another way must set `cluster.broken = True`.
        """
        self._collect(patient=True)
        return self._by_rank()

    def _by_rank(self) -> list[Outcome]:
        ranks = range(self._cluster.world_size)
        return [self._outcomes.get(rank, Outcome(rank)) for rank in ranks]

    def _collect(self, *, patient: bool) -> None:
        """Wait for all answers; unless patient, only GRACE_S longer once one is an error."""
        deadline = self._deadline
        while missing := [w for w in self._asked if w.rank not in self._outcomes]:
            if self._errors and not patient:
                deadline = min(deadline, time.monotonic() + GRACE_S)
            remaining_s = max(0.0, deadline - time.monotonic())
            waitables = [c for w in missing for c in (w.conn, w.process.sentinel)]
            ready = connection.wait(waitables, remaining_s)
            for worker in missing:
                if not ready:
                    self._cluster.broken = True
                    waited_s = time.monotonic() - self._started
                    self._record(worker.rank, WorkerHung(worker.rank, waited_s, worker.stacks()))
                elif worker.conn in ready or worker.process.sentinel in ready:
                    self._record(worker.rank, _answer_from(worker))
        self._cluster._pending = None

    def _record(self, rank: int, answer: Answer | ClusterError) -> None:
        if isinstance(answer, ClusterError):
            self._errors.append(answer)
            self._outcomes[rank] = Outcome(rank, error=answer)
        else:
            self._outcomes[rank] = Outcome(rank, value=answer.value)


@dataclass
class _Worker:
    rank: int
    pid: int
    process: BaseProcess
    conn: connection.Connection
    stacks_file: Path

    @property
    def alive(self) -> bool:
        return self.process.is_alive()

    def stacks(self) -> str:
        """Return the Python stack of each thread of the process."""
        before = self.stacks_file.read_text() if self.stacks_file.exists() else ""
        if self.alive:
            os.kill(self.pid, SHOW_STACKS)
        for _ in range(10):
            time.sleep(0.05)
            if shown := self.stacks_file.read_text()[len(before) :]:
                return shown
        return "(the worker wrote no stacks)"


def _start_worker(cluster: Cluster, rank: int, port: int, scratch: Path) -> _Worker:
    # Not forked from this process: the threads of torch and gloo do not survive a fork.
    context = multiprocessing.get_context(cluster.start_method)
    parent_end, worker_end = context.Pipe()
    stacks_file = scratch / f"stacks-{rank}.txt"
    process = context.Process(  # type: ignore[attr-defined]
        target=worker_main,
        name=f"rank {rank} of {cluster.world_size}",
        args=(
            rank,
            cluster.world_size,
            HOST,
            port,
            cluster.group_timeout_s,
            stacks_file,
            worker_end,
        ),
        daemon=True,
    )
    process.start()
    # With this copy of the worker's end closed, the worker's death closes the pipe.
    worker_end.close()
    assert process.pid is not None
    return _Worker(rank, process.pid, process, parent_end, stacks_file)


def _end(workers: list[_Worker], ways: Sequence[signal.Signals | None]) -> None:
    for way in ways:
        remaining = [w for w in workers if w.alive]
        for worker in remaining:
            if way is not None:
                os.kill(worker.pid, way)
        deadline = time.monotonic() + LEAVE_TIMEOUT_S
        for worker in remaining:
            worker.process.join(max(0.0, deadline - time.monotonic()))
    for worker in workers:
        if worker.alive:
            raise ClusterError(f"process {worker.pid} survived SIGKILL", rank=worker.rank)


def _request(job: Job) -> bytes:
    try:
        return pickle.dumps(Call(list(sys.path), pickle.dumps(job)))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"{job[0]!r} and its arguments can't be pickled ({error}); "
            "a worker runs a function of a module with plain arguments"
        ) from error


def _answer_from(worker: _Worker) -> Answer | ClusterError:
    try:
        # The pipe of a dead worker may still have the answer; otherwise this raises at once.
        answer = pickle.loads(worker.conn.recv_bytes())
    except (EOFError, OSError):
        worker.process.join(LEAVE_TIMEOUT_S)
        return WorkerDied(worker.rank, worker.process.exitcode)
    assert isinstance(answer, Answer)
    if answer.failure is not None:
        return RemoteError(worker.rank, answer.failure)
    return answer
