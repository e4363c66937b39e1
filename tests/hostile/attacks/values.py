"""Values: unknown codes, payloads of other types, nested values, and numpy's dtypes."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, NamedTuple

import torch

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


class Text(str):
    """Registered while the attacks run."""


class Table(dict[str, object]):
    """Registered while the attacks run."""

    def __setitem__(self, key: str, value: object) -> None:
        raise AssertionError("nothing of the type may be called")


class Wrapper(torch.Tensor):
    """Registered while the attacks run. It holds one tensor."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor, size: Any) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, size, dtype=held.dtype, device=held.device)

    def __init__(self, held: torch.Tensor, size: Any) -> None:
        self.held = held

    def __tensor_flatten__(self) -> tuple[list[str], object]:
        return ["held"], None

    @staticmethod
    def __tensor_unflatten__(tensors: Any, context: object, size: Any, stride: object) -> Wrapper:
        return Wrapper(tensors["held"], size)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: object, types: object, args: Any = (), kwargs: object = None
    ) -> Any:
        raise NotImplementedError(str(func))


REGISTERED: tuple[type, ...] = (Mode, Switches, Loader, Point, Nothing, Text, Table, Wrapper)


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


def nested_containers(depth: int) -> Special:
    """Return namespaces, each the only item of the next."""
    found: object = 1
    for _ in range(depth):
        found = Special(22, encode_value(["namespace", ["a"], [found], None]))
    assert isinstance(found, Special)
    return found


def fields(*each: list[Any], itemsize: int = 8, aligned: bool = False) -> list[object]:
    """Return a structured dtype: of each field the name, title, dtype, shape and offset."""
    return [list(each), itemsize, aligned]


def nested_fields(levels: int) -> bytes:
    """Return an encoded dtype of one field that has one field, and so on."""
    head, _, tail = encode_value(fields(["a", None, "inner", [], 0])).partition(encode_value("inner"))
    return head * levels + encode_value("<i8") + tail * levels


def dtype(descr: object) -> bytes:
    """Return the frame of one numpy scalar."""
    return special(41, [descr, b"\x00" * 8])


CODES = (
    *(1, 2, 3, 4, 5, 6, 16, 17, 18, 19, 20, 21, 22, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43),
    *(48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59),
)
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
        for code in CODES
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
        "is_a_scalar_of_fields_of_objects": lambda: dtype(fields(["a", None, "|O", [], 0])),
        "is_a_scalar_of_two_gigabytes": lambda: dtype("|V2147483647"),
        "is_a_scalar_beyond_two_gigabytes": lambda: dtype("|V99999999999"),
        "is_a_scalar_of_a_huge_subarray": lambda: dtype(fields(["a", None, "<f8", [2**31], 0])),
        "is_a_scalar_of_a_subarray_of_lists": lambda: dtype(fields(["a", None, "<f8", ["x"], 0])),
        "is_a_scalar_of_a_comma_string": lambda: dtype("i4, (" + "(" * 10_000),
        "is_a_scalar_of_a_python_expression": lambda: dtype("(__import__('os').getpid(),)i4"),
        "is_a_scalar_of_a_type_and_fields": lambda: dtype(["<i8", [["a", "|O"]]]),
        "is_a_scalar_of_a_field_twice": lambda: dtype(
            fields(["a", None, "<i4", [], 0], ["a", None, "<i4", [], 4])
        ),
        "is_a_scalar_of_no_fields": lambda: dtype({}),
        "is_a_scalar_of_a_field_without_type": lambda: dtype(fields(["a", None])),
        "is_a_scalar_of_fields_in_fields": lambda: value(
            Special(41, b"\x92" + b"\x91\x92\xa1a" * 5000 + b"\xa3<i4\xc4\x01a")
        ),
        "is_a_scalar_of_a_unit_of_time_that_is_none": lambda: dtype("<M8[parsec]"),
        "is_a_scalar_with_too_few_bytes": lambda: special(41, ["<f8", b"1234"]),
        "is_a_path_of_an_unknown_class": lambda: special(48, ["Path", "/etc"]),
        "is_a_path_of_a_number": lambda: special(48, ["PurePosixPath", 7]),
        "is_a_datetime_of_a_thirteenth_month": lambda: special(49, [2026, 13, 1, 0, 0, 0, 0, None, 0]),
        "is_a_datetime_in_a_zone_of_text": lambda: special(49, [2026, 1, 1, 0, 0, 0, 0, "UTC", 0]),
        "is_a_datetime_with_bytes_as_a_year": lambda: special(
            49, [Special(8, encode_value(b"\x07\xea\x0d\xff\xff\xff\xff\0\0\0")), None]
        ),
        "is_a_time_folded_twice": lambda: special(51, [1, 1, 1, 1, None, 2]),
        "is_a_date_of_the_year_0": lambda: special(50, [0, 1, 1]),
        "is_a_timedelta_beyond_all_days": lambda: special(52, [2**60, 0, 0]),
        "is_a_timezone_of_two_days": lambda: special(53, [Special(52, encode_value([2, 0, 0]))]),
        "is_a_decimal_of_words": lambda: special(54, "ten"),
        "is_a_fraction_over_zero": lambda: special(55, [1, 0]),
        "is_a_fraction_of_floats": lambda: special(55, [1.5, 2.5]),
        "is_a_fraction_that_takes_long_to_reduce": lambda: special(
            55, [Special(2, encode_value(b"\x7f" * (2 << 20))), Special(2, encode_value(b"\x55" * (2 << 20)))]
        ),
        "is_a_uuid_of_three_bytes": lambda: special(56, [b"abc", 0]),
        "is_a_uuid_of_unknown_safety": lambda: special(56, [b"a" * 16, 99]),
        "is_a_stream_at_a_negative_position": lambda: special(57, [b"abc", -1]),
        "is_a_stream_at_a_position_that_overflows": lambda: special(57, [b"abc", 2**64 - 1]),
        "is_an_array_of_objects": lambda: special(58, [b"abcdefgh", "O", 8]),
        "is_an_array_of_half_an_item": lambda: special(58, [b"abc", "d", 8]),
        "is_an_array_of_another_item_size": lambda: special(58, [b"abcd", "d", 4]),
        "is_a_finfo_of_a_function": lambda: special(38, "load"),
        "is_a_finfo_of_ints": lambda: special(38, "int8"),
        "is_an_iinfo_of_floats": lambda: special(39, "float32"),
        "is_a_dtype_of_a_python_expression": lambda: special(42, "(__import__('os').getpid(),)i4"),
        "is_a_dtype_of_objects_that_overlap_numbers": lambda: special(
            42, fields(["a", None, "|O", [], 0], ["b", None, "<i8", [], 0])
        ),
        "is_a_dtype_of_a_field_beyond_its_item": lambda: special(42, fields(["a", None, "<i8", [], 100])),
        "is_a_dtype_of_a_field_at_a_misaligned_offset": lambda: special(
            42, fields(["a", None, "<i4", [], 3], aligned=True)
        ),
        "is_a_dtype_of_a_huge_item": lambda: special(42, fields(["a", None, "<i8", [], 0], itemsize=2**62)),
        "is_a_dtype_nested_a_hundred_thousand_deep": lambda: value(Special(42, nested_fields(100_000))),
        "is_a_time_zone_in_another_directory": lambda: special(59, "../../../etc/localtime"),
        "is_a_time_zone_at_an_absolute_path": lambda: special(59, "/etc/localtime"),
        "is_a_time_zone_in_another_package": lambda: special(59, "..os.path/UTC"),
        "is_a_subclass_of_str_made_of_a_number": lambda: special(43, [NAME + "Text", 1]),
        "is_a_subclass_of_str_that_is_an_enum": lambda: special(43, [NAME + "Mode", "TRAIN"]),
        "is_a_subclass_of_int_that_is_a_flag": lambda: special(43, [NAME + "Switches", 1]),
        "is_a_subclass_of_str_that_is_a_tensor": lambda: special(43, [NAME + "Wrapper", "x"]),
        "is_a_container_of_an_unknown_kind": lambda: special(22, ["exec", None, [1], None]),
        "is_a_container_of_fewer_keys_than_children": lambda: special(22, ["namespace", ["a"], [1, 2], None]),
        "is_a_container_with_a_key_twice": lambda: special(22, ["mappingproxy", ["a", "a"], [1, 2], None]),
        "is_a_container_that_is_a_masked_array_of_text": lambda: special(
            22, ["masked", ["data", "mask", "fill_value"], [Special(17, encode_value([])), "x", "y"], False]
        ),
        "is_a_container_nested_a_hundred_thousand_deep": lambda: value(nested_containers(5000)),
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


def mapping(*extra: object) -> bytes:
    """Return the frame of a subclass of dict with one item."""
    return container(Branch("mapping", (0,), ("a",), Special(16, encode_value(extra))))


attacks(
    "values",
    {
        "is_a_mapping_that_is_not_registered": lambda: mapping("builtins.dict", None, None),
        "is_a_mapping_that_is_a_dataclass": lambda: mapping(NAME + "Loader", None, None),
        "is_a_mapping_that_is_a_tensor": lambda: mapping(NAME + "Wrapper", None, None),
        "is_a_mapping_without_a_name": lambda: mapping(),
        "is_a_mapping_with_attributes_of_numbers": lambda: mapping(
            NAME + "Table", None, Special(18, encode_value([[1, 2]]))
        ),
        "is_a_mapping_whose_extra_is_text": lambda: container(
            Branch("mapping", (0,), ("a",), NAME + "Table")
        ),
        "is_a_result_of_no_function": lambda: container(Branch("return_type", (0,), ("a",), "load")),
        "is_a_result_that_is_a_module": lambda: container(Branch("return_type", (0,), ("a",), "sys")),
        "is_a_result_with_other_fields": lambda: container(Branch("return_type", (0,), ("values",), "max")),
        "is_a_result_by_a_number": lambda: container(Branch("return_type", (0,), ("a",), 7)),
        "is_a_namespace_with_a_number_as_a_name": lambda: container(Branch("namespace", (0,), (1,))),
        "is_a_namespace_without_names": lambda: container(Branch("simplenamespace", (0,))),
        "is_a_masked_array_without_data": lambda: container(Branch("masked", (0,), ("mask",), False)),
        "is_a_masked_array_that_is_hard_by_a_number": lambda: container(
            Branch("masked", (0, 0, 0), ("data", "mask", "fill_value"), 1)
        ),
    },
    PeerError,
)
