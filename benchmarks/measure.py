"""From a plan to results: on this machine, on torchrun's ranks, or on a cluster of network namespaces.

The parent starts a worker process for each rank, receives events, and kills the workers when
the run ends or fails. A worker whose parent has died exits.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist

from benchmarks.hosts import Host, cluster
from benchmarks.machine import describe_machine
from benchmarks.results import BenchmarkError, Measurement, Results, SystemInfo, WorkloadInfo, evaluate
from benchmarks.rounds import IDLE_TIMEOUT, share
from benchmarks.run import Emit, Event, Measured, Plan, Skipped, run
from benchmarks.systems import SYSTEMS
from benchmarks.systems.session import SENDER

_JOIN_TIMEOUT = timedelta(seconds=120)
_EXIT_TIMEOUT_S = 10.0
# After one worker has failed, the others get this long to report why they failed.
_REPORT_TIMEOUT_S = 5.0
_SHOWN_LINES = 5


def measure(plan: Plan, command: str, emit: Emit) -> Results | None:
    """Run the plan; return None on the ranks of a torchrun that do not show results.

    Raises:
        BenchmarkError: a worker failed.
        ClusterError: no cluster can be built here.
        RuntimeError: under torchrun, another rank has died.
    """
    measurements: list[Measurement] = []
    skipped: list[str] = []

    def collect(event: Event) -> None:
        match event:
            case Measured(one):
                measurements.append(one)
            case Skipped(reason):
                skipped.append(reason)
        emit(event)

    machine = describe_machine()
    if plan.hosts:
        machine["load before"] = f"{os.getloadavg()[0]:.1f}"
        with cluster(plan.hosts) as hosts:
            _run_workers(plan, collect, hosts)
    elif {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        if _run_under_torchrun(plan, collect) != SENDER:
            return None
    else:
        _run_workers(plan, collect)
    chosen = plan.chosen()
    return Results(
        command=command,
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        size=plan.size,
        repeats=plan.repeats,
        machine=machine,
        workloads=tuple(WorkloadInfo(one.name, one.title, one.axis, one.shows) for one in chosen),
        systems=tuple(SystemInfo(one.name, one.title, one.kind) for one in SYSTEMS.values()),
        measurements=tuple(measurements),
        targets=tuple(evaluate(one.name, target, measurements) for one in chosen for target in one.targets),
        skipped=tuple(skipped),
    )


def _run_under_torchrun(plan: Plan, emit: Emit) -> int:
    """Run the plan on this process's rank, and return the rank."""
    dist.init_process_group("gloo", timeout=IDLE_TIMEOUT)
    rank, world = dist.get_rank(), dist.group.WORLD
    assert world is not None, "init_process_group creates the default group"
    with _shared_folder() as own:
        run(plan, share(own, world, dist.get_world_size())[SENDER], emit)
        # The first rank to exit closes connections and removes files that others may still need.
        dist.barrier()
    dist.destroy_process_group()
    return rank


class _Finished(NamedTuple):
    """A worker has finished the plan."""


class _Crashed(NamedTuple):
    """A worker has failed. `report` is its traceback, or empty if its process ended without one."""

    report: str = ""


class _Worker(NamedTuple):
    rank: int
    process: BaseProcess
    channel: Connection


def _run_workers(plan: Plan, emit: Emit, hosts: Sequence[Host] = ()) -> None:
    """Run the plan in `plan.ranks` processes: on this machine, or one on each host.

    Raises:
        BenchmarkError: a worker failed or was killed, or no worker sent an event for too long.
    """
    silence_s = 2 * plan.round_timeout_s + _JOIN_TIMEOUT.total_seconds()
    with _shared_folder() as folder, _started(plan, folder, hosts) as workers:
        waiting = {worker.channel: worker for worker in workers}
        while waiting:
            ready = multiprocessing.connection.wait(list(waiting), silence_s)
            if not ready:
                raise BenchmarkError(f"the run hangs: no worker sent an event for {silence_s:.0f} s", 1)
            for channel in ready:
                assert isinstance(channel, Connection), "only channels are waited for"
                match _receive(channel):
                    case _Finished():
                        del waiting[channel]
                    case _Crashed() as crash:
                        reports = {waiting[channel].rank: crash.report}
                        raise BenchmarkError(_failure_report(list(waiting.values()), reports, folder), 1)
                    case event:
                        emit(event)


@contextlib.contextmanager
def _shared_folder() -> Iterator[Path]:
    """Make a folder on tmpfs, or on disk where there is no tmpfs, and remove it."""
    memory = Path("/dev/shm")
    parent = memory if memory.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="torchferry-bench-", dir=parent) as folder:
        yield Path(folder)


@contextlib.contextmanager
def _started(plan: Plan, folder: Path, hosts: Sequence[Host]) -> Iterator[list[_Worker]]:
    """Start the workers; kill them when the block ends."""
    # Importing torch takes four seconds of a core. A forked worker has it at once. This process has started
    # no thread. Systems other than Linux do not allow a fork with torch loaded.
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    workers: list[_Worker] = []
    try:
        for rank in range(plan.ranks):
            ours, theirs = context.Pipe()
            parent_ends = [*(worker.channel for worker in workers), ours]
            # mypy's view of a context has no Process.
            process: BaseProcess = context.Process(  # type: ignore[attr-defined]
                target=_worker_main,
                args=(theirs, parent_ends, rank, plan, folder, hosts[rank] if hosts else None),
                name=f"torchferry-bench-{rank}",
                daemon=True,
            )
            process.start()
            # Only the worker holds its end now, so that its death closes the channel.
            theirs.close()
            workers.append(_Worker(rank, process, ours))
        yield workers
    finally:
        for worker in workers:
            worker.process.kill()
        for worker in workers:
            worker.process.join(_EXIT_TIMEOUT_S)
            worker.channel.close()


def _receive(channel: Connection) -> Any:
    """Return the next event of a worker, or how it ended."""
    try:
        return channel.recv()
    except (EOFError, OSError):
        return _Crashed()


def _failure_report(workers: Sequence[_Worker], reports: dict[int, str], folder: Path) -> str:
    """Report why workers failed. Killed workers come first: the others fail because of them."""
    deadline_s = time.monotonic() + _REPORT_TIMEOUT_S
    killed, failed = [], []
    for worker in workers:
        report = reports.get(worker.rank) or _last_report(worker.channel, deadline_s)
        worker.process.join(max(0.0, deadline_s - time.monotonic()))
        code = worker.process.exitcode
        if report:
            failed.append((worker.rank, report.strip()))
        elif code is not None:
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
            killed.append(f"the process of rank {worker.rank} {how}")
            if (output := _output_file(folder, worker.rank)).exists():
                lines = output.read_text(errors="replace").splitlines()
                killed += [f"  output: {line}" for line in lines[-_SHOWN_LINES:]]
    if failed and not killed:
        # The benchmark itself has a bug: show where.
        return "\n".join(f"rank {rank} failed:\n{report}" for rank, report in failed)
    brief = [f"rank {rank} failed: {report.splitlines()[-1]}" for rank, report in failed]
    return "\n".join([*killed, *brief]) or "a worker closed its channel without a report"


def _last_report(channel: Connection, deadline_s: float) -> str:
    with contextlib.suppress(OSError):
        while channel.poll(max(0.0, deadline_s - time.monotonic())):
            if isinstance(last := _receive(channel), _Crashed):
                return last.report
    return ""


def _worker_main(
    channel: Connection,
    parent_ends: Sequence[Connection],
    rank: int,
    plan: Plan,
    folder: Path,
    host: Host | None,
) -> NoReturn:
    """Run one rank of the plan, and exit."""
    status = 1
    try:
        # Only the parent holds its ends now, so that its death closes the channels.
        for end in parent_ends:
            end.close()
        # The terminal sends Ctrl-C to all processes. Only the parent acts on signals.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _redirect_output(_output_file(folder, rank))
        if host is not None:
            # Before any thread starts: a thread stays in the network in which it was started.
            host.enter()
        _exit_with_parent(channel, folder)
        # As torchrun does: with more threads, the ranks would compete for the cores.
        torch.set_num_threads(1)
        _join(rank, plan.ranks, folder, host)
        run(plan, folder, channel.send, host)
        # The first worker to exit closes connections that others may still need.
        dist.barrier()
        channel.send(_Finished())
        status = 0
    except Exception:
        with contextlib.suppress(OSError):
            channel.send(_Crashed(traceback.format_exc()))
    finally:
        # Without the interpreter's shutdown, which would wait for blocked threads.
        os._exit(status)


def _join(rank: int, ranks: int, folder: Path, host: Host | None) -> None:
    if host is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = host.interface
    elif loopback := {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}:
        # By default gloo uses the address of the host name, which may not resolve.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback.pop())
    # Hosts are namespaces of one machine, and share its files.
    store = dist.FileStore(str(folder / "store"), ranks)
    store.set_timeout(_JOIN_TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=IDLE_TIMEOUT)


def _exit_with_parent(channel: Connection, folder: Path) -> None:
    def watch() -> None:
        # The parent sends nothing, so that this returns only when the parent has died.
        with contextlib.suppress(EOFError, OSError):
            channel.recv()
        # The dead parent can't remove the folder, and files on tmpfs use memory.
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def _output_file(folder: Path, rank: int) -> Path:
    return folder / f"output-of-rank-{rank}.txt"


def _redirect_output(file: Path) -> None:
    """Write stdout and stderr to a file, so that they do not mix with the parent's tables."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.close(descriptor)
