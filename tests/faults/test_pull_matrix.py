"""Faults at exact steps of a fetch of 16 MiB between real processes, over TCP and over memory."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.faults.controller import wait_until
from tests.faults.pull_cases import PULLS, PULLS_OVER_MEMORY, PullCase
from tests.faults.pull_run import FAR_S, VERSION, PullRun
from tests.faults.test_matrix import DETECTION_S, LATE_S, MARKS
from tests.support.pull import PATHS, FetchResult, is_idle, reader_states
from tests.support.solo import EXIT_CODE, Solos
from torchferry.errors import FerryError, SourcesLost, TargetTorn


def parametrized_by(cases: list[PullCase]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "case", [pytest.param(case, id=case.name, marks=MARKS[case.runs_in]) for case in cases]
    )


@pytest.fixture
def run(case: PullCase, solos: Solos) -> Iterator[PullRun]:
    found = PullRun(case, solos)
    try:
        yield found
    finally:
        found.close()


def assert_error_matches_state(run: PullRun, result: FetchResult) -> None:
    """Check that the error describes the local state correctly."""
    error, contents = result.error, result.contents
    assert isinstance(error, FerryError), error
    if isinstance(error, TargetTorn):
        assert sorted([*error.whole, *error.torn, *error.untouched]) == sorted(PATHS)
        assert error.whole or error.torn, "TargetTorn, but no path is whole or torn"
        assert {contents[path] for path in error.whole} <= {"new"}
        assert {contents[path] for path in error.untouched} <= {"old"}
        assert run.case.fault == "wrong_bytes" or "neither" not in contents.values()
    else:
        assert contents == dict.fromkeys(PATHS, "old"), f"changed, but the error is not TargetTorn: {error}"


def assert_in_time(run: PullRun, result: FetchResult) -> None:
    if run.case.fault in ("stop", "wrong_length"):
        # A process can't notice its deadline while it is stopped.
        assert result.ended_s < max(result.started_s + run.timeout_s, run.continued_s) + LATE_S
    elif run.case.fault == "pause":
        assert result.seconds < FAR_S
    else:
        assert result.ended_s - run.fault_s < DETECTION_S


def assert_result(run: PullRun, result: FetchResult) -> None:
    case, error = run.case, result.error
    assert ("" if error is None else type(error).__name__) in case.errors, error
    assert_in_time(run, result)
    assert result.left == "", f"the fetch left {result.left}"
    if error is not None:
        assert_error_matches_state(run, result)
        if isinstance(error, SourcesLost):
            assert list(error.reasons) == [proxy.peer for proxy in run.proxies]
        return
    assert result.contents == dict.fromkeys(PATHS, "new")
    assert result.version == VERSION
    assert result.report is not None
    assert result.report.verified
    # A process without memory can't map any, and a dead one has no Unix socket. After an answer of a wrong
    # length, the next one does not tell where the memory is, and TCP is used.
    for number, proxy in enumerate(run.proxies):
        report = result.report.sources[proxy.peer]
        if case.fault == "wrong_length" and number == run.faulty and report.via == "tcp":
            assert report.why_tcp
            continue
        if report.bytes and (case.fault != "no_memory" and run.sources[number].alive):
            assert (report.via, bool(report.why_tcp)) == (case.link, case.link == "tcp")
    # Who says that the source knows must not be wrong.
    assert result.report.confirmed == (result.warnings == [])
    if result.report.confirmed:
        reports = [result.report.sources[proxy.peer] for proxy in run.proxies]
        # A source that was given up, or has not answered, is not told.
        told = [each.bytes > 0 and not each.failures for each in reports]
        knows = ["confirmed" in source.run(reader_states) for source in run.sources if source.alive]
        assert any(knows)
        assert len(knows) < len(told) or all(knows[n] for n, is_told in enumerate(told) if is_told)


def assert_all_are_usable(run: PullRun, result: FetchResult | None) -> None:
    """Check that no source keeps anything of the fetch, and that the next fetch from all works."""
    run.close()
    for source, baseline in zip(run.sources, run.baselines, strict=True):
        if source.alive:
            assert source.run(is_idle, baseline) == ""
            wait_until(lambda: "reading" not in source.run(reader_states), "a lease is still open", 1.0)  # noqa: B023
            if run.case.kills_receiver and run.case.sources == 1:
                assert source.run(reader_states) in (["lost"], ["failed"], [])
    again = run.fetch_again(keep=result is not None)
    assert again.error is None, again.error
    assert again.contents == dict.fromkeys(PATHS, "new")
    assert again.left == ""


def assert_case(run: PullRun) -> None:
    result = run.run()
    if run.case.kills_receiver:
        assert result is None
        killed = run.case.fault == "kill"
        assert run.receiver.exitcode == (-signal.SIGKILL if killed else EXIT_CODE)
    else:
        assert result is not None
        assert_result(run, result)
    assert_all_are_usable(run, result)


@parametrized_by(PULLS[1] + PULLS_OVER_MEMORY[1])
def test_a_fault_with_one_source_ends_in_a_typed_error_or_the_exact_state(run: PullRun) -> None:
    assert_case(run)


@parametrized_by(PULLS[2] + PULLS_OVER_MEMORY[2])
def test_a_fault_of_one_of_two_sources_does_not_fail_the_fetch(run: PullRun) -> None:
    assert_case(run)
