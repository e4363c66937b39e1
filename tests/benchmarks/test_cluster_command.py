"""`python -m benchmarks cluster`: it measures, and its cluster is removed, at the latest by the next run."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.hosts import namespaces, remove_leftovers
from benchmarks.results import read_json
from benchmarks.workloads import Size, cluster_workloads
from tests.benchmarks.samples import environment
from tests.support import processes

DEADLINE_S = 120.0


def all_processes() -> set[int]:
    """List the processes of this test session, with the workers that other tests share."""
    return {process.pid for process in processes.left_behind(os.environ[processes.MARK])}


def new_processes(known: set[int]) -> list[int]:
    return sorted(all_processes() - known)


@contextlib.contextmanager
def running(*options: str) -> Iterator[subprocess.Popen[str]]:
    """Start the command; at the end, check that no process and no namespace is left."""
    known = all_processes()
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks", "cluster", "--size", "smoke", *options],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # Its own process group, for a Ctrl-C that does not reach the tests.
        start_new_session=True,
    )
    try:
        yield process
        assert built_by(process) == []
        assert new_processes(known) == []
    finally:
        process.kill()
        process.communicate()
        remove_leftovers()


def read_until(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdout is not None
    output = ""
    for line in process.stdout:
        output += line
        if text in line:
            return
    raise AssertionError(f"it exited without printing {text!r}:\n{output}")


def built_by(process: subprocess.Popen[str]) -> list[str]:
    return [name for name in namespaces() if name.startswith(f"tf{process.pid}-")]


@pytest.mark.slow
@pytest.mark.usefixtures("cluster_rights")
class TestTheCommand:
    def test_measures_every_case_and_evaluates_the_targets(self, tmp_path: Path) -> None:
        with running("--hosts", "5", "--json", str(tmp_path / "results.json")) as process:
            output, _ = process.communicate(timeout=DEADLINE_S)
            assert process.returncode == 0, output
        results = read_json(tmp_path / "results.json")
        workloads = cluster_workloads(Size.SMOKE, hosts=5)
        expected = {(case.name, name) for one in workloads for case in one.cases for name in case.systems}
        assert {(one.case, one.system) for one in results.measurements} == expected
        # What this version of fetch can't do is shown as such.
        available = [one for one in results.measurements if "not available" not in (one.problem or "")]
        assert [one.problem for one in available if one.problem] == []
        assert {len(one.rounds) for one in available} == {results.repeats} == {1}
        assert {one.name for one in workloads} == {one.workload for one in available}
        assert len(results.targets) == sum(len(one.targets) for one in workloads) == 10
        problems = [one.problem or "" for one in results.targets if one.ratio is None]
        assert [problem for problem in problems if "not available" not in problem] == []
        assert results.command == "python -m benchmarks cluster --size smoke --hosts 5"
        for text in ("fan-out-4-direct", "fan-out-4-killed", "fan-out-asleep", "sources-4", "verdict"):
            assert text in output

    def test_measures_only_the_chosen_workloads_and_systems(self) -> None:
        with running("--hosts", "2", "--work", "unchanged-*", "--system", "fetch-tcp") as process:
            output, _ = process.communicate(timeout=DEADLINE_S)
            assert process.returncode == 0, output
        assert "2 MiB that the receiver has, over a link of 1 Gbit/s" in output
        assert "not measured: torch-pg was not run" in output
        assert "fan-out" not in output

    @pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
    def test_removes_the_cluster_when_it_is_interrupted(self, number: signal.Signals, code: int) -> None:
        with running("--hosts", "2", "--repeats", "1000") as process:
            read_until(process, "measuring")
            assert len(built_by(process)) == 3
            os.killpg(process.pid, number)
            assert process.wait(30) == code

    def test_removes_the_cluster_when_a_worker_is_killed(self) -> None:
        with running("--hosts", "2", "--repeats", "1000") as process:
            read_until(process, "measuring")
            host = next(name for name in built_by(process) if name.endswith("-h1"))
            pids = subprocess.run(["ip", "netns", "pids", host], capture_output=True, text=True).stdout
            os.kill(int(pids), signal.SIGKILL)
            output, _ = process.communicate(timeout=30)
            assert process.returncode == 1
            assert "the process of rank 1 was killed by SIGKILL" in output

    def test_when_killed_leaves_no_process_and_the_next_run_removes_its_namespaces(self) -> None:
        known = all_processes()
        with running("--hosts", "2", "--repeats", "1000") as process:
            read_until(process, "measuring")
            left = built_by(process)
            process.kill()
            process.wait()
            assert new_processes(known) == []
            assert sorted(remove_leftovers()) == sorted(left)


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="only root can drop root's rights")
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="setpriv is not installed")
def test_root_without_the_capabilities_is_refused() -> None:
    done = subprocess.run(
        ["setpriv", "--bounding-set", "-net_admin", sys.executable, "-m", "benchmarks", "cluster"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 2
    assert "no cluster can be built here" in done.stdout
    assert "lacks CAP_NET_ADMIN: run it as root" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
