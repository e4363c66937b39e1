"""Whether keys that a peer chose crowd in Python's tables.

A dict or set looks for a free place along a way that follows from a key's hash. Texts and bytes are hashed
with a secret of this process; numbers, and tuples of them, are not. So a peer can choose numbers, no two of
one hash, that all go the same way: a hundred thousand of them take minutes to enter, and nothing else runs
meanwhile.

Here those ways are walked on a map of the table that only says which places are taken, up to a budget. That
is exact, and costs a fraction of a microsecond for each key; a clock would cost as little, and refuse an
honest state on a slow machine.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from itertools import islice

MOST_STEPS = 32
"""What a key may take on average. Honest ones take one or two, and some thirteen if all that they differ in
is at the upper end of their hashes."""

_FEW = 128
"""So many keys take little time, wherever they go."""

_SALTED = frozenset({str, bytes})

_WORD = 2**64 - 1
_LINEAR_PROBES = 9
"""How many neighbours a set looks at before it goes on."""


def are_crowded(keys: Sequence[Hashable], salted: frozenset[type] = _SALTED) -> bool:
    """Say whether a dict of these keys, entered in this order, would take unduly long, or a set of that dict.

    `salted` are the types whose hashes a peer can't foresee.

    >>> are_crowded(range(100_000)), are_crowded([number << 40 for number in range(10_000)])
    (False, False)
    >>> are_crowded([number * (2**61 - 1) for number in range(10_000)])
    True

    Raises:
        TypeError: one can't be hashed.
    """
    count = len(keys)
    if count <= _FEW or _are_tame(keys, salted):
        return False
    bits = _FEW.bit_length()
    while (room := _room(bits)) < count:
        if _steps_in_dict(islice(keys, room), bits, MOST_STEPS * room) > MOST_STEPS * room:
            return True
        bits += 1
    limit = MOST_STEPS * count
    # A dict that begins with texts and goes on with others is doubled once more than need be.
    return (
        _steps_in_dict(keys, bits, limit) > limit
        or _steps_in_dict(keys, bits + 1, limit) > limit
        or _steps_in_set(keys, (2 * count).bit_length(), limit) > limit
    )


def _are_tame(keys: Sequence[Hashable], salted: frozenset[type]) -> bool:
    """Say whether these are what nearly all dicts have for keys: texts, or numbers one after the other."""
    types = set(map(type, keys))
    if types <= salted:
        return True
    first = keys[0]
    # Not merely close together: in another order they can crowd while the table is small.
    return types == {int} and isinstance(first, int) and all(map(int.__eq__, keys, _from(first, len(keys))))  # type: ignore[arg-type]


def _from(first: int, count: int) -> range:
    return range(first, first + count)


def _room(bits: int) -> int:
    """How many keys a dict's table takes before it is doubled."""
    return (2 << bits) // 3


def _steps_in_dict(keys: Iterable[Hashable], bits: int, limit: int) -> int:
    """Count the places that are found taken while keys are entered, until they are more than the limit."""
    mask = (1 << bits) - 1
    taken = bytearray(mask + 1)
    steps = 0
    for number in map(hash, keys):
        at = number & mask
        if taken[at]:
            rest = number & _WORD
            while taken[at]:
                rest >>= 5
                at = (at * 5 + rest + 1) & mask
                steps += 1
            if steps > limit:
                break
        taken[at] = 1
    return steps


def _steps_in_set(keys: Iterable[Hashable], bits: int, limit: int) -> int:
    """The same for a set, which looks at neighbours first; all of them together are one step."""
    mask = (1 << bits) - 1
    taken = bytearray(mask + 1)
    steps = 0
    for number in map(hash, keys):
        at = number & mask
        if taken[at]:
            rest = number & _WORD
            while (free := taken.find(0, at, at + 1 + _near(at, mask))) < 0:
                rest >>= 5
                at = (at * 5 + 1 + rest) & mask
                steps += 1
            at = free
            if steps > limit:
                break
        taken[at] = 1
    return steps


def _near(at: int, mask: int) -> int:
    return _LINEAR_PROBES if at + _LINEAR_PROBES <= mask else 0
