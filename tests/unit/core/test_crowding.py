"""Keys that crowd are told from keys that do not, by walking the ways that Python's tables have."""

from __future__ import annotations

import random
import time

import pytest

from tests.hostile.attacks.trees import PRIME, colliding_pairs, crowding_keys
from torchferry.core.crowding import _steps_in_set, are_crowded

COUNT = 20_000


def shuffled(keys: list[object]) -> list[object]:
    random.Random(7).shuffle(keys)
    return keys


HONEST: dict[str, list[object]] = {
    "numbers in order": list(range(COUNT)),
    "numbers from below zero": list(range(-COUNT // 2, COUNT // 2)),
    "numbers with gaps": [n for n in range(COUNT) if n % 7],
    "numbers in another order": shuffled(list(range(COUNT))),
    "random numbers": [random.Random(n).getrandbits(63) for n in range(COUNT)],
    "addresses": [0x7F0000000000 + 4096 * n for n in range(COUNT)],
    "numbers that differ at their upper end": [n << 44 for n in range(COUNT)],
    "powers of two": [1 << n for n in range(COUNT // 20)],
    "fractions": [n / 8 for n in range(COUNT)],
    "tenths": [n / 10 for n in range(COUNT)],
    "texts": [f"layers.{n}" for n in range(COUNT)],
    "bytes": [n.to_bytes(4, "big") for n in range(COUNT)],
    "texts and numbers": [n if n % 2 else str(n) for n in range(COUNT)],
    "pairs": [(n // 100, n % 100) for n in range(COUNT)],
    "names with numbers": [("w", n) for n in range(COUNT)],
    "frozen sets": [frozenset({n, n + 1}) for n in range(COUNT)],
}


@pytest.mark.parametrize("name", HONEST)
def test_honest_keys_do_not_crowd(name: str) -> None:
    assert not are_crowded(HONEST[name])


CHOSEN: dict[str, list[object]] = {
    "all of one hash": [n * PRIME for n in range(COUNT)],
    "pairs of one hash": list(colliding_pairs(COUNT)),
    "on each other's way": list(crowding_keys(14)),
    "on each other's way, as floats": [float(n) for n in crowding_keys(14)],
    "on each other's way, then all the rest": list(dict.fromkeys((*crowding_keys(14), *range(40_000)))),
    "on each other's way, behind a text": ["a", *crowding_keys(14)],
    "on each other's way, before texts": [*crowding_keys(14), *map(str, range(10_000))],
    "the same again and again": [-20] * COUNT,
}


@pytest.mark.parametrize("name", CHOSEN)
def test_keys_that_were_chosen_crowd(name: str) -> None:
    assert are_crowded(CHOSEN[name])


def test_a_few_never_crowd() -> None:
    assert not are_crowded([n * PRIME for n in range(100)])


def test_a_set_has_a_way_of_its_own() -> None:
    assert _steps_in_set([n * PRIME for n in range(1000)], 11, 10**9) > 10_000
    assert _steps_in_set(range(1000), 11, 10**9) == 0
    # A step is over when one of nine neighbours is free.
    assert _steps_in_set([n << 11 for n in range(10)], 11, 10**9) == 0


def test_what_can_t_be_hashed_is_a_type_error() -> None:
    with pytest.raises(TypeError):
        are_crowded([[n] for n in range(1000)])  # type: ignore[misc]


def test_fifty_thousand_random_numbers_are_seen_to_be_harmless_in_a_moment() -> None:
    keys = [random.Random(n).getrandbits(63) for n in range(50_000)]
    started = time.thread_time()
    assert not are_crowded(keys)
    assert time.thread_time() - started < 0.3
