"""`python -m benchmarks` as a user runs it: everything at its smallest, and its error messages."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import build_app
from benchmarks.results import Results, read_json, write_json
from benchmarks.systems import SYSTEMS
from benchmarks.workloads import FERRY, GLOO, METADATA, Size, workloads
from tests.benchmarks.samples import environment, whole_run

COMMAND = [sys.executable, "-m", "benchmarks"]
# Far more than the ten seconds that it takes on an idle machine.
DEADLINE_S = 240.0
MEMORY = Path("/dev/shm")


def invoke(*arguments: str) -> tuple[int, str]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        result = CliRunner().invoke(
            build_app(for_cluster=False), list(arguments), env={"COLUMNS": "200", "TERM": "dumb"}
        )
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return result.exit_code, result.output


def test_the_help_shows_flags_without_a_type() -> None:
    code, output = invoke("--help")
    assert code == 0
    assert "--list" in output
    assert "bool" not in output


def run(*arguments: str, command: list[str] | None = None) -> str:
    done = subprocess.run(
        [*(command or COMMAND), *arguments],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def folders() -> set[Path]:
    return set(MEMORY.glob("torchferry-bench-*")) if MEMORY.is_dir() else set()


@dataclasses.dataclass(frozen=True)
class Smoke:
    """A run of everything: its results, what it printed, where it wrote, and what it left in memory."""

    results: Results
    printed: str
    folder: Path
    left: set[Path]


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Smoke:
    """Run every workload at its smallest by the real command, with all outputs."""
    folder = tmp_path_factory.mktemp("bench")
    outputs = {"--json": "results.json", "--report": "out.html", "--markdown": "benchmarks.md"}
    before = folders()
    printed = run(
        "--size",
        "smoke",
        *(word for option, name in outputs.items() for word in (option, str(folder / name))),
    )
    return Smoke(read_json(folder / "results.json"), printed, folder, folders() - before)


@pytest.mark.slow
class TestTheSmallestRun:
    def test_has_every_case_of_every_workload(self, smoke: Smoke) -> None:
        expected = {(case.name, case.systems[0]) for one in workloads(Size.SMOKE) for case in one.cases}
        assert expected <= {(one.case, one.system) for one in smoke.results.measurements if one.rounds}

    def test_has_every_installed_system(self, smoke: Smoke) -> None:
        used = {name for one in workloads(Size.SMOKE) for case in one.cases for name in case.systems}
        installed = {name for name in used if SYSTEMS[name].missing() is None}
        assert installed == {one.system for one in smoke.results.measurements if one.rounds}
        assert {FERRY, "torch-pg", "raw", "memcpy", "torch-save", "dcp"} <= installed

    def test_delivers_every_state(self, smoke: Smoke) -> None:
        assert [one for one in smoke.results.measurements if one.problem] == []

    def test_evaluates_every_target(self, smoke: Smoke) -> None:
        targets = [target.title for one in workloads(Size.SMOKE) for target in one.targets]
        assert [one.title for one in smoke.results.targets] == targets
        assert [one.problem for one in smoke.results.targets if one.ratio is None] == []
        assert "Targets apply to --size full; this run has size smoke." in smoke.printed

    def test_counts_the_bytes_of_views_once(self, smoke: Smoke) -> None:
        measured = smoke.results.of("views")
        wire = {one.system: one.rounds[0].wire_bytes or 0 for one in measured}
        needed = measured[0].state_bytes
        assert needed <= wire[GLOO] < 1.1 * needed
        assert wire["torch-pg"] > 9 * needed

    def test_has_a_rate_for_all_systems_that_move_a_state(self, smoke: Smoke) -> None:
        without = {one.system for one in smoke.results.measurements if one.rounds and not one.bytes_per_s}
        assert without == {METADATA}

    def test_writes_the_page_and_the_markdown(self, smoke: Smoke) -> None:
        assert "<svg" in (smoke.folder / "out.html").read_text()
        assert "## Targets" in (smoke.folder / "benchmarks.md").read_text()
        assert f"wrote {smoke.folder / 'results.json'}" in smoke.printed
        assert smoke.results.command == "python -m benchmarks --size smoke"

    def test_leaves_nothing_in_memory(self, smoke: Smoke) -> None:
        assert smoke.left == set()


def test_a_quick_run_measures_and_checks() -> None:
    printed = run("--size", "smoke", "--work", "big-*", "--system", "torchferry", "--system", "raw")
    assert "2 × 1 MiB, in place" in printed
    assert "not measured: torch-pg was not run" in printed


@pytest.mark.slow
def test_under_torchrun_it_uses_torchruns_ranks() -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
    printed = run(
        *("--size", "smoke", "--work", "small-fresh", "--work", "receivers", "--system", "torchferry"),
        command=[*torchrun, "benchmarks"],
    )
    assert "skipped: receivers-2 needs 3 ranks; there are 2" in printed
    assert printed.count("targets") == 1


class TestWrongArguments:
    @pytest.mark.parametrize(
        ("arguments", "complaint"),
        [
            (["--work", "nothing"], "there is no workload 'nothing'; choose from: memory, small-fresh"),
            (["--system", "nothing"], "there is no system 'nothing'; choose from: torchferry"),
            (["--size", "huge"], "'huge' is not one of 'smoke', 'small', 'full'"),
            (["--json", "no/such/folder/out.json"], "there is no folder no/such/folder"),
            (["--report", "."], "it is a folder"),
            (["--from", "nothing.json"], "can't read nothing.json"),
            (["--from", "nothing.json", "--work", "big-*"], "--from can't be combined with --work"),
            (["--json", "out", "--report", "./out"], "out is given for two outputs"),
            (["--repeats", "0"], "--repeats"),
        ],
    )
    def test_are_refused_before_anything_runs(self, arguments: list[str], complaint: str) -> None:
        code, output = invoke(*arguments)
        assert code == 2
        assert complaint in " ".join(output.split())
        assert "Traceback" not in output


class TestWithoutARun:
    def test_the_choices_are_listed(self) -> None:
        code, output = invoke("--list")
        assert code == 0
        for name in [*(one.name for one in workloads(Size.FULL)), *SYSTEMS]:
            assert name in output

    def test_a_missing_package_is_listed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        missing = dataclasses.replace(SYSTEMS["raw"], missing=lambda: "pip install 'torchferry[bench]'")
        monkeypatch.setitem(SYSTEMS, "raw", missing)
        assert "pip install 'torchferry[bench]'" in invoke("--list")[1]

    def test_results_without_measurements_are_an_error(self, tmp_path: Path) -> None:
        nothing = msgspec.structs.replace(whole_run(), measurements=(), skipped=("a needs 2 ranks",))
        write_json(nothing, tmp_path / "results.json")
        code, output = invoke("--from", str(tmp_path / "results.json"), "--report", str(tmp_path / "page"))
        assert code == 1
        assert "nothing was measured: a needs 2 ranks" in output
        assert not (tmp_path / "page").exists()

    def test_earlier_results_are_shown(self, tmp_path: Path) -> None:
        write_json(whole_run(), tmp_path / "results.json")
        code, output = invoke("--from", str(tmp_path / "results.json"))
        assert code == 0
        assert "targets" in output

    def test_a_failure_of_torchferry_sets_the_exit_code(self, tmp_path: Path) -> None:
        whole = whole_run()
        first, *rest = whole.measurements
        failed = msgspec.structs.replace(first, rounds=(), problem="rank 1: it broke", failed=True)
        write_json(msgspec.structs.replace(whole, measurements=(failed, *rest)), tmp_path / "results.json")
        code, output = invoke("--from", str(tmp_path / "results.json"))
        assert code == 1
        assert "rank 1: it broke" in output


@contextlib.contextmanager
def long_run() -> Iterator[subprocess.Popen[str]]:
    """Start a long run and wait until it measures; kill it at the end."""
    process = subprocess.Popen(
        [*COMMAND, "--size", "smoke", "--work", "small-*", "--repeats", "1000", "--system", "torch*"],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    # A killed process ends its output, so that a reader does not hang.
    deadline = threading.Timer(DEADLINE_S, process.kill)
    deadline.start()
    try:
        next(line for line in process.stdout if "measuring" in line)
        yield process
    finally:
        deadline.cancel()
        process.kill()
        process.wait()
        process.stdout.close()


class TestAnInterruptedRun:
    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
    @pytest.mark.slow
    def test_leaves_no_processes_and_no_files(self, number: signal.Signals) -> None:
        before = folders()
        with long_run() as process:
            process.send_signal(number)
            process.wait(30)
        end = time.monotonic() + 15
        while (left := _living(process.pid) or folders() - before) and time.monotonic() < end:
            time.sleep(0.1)
        assert not left

    @pytest.mark.slow
    def test_by_the_death_of_a_worker_names_the_worker(self) -> None:
        with long_run() as process:
            # The newest of its processes is the last rank.
            os.kill(max(_living(process.pid)), signal.SIGABRT)
            assert process.stdout is not None
            rest = process.stdout.read()
            assert process.wait(30) == 1
        assert "the process of rank 1 was killed by SIGABRT" in rest
        assert "rank 0 failed: RuntimeError" in rest


def _living(session: int) -> list[int]:
    """List the living processes of a session, without zombies."""
    living = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, its_session = entry.read_text().rpartition(")")[2].split()[:4]
        except (OSError, ValueError):
            continue
        if int(its_session) == session and state != "Z":
            living.append(int(entry.parent.name))
    return living
