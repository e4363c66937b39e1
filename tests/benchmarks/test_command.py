"""`torchferry bench` as a user runs it: the whole of it at its smallest, and what it says when it can't."""

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

from benchmarks.results import Results, read_json, write_json
from benchmarks.systems import SYSTEMS
from benchmarks.works import FERRY, METADATA, Size, works
from tests.benchmarks.samples import a_whole_run
from torchferry import cli

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "torchferry", "bench"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
# Far more than it takes on an idle machine, where it is some ten seconds.
DEADLINE_S = 240.0
MEMORY = Path("/dev/shm")


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(
        cli._build_app(), ["bench", *arguments], env={"COLUMNS": "200", "TERM": "dumb"}
    )
    return result.exit_code, result.output


def run(*arguments: str, command: list[str] | None = None) -> str:
    done = subprocess.run(
        [*(command or COMMAND), *arguments],
        env=ENVIRONMENT,
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
    """What came of a run of everything: results, what was printed and written, and what was left behind."""

    results: Results
    printed: str
    folder: Path
    left: set[Path]


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Smoke:
    """Every work at its smallest, by the real command, with everything that it can write."""
    folder = tmp_path_factory.mktemp("bench")
    outputs = ["--json", "results.json", "--report", "out.html", "--markdown", "benchmarks.md"]
    given = [str(folder / word) if "." in word else word for word in outputs]
    before = folders()
    printed = run("--size", "smoke", *given)
    return Smoke(read_json(folder / "results.json"), printed, folder, folders() - before)


class TestTheSmallestRun:
    def test_has_every_case_of_every_work(self, smoke: Smoke) -> None:
        results = smoke.results
        # Of each the first of its systems, which is torchferry, or a part of it.
        expected = {(case.name, case.systems[0]) for work in works(Size.SMOKE) for case in work.cases}
        measured = {(one.case, one.system) for one in results.series if one.takes}
        assert expected <= measured

    def test_has_every_system_that_is_installed(self, smoke: Smoke) -> None:
        results = smoke.results
        installed = {name for name, system in SYSTEMS.items() if system.missing() is None}
        assert installed == {one.system for one in results.series if one.takes}
        assert {FERRY, "torch-pg", "raw", "memcpy", "torch-save", "dcp"} <= installed

    def test_delivers_everything_right(self, smoke: Smoke) -> None:
        results = smoke.results
        assert [one for one in results.series if one.problem] == []

    def test_judges_every_mark(self, smoke: Smoke) -> None:
        results, printed = smoke.results, smoke.printed
        marks = [mark.title for work in works(Size.SMOKE) for mark in work.marks]
        assert [one.title for one in results.judgements] == marks
        assert [one.problem for one in results.judgements if one.ratio is None] == []
        assert printed.count("reached") >= len(marks)

    def test_counts_the_bytes_of_views_once(self, smoke: Smoke) -> None:
        results = smoke.results
        wire = {one.system: one.takes[0].wire_bytes for one in results.of("views")}
        needed = results.of("views")[0].state_bytes
        assert needed <= (wire[FERRY] or 0) < 1.1 * needed
        assert (wire["torch-pg"] or 0) > 9 * needed

    def test_gives_a_rate_to_what_moves_something(self, smoke: Smoke) -> None:
        still = {one.system for one in smoke.results.series if one.takes and not one.bytes_per_second}
        assert still == {METADATA}
        lines = [line.split() for line in smoke.printed.splitlines() if METADATA in line.split()]
        assert lines
        assert not [line for line in lines if any(word.endswith("/s") for word in line)]

    def test_writes_the_page_and_the_document(self, smoke: Smoke) -> None:
        results, printed, folder = smoke.results, smoke.printed, smoke.folder
        assert "<svg" in (folder / "out.html").read_text()
        assert "## The marks" in (folder / "benchmarks.md").read_text()
        assert f"wrote {folder / 'results.json'}" in printed
        assert str(folder) not in results.command

    def test_says_that_its_marks_are_for_another_size(self, smoke: Smoke) -> None:
        assert "The marks are for --size full; this was smoke." in smoke.printed

    def test_leaves_nothing_in_memory(self, smoke: Smoke) -> None:
        assert smoke.left == set()


class TestUnderTorchrun:
    def test_it_uses_the_ranks_that_are_there(self) -> None:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
        printed = run(
            *("--size", "smoke", "--work", "small-fresh", "--work", "receivers", "--system", "torchferry"),
            command=[*torchrun, "torchferry", "bench"],
        )
        assert "left out: receivers-2 needs 3 ranks, and there are 2" in printed
        assert printed.count("the marks") == 1


class TestWhatMakesNoSense:
    @pytest.mark.parametrize(
        ("arguments", "complaint"),
        [
            (["--work", "bog-fresh"], "there is no work 'bog-fresh'; there are: memory, small-fresh"),
            (["--work", "huge-*"], "there is no work 'huge-*'"),
            (["--system", "carrier-pigeon"], "there is no system 'carrier-pigeon'; there are: torchferry"),
            (["--size", "enormous"], "there is no size 'enormous'; there are: smoke, small, full"),
            (["--json", "no/such/folder/out.json"], "there is no folder no/such/folder"),
            (["--report", "."], "it is a folder"),
            (["--from", "nothing.json"], "nothing.json"),
            (["--from", "nothing.json", "--work", "big-*"], "--from shows what was measured"),
            (["--json", "out", "--report", "./out"], "out can't be two things at once"),
            (["--repeats", "0"], "--repeats"),
        ],
    )
    def test_is_refused_by_name_before_anything_runs(self, arguments: list[str], complaint: str) -> None:
        code, output = invoke(*arguments)
        assert code == 2
        assert complaint in " ".join(output.split())
        assert "Traceback" not in output


class TestWithoutARun:
    def test_the_choices_are_listed(self) -> None:
        code, output = invoke("--list")
        assert code == 0
        for name in [*(work.name for work in works(Size.FULL)), *SYSTEMS]:
            assert name in output

    def test_what_is_missing_is_said_in_full(self, monkeypatch: pytest.MonkeyPatch) -> None:
        absent = dataclasses.replace(SYSTEMS["raw"], missing=lambda: "pip install 'torchferry[bench]'")
        monkeypatch.setitem(SYSTEMS, "raw", absent)
        assert "pip install 'torchferry[bench]'" in invoke("--list")[1]

    def test_one_that_measured_nothing_is_no_success(self, tmp_path: Path) -> None:
        nothing = msgspec.structs.replace(a_whole_run(), series=(), left_out=("a needs 2 ranks",))
        write_json(nothing, tmp_path / "results.json")
        code, output = invoke("--from", str(tmp_path / "results.json"), "--report", str(tmp_path / "page"))
        assert code == 1
        assert "nothing was measured: a needs 2 ranks" in output
        assert not (tmp_path / "page").exists()

    def test_an_earlier_one_can_be_shown_again(self, tmp_path: Path) -> None:
        write_json(a_whole_run(), tmp_path / "results.json")
        code, output = invoke(
            "--from", str(tmp_path / "results.json"), "--report", str(tmp_path / "out.html")
        )
        assert code == 0
        assert "the marks" in output
        assert (tmp_path / "out.html").exists()


@contextlib.contextmanager
def under_way() -> Iterator[subprocess.Popen[str]]:
    """A long run that has begun to measure; all of it is gone when the block is left."""
    process = subprocess.Popen(
        [*COMMAND, "--size", "smoke", "--work", "small-*", "--repeats", "1000", "--system", "torch*"],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    # Whoever reads its output then sees the end of it.
    last_resort = threading.Timer(DEADLINE_S, process.kill)
    last_resort.start()
    try:
        next(line for line in process.stdout if "measuring" in line)
        yield process
    finally:
        last_resort.cancel()
        process.kill()
        process.wait()
        process.stdout.close()


class TestARunThatIsCutOff:
    @pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
    def test_leaves_neither_processes_nor_files(self, how: signal.Signals) -> None:
        before = folders()
        with under_way() as process:
            process.send_signal(how)
            process.wait(30)
        end = time.monotonic() + 15
        while (left := _living(process.pid) or folders() - before) and time.monotonic() < end:
            time.sleep(0.1)
        assert not left


class TestAProcessThatDies:
    def test_is_named_and_the_run_ends_at_once(self) -> None:
        with under_way() as process:
            # The newest of its processes is the last rank.
            os.kill(max(_living(process.pid)), signal.SIGABRT)
            assert process.stdout is not None
            rest = process.stdout.read()
            assert process.wait(30) == 1
        assert "the process of rank 1 was killed by SIGABRT" in rest
        assert "rank 0 failed: RuntimeError" in rest


def _living(session: int) -> list[int]:
    """The processes of a session that are still there, the dead that nobody has buried not counted."""
    living = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, its_session = entry.read_text().rpartition(")")[2].split()[:4]
        except (OSError, ValueError):
            continue
        if int(its_session) == session and state != "Z":
            living.append(int(entry.parent.name))
    return living
