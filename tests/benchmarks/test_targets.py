"""A target is met, missed or within noise; a target that was not measured is not met."""

from __future__ import annotations

import pytest

from benchmarks.results import Figure, Metric, Target, TargetResult, evaluate
from benchmarks.workloads import FERRY, FETCH_RESHARE, TORCH, Size, cluster_workloads, workloads
from tests.benchmarks.samples import measurement

TWICE = Target("twice as fast", Figure("c", "theirs"), Figure("c", "ours"), 2.0, at_least=True)


def compared(ours: list[float], theirs: list[float]) -> TargetResult:
    return evaluate("w", TWICE, [measurement("c", "ours", ours), measurement("c", "theirs", theirs)])


class TestATarget:
    @pytest.mark.parametrize(
        ("ours", "theirs", "verdict"),
        [
            ([1.0, 1.0, 1.0], [3.0, 3.0, 3.0], "met"),
            ([1.0, 1.0, 1.0], [1.5, 1.5, 1.5], "missed"),
            ([1.0, 1.0, 1.0], [1.0, 2.1, 4.0], "met (within noise)"),
            ([0.5, 1.0, 2.0], [1.9, 1.9, 1.9], "missed (within noise)"),
            ([1.0, 1.0, 1.0], [2.0, 2.0, 2.0], "met (within noise)"),
            ([1.0, 1.0, 1.0], [9.0], "met (one round)"),
        ],
    )
    def test_is_compared_with_medians_and_quartiles(
        self, ours: list[float], theirs: list[float], verdict: str
    ) -> None:
        assert compared(ours, theirs).verdict == verdict

    def test_has_the_ratio_of_the_medians(self) -> None:
        ratio = compared([1.0, 2.0, 9.0], [5.0, 6.0, 7.0]).ratio
        assert ratio is not None
        assert ratio.q1 < ratio.median == 3.0 < ratio.q3

    def test_may_be_a_maximum(self) -> None:
        for allowed, verdict in ((1000.0, "met"), (900.0, "missed")):
            target = Target("no more", Figure("c", "ours", Metric.WIRE_BYTES), allowed, 1.02)
            assert evaluate("w", target, [measurement("c", "ours", [1.0, 1.0])]).verdict == verdict

    def test_may_be_the_time_per_tensor(self) -> None:
        few, many = (Figure(case, "ours", Metric.SECONDS_PER_TENSOR) for case in ("few", "many"))
        found = evaluate(
            "w",
            Target("per tensor", many, few, 1.3),
            [measurement("few", "ours", [1.0], tensors=10), measurement("many", "ours", [12.0], tensors=100)],
        )
        assert found.ratio is not None
        assert found.ratio.median == pytest.approx(1.2)
        assert found.met

    def test_may_be_memory(self) -> None:
        target = Target("memory", Figure("c", "ours", Metric.PEAK_BYTES), float(2**20), 64.0, unit=" MiB")
        ratio = evaluate("w", target, [measurement("c", "ours", [1.0])]).ratio
        assert ratio is not None
        assert ratio.median == 1.0


class TestATargetThatWasNotMeasured:
    def test_is_not_met_and_names_the_system(self) -> None:
        found = evaluate("w", TWICE, [measurement("c", "ours", [1.0])])
        assert found.verdict == "not measured: theirs was not run"
        assert not found.met

    def test_has_the_systems_problem(self) -> None:
        broken = measurement("c", "ours", [], problem="rank 1: it broke", failed=True)
        found = evaluate("w", TWICE, [broken, measurement("c", "theirs", [1.0])])
        assert found.problem == "ours failed: rank 1: it broke"

    def test_says_what_the_kernel_does_not_report(self) -> None:
        target = Target("bytes", Figure("c", "ours", Metric.WIRE_BYTES), 1000.0, 1.0)
        found = evaluate("w", target, [measurement("c", "ours", [])])
        assert (
            found.problem
            == "ours has no measurement of bytes on the wire: it can't be counted for this system or kernel"
        )


def test_the_limits_are_unchanged() -> None:
    limits = {
        target.title: target.limit
        for workload in [*workloads(Size.FULL), *cluster_workloads(Size.FULL)]
        for target in workload.targets
    }
    assert list(limits.values()) == [
        # On one machine: memory, small tensors, metadata, large tensors, unchanged, publish,
        *(64.0, 64.0, 64.0, 15.0, 15.0, 12.0, 12.0, 10.0, 10.0, 10.0, 10.0),
        *(1.5, 1.8, 2.5, 3.0, 2.0, 1.3, 1.8, 3.0, 0.7),
        # views, GPT-2, a sleeper, many tensors.
        *(1.02, 1.8, 1.8, 0.99, 1.1, 1.3, 1.3),
        # On a cluster: fan-out, a killed receiver, a sleeper, a stopped receiver, unchanged, sources.
        *(1.15, 1.15, 1.1, 1.1, 1.4, 1.1, 1.1, 1.1, 20.0, 3.5),
    ]


def test_the_cluster_compares_one_to_six_receivers_with_torch() -> None:
    fan_out, sleeper, *_ = cluster_workloads(Size.FULL)
    assert fan_out.targets[0].title.startswith("128 MiB to 6 receivers, 7 hosts with 1 Gbit/s links")
    assert (fan_out.targets[0].limit, fan_out.targets[0].at_least) == (1.15, False)
    assert sleeper.title == "64 MiB to 3 receivers without relays, one asleep for 3 s, links of 1 Gbit/s"
    compared = [case for case in fan_out.cases if {FERRY, FETCH_RESHARE, TORCH} <= set(case.systems)]
    assert [(case.receivers, case.relay) for case in compared] == [
        (1, False),
        (2, True),
        (4, True),
        (6, True),
    ]


def test_the_cluster_disturbs_one_receiver_and_times_the_others() -> None:
    cases = {case.name: case for one in cluster_workloads(Size.FULL) for case in one.cases}
    killed, stopped = cases["fan-out-6-killed"], cases["stopped"]
    assert (killed.killed, killed.timed) == (True, (1, 2, 3, 4, 5))
    assert (stopped.stopped_s, stopped.timed) == (3.0, (1, 2, 3))
    assert stopped.last == 4


def test_the_cluster_compares_four_slow_sources_with_one() -> None:
    (sources,) = (one for one in cluster_workloads(Size.FULL) if one.name == "sources")
    assert sources.source_mbit == 250
    assert [(case.sources, case.receivers, case.last) for case in sources.cases] == [(1, 1, 1), (4, 1, 4)]
