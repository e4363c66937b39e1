"""Values without tensors, as leaves and as keys, arrive with the same type and bits."""

from __future__ import annotations

import array
import collections
import enum
import inspect
import io
import pathlib
import random
import struct
import sys
import types
import uuid
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

import pytest
import torch

from tests.support.equality import assert_same
from tests.support.transfer import transfer
from tests.unit.tensors.refusing import refusal_at_a_path, refusal_of
from torchferry import register
from torchferry.core.codec import encode_value
from torchferry.core.manifest import Special
from torchferry.errors import BadManifest, StateMismatch, UnknownType, Unsendable
from torchferry.tensors.describe import describe
from torchferry.tensors.values import MAX_NESTING, from_wire


@register
class Counted(NamedTuple):
    one: Any
    two: Any


def stream_at(position: int) -> io.BytesIO:
    stream = io.BytesIO(b"abc")
    stream.seek(position)
    return stream


VALUES = [
    None, True, False, 0, 1, -1, 2**31, -(2**63), 2**63, 2**64 - 1, 2**64, -(2**63) - 1, 2**125, -(2**200),
    0.1, -0.0, float("inf"), float("-inf"), float("nan"), 5e-324, 1e308,
    1 - 2j, complex("nan-infj"), complex(-0.0, -0.0),
    "", "plain", "fährt über 🚢", "zero\0inside", "half a pair \ud83d", b"", b"\x00\xff", bytearray(b"abc"),
    range(3), range(10, -5, -3), range(2**70), slice(None), slice(1, 2**70, -1), ...,
    torch.Size([]), torch.Size([2, 0, 3]),
    torch.float32, torch.float8_e5m2, torch.bool, torch.strided, torch.sparse_csr, torch.channels_last,
    torch.preserve_format, torch.per_tensor_affine, torch.device("cpu"), torch.device("cuda:3"),
    set(), {1, "a", (2, None)}, frozenset({1.5, frozenset()}), {0, 1, 2**70},
    pathlib.Path("/a/b c"), pathlib.Path("half \ud83d"), pathlib.PurePosixPath("//a/.."),
    pathlib.PureWindowsPath("c:/x"),
    datetime(2026, 1, 2, 3, 4, 5, 6), datetime(1, 1, 1, tzinfo=UTC, fold=1), date(9999, 12, 31),
    time(23, 59, 59, 999999, timezone(timedelta(hours=-3), "here"), fold=1), timedelta(-5, 3, 2),
    timedelta.max, UTC, timezone(timedelta(minutes=90)), timezone(timedelta(0), "zero"),
    Decimal("-0.100"), Decimal("sNaN123"), Decimal("-Infinity"), Decimal("1E+999999"),
    Fraction(-1, 3), Fraction(2**80, 3), uuid.UUID(int=5), uuid.uuid1(),
    io.BytesIO(), stream_at(2), array.array("d", [0.5, -0.0]), array.array("b"), array.array("u", "aé"),
    torch.finfo(torch.bfloat16), torch.iinfo(torch.uint8),
]  # fmt: skip


@pytest.mark.parametrize(
    "value", VALUES, ids=lambda v: f"{type(v).__name__} {v!r:.20}".encode("ascii", "replace")
)
def test_every_value_arrives_with_its_type_and_value(value: Any) -> None:
    assert_same({"v": value}, transfer({"v": value}).state)
    assert_same(value, transfer(value).state)


KEYS = [
    "name", "", "a.b", "half \ud83d", 0, -5, 2**64, 2**125, True, None, 1.5, float("inf"), 2j, b"raw",
    (), (1, "b", (None,)), frozenset({1, 2}), torch.float32, torch.Size([1]), torch.device("cpu"), range(3),
    pathlib.Path("a"), datetime(2026, 1, 2), Decimal("1.0"), Fraction(1, 3), uuid.UUID(int=7), Counted(1, 2),
]  # fmt: skip


@pytest.mark.parametrize(
    "key", KEYS, ids=lambda k: f"{type(k).__name__} {k!r:.20}".encode("ascii", "replace")
)
def test_every_key_arrives_and_matches_in_place(key: Any) -> None:
    assert_same({key: 1}, transfer({key: 1}).state)
    local = torch.zeros(2)
    received = transfer({"in": {key: torch.ones(2)}}, into={"in": {key: local}}).state
    assert received["in"][key] is local
    assert local.tolist() == [1, 1]


def test_keys_with_the_same_text_stay_different() -> None:
    state = {"1": 1, 1: 2, "a.b": 3, "a": {"b": 4}, b"1": 5, (1,): 6}
    assert_same(state, transfer(state).state)
    with pytest.raises(StateMismatch) as raised:
        transfer({"1": 1}, into={1: 1})
    assert len(raised.value.mismatches) == 2


def test_the_order_of_keys_is_kept() -> None:
    state = {name: number for number, name in enumerate("zyxabc")}
    assert list(transfer(state).state) == list("zyxabc")


def test_the_state_of_python_s_generator_arrives() -> None:
    source, target = random.Random(5), random.Random(0)
    target.setstate(transfer({"rng": source.getstate()}).state["rng"])
    assert target.random() == source.random()


def test_the_state_of_torch_s_generator_arrives() -> None:
    source, target = torch.Generator().manual_seed(5), torch.Generator()
    torch.randn(3, generator=source)
    target.set_state(transfer({"rng": source.get_state()}).state["rng"])
    assert torch.equal(torch.randn(4, generator=target), torch.randn(4, generator=source))


@register
class Mode(enum.Enum):
    TRAIN = "train"
    EVAL = object()  # a member is sent by name, so its value may be anything


@register
class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


@register
class Name(enum.StrEnum):
    A = "a"


@register
class Rights(enum.Flag):
    READ = 1
    WRITE = 2


class UnregisteredEnum(enum.Enum):
    A = 1


def test_members_of_registered_enums_arrive_as_the_same_objects() -> None:
    state = [Mode.TRAIN, Mode.EVAL, Level.HIGH, Name.A, Rights.READ, Rights.READ | Rights.WRITE, Rights(0)]
    received = transfer(state).state
    assert all(one is two for one, two in zip(received, state, strict=True))
    assert transfer({Mode.EVAL: 1, Level.LOW: 2}).state == {Mode.EVAL: 1, Level.LOW: 2}
    assert transfer({Mode.EVAL}).state == {Mode.EVAL}


class Slotted(str):
    __slots__ = ("note",)


def slotted(text: str) -> Slotted:
    built = Slotted(text)
    built.note = "kept nowhere"  # type: ignore[attr-defined]
    return built


class Text(str):
    note: str

    @classmethod
    def noted(cls, text: str) -> Text:
        """Return one with an attribute."""
        made = cls(text)
        made.note = "a note"
        return made


class Number(int):
    pass


class Ratio(float):
    pass


@register
class RegisteredText(str):
    pass


@register
class RegisteredNumber(int):
    def __new__(cls, value: int) -> RegisteredNumber:
        raise AssertionError("no constructor may be called on arrival")


def closed_stream() -> io.BytesIO:
    stream = io.BytesIO(b"a")
    stream.close()
    return stream


def released_view() -> memoryview:
    view = memoryview(b"a")
    view.release()
    return view


class Unreadable(dict[str, object]):
    def items(self) -> Any:
        raise OSError("not mounted")


def test_instances_of_registered_subclasses_of_str_and_int_keep_their_type() -> None:
    number = int.__new__(RegisteredNumber, 7)
    state = {"text": RegisteredText("half \ud83d"), "number": number, RegisteredText("key"): 1}
    received = transfer(state).state
    assert_same(state, received)
    assert [type(key) for key in received] == [str, str, RegisteredText]


def test_torch_s_version_arrives_as_such() -> None:
    received = transfer({"torch": torch.__version__}).state["torch"]
    assert type(received) is type(torch.__version__)
    assert received == torch.__version__
    assert received >= "2.9"


def test_instances_of_other_subclasses_of_str_and_int_arrive_as_str_and_int() -> None:
    received = transfer([Text("a"), Number(3), {Text("key"): Number(2**70)}]).state
    assert_same(["a", 3, {"key": 2**70}], received)


def test_a_memoryview_arrives_as_bytes() -> None:
    assert_same([b"abc", b"ac"], transfer([memoryview(b"abc"), memoryview(b"abc")[::2]]).state)


class OwnZone(ZoneInfo):
    pass


def zone_from_file(key: str | None) -> ZoneInfo:
    """Return a zone of an own file, which may have another zone's name."""
    head = struct.pack(">4sc15x6l", b"TZif", b"2", 0, 0, 0, 0, 1, 4)
    block = struct.pack(">lbb4s", 0, 0, 0, b"Own\0")
    return ZoneInfo.from_file(io.BytesIO(head + block + head + block + b"\nOwn0\n"), key=key)


@pytest.mark.parametrize("key", ["UTC", "Europe/Berlin", "America/Argentina/Buenos_Aires", "Etc/GMT+5"])
def test_a_time_zone_arrives_by_its_name(key: str) -> None:
    moment = datetime(2026, 7, 1, 2, 30, tzinfo=ZoneInfo(key), fold=1)
    received = transfer({"zone": ZoneInfo(key), "at": moment, moment: 1}).state
    assert received["zone"] is received["at"].tzinfo is ZoneInfo(key)
    assert_same(received["at"], moment)
    assert received[moment] == 1


ZONE_CODE = describe(ZoneInfo("UTC")).manifest.leaves[0].traits.code  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "key",
    ["", "/etc/localtime", "../UTC", "Etc/../UTC", "Etc//UTC", "Etc/", ".", "Etc/.hidden", "UTC\n", "UTC\0",
     "tzdata.zi", "os.path/UTC", "..os/UTC", "Etc\\UTC", "C:UTC", "Zürich", "x" * 65],
)  # fmt: skip
def test_a_peer_names_no_file_outside_the_time_zones(key: str) -> None:
    with pytest.raises(BadManifest):
        from_wire(Special(ZONE_CODE, encode_value(key)))


@pytest.mark.parametrize("key", ["No/Such_Zone", "Europe", "antigravity", "this/UTC", "__init__", "xml/dom"])
def test_a_name_that_is_no_time_zone_imports_nothing_but_the_package_of_time_zones(key: str) -> None:
    before = set(sys.modules)
    with pytest.raises(UnknownType, match=f"this machine has no time zone {key}"):
        from_wire(Special(ZONE_CODE, encode_value(key)))
    new = {name.partition(".")[0] for name in sys.modules.keys() - before}
    assert new <= {"tzdata", "importlib", "zipfile"}


@register
@dataclass(frozen=True)
class Config:
    mode: Any
    sizes: Any = ()


@pytest.mark.parametrize(
    "value",
    [Config(1, (2, None)), Config(Config(torch.float32), "x"), Counted(1, (2,)), types.SimpleNamespace(a=1)],
    ids=repr,
)
def test_a_container_inside_a_value_keeps_its_type(value: Any) -> None:
    state: Any = collections.OrderedDict(w=1)
    state._metadata = {"": value}
    assert transfer(state).state._metadata == {"": value}
    if not isinstance(value, types.SimpleNamespace):
        assert transfer({Config(value): 3}).state == {Config(value): 3}


REFUSED = {
    "a lambda": (lambda: 1, ["builtins.function", "allow_pickle"]),
    "a function": (len, ["builtin_function_or_method"]),
    "a class": (int, ["builtins.type"]),
    "an optimizer": (
        torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]),
        ["torch.optim.sgd.SGD", "send its state_dict()"],
    ),
    "a method that was not called": (
        torch.nn.Linear(1, 1).state_dict,
        ["builtins.method", "send what state_dict() returns"],
    ),
    "a module": (torch.nn.Linear(1, 1), ["torch.nn.modules.linear.Linear", "send its state_dict()"]),
    "a tensor in a set": ({torch.ones(1)}, ["torch.Tensor", "a tensor can't be a key or in a set"]),
    "a tensor as a key": ({torch.ones(1): 1}, ["torch.Tensor", "a tensor can't be a key or in a set"]),
    "an object": (object(), ["builtins.object", "leave it out"]),
    "a generator": (torch.Generator(), ["torch._C.Generator"]),
    "a storage": (torch.ones(1).untyped_storage(), ["UntypedStorage"]),
    "an enum": (UnregisteredEnum.A, ["test_values.UnregisteredEnum", "torchferry.register"]),
    "an enum in a set": ({1, UnregisteredEnum.A}, ["test_values.UnregisteredEnum", "torchferry.register"]),
    "a subclass of str with slots": (slotted("a"), ["test_values.Slotted", "note"]),
    "a subclass of str with attributes": (Text.noted("a"), ["test_values.Text", "note"]),
    "a subclass of float": (Ratio(1), ["test_values.Ratio"]),
    "a closed BytesIO": (closed_stream(), ["closed", "leave it out"]),
    "a released memoryview": (released_view(), ["reading a memoryview raised ValueError", "released"]),
    "a mapping that can not be read": (types.MappingProxyType(Unreadable()), ["OSError: not mounted"]),
    "a datetime in a zone of a class that is not known": (
        datetime(2026, 1, 2, tzinfo=OwnZone("UTC")),
        ["test_values.OwnZone"],
    ),
    "a time zone that was read from a file": (zone_from_file("UTC"), ["time zone", "not that of a name"]),
    "a time zone without a name": (zone_from_file(None), ["time zone", "not that of a name"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_unknown_value_is_refused_with_its_path_type_and_advice(name: str) -> None:
    value, said = REFUSED[name]
    message = refusal_at_a_path(value)
    assert [words for words in said if words not in message] == []


@pytest.mark.parametrize("key", [UnregisteredEnum.A, len, Ratio(1), (1, UnregisteredEnum.A)], ids=str)
def test_an_unknown_key_is_refused_with_the_path_of_its_dict(key: Any) -> None:
    error = refusal_of({"model": {"w": 1}, "odd": {"b": 1, key: 2}})
    assert error.path == "odd"
    assert str(error).startswith("odd: one of its keys can't be sent: a value of type ")


def test_a_tensor_as_a_key_is_refused() -> None:
    assert "torch.Tensor" in str(refusal_of({torch.ones(1): 1}))


def test_a_state_that_is_one_unknown_value_is_refused() -> None:
    assert str(refusal_of(len)).startswith("(the state itself): ")


def nested(kind: Any, levels: int) -> Any:
    value: Any = kind()
    for _ in range(levels):
        value = kind([value])
    return value


@pytest.mark.parametrize("kind", [tuple, frozenset])
def test_keys_and_sets_that_are_nested_too_deep_are_refused(kind: Any) -> None:
    for value in ({nested(kind, 500): 1}, {nested(kind, 500)}, {nested(kind, 100_000)}):
        assert "nested deeper than 64" in refusal_at_a_path(value)


@pytest.mark.parametrize("kind", [tuple, frozenset])
def test_keys_and_sets_are_sent_up_to_the_maximum_depth(kind: Any) -> None:
    deepest = nested(kind, MAX_NESTING - 2)
    assert transfer({deepest: 1, "s": {deepest}}).state == {deepest: 1, "s": {deepest}}


def test_a_shared_object_in_an_attribute_is_visited_once() -> None:
    """A visit of every path would take 2**74 steps."""
    value: Any = ()
    for _ in range(MAX_NESTING + 10):
        value = (value, value)
    state = OrderedDict(w=1)
    state._metadata = value  # type: ignore[attr-defined]
    assert "nested deeper than 64" in refusal_at_a_path(state)


def in_a_deep_stack(levels: int, call: Callable[[], Any]) -> Any:
    return call() if levels == 0 else in_a_deep_stack(levels - 1, call)


def test_a_state_that_exceeds_the_remaining_stack_is_refused() -> None:
    state: Any = 1
    for _ in range(250):
        state = [state]
    free = sys.getrecursionlimit() - len(inspect.stack())
    with pytest.raises(Unsendable, match="deeper than Python's stack allows"):
        in_a_deep_stack(free - 300, lambda: describe(state))
