"""Values: unknown codes, payloads of other types, nested values, and numpy's dtypes."""

from __future__ import annotations

import dataclasses
import enum
from typing import NamedTuple

from tests.hostile.attacks.base import attack, attacks, container, value
from torchferry.core.codec import encode_value
from torchferry.core.manifest import Branch, Special
from torchferry.errors import BadManifest, PeerError, PickleRefused, UnknownType

NAME = f"{__name__}."


class Mode(enum.Enum):
    """Registered while the attacks run."""

    TRAIN = 1


class Switches(enum.IntFlag):
    """Registered while the attacks run. It keeps unnamed bits."""

    A = 1
    B = 2


@dataclasses.dataclass
class Loader:
    """Registered while the attacks run."""

    epoch: int
    seen: int

    def __post_init__(self) -> None:
        raise AssertionError("nothing of the type may be called")


class Point(NamedTuple):
    """Registered while the attacks run."""

    x: int
    y: int


class Nothing(NamedTuple):
    """Registered while the attacks run."""


REGISTERED: tuple[type, ...] = (Mode, Switches, Loader, Point, Nothing)


def special(code: int, payload: object) -> bytes:
    """Return the frame of one special value."""
    return value(Special(code, encode_value(payload)))


def nested(code: int, depth: int, inside: object = None) -> Special:
    """Return nested specials, each the only item of the next."""
    found: object = inside
    for _ in range(depth):
        found = Special(code, encode_value([found]))
    assert isinstance(found, Special)
    return found


def dtype(descr: object) -> bytes:
    """Return the frame of one numpy scalar."""
    return special(41, [descr, b"\x00" * 8])


_CODES = (1, 2, 3, 4, 5, 6, 16, 17, 18, 19, 20, 21, 32, 33, 34, 35, 36, 37, 40, 41)
_PAYLOADS: dict[str, object] = {
    "none": None,
    "true": True,
    "a_huge_number": 2**40,
    "a_text": "text",
    "a_map": {"a": 1},
    "a_list_of_lists": [[1, 2, 3], [4]],
    "a_list_of_maps": [{}],
    "a_nan": float("nan"),
    "bytes": b"\xff" * 7,
}
# Payloads that are valid for both types.
_HARMLESS = {(2, "bytes"), (4, "bytes")}

attacks(
    "values",
    {
        f"code_{code}_of_{name}": lambda code=code, payload=payload: special(code, payload)  # type: ignore[misc]
        for code in _CODES
        for name, payload in _PAYLOADS.items()
        if (code, name) not in _HARMLESS
    },
    PeerError,
)

attacks(
    "values",
    {
        "is_of_an_unknown_code": lambda: value(Special(99, b"\xc0")),
        "is_of_a_negative_code": lambda: value(Special(-128, b"\xc0")),
        "is_cut_short": lambda: value(Special(16, b"\x92\x01")),
        "has_bytes_behind_it": lambda: value(Special(16, b"\x91\x01\x01")),
        "is_a_bare_list": lambda: value([1, 2]),
        "is_a_bare_map": lambda: value({"a": 1}),
        "is_a_list_with_a_bare_list": lambda: special(17, [[1]]),
        "is_nested_a_hundred_thousand_deep": lambda: value(nested(16, 5000)),
        "is_a_set_with_a_member_twice": lambda: special(20, [1, 1]),
        "is_a_set_with_true_and_1": lambda: special(20, [1, True]),
        "is_a_dict_with_a_key_twice": lambda: special(18, [["a", 1], ["a", 2]]),
        "is_a_dict_of_a_list": lambda: special(18, [[Special(17, encode_value([])), 1]]),
        "is_an_ordered_dict_with_attributes_of_numbers": lambda: special(19, [[], [[1, 2]]]),
        "is_a_range_with_step_zero": lambda: special(5, [0, 1, 0]),
        "is_a_size_of_texts": lambda: special(32, ["4"]),
        "is_a_device_that_is_not_known": lambda: special(37, "warp:drive"),
        "is_a_device_of_a_huge_number": lambda: special(37, "cuda:99999999999999999999"),
        "is_a_dtype_by_the_name_of_a_function": lambda: special(33, "torch.load"),
        "is_a_layout_by_a_dtype_s_name": lambda: special(34, "torch.float32"),
        "is_an_enum_by_an_unknown_member": lambda: special(40, [NAME + "Mode", "EVAL"]),
        "is_an_enum_by_a_dunder": lambda: special(40, [NAME + "Mode", "__class__"]),
        "is_an_enum_by_a_list": lambda: special(40, [NAME + "Mode", ["TRAIN"]]),
        "is_an_enum_that_is_a_dataclass": lambda: special(40, [NAME + "Loader", "epoch"]),
        "is_a_flag_by_a_text": lambda: special(40, [NAME + "Switches", "A"]),
        "is_a_flag_by_true": lambda: special(40, [NAME + "Switches", True]),
        "is_a_flag_by_a_float": lambda: special(40, [NAME + "Switches", 1.0]),
        "is_a_scalar_of_objects": lambda: dtype("|O"),
        "is_a_scalar_of_fields_of_objects": lambda: dtype([["a", "|O"]]),
        "is_a_scalar_of_two_gigabytes": lambda: dtype("|V2147483647"),
        "is_a_scalar_beyond_two_gigabytes": lambda: dtype("|V99999999999"),
        "is_a_scalar_of_a_huge_subarray": lambda: dtype([["a", "<f8", [2**31]]]),
        "is_a_scalar_of_a_subarray_of_lists": lambda: dtype([["a", "<f8", ["x"]]]),
        "is_a_scalar_of_a_comma_string": lambda: dtype("i4, (" + "(" * 10_000),
        "is_a_scalar_of_a_python_expression": lambda: dtype("(__import__('os').getpid(),)i4"),
        "is_a_scalar_of_a_type_and_fields": lambda: dtype(["<i8", [["a", "|O"]]]),
        "is_a_scalar_of_a_field_twice": lambda: dtype([["a", "<i4"], ["a", "<i4"]]),
        "is_a_scalar_of_no_fields": lambda: dtype({}),
        "is_a_scalar_of_a_field_without_type": lambda: dtype([["a"]]),
        "is_a_scalar_of_fields_in_fields": lambda: value(
            Special(41, b"\x92" + b"\x91\x92\xa1a" * 5000 + b"\xa3<i4\xc4\x01a")
        ),
        "is_a_scalar_of_a_unit_of_time_that_is_none": lambda: dtype("<M8[parsec]"),
        "is_a_scalar_with_too_few_bytes": lambda: special(41, ["<f8", b"1234"]),
        "is_a_text_cut_in_half": lambda: special(41, ["<U2", b"\xff" * 8]),
    },
)


@attack(None)
def is_a_flag_of_unknown_bits() -> bytes:
    """An IntFlag keeps them, so they are accepted."""
    return special(40, [NAME + "Switches", 2**60])


@attack(BadManifest)
def is_nested_with_a_large_core() -> bytes:
    """Two hundred levels around eight megabytes. A copy at each level would need gigabytes."""
    return value(nested(16, 190, Special(99, b"\x00" * (8 << 20))))


@attack(None)
def is_a_large_number() -> bytes:
    """An int of four megabytes, which must not be printed or computed with."""
    return special(2, b"\x7f" * (4 << 20))


@attack(BadManifest)
def is_a_large_number_as_a_flag() -> bytes:
    """Python's error message would have the whole number."""
    return special(40, [NAME + "Mode", Special(2, encode_value(b"\x7f" * (1 << 20)))])


@attack(PickleRefused)
def is_pickled() -> bytes:
    """A pickled leaf in a frame that is not a pickle."""
    from tests.hostile.attacks.base import frame_of, one_value
    from tests.hostile.attacks.pickles import CALL

    return frame_of(one_value(Special(8, encode_value(CALL)), kind="pickled"))


@attack(PeerError)
def is_pickled_and_no_bytes() -> bytes:
    """A pickled leaf that is not bytes."""
    from tests.hostile.attacks.base import frame_of, one_value

    return frame_of(one_value(["x"], kind="pickled"))


@attack()
def is_opaque() -> bytes:
    """The kind that only local leaves have."""
    from tests.hostile.attacks.base import frame_of, one_value

    return frame_of(one_value(None, kind="opaque"))


@attack(UnknownType)
def names_a_type_that_can_be_imported() -> bytes:
    """Only registered types are looked up."""
    return container(Branch("dataclass", (0,), ("args",), "subprocess.Popen"))


@attack()
def names_a_type_by_a_list() -> bytes:
    """A list can't be a key of the registry."""
    return container(Branch("namedtuple", (0,), ("x",), [1]))  # type: ignore[arg-type]


@attack(UnknownType)
def names_a_type_by_a_tuple() -> bytes:
    """A tuple could be a key of the registry, but is not a name."""
    return container(Branch("namedtuple", (0,), ("x",), Special(16, encode_value([1]))))


@attack(UnknownType)
def is_a_dataclass_of_other_fields() -> bytes:
    """Fields that the local class does not have."""
    return container(Branch("dataclass", (0, 0), ("epoch", "__class__"), NAME + "Loader"))


@attack(UnknownType)
def is_a_dataclass_with_a_field_missing() -> bytes:
    """One field less than the local class has."""
    return container(Branch("dataclass", (0,), ("epoch",), NAME + "Loader"))


@attack(UnknownType)
def is_a_dataclass_with_fields_that_are_no_names() -> bytes:
    """Field names that are a number and a text of a megabyte."""
    return container(Branch("dataclass", (0, 0), (1, "x" * (1 << 20)), NAME + "Loader"))


@attack()
def is_a_namedtuple_without_keys() -> bytes:
    """Items without names."""
    return container(Branch("namedtuple", (0, 0), None, NAME + "Nothing"))


@attack()
def is_a_dataclass_that_is_an_enum() -> bytes:
    """A registered type that is not a dataclass."""
    return container(Branch("dataclass", (0,), ("TRAIN",), NAME + "Mode"))
