"""Values without tensors: MessagePack encodes some types itself, all others become a Special with a code.

One `ValueKind` encodes and decodes one exact type; it does not apply to subclasses.
"""

import array
import enum
import io
import pathlib
import re
import struct
import types
import uuid
import zoneinfo
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from typing import Any, NamedTuple, TypeVar

import torch
from msgspec.msgpack import Decoder

from torchferry.core.codec import data_of, decode_value, encode_value
from torchferry.core.hash_flooding import is_hash_flood
from torchferry.core.manifest import Branch, Count, Item, Nested, Special, Value
from torchferry.core.text import MAX_CHARACTERS, show
from torchferry.errors import BadManifest, FerryError, UnknownType, Unsendable
from torchferry.tensors import registry
from torchferry.tensors.kinds import ndarray
from torchferry.tensors.kinds.buffer import make_array, make_stream
from torchferry.tensors.memory import DTYPES

T = TypeVar("T")
_Items = tuple[Item, ...]
_Pairs = tuple[tuple[Item, Item], ...]
_Encode = Callable[[object], Value]
"""Encodes a value that is inside another."""

MAX_NESTING = 64
"""How deep keys, sets and attributes may be nested. Encoding and decoding them is recursive."""

_MSGPACK_TYPES = frozenset({type(None), bool, float})


class ValueKind(NamedTuple):
    """How one type is encoded and decoded. `payload` is the type of the encoded form, checked on arrival."""

    code: int
    type: type
    payload: Any
    to_wire: Callable[[Any, _Encode], object]
    from_wire: Callable[[Any], object]


def to_wire(value: Any, depth: int = 0) -> Value:
    """Turn a value into one that the codec can encode; raises Unsendable if that is not possible."""
    cls = type(value)
    if cls in _MSGPACK_TYPES or (cls is int and -(2**63) <= value < 2**64):
        return value  # type: ignore[no-any-return]
    if cls is str:
        with suppress(UnicodeEncodeError):
            value.encode()
            return value  # type: ignore[no-any-return]
    kind = _by_type.get(cls)
    if kind is None:
        # `isinstance` would read `__class__`, which may be a property that raises.
        if issubclass(cls, enum.Enum) and registry.is_registered(cls):
            kind = _ENUM
        elif ndarray.is_scalar(value):
            kind = _NUMPY_SCALAR
        elif issubclass(cls, ndarray.numpy_class("dtype")):
            kind = _NUMPY_DTYPE
        elif issubclass(cls, (str, int)) and not issubclass(cls, enum.Enum):
            if not registry.is_registered(cls):
                return to_wire(_base_value(value), depth)
            kind = _SUBCLASS
        else:
            kind = _CONTAINER

    def encode(inner: object) -> Value:
        if depth == MAX_NESTING:
            raise Unsendable(
                f"a {cls.__qualname__} that is nested deeper than {MAX_NESTING} can't be sent as a key, in a "
                "set or in an attribute: flatten it"
            )
        return to_wire(inner, depth + 1)

    return Special(kind.code, encode_value(kind.to_wire(value, encode)))


def _explain_unsendable(value: Any) -> str:
    """Return why a value can't be sent, and what to send instead."""
    cls = type(value)
    what = f"a value of type {registry.name_of(cls)} can't be sent: "
    if issubclass(cls, (dict, list, tuple, enum.Enum)) or hasattr(cls, "__dataclass_fields__"):
        return what + (
            "namedtuples, dataclasses, enums and subclasses of dict can be sent after torchferry.register "
            "was called with their class on both sides; convert others to a built-in container"
        )
    if callable(getattr(cls, "state_dict", None)):
        return what + "send its state_dict(), and load it at the receiver"
    if cls is types.MethodType:
        return what + f"it is a method, so call it and send what {value.__name__}() returns"
    if issubclass(cls, torch.Tensor):
        return what + "a tensor can't be a key or in a set: put it into a list or a dict's values"
    return what + (
        "send its state as built-in values and tensors and rebuild it at the receiver, leave it out, "
        "or, with PGTransport between peers that trust each other, set allow_pickle=True on both"
    )


def from_wire(value: Value | Item) -> object:
    """Turn a decoded wire value back into the value.

    Raises BadManifest if it is malformed, and UnknownType if its type is not registered or not installed.
    """
    if not isinstance(value, (Special, Nested)):
        return value
    kind = _by_code.get(value.code)
    if kind is None:
        raise BadManifest(f"a value has the unknown code {value.code}")
    payload = decode_value(data_of(value), _decoders[kind.code])
    return try_build(kind.type.__qualname__, kind.from_wire, payload)


def try_build(what: str, build: Callable[..., T], *args: Any) -> T:
    """Build something from a peer's data; raise BadManifest if that raises any error but a FerryError."""
    try:
        return build(*args)
    except FerryError:
        raise
    except Exception as error:
        reason = f"{type(error).__qualname__}: {str(error)[:MAX_CHARACTERS]}"
        raise BadManifest(f"a {what} can't be built: {reason}") from None


def require_distinct(keys: Iterable[object]) -> Collection[Any]:
    """Return a peer's dict keys or set members, after checking that they are distinct and quick to hash.

    Different wire values may decode to equal keys, and a peer can choose keys that collide. Create a set from
    the returned dict, not from `keys`: only then it has its full size at once, which the check assumes.
    """
    found = list(keys)
    if is_hash_flood(found):
        raise ValueError(f"{len(found)} keys with colliding hashes")
    distinct = dict.fromkeys(found)
    if len(distinct) != len(found):
        raise ValueError(f"{len(found) - len(distinct)} of {len(found)} keys are repeated")
    return distinct


def attributes_to_wire(container: object) -> Value:
    """Encode the attributes of a container, such as a state dict's `_metadata`; or raise Unsendable."""
    pairs = []
    for name, value in vars(container).items():
        try:
            pairs.append([to_wire(name), to_wire(value)])
        except Unsendable as error:
            raise Unsendable(f"in its attribute {name}, {error.what}") from None
    return Special(_DICT.code, encode_value(pairs)) if pairs else None


def set_attributes(container: T, attributes: object) -> T:
    """Set the attributes of a container; raise TypeError unless they are a dict with strings as keys."""
    for name, value in require_type(dict, attributes).items():
        vars(container)[require_type(str, name)] = value
    return container


def require_type(cls: type[T], value: object) -> T:
    """Return the value if it has exactly this type; raise TypeError if not."""
    if type(value) is not cls:
        raise TypeError(f"expected {cls.__qualname__}, got {type(value).__qualname__}")
    return value


def _list_from_wire(values: _Items) -> list[Any]:
    return [from_wire(value) for value in values]


def _dict_to_wire(mapping: Any, encode: _Encode) -> object:
    return [[encode(key), encode(value)] for key, value in mapping.items()]


def _set_to_wire(members: Any, encode: _Encode) -> object:
    # Equal sets must be equal Specials, because they may be keys. The order of iteration may differ.
    return sorted(map(encode, members), key=encode_value)


def _dict_from_wire(pairs: _Pairs) -> dict[Any, object]:
    keys = require_distinct(from_wire(key) for key, _ in pairs)
    return dict(zip(keys, (from_wire(value) for _, value in pairs), strict=True))


def _enum_to_wire(member: enum.Enum, encode: _Encode) -> object:
    # A combination of flags has no name.
    wire = encode(member.value) if isinstance(member, enum.Flag) else member.name
    return [registry.name_of(type(member)), wire]


def _enum_from_wire(wire: tuple[str, Item]) -> object:
    name, member = wire
    cls = registry.look_up(name)
    if not issubclass(cls, enum.Enum):
        raise ValueError(f"{name} is not an enum")
    if issubclass(cls, enum.Flag):
        return cls(require_type(int, from_wire(member)))
    return cls[require_type(str, member)]


def _base_value(value: Any) -> str | int:
    """Return an instance of a subclass of str or int as a plain one; raises Unsendable if it holds more."""
    # The `__dict__`, or a tuple of the `__dict__` and the slots that are set. Either may be None.
    held: Any = object.__getstate__(value)
    if names := [name for part in (held if type(held) is tuple else (held,)) for name in part or ()]:
        raise Unsendable(
            f"a {registry.name_of(type(value))} has attributes ({', '.join(map(str, names))}), which "
            "would be lost: send them as values of their own"
        )
    return str.__str__(value) if isinstance(value, str) else int.__int__(value)


def _subclass_from_wire(wire: tuple[str, Item]) -> object:
    name, base = wire
    cls, value = registry.look_up(name), from_wire(base)
    if not issubclass(cls, type(value)) or issubclass(cls, enum.Enum) or type(value) not in (str, int):
        raise ValueError(f"{name} is not a subclass of {type(value).__qualname__}")
    return type(value).__new__(cls, value)  # type: ignore[call-arg]


def _container_to_wire(value: Any, encode: _Encode) -> object:
    """Encode a container that is inside a value and has no kind of its own, such as a dataclass."""
    from torchferry.tensors.containers import take_apart  # which imports values

    parts = take_apart(value)
    if parts is None:
        raise Unsendable(_explain_unsendable(value))
    keys = None if type(parts.keys) is range else [*map(encode, parts.keys)]
    return [parts.kind, keys, [*map(encode, parts.children)], parts.extra]


def _container_from_wire(wire: tuple[str, _Items | None, _Items, Item]) -> object:
    from torchferry.tensors.containers import container_builder

    kind, keys, children, extra = wire
    branch = Branch(kind, (0,) * len(children), keys, extra)  # type: ignore[arg-type]
    return container_builder(branch)(_list_from_wire(children))


_ZONE_KEY = re.compile(r"(?=.{1,64}$)[A-Za-z0-9_+-]+(/[A-Za-z0-9_+-]+)*", re.ASCII)
"""The only names of time zones that a peer can choose: names below the directories that Python searches, or
below its package `tzdata`, and no name of another package or of a file elsewhere."""


def _zone_to_wire(zone: Any, _: _Encode) -> object:
    with suppress(Exception):
        # Raises for a zone that was read from a file: its name says nothing about it.
        zone.__reduce__()
        if _ZONE_KEY.fullmatch(zone.key):
            return zone.key
    raise Unsendable(f"the time zone {zone!r} can't be sent: it is not that of a name, as of ZoneInfo('UTC')")


def _zone_from_wire(key: str) -> object:
    if not _ZONE_KEY.fullmatch(key):
        raise ValueError(f"{show(key)} is not the name of a time zone")
    try:
        return zoneinfo.ZoneInfo(key)
    except (zoneinfo.ZoneInfoNotFoundError, OSError):
        raise UnknownType(f"this machine has no time zone {key}: pip install tzdata") from None


def _time_of(moment: Any) -> list[Any]:
    return [moment.hour, moment.minute, moment.second, moment.microsecond, moment.tzinfo, moment.fold]


def _moment_from_wire(cls: Any) -> Callable[[_Items], object]:
    def build(wire: _Items) -> object:
        *numbers, fold = _list_from_wire(wire)
        return cls(*numbers, fold=fold)

    return build


_MAX_FRACTION_BITS = 1 << 16
"""No receiver takes a larger fraction: Python reduces it in time that is quadratic in its bits."""


def _fraction_from_wire(wire: _Items) -> object:
    numbers = [require_type(int, number) for number in _list_from_wire(wire)]
    if max(number.bit_length() for number in numbers) > _MAX_FRACTION_BITS:
        raise ValueError(f"it has more than {_MAX_FRACTION_BITS} bits")
    return Fraction(*numbers)


def _stream_to_wire(stream: io.BytesIO, _: _Encode) -> object:
    if stream.closed:
        raise Unsendable("a closed BytesIO can't be sent: leave it out")
    return [stream.getvalue(), stream.tell()]


_PATHS = {
    cls.__name__: cls
    for cls in (pathlib.PurePosixPath, pathlib.PureWindowsPath, pathlib.PosixPath, pathlib.WindowsPath)
}

_DICT = ValueKind(18, dict, _Pairs, _dict_to_wire, _dict_from_wire)
_ENUM = ValueKind(40, enum.Enum, tuple[str, Item], _enum_to_wire, _enum_from_wire)
_NUMPY_SCALAR = ValueKind(41, ndarray.NumpyScalar, ndarray.ScalarForm,
                          lambda item, _: ndarray.scalar_to_wire(item), ndarray.scalar_from_wire)  # fmt: skip
_NUMPY_DTYPE = ValueKind(42, ndarray.NumpyScalar, ndarray.DtypeForm,
                         lambda dtype, _: ndarray.dtype_to_wire(dtype, is_value=True),
                         ndarray.value_from_wire)  # fmt: skip
_SUBCLASS = ValueKind(43, object, tuple[str, Item],
                      lambda value, encode: [registry.name_of(type(value)), encode(_base_value(value))],
                      _subclass_from_wire)  # fmt: skip
_CONTAINER = ValueKind(22, object, tuple[str, _Items | None, _Items, Item],
                       _container_to_wire, _container_from_wire)  # fmt: skip
_PATH = ValueKind(48, pathlib.PurePath, tuple[str, Item],
                  lambda path, encode: [type(path).__name__, encode(str(path))],
                  lambda wire: _PATHS[wire[0]](from_wire(wire[1])))  # type: ignore[arg-type]  # fmt: skip
_KINDS = (
    # A str with surrogates, and an int of more than 64 bits: MessagePack encodes all others.
    ValueKind(1, str, bytes, lambda text, _: text.encode("utf-8", "surrogatepass"),
              lambda data: data.decode("utf-8", "surrogatepass")),
    ValueKind(2, int, bytes, lambda n, _: n.to_bytes(n.bit_length() // 8 + 1, "little", signed=True),
              lambda data: int.from_bytes(data, "little", signed=True)),
    ValueKind(3, complex, bytes, lambda z, _: struct.pack("<dd", z.real, z.imag),
              lambda data: complex(*struct.unpack("<dd", data))),
    ValueKind(4, bytearray, bytes, lambda data, _: bytes(data), bytearray),
    ValueKind(5, range, _Items, lambda r, encode: [*map(encode, (r.start, r.stop, r.step))],
              lambda wire: range(*_list_from_wire(wire))),
    ValueKind(6, slice, _Items, lambda s, encode: [*map(encode, (s.start, s.stop, s.step))],
              lambda wire: slice(*_list_from_wire(wire))),
    ValueKind(7, type(Ellipsis), None, lambda *_: None, lambda _: Ellipsis),
    # MessagePack has bytes, but msgspec allows no field that is either str or bytes.
    ValueKind(8, bytes, bytes, lambda data, _: bytes(data), bytes),
    # Containers inside keys, sets and attributes. All others are branches of the manifest.
    ValueKind(16, tuple, _Items, lambda items, encode: [*map(encode, items)],
              lambda wire: tuple(_list_from_wire(wire))),
    ValueKind(17, list, _Items, lambda items, encode: [*map(encode, items)], _list_from_wire),
    _DICT,
    ValueKind(19, OrderedDict, tuple[_Pairs, _Pairs],
              lambda d, encode: [_dict_to_wire(d, encode), _dict_to_wire(vars(d), encode)],
              lambda wire: set_attributes(OrderedDict(_dict_from_wire(wire[0])), _dict_from_wire(wire[1]))),
    ValueKind(20, set, _Items, _set_to_wire, lambda wire: set(require_distinct(map(from_wire, wire)))),
    ValueKind(21, frozenset, _Items, _set_to_wire,
              lambda wire: frozenset(require_distinct(map(from_wire, wire)))),
    ValueKind(32, torch.Size, tuple[int, ...], lambda size, _: [*size], torch.Size),
    *(ValueKind(code, cls, str, lambda value, _: str(value),
                {str(v): v for v in vars(torch).values() if type(v) is cls}.__getitem__)
      for code, cls in [(33, torch.dtype), (34, torch.layout), (35, torch.memory_format),
                        (36, torch.qscheme)]),
    ValueKind(37, torch.device, str, lambda device, _: str(device), torch.device),
    ValueKind(38, torch.finfo, str, lambda info, _: info.dtype, lambda name: torch.finfo(DTYPES[name])),
    ValueKind(39, torch.iinfo, str, lambda info, _: info.dtype, lambda name: torch.iinfo(DTYPES[name])),
    ValueKind(49, datetime, _Items,
              lambda t, encode: [*map(encode, (t.year, t.month, t.day, *_time_of(t)))],
              _moment_from_wire(datetime)),
    ValueKind(50, date, tuple[int, int, int], lambda day, _: [day.year, day.month, day.day],
              lambda wire: date(*wire)),
    ValueKind(51, time, _Items, lambda t, encode: [*map(encode, _time_of(t))], _moment_from_wire(time)),
    ValueKind(52, timedelta, tuple[int, int, int], lambda d, _: [d.days, d.seconds, d.microseconds],
              lambda wire: timedelta(*wire)),
    ValueKind(53, timezone, _Items, lambda zone, encode: [*map(encode, zone.__getinitargs__())],
              lambda wire: timezone(*_list_from_wire(wire))),
    ValueKind(59, zoneinfo.ZoneInfo, str, _zone_to_wire, _zone_from_wire),
    ValueKind(54, Decimal, str, lambda number, _: str(number), Decimal),
    ValueKind(55, Fraction, _Items, lambda f, encode: [encode(f.numerator), encode(f.denominator)],
              _fraction_from_wire),
    ValueKind(56, uuid.UUID, tuple[bytes, int | None], lambda u, _: [u.bytes, u.is_safe.value],
              lambda wire: uuid.UUID(bytes=wire[0], is_safe=uuid.SafeUUID(wire[1]))),
    ValueKind(57, io.BytesIO, tuple[bytes, Count], _stream_to_wire, lambda wire: make_stream(*wire)),
    ValueKind(58, array.array, tuple[bytes, str, Count],
              lambda a, _: [a.tobytes(), a.typecode, a.itemsize], lambda wire: make_array(*wire)),
)  # fmt: skip

_by_type = {kind.type: kind for kind in _KINDS} | dict.fromkeys(_PATHS.values(), _PATH)
_by_type[memoryview] = _by_type[bytes]
_by_code = {
    kind.code: kind for kind in (*_KINDS, _ENUM, _NUMPY_SCALAR, _NUMPY_DTYPE, _SUBCLASS, _CONTAINER, _PATH)
}
_decoders = {kind.code: Decoder(kind.payload) for kind in _by_code.values()}
