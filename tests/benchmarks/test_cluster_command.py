"""`torchferry bench-cluster`: it measures, and whatever becomes of it, its cluster is gone afterwards."""

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

from benchmarks.fanout_works import fanout_works
from benchmarks.hosts import namespaces, remove_leftovers
from benchmarks.results import find, read_json
from benchmarks.works import FERRY, TORCH, Size
from tests.support import processes

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
DEADLINE_S = 120.0

SLOW = pytest.mark.skipif(
    os.environ.get("FAULTS") != "all", reason="takes a quarter of a minute: make faults plays it"
)


def all_processes() -> set[int]:
    """List the processes of this session of tests: workers of other tests live on between them."""
    return {process.pid for process in processes.left_behind(os.environ[processes.MARK])}


def new_processes(known: set[int]) -> list[int]:
    """List those that have come since, and are still there."""
    return sorted(all_processes() - known)


@contextlib.contextmanager
def running(*options: str) -> Iterator[subprocess.Popen[str]]:
    """The command as a user would start it, and nothing of it left when the block is."""
    others = set(namespaces())
    known = all_processes()
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks", "cluster", "--size", "smoke", *options],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # A group of its own, for a Ctrl-C that goes to all of it and not to the tests.
        start_new_session=True,
    )
    try:
        yield process
        assert set(namespaces()) <= others
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
    raise AssertionError(f"it ended without saying {text!r}:\n{output}")


def built_by(process: subprocess.Popen[str]) -> list[str]:
    return [name for name in namespaces() if name.startswith(f"tf{process.pid}-")]


@pytest.mark.usefixtures("the_rights")
class TestTheCommand:
    def test_measures_every_case_and_judges_it(self, tmp_path: Path) -> None:
        with running("--hosts", "4", "--json", str(tmp_path / "figures.json")) as process:
            output, _ = process.communicate(timeout=DEADLINE_S)
            assert process.returncode == 0, output
        results = read_json(tmp_path / "figures.json")
        for work in fanout_works(Size.SMOKE, hosts=4):
            for case in work.cases:
                series = find(results.series, case.name, FERRY)
                assert series is not None
                assert series.problem is None
                assert len(series.takes) == results.repeats == 1
        assert len(results.judgements) == 3
        assert all(judgement.ratio is not None for judgement in results.judgements)
        for text in ("× one link", "relays off", "one asleep", "must reach"):
            assert text in output

    @SLOW
    @pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
    def test_removes_all_when_it_is_ended(self, number: signal.Signals, code: int) -> None:
        with running("--hosts", "2", "--repeats", "1000") as process:
            read_until(process, "measuring")
            assert len(built_by(process)) == 3
            os.killpg(process.pid, number)
            assert process.wait(30) == code

    @SLOW
    def test_removes_all_when_one_of_its_processes_is_killed(self) -> None:
        with running("--hosts", "2", "--repeats", "1000") as process:
            read_until(process, "measuring")
            host = next(name for name in built_by(process) if name.endswith("-h1"))
            pids = subprocess.run(["ip", "netns", "pids", host], capture_output=True, text=True).stdout
            os.kill(int(pids), signal.SIGKILL)
            output, _ = process.communicate(timeout=30)
            assert process.returncode == 1
            assert "host 1 was killed by SIGKILL" in output or "closed by peer" in output

    @SLOW
    def test_leaves_no_process_when_it_is_killed_and_the_rest_to_the_next(self) -> None:
        known = all_processes()
        with running("--hosts", "2", "--repeats", "1000") as process:
            read_until(process, "measuring")
            left = built_by(process)
            process.kill()
            process.wait()
            assert new_processes(known) == []
            assert sorted(remove_leftovers()) == sorted(left)


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="only root can give up root's rights")
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="there is no setpriv to give up rights with")
def test_it_is_refused_to_root_in_a_container_without_the_rights() -> None:
    command = [sys.executable, "-m", "benchmarks", "cluster"]
    done = subprocess.run(
        ["setpriv", "--bounding-set", "-net_admin", *command],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 2
    assert "no cluster can be built here" in done.stdout
    assert "lacks CAP_NET_ADMIN: run it as root" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_the_marks_are_those_of_the_issue() -> None:
    fan_out, sleeper = fanout_works(Size.FULL)
    assert fan_out.marks[0].title == "128 MiB to 6 receivers, 7 hosts of 1 Gbit/s: against one link"
    assert (fan_out.marks[0].wanted, fan_out.marks[0].at_least) == (1.15, False)
    assert sleeper.title == "64 MiB to 3 receivers without relays, one asleep for 3 s"
    compared = [case for case in fan_out.cases if case.systems == (FERRY, TORCH)]
    assert [(case.receivers, case.relay) for case in compared] == [
        (1, False),
        (2, True),
        (4, True),
        (6, True),
    ]
