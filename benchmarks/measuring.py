"""From a plan to results: here, in processes of this machine, or on the ranks that torchrun has started."""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from datetime import UTC, datetime

import torch.distributed as dist

from benchmarks.assembly import PATIENCE, share
from benchmarks.crew import run_here, shared_folder
from benchmarks.machine import describe_machine
from benchmarks.marks import judge
from benchmarks.results import Results, Series, SystemTitle, WorkTitle
from benchmarks.run import Event, LeftOut, Measured, Plan, Tell, perform
from benchmarks.systems import SYSTEMS
from benchmarks.systems.base import SENDER
from benchmarks.works import Work


def measure(plan: Plan, command: str, tell: Tell) -> Results | None:
    """Run the plan, and return what it came to; None on the ranks of a torchrun that have nothing to show.

    Raises:
        BenchFailed: a process ended early, or all were silent for too long.
        RuntimeError: under torchrun, another rank is gone.
    """
    series: list[Series] = []
    left_out: list[str] = []

    def collect(event: Event) -> None:
        match event:
            case Measured(one):
                series.append(one)
            case LeftOut(reason):
                left_out.append(reason)
        tell(event)

    if under_torchrun():
        rank = _run_on_these_ranks(plan, collect)
        if rank != SENDER:
            return None
    else:
        run_here(plan, plan.ranks, collect)
    return make_results(
        plan.chosen(), series, command=command, size=plan.size, repeats=plan.repeats, left_out=left_out
    )


def make_results(
    works: Sequence[Work],
    series: Sequence[Series],
    *,
    command: str,
    size: str,
    repeats: int,
    left_out: Sequence[str],
) -> Results:
    """Judge what was measured of these works, and add who measured it, on what, and when."""
    return Results(
        command=command,
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        size=size,
        repeats=repeats,
        machine=describe_machine(),
        works=tuple(WorkTitle(work.name, work.title, work.axis, work.shows) for work in works),
        systems=tuple(SystemTitle(one.name, one.title, one.kind) for one in SYSTEMS.values()),
        series=tuple(series),
        judgements=tuple(judge(work.name, mark, series) for work in works for mark in work.marks),
        left_out=tuple(left_out),
    )


def under_torchrun() -> bool:
    """Whether this process is one of those that torchrun has started."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()


def _run_on_these_ranks(plan: Plan, tell: Tell) -> int:
    # What was imported stays: not to look through it makes the collections between takes short.
    gc.freeze()
    dist.init_process_group("gloo", timeout=PATIENCE)
    rank, world = dist.get_rank(), dist.group.WORLD
    assert world is not None, "init_process_group makes the default group"
    with shared_folder() as own:
        folders = share(str(own).encode(), world, dist.get_world_size())
        perform(plan, type(own)(folders[SENDER].decode()), tell)
        # Nobody leaves before all are done with each other's files and connections.
        dist.barrier()
    dist.destroy_process_group()
    return rank
