"""Detects keys that a peer chose to make Python's dicts and sets slow.

A dict or set probes a sequence of slots that follows from a key's hash. Python hashes str and bytes with a
secret, but numbers and tuples of numbers without one. So a peer can choose numbers that all probe the same
slots: inserting a hundred thousand of them blocks the process for minutes. The exact number of probes is
counted here first, in a few microseconds per key. A time limit would reject harmless keys on a slow machine.
"""

from collections.abc import Hashable, Iterable, Sequence
from itertools import islice

MAX_PROBES = 32
"""The limit, on average per key. Ordinary keys need 1 or 2, or 13 if hashes differ only in upper bits."""

_MIN_KEYS = 128
"""Fewer keys are fast to insert, whatever their hashes."""

_SET_NEIGHBOURS = 9
"""How many slots after a taken one a set tries first: CPython's LINEAR_PROBES. A dict tries none."""


def is_hash_flood(
    keys: Sequence[Hashable], randomly_hashed: frozenset[type] = frozenset({str, bytes})
) -> bool:
    """Return whether it is slow to insert keys into a dict in this order, or to make a set from that dict.

    `randomly_hashed` are the types whose hashes a peer cannot predict. Raises TypeError for unhashable keys.

    >>> is_hash_flood(range(100_000)), is_hash_flood([number << 40 for number in range(10_000)])
    (False, False)
    >>> is_hash_flood([number * (2**61 - 1) for number in range(10_000)])
    True
    """
    count = len(keys)
    if count <= _MIN_KEYS or randomly_hashed.issuperset(map(type, keys)):
        return False
    bits = _MIN_KEYS.bit_length()
    # A dict grows when it is two thirds full.
    while (capacity := (2 << bits) // 3) < count:
        if exceeds_probes(islice(keys, capacity), MAX_PROBES * capacity, bits):
            return True
        bits += 1
    # A dict whose first keys are strings and later ones are not grows once more. The last table is a set's.
    tables = ((bits, 0), (bits + 1, 0), ((2 * count).bit_length(), _SET_NEIGHBOURS))
    return any(exceeds_probes(keys, MAX_PROBES * count, *table) for table in tables)


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
