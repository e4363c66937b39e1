"""What the tests of the benchmark share: sample results, and the environment of the real command."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from benchmarks.results import Measurement, Results, Round, SystemInfo, WorkloadInfo, evaluate
from benchmarks.systems import SYSTEMS
from benchmarks.workloads import Case, Size, Workload, cluster_workloads, workloads

ROOT = Path(__file__).parents[2]
MACHINE = {"processor": "a <small> one", "cores": "2", "memory": "8 GiB", "torch": "2.13.0", "python": "3.11"}


def environment() -> dict[str, str]:
    """Return the environment for a command. A session fixture has added the mark of this session to it."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}


def measurement(case: str, system: str, seconds: Sequence[float], **given: object) -> Measurement:
    """Make the measurement of a system that took these times."""
    rounds = tuple(Round(one, wire_bytes=1000, peak_bytes=2**20) for one in seconds)
    fields: dict[str, object] = {"state_bytes": 10**6, "tensors": 100, "rounds": rounds, **given}
    return Measurement(workload=case, case=case, system=system, **fields)  # type: ignore[arg-type]


def whole_run(size: Size = Size.FULL, *, hosts: int = 0) -> Results:
    """Make results for every case by every system; each system is slower than the one before."""
    chosen = cluster_workloads(size, hosts) if hosts else workloads(size)
    everything = [
        _measured(workload, case, system, number)
        for workload in chosen
        for case in workload.cases
        for number, system in enumerate(case.systems)
    ]
    return Results(
        command="python -m benchmarks --size full",
        date="2024-05-01 12:00 UTC",
        size=size,
        repeats=3,
        machine=MACHINE,
        workloads=tuple(WorkloadInfo(one.name, one.title, one.axis, one.shows) for one in chosen),
        systems=tuple(SystemInfo(one.name, one.title, one.kind) for one in SYSTEMS.values()),
        measurements=tuple(everything),
        targets=tuple(evaluate(one.name, target, everything) for one in chosen for target in one.targets),
        skipped=("something & <something> else",),
    )


def _measured(workload: Workload, case: Case, system: str, number: int) -> Measurement:
    middle = case.state.state_bytes / 1e9 * (number + 1) * case.receivers
    phases = {
        "send": {"describe": middle / 4, "send tensors": middle / 2},
        "receive": {"assemble": middle / 2},
    }
    return Measurement(
        workload=workload.name,
        case=case.name,
        system=system,
        rounds=tuple(
            Round(middle * part, case.state.state_bytes, 2**20, phases if number < 2 else {})
            for part in (0.9, 1.0, 1.1)
        ),
        state_bytes=case.state.state_bytes,
        tensors=case.state.tensors,
        receivers=case.receivers,
        x=case.x,
    )
