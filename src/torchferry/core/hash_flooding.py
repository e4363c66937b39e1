"""Detects keys that a peer chose to make Python's dicts and sets slow.

A dict or set probes a sequence of slots that follows from a key's hash. Python hashes str and bytes with a
secret, but numbers and tuples of numbers without one. So a peer can choose numbers with different hashes that
all probe the same slots: inserting a hundred thousand of them takes minutes and blocks the process.

So the probes are counted here beforehand, exactly, in less than a microsecond per key. A time limit would
reject harmless states on a slow machine.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from itertools import islice
from operator import eq

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
        if exceeds_probes(islice(keys, capacity), MAX_PROBES * capacity, bits):
            return True
        bits += 1
    limit = MAX_PROBES * count
    # A dict whose first keys are strings and later ones are not grows once more.
    return (
        exceeds_probes(keys, limit, bits)
        or exceeds_probes(keys, limit, bits + 1)
        or exceeds_probes(keys, limit, (2 * count).bit_length(), _SET_NEIGHBOURS)
    )


def _are_ordinary(keys: Sequence[Hashable], secretly_hashed: frozenset[type]) -> bool:
    """Return whether the keys are strings, or consecutive integers in order, as in nearly every dict."""
    types = set(map(type, keys))
    if types <= secretly_hashed:
        return True
    first = keys[0]
    # Compared one by one, because a list of the range would take a multiple of a hostile frame's memory.
    return types == {int} and isinstance(first, int) and all(map(eq, keys, range(first, first + len(keys))))


def exceeds_probes(keys: Iterable[Hashable], limit: int, bits: int, neighbours: int = 0) -> bool:
    """Return whether inserting the keys into a table of 2**bits slots takes more than `limit` probes."""
    mask = (1 << bits) - 1
    taken = bytearray(mask + 1)
    probes = 0
    for number in map(hash, keys):
        slot, perturb = number & mask, number & (2**64 - 1)
        while taken[slot]:
            near = neighbours if slot + neighbours <= mask else 0
            if (free := taken.find(0, slot, slot + 1 + near)) >= 0:
                slot = free
                break
            perturb >>= 5
            slot = (slot * 5 + perturb + 1) & mask
            probes += 1
        if probes > limit:
            return True
        taken[slot] = 1
    return False
