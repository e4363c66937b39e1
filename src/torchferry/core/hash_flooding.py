"""Detects keys that a peer chose to make Python's dicts and sets slow.

A dict or set probes a sequence of slots that follows from a key's hash. Python hashes str and bytes with a
secret, but numbers and tuples of numbers without one. So a peer can choose numbers with different hashes that
all probe the same slots: inserting a hundred thousand of them takes minutes and blocks the process.

So the probes are counted here beforehand, on a table of taken slots. The count is exact and takes less than a
microsecond per key. A time limit would reject harmless states on a slow machine.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from itertools import islice

MAX_PROBES = 32
"""Average per key. Ordinary keys need one or two, and thirteen if their hashes differ only in upper bits."""

_MIN_KEYS = 128
"""Fewer keys are fast to insert, whatever their hashes."""

_SET_NEIGHBOURS = 9
"""The slots after the first that a set tries before it probes further. A dict tries none."""


def is_hash_flood(
    keys: Sequence[Hashable], secretly_hashed: frozenset[type] = frozenset({str, bytes})
) -> bool:
    """Return whether a dict of these keys, inserted in this order, or a set of that dict would be slow.

    `secretly_hashed` are the types whose hashes a peer cannot predict.

    >>> is_hash_flood(range(100_000)), is_hash_flood([number << 40 for number in range(10_000)])
    (False, False)
    >>> is_hash_flood([number * (2**61 - 1) for number in range(10_000)])
    True

    Raises:
        TypeError: a key is not hashable.
    """
    count = len(keys)
    if count <= _MIN_KEYS or _are_ordinary(keys, secretly_hashed):
        return False
    bits = _MIN_KEYS.bit_length()
    # A dict grows when it is two thirds full.
    while (capacity := (2 << bits) // 3) < count:
        if _needs_many_probes(islice(keys, capacity), capacity, bits):
            return True
        bits += 1
    # A dict whose first keys are strings and later ones are not grows once more.
    return (
        _needs_many_probes(keys, count, bits)
        or _needs_many_probes(keys, count, bits + 1)
        or _needs_many_probes(keys, count, (2 * count).bit_length(), _SET_NEIGHBOURS)
    )


def _are_ordinary(keys: Sequence[Hashable], secretly_hashed: frozenset[type]) -> bool:
    """Return whether the keys are strings, or consecutive integers in order, as in nearly every dict."""
    types = set(map(type, keys))
    if types <= secretly_hashed:
        return True
    first = keys[0]
    return types == {int} and isinstance(first, int) and list(keys) == [*range(first, first + len(keys))]


def _needs_many_probes(keys: Iterable[Hashable], count: int, bits: int, neighbours: int = 0) -> bool:
    limit = MAX_PROBES * count
    return count_probes(keys, bits, limit, neighbours) > limit


def count_probes(keys: Iterable[Hashable], bits: int, limit: int, neighbours: int = 0) -> int:
    """Count how often an insertion into a table of 2**bits slots probes further; stop beyond the limit."""
    mask = (1 << bits) - 1
    taken = bytearray(mask + 1)
    probes = 0
    for key in keys:
        number = hash(key)
        slot = number & mask
        if taken[slot]:
            perturb = number & (2**64 - 1)
            while taken[slot]:
                near = neighbours if slot + neighbours <= mask else 0
                if (free := taken.find(0, slot, slot + 1 + near)) >= 0:
                    slot = free
                    break
                perturb >>= 5
                slot = (slot * 5 + perturb + 1) & mask
                probes += 1
            if probes > limit:
                break
        taken[slot] = 1
    return probes
