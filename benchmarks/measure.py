"""From a plan to results: on this machine, on torchrun's ranks, or on a cluster of network namespaces."""

from __future__ import annotations

import os
from datetime import UTC, datetime

import torch.distributed as dist

from benchmarks.hosts import cluster
from benchmarks.machine import describe_machine
from benchmarks.results import Measurement, Results, SystemInfo, WorkloadInfo
from benchmarks.rounds import IDLE_TIMEOUT, share
from benchmarks.run import Emit, Event, Measured, Plan, Skipped, run
from benchmarks.systems import SYSTEMS
from benchmarks.systems.session import SENDER
from benchmarks.targets import evaluate
from benchmarks.workers import run_workers, shared_folder


def measure(plan: Plan, command: str, emit: Emit) -> Results | None:
    """Run the plan; return None on the ranks of a torchrun that do not show results.

    Raises:
        BenchmarkError: a worker failed.
        ClusterRefused: no cluster can be built here.
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
            run_workers(plan, collect, hosts)
    elif {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        if _run_under_torchrun(plan, collect) != SENDER:
            return None
    else:
        run_workers(plan, collect)
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
    with shared_folder() as own:
        run(plan, share(own, world, dist.get_world_size())[SENDER], emit)
        # The first rank to exit closes connections and removes files that others may still need.
        dist.barrier()
    dist.destroy_process_group()
    return rank
