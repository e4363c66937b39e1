"""Trees: too deep, too wide, with cycles, duplicate keys, or keys that exhaust time or memory."""

from __future__ import annotations

from functools import cache

from tests.hostile.attacks.base import attack, attacks, container, frame_of, framed, raw
from torchferry.core.codec import encode_value
from torchferry.core.manifest import FORM, Branch, Leaf, Manifest, Special
from torchferry.core.tree import MAX_DEPTH
from torchferry.errors import BadManifest

ONE = (Leaf("value"),)
PRIME = 2**61 - 1
"""Python's hash of an int is its remainder by this."""


def big(number: int) -> Special:
    """Return an int in the encoding for large ints."""
    return Special(2, encode_value(number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True)))


@attack()
def nests_messagepack() -> bytes:
    """A million nested arrays."""
    return framed(b"\x91" * 1_000_000 + b"\xc0")


@attack()
def nests_messagepack_in_a_value() -> bytes:
    """The same in a field of any type."""
    return framed(
        b"\x92\x95\xff\x91\x92\xa4list\x91\x00\x91\x94\xa5value\x90\xc0"
        + b"\x91" * 500_000
        + b"\xc0\x90\x90\x10"
    )


@attack()
def nests_maps_in_keys() -> bytes:
    """Maps whose keys are arrays of arrays."""
    return framed(b"\x81" + b"\x91" * 200_000 + b"\xc0\xc0")


@attack()
def is_a_chain_that_is_too_deep() -> bytes:
    """One level more than allowed."""
    depth = MAX_DEPTH + 1
    chain = tuple(Branch("list", (~(n + 1) if n + 1 < depth else 0,)) for n in range(depth))
    return frame_of(Manifest(-1, chain, ONE, (), ()))


@attack()
def is_a_chain_of_a_hundred_thousand() -> bytes:
    """The check must not recurse."""
    depth = 100_000
    chain = tuple(Branch("list", (~(n + 1) if n + 1 < depth else 0,)) for n in range(depth))
    return frame_of(Manifest(-1, chain, ONE, (), ()))


def deep(bottom: Branch, key: str | int = 0) -> Manifest:
    """Return a chain of the maximum depth that ends in a given branch."""
    depth = MAX_DEPTH - 1
    chain = tuple(Branch("dict", (~(n + 1),), (key,)) for n in range(depth))
    return Manifest(-1, (*chain, bottom), ONE, (), ())


@attack()
def has_a_million_places_at_the_end_of_a_chain() -> bytes:
    """Each place is one byte of metadata, but its path has two kilobytes."""
    return frame_of(deep(Branch("list", (0,) * 1_000_000)))


@attack()
def has_long_names_on_the_way_to_many_places() -> bytes:
    """A thousand places whose paths have two hundred and fifty keys of a megabyte."""
    return frame_of(deep(Branch("list", (0,) * 1000), "n" * (1 << 18)))


@attack()
def puts_a_leaf_of_many_parts_in_many_places() -> bytes:
    """A hundred thousand places of a leaf with a hundred thousand tensors."""
    from tests.hostile.attacks.base import spec

    return frame_of(
        Manifest(
            -1,
            (Branch("list", (0,) * 100_000),),
            (Leaf("sharded", (0,) * 100_000),),
            (spec(),),
            (16,),
        )
    )


@attack()
def puts_a_large_value_in_many_places() -> bytes:
    """A set that needs a tenth of a second to decode, in ten thousand places. It must be decoded once; only
    the branch is invalid."""
    members = Special(20, encode_value(list(range(100_000))))
    return frame_of(
        Manifest(-1, (Branch("hologram", (0,) * 10_000),), (Leaf("value", traits=members),), (), ())
    )


attacks(
    "trees",
    {
        "is_its_own_child": lambda: frame_of(Manifest(-1, (Branch("list", (-1,)),), ONE, (), ())),
        "has_a_cycle": lambda: frame_of(
            Manifest(-1, (Branch("list", (-2,)), Branch("list", (-1, 0))), ONE, (), ())
        ),
        "has_two_parents": lambda: frame_of(
            Manifest(-1, (Branch("list", (-2, -2)), Branch("list", (0,))), ONE, (), ())
        ),
        "points_to_no_leaf": lambda: frame_of(Manifest(2**62, (), ONE, (), ())),
        "points_to_no_branch": lambda: frame_of(Manifest(-(2**62), (), ONE, (), ())),
        "has_a_leaf_nowhere": lambda: frame_of(Manifest(0, (), ONE * 2, (), ())),
        "has_no_leaves": lambda: frame_of(Manifest(0, (), (), (), ())),
        "has_a_key_twice": lambda: container(Branch("dict", (0, 0), ("a", "a"))),
        "has_1_and_true_as_keys": lambda: container(Branch("dict", (0, 0), (1, True))),
        "has_0_and_minus_0_as_keys": lambda: container(Branch("dict", (0, 0), (0.0, -0.0))),
        "has_1_in_two_encodings_as_keys": lambda: container(Branch("dict", (0, 0), (1, big(1)))),
        "has_equal_tuples_in_two_encodings_as_keys": lambda: container(
            Branch("dict", (0, 0), (Special(16, encode_value([1])), Special(16, encode_value([big(1)]))))
        ),
        "has_equal_sets_in_two_orders_as_keys": lambda: container(
            Branch("dict", (0, 0), (Special(21, encode_value([1, 2])), Special(21, encode_value([2, 1]))))
        ),
        "has_a_list_as_key": lambda: container(Branch("dict", (0,), (Special(17, encode_value([])),))),
        "has_a_bare_list_as_key": lambda: container(
            Branch("dict", (0,), ([1],))  # type: ignore[arg-type]
        ),
        "has_more_keys_than_children": lambda: container(Branch("dict", (0,), ("a", "b"))),
        "is_a_dict_without_keys": lambda: container(Branch("dict", (0, 0))),
        "is_a_list_with_keys": lambda: container(Branch("list", (0,), ("a",))),
        "is_a_deque_for_fewer": lambda: container(Branch("deque", (0, 0), None, 1)),
        "is_a_deque_for_too_many": lambda: container(Branch("deque", (0,), None, 2**64 - 1)),
        "is_a_deque_for_true": lambda: container(Branch("deque", (0,), None, True)),
        "is_a_defaultdict_of_eval": lambda: container(Branch("defaultdict", (0,), ("a",), "eval")),
        "is_a_defaultdict_of_a_list": lambda: container(
            Branch("defaultdict", (0,), ("a",), ["list"])  # type: ignore[arg-type]
        ),
        "has_attributes_that_are_no_dict": lambda: container(Branch("odict", (0,), ("a",), "x")),
        "has_attributes_without_names": lambda: container(
            Branch("odict", (0,), ("a",), Special(18, encode_value([[1, 2]])))
        ),
        "is_of_no_known_kind": lambda: container(Branch("os.system", (0,), ("a",))),
        "is_of_a_kind_of_a_megabyte": lambda: container(Branch("k" * (1 << 20), (0,))),
        "is_a_leaf_of_a_kind_of_a_megabyte": lambda: frame_of(
            Manifest(0, (), (Leaf("k\n" * (1 << 19)),), (), ())
        ),
        "is_nothing": lambda: raw(None),
        "is_an_empty_array": lambda: raw([]),
        "is_a_map": lambda: raw({"manifest": 1}),
        "is_a_text": lambda: raw("state"),
    },
)


@attack()
def has_keys_that_collide() -> bytes:
    """A hundred thousand ints with one hash: one megabyte, but a dict of them needs minutes."""
    keys = tuple(big(n * PRIME) for n in range(8, 100_008))
    return container(Branch("dict", (0,) * len(keys), keys))


def colliding_pairs(count: int, sign: int = 1) -> list[tuple[int, int]]:
    """Return pairs of ints with one hash: Python's hash of a tuple can be solved for its second item.

    The second items have the given sign.
    """
    p1, p2, p5 = 11400714785074694791, 14029467366897019727, 2870177450012600261
    mask = 2**64 - 1

    def lane(acc: int, item: int) -> int:
        acc = (acc + item * p2) & mask
        return (((acc << 31) | (acc >> 33)) & mask) * p1 & mask

    inverse = pow(p2, -1, 2**64)
    wanted = lane(lane(p5, 1), 1)
    before = wanted * pow(p1, -1, 2**64) & mask
    before = ((before >> 31) | (before << 33)) & mask
    found: list[tuple[int, int]] = []
    first = 1
    while len(found) < count:
        second = (before - lane(p5, first)) * inverse & mask
        magnitude = sign * second & mask
        if magnitude < PRIME:
            found.append((first, sign * magnitude))
        first += 1
    return found


@attack()
def has_a_set_of_tuples_that_collide() -> bytes:
    """The same with tuples, in a set inside a value."""
    from tests.hostile.attacks.base import value

    return value(
        Special(20, encode_value([Special(16, encode_value(pair)) for pair in colliding_pairs(50_000)]))
    )


def colliding_steps(count: int) -> list[tuple[int, int]]:
    """Return pairs of ints that give one hash to all tuples that end with them, whatever comes before.

    Python adds the first int times p2 to its sum and rotates the sum by 31 bits. A step of 2**33 becomes 1,
    which a step of the second int cancels. So a str before the pair, which is hashed with a secret, is no
    protection.
    """
    p1, p2, modulus = 11400714785074694791, 14029467366897019727, 2**64
    inverse = pow(p2, -1, modulus)
    found: list[tuple[int, int]] = []
    number = 1
    while len(found) < count:
        steps = (inverse << 33) * number % modulus, -p1 * inverse * number % modulus
        first, second = (step - modulus if step >= modulus // 2 else step for step in steps)
        if max(abs(first), abs(second)) < PRIME:
            found.append((first, second))
        number += 1
    return found


@attack(None)
def has_paths_that_collide() -> bytes:
    """No container has two keys that collide, but all paths do: a dict of them needs many seconds."""
    pairs = colliding_steps(30_000)
    inner = tuple(Branch("dict", (0,), (second,)) for _, second in pairs)
    outer = Branch(
        "dict", tuple(~number for number in range(2, len(inner) + 2)), tuple(first for first, _ in pairs)
    )
    root = Branch("dict", (0, -2), ("step", "model"))
    return frame_of(Manifest(-1, (root, outer, *inner), ONE, (), ()))


@attack()
def has_strides_that_collide() -> bytes:
    """Tensors with different strides that have one hash, for the cache of patterns, which is a dict."""
    from tests.hostile.attacks.base import spec, tensors

    return tensors(*(spec((1, 1), pair, storage=0) for pair in colliding_pairs(50_000)), storages=(4,))


@cache
def crowding_keys(bits: int) -> tuple[int, ...]:
    """Return numbers with different hashes whose probes collide in a dict.

    If a slot is used, Python probes slot 5 * slot + 1 plus the number's higher bits. The result has a third
    of such a chain of slots, and then numbers whose probes stay on it until their higher bits are zero.
    """
    mask, chain = (1 << bits) - 1, [1]
    while len(chain) < mask // 3:
        chain.append((5 * chain[-1] + 1) & mask)
    # Not a set, because lookups of these numbers in a set are slow.
    on_chain = bytearray(mask + 1)
    for at in chain:
        on_chain[at] = 1
    late: list[int] = []
    number = mask
    while len(late) < mask // 3:
        number += 1
        rest, at = number, number & mask
        while on_chain[at] and rest:
            rest >>= 5
            at = (5 * at + rest + 1) & mask
        if on_chain[at]:
            late.append(number)
    return (*chain, *late)


@attack()
def has_keys_with_colliding_probes() -> bytes:
    """Half a megabyte of keys with different hashes, but each dict of them needs many seconds."""
    keys = crowding_keys(17)
    return container(Branch("dict", (0,) * len(keys), keys))


@attack()
def has_dense_keys_with_colliding_probes() -> bytes:
    """The same, followed by all numbers between them."""
    first = crowding_keys(16)
    keys = tuple(dict.fromkeys((*first, *range(max(first)))))
    return container(Branch("dict", (0,) * len(keys), keys))


@attack()
def has_keys_with_colliding_probes_after_texts() -> bytes:
    """A dict that begins with texts has a table of another size."""
    texts = tuple(f"{number}" for number in range(3_000))
    keys: tuple[str | int, ...] = (*texts, *crowding_keys(17))
    return container(Branch("dict", (0,) * len(keys), keys))


@attack()
def has_encoded_numbers_with_colliding_probes() -> bytes:
    """The same in the encoding for large ints, of which the decoder compares the bytes first."""
    keys = tuple(big(number) for number in crowding_keys(17))
    return container(Branch("dict", (0,) * len(keys), keys))


@attack()
def has_a_set_with_colliding_probes() -> bytes:
    """The same in a set inside a value."""
    from tests.hostile.attacks.base import value

    return value(Special(20, encode_value(crowding_keys(17))))


@attack()
def has_floats_with_colliding_probes() -> bytes:
    """A float without fraction has the hash of its int."""
    from tests.hostile.attacks.base import value

    return value(Special(18, encode_value([[float(number), None] for number in crowding_keys(17)])))


@attack(BadManifest)
def has_a_dict_with_keys_that_collide_in_a_value() -> bytes:
    """The same in the attributes of a container."""
    pairs = [[big(n * PRIME), None] for n in range(8, 60_008)]
    return container(Branch("odict", (0,), ("a",), Special(18, encode_value(pairs))))


@attack(None)
def has_very_many_leaves() -> bytes:
    """A valid frame of a hundred thousand leaves: time and memory must be proportional to its size."""
    count = 100_000
    return frame_of(Manifest(-1, (Branch("list", tuple(range(count))),), ONE * count, (), ()))


MANY = 8_000_000

HEAD = b"\x92\x95\xff"
"""The beginning of a frame of two fields: the manifest, whose root is the first branch."""


def many(item: bytes, count: int = MANY) -> bytes:
    """Return an array of many equal items."""
    return b"\xdd" + count.to_bytes(4, "big") + item * count


def with_keys(keys: bytes) -> bytes:
    """Return a frame of one dict with these keys."""
    return framed(HEAD + b"\x91\x94\xa4dict\x91\x00" + keys + b"\xc0\x91\x91\xa5value\x90\x90\x10")


def with_extra(extra: bytes) -> bytes:
    """Return a frame of one list with this extra field."""
    return framed(HEAD + b"\x91\x94\xa4list\x91\x00\xc0" + extra + b"\x91\x91\xa5value\x90\x90\x10")


def with_leaf(fixed: bytes, traits: bytes, kind: bytes = b"\xa5value") -> bytes:
    """Return a frame of one leaf with these fixed fields and traits."""
    return framed(
        HEAD + b"\x91\x92\xa4list\x91\x00\x91\x94" + kind + b"\x90" + fixed + traits + b"\x90\x90\x10"
    )


attacks(
    "trees",
    {
        "has_empty_lists_for_keys": lambda: with_keys(many(b"\x90")),
        "has_empty_maps_for_keys": lambda: with_keys(many(b"\x80")),
        "has_empty_lists_beside_its_items": lambda: with_extra(many(b"\x90")),
        "has_empty_maps_for_a_form": lambda: with_leaf(many(b"\x80"), b"\xc0"),
        "has_empty_lists_for_a_value": lambda: with_leaf(b"\xc0", many(b"\x90")),
        "has_empty_lists_inside_a_value": lambda: frame_of(
            Manifest(0, (), (Leaf("value", traits=Special(16, many(b"\x90"))),), (), ())
        ),
        "has_empty_pairs_inside_a_value": lambda: frame_of(
            Manifest(0, (), (Leaf("value", traits=Special(18, many(b"\x90"))),), (), ())
        ),
        "has_empty_lists_inside_a_form": lambda: with_leaf(
            encode_value(Special(FORM, b"\x81\xaaplacements" + many(b"\x90"))), b"\xc0", b"\xa7dtensor"
        ),
        "has_leaves_without_a_kind": lambda: framed(HEAD + b"\x90" + many(b"\x91\xa0") + b"\x90\x90\x10"),
    },
)
