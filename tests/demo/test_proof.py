"""The comparison that the demo stands on finds every difference, and never passes on nothing."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from torchferry.demo.proof import Portrait, compare, weights_digest


def portrait(**changed: bytes) -> dict[str, bytes]:
    """A worker's final state in small; arguments replace entries, with `__` for a dot."""
    whole = {
        "model.weight": b"\x00\x01\x02\x03",
        "optimizer.weight.exp_avg": b"\x07",
        "rng": b"\x2a",
    }
    return whole | {name.replace("__", "."): value for name, value in changed.items()}


def differences(disturbed: Mapping[int, Portrait], undisturbed: Mapping[int, Portrait]) -> list[str]:
    verdict = compare(disturbed, undisturbed)
    found = [f"{one.rank}: {line}" for one in verdict.comparisons for line in one.differences]
    assert verdict.identical == (not found)
    return found


def test_equal_runs_are_identical() -> None:
    run = {0: portrait(), 1: portrait()}
    verdict = compare(run, {0: portrait(), 1: portrait()})
    assert verdict.identical
    assert (verdict.tensors, verdict.compared_bytes) == (3, 6)
    assert {one.disturbed_digest for one in verdict.comparisons} == {weights_digest(portrait())}


def test_one_bit_in_one_worker_is_found_and_named() -> None:
    flipped = portrait(model__weight=b"\x00\x01\x02\x02")
    found = differences({0: portrait(), 1: flipped}, {0: portrait(), 1: portrait()})
    assert found == ["1: disturbed run, model.weight: 1 of 4 bytes differ"]


@pytest.mark.parametrize("name", ["optimizer__weight__exp_avg", "rng"])
def test_a_difference_beside_the_weights_counts_too(name: str) -> None:
    assert differences({0: portrait(**{name: b"\xff"})}, {0: portrait()})


def test_the_workers_of_a_run_must_agree_even_if_both_runs_disagree_alike() -> None:
    split = {0: portrait(), 1: portrait(model__weight=b"\xff\xff\xff\xff")}
    assert len(differences(split, split)) == 2


def test_tensors_that_are_missing_added_or_of_another_size_differ() -> None:
    lacking = {name: value for name, value in portrait().items() if name != "rng"}
    assert differences({0: lacking}, {0: portrait()}) == ["0: disturbed run, rng: missing"]
    assert "not expected" in differences({0: portrait(extra=b"")}, {0: portrait()})[0]
    short = portrait(model__weight=b"\x00")
    assert "1 bytes instead of 4" in differences({0: short}, {0: portrait()})[0]


@pytest.mark.parametrize(
    ("disturbed", "undisturbed"),
    [
        ({}, {}),
        ({0: portrait()}, {0: portrait(), 1: portrait()}),
        ({0: {}}, {0: {}}),
        ({0: {"rng": b"1"}}, {0: {"rng": b"1"}}),
    ],
)
def test_nothing_is_proved_by_comparing_nothing(
    disturbed: dict[int, Portrait], undisturbed: dict[int, Portrait]
) -> None:
    with pytest.raises(ValueError, match="compare"):
        compare(disturbed, undisturbed)


def test_the_digest_is_of_the_weights_alone_and_knows_their_names() -> None:
    assert weights_digest(portrait(rng=b"other")) == weights_digest(portrait())
    assert weights_digest({"model.a": b"1"}) != weights_digest({"model.b": b"1"})
    assert weights_digest({"model.a": b"1"}) != weights_digest({"model.a": b"2"})
