"""Keys that a peer chose to collide are detected, and ordinary keys are not refused."""

from __future__ import annotations

import random
import time

import pytest

from tests.hostile.attacks.trees import PRIME, colliding_pairs, crowding_keys
from torchferry.core.hash_flooding import exceeds_probes, is_hash_flood

COUNT = 20_000


def shuffled(keys: list[object]) -> list[object]:
    random.Random(7).shuffle(keys)
    return keys


ORDINARY: dict[str, list[object]] = {
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


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_keys_are_no_flood(name: str) -> None:
    assert not is_hash_flood(ORDINARY[name])


COLLIDING: dict[str, list[object]] = {
    "all of one hash": [n * PRIME for n in range(COUNT)],
    "pairs of one hash": list(colliding_pairs(COUNT)),
    "with the same probes": list(crowding_keys(14)),
    "with the same probes, as floats": [float(n) for n in crowding_keys(14)],
    "with the same probes, then all the rest": list(dict.fromkeys((*crowding_keys(14), *range(40_000)))),
    "with the same probes, behind a text": ["a", *crowding_keys(14)],
    "with the same probes, before texts": [*crowding_keys(14), *map(str, range(10_000))],
    "the same again and again": [-20] * COUNT,
}


@pytest.mark.parametrize("name", COLLIDING)
def test_colliding_keys_are_a_flood(name: str) -> None:
    assert is_hash_flood(COLLIDING[name])


def test_a_few_keys_are_never_a_flood() -> None:
    assert not is_hash_flood([n * PRIME for n in range(100)])


def test_a_set_tries_nine_neighbours_before_it_probes_further() -> None:
    assert exceeds_probes([n * PRIME for n in range(1000)], 10_000, 11, 9)
    assert not exceeds_probes(range(1000), 0, 11, 9)
    same_slot = [n << 11 for n in range(10)]
    assert not exceeds_probes(same_slot, 0, 11, 9)
    assert exceeds_probes(same_slot, 0, 11)


def test_an_unhashable_key_is_a_type_error() -> None:
    with pytest.raises(TypeError):
        is_hash_flood([[n] for n in range(1000)])  # type: ignore[misc]


def test_checking_fifty_thousand_random_numbers_is_fast() -> None:
    keys = [random.Random(n).getrandbits(63) for n in range(50_000)]
    started = time.thread_time()
    assert not is_hash_flood(keys)
    assert time.thread_time() - started < 0.3
