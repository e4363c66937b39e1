"""Values without tensors: what MessagePack has as it is, everything else as a coded Special.

One entry for one type, with both halves. Exact types only: a subclass of int or str is another type, and
sending it as its base would not be exact.
"""

from __future__ import annotations

import enum
import struct
import types
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple, TypeVar

import torch
from msgspec.msgpack import Decoder

from torchferry.core.codec import pack, payload_of, unpack
from torchferry.core.hash_flooding import is_hash_flood
from torchferry.core.manifest import Item, Nested, Special, Value
from torchferry.core.text import MAX_CHARACTERS
from torchferry.errors import BadManifest, Unsendable
from torchferry.tensors import numpy_bridge, registry

T = TypeVar("T")

_AS_THEY_ARE = frozenset({type(None), bool, float})

_Items = tuple[Item, ...]
_Pairs = tuple[tuple[Item, Item], ...]

# Named constants of torch that appear in states, by the name that torch shows them under.
_TORCH_NAMED: dict[type, dict[str, object]] = {
    kind: {str(value): value for value in vars(torch).values() if type(value) is kind}
    for kind in (torch.dtype, torch.layout, torch.memory_format, torch.qscheme)
}


class ValueKind(NamedTuple):
    """How one type of value becomes wire values and comes back. `payload` is what is accepted for them."""

    code: int
    type: type
    payload: Any
    to_wire: Callable[[Any], object]
    from_wire: Callable[[Any], object]


MAX_NESTED = 64
"""How deep keys, sets and attributes may be nested. Encoding and decoding recurse over them."""

_NESTING = (tuple, list, dict, set, frozenset)


def to_wire(value: object) -> Value:
    """Turn a value into what the codec can encode.

    Raises:
        Unsendable: the value, or one inside it, is of no known type, or nested too deep. Its path is the
            caller's to add.
    """
    if isinstance(value, _NESTING):
        _check_nesting(value)
    return _to_wire(value)


def _check_nesting(value: object) -> None:
    level: list[Any] = [value]
    for _ in range(MAX_NESTED):
        inner: list[Any] = []
        for each in level:
            inner += [*each, *each.values()] if isinstance(each, dict) else each
        # Visit an object that is in two places once.
        level = list({id(each): each for each in inner if isinstance(each, _NESTING)}.values())
        if not level:
            return
    raise Unsendable(
        f"a {type(value).__qualname__} that is nested deeper than {MAX_NESTED} can't travel as a key, in a "
        "set or in an attribute: flatten it"
    )


def _to_wire(value: object) -> Value:
    kind = type(value)
    if kind in _AS_THEY_ARE:
        return value  # type: ignore[return-value]
    if kind is str:
        return value if _is_unicode(value) else _special(_SURROGATES, value)  # type: ignore[arg-type,return-value]
    if kind is int and -(2**63) <= value < 2**64:  # type: ignore[operator]
        return value  # type: ignore[return-value]
    known = _by_type.get(kind)
    if known is None:
        if isinstance(value, enum.Enum) and registry.is_registered(kind):
            known = _ENUM
        elif numpy_bridge.is_scalar(value):
            known = _NUMPY_SCALAR
        else:
            raise Unsendable(_advice(value))
    return _special(known, value)


def from_wire(value: Value | Item) -> object:
    """Turn a decoded wire value back into the value.

    Raises:
        BadManifest: a code that is not known, or a payload that does not fit it.
        UnknownType: a type that is not registered, or needs a library that is not installed.
    """
    if not isinstance(value, (Special, Nested)):
        return value
    kind = _by_code.get(value.code)
    if kind is None:
        raise BadManifest(f"a value of unknown code {value.code}")
    try:
        return kind.from_wire(unpack(payload_of(value), _decoders[kind.code]))
    except (
        TypeError,
        ValueError,
        LookupError,
        AttributeError,
        ArithmeticError,
        RuntimeError,
        MemoryError,
        struct.error,
    ) as error:
        said = f"{type(error).__qualname__}: {str(error)[:MAX_CHARACTERS]}"
        raise BadManifest(f"a {kind.type.__qualname__} that can't be decoded: {said}") from None


def distinct(keys: Iterable[object]) -> Collection[Any]:
    """Give the keys of a mapping or the members of a set back, once it is known that they can be.

    Wire values that differ may be equal once decoded. And a peer can choose those that crowd. A set is to be
    made of what this gives, for then it is made at its full size at once.

    Raises:
        ValueError: two of them are equal, or they would take too long to enter.
        TypeError: one can't be hashed.
    """
    found = list(keys)
    if is_hash_flood(found):
        raise ValueError("keys that were chosen to collide")
    entered = dict.fromkeys(found)
    if len(entered) != len(found):
        raise ValueError("the same key twice")
    return entered


def can_travel(value: object) -> bool:
    """Say whether `to_wire` takes it."""
    try:
        to_wire(value)
    except Unsendable:
        return False
    return True


def _special(kind: ValueKind, value: object) -> Special:
    return Special(kind.code, pack(kind.to_wire(value)))


def _advice(value: object) -> str:
    kind = type(value)
    what = f"a value of type {registry.name_of(kind)} can't travel: "
    if isinstance(value, (dict, list, tuple, enum.Enum)) or hasattr(kind, "__dataclass_fields__"):
        return what + (
            "namedtuples, dataclasses and enums travel once torchferry.register has been called "
            "with their class on both sides; for others, convert to a built-in container"
        )
    if callable(getattr(value, "state_dict", None)):
        return what + "send its state_dict() and load it on the other side"
    if isinstance(value, types.MethodType):
        return what + f"it is a method, so call it and send what {value.__name__}() returns"
    if isinstance(value, torch.Tensor):
        return what + "a tensor can't be a key or in a set: put it into a list or a dict's values"
    return what + (
        "send its state as built-in values and tensors and rebuild it on the other side, leave it out, "
        "or, between peers that trust each other, set allow_pickle=True on both"
    )


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _wire_list(values: Any) -> object:
    return [_to_wire(value) for value in values]


def _unwire_list(values: _Items) -> list[Any]:
    return [from_wire(value) for value in values]


def _unwire_members(values: _Items) -> Collection[Any]:
    return distinct(map(from_wire, values))


def _sorted_wire(values: Any) -> object:
    # Equal sets must be equal Specials, for they may be keys; iteration order is not part of a set.
    return sorted((_to_wire(value) for value in values), key=pack)


def _wire_pairs(mapping: Any) -> object:
    return [[_to_wire(key), _to_wire(value)] for key, value in mapping.items()]


def _unwire_pairs(pairs: _Pairs) -> list[tuple[Any, object]]:
    found = [(from_wire(key), from_wire(value)) for key, value in pairs]
    distinct(key for key, _ in found)
    return found


def _unwire_ordered(wire: tuple[_Pairs, _Pairs]) -> OrderedDict[object, object]:
    pairs, attributes = wire
    built = OrderedDict(_unwire_pairs(pairs))
    set_attributes(built, dict(_unwire_pairs(attributes)))
    return built


def set_attributes(built: object, attributes: dict[Any, object]) -> None:
    """Put back what was set on a container itself, such as a state dict's `_metadata`.

    Raises:
        TypeError: one of the names is not a name.
    """
    vars(built).update({_only(str, name): value for name, value in attributes.items()})


def _only(kind: type[T], value: Any) -> T:
    """Hold a payload to its type, where Python would take others and mean something else by them."""
    if type(value) is not kind:
        raise TypeError(f"{type(value).__qualname__}, not {kind.__qualname__}")
    return value


def _int_to_bytes(value: int) -> bytes:
    return value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)


def _enum_to_wire(member: enum.Enum) -> object:
    name = registry.name_of(type(member))
    # A combination of flags has no name of its own to be looked up by.
    return [name, to_wire(member.value) if isinstance(member, enum.Flag) else member.name]


def _enum_from_wire(wire: tuple[str, Item]) -> object:
    name, member = wire
    cls = registry.look_up(name)
    if not issubclass(cls, enum.Enum):
        raise ValueError(f"{name} is not an enum")
    return cls(_only(int, from_wire(member))) if issubclass(cls, enum.Flag) else cls[_only(str, member)]


def _named(kind: type) -> Callable[[str], object]:
    return lambda name: _TORCH_NAMED[kind][name]


_SURROGATES = ValueKind(
    1,
    str,
    bytes,
    lambda text: text.encode("utf-8", "surrogatepass"),
    lambda data: data.decode("utf-8", "surrogatepass"),
)
_ENUM = ValueKind(40, enum.Enum, tuple[str, Item], _enum_to_wire, _enum_from_wire)
_NUMPY_SCALAR = ValueKind(
    41,
    numpy_bridge.Scalar,
    numpy_bridge.ScalarForm,
    numpy_bridge.scalar_to_wire,
    numpy_bridge.scalar_from_wire,
)

_KINDS = (
    ValueKind(2, int, bytes, _int_to_bytes, lambda data: int.from_bytes(data, "little", signed=True)),
    ValueKind(3, complex, bytes, lambda z: struct.pack("<dd", z.real, z.imag),
              lambda data: complex(*struct.unpack("<dd", data))),
    ValueKind(4, bytearray, bytes, bytes, bytearray),
    ValueKind(5, range, _Items, lambda r: _wire_list((r.start, r.stop, r.step)),
              lambda wire: range(*_unwire_list(wire))),
    ValueKind(6, slice, _Items, lambda s: _wire_list((s.start, s.stop, s.step)),
              lambda wire: slice(*_unwire_list(wire))),
    ValueKind(7, type(Ellipsis), None, lambda _: None, lambda _: Ellipsis),
    # Not as they are, for in MessagePack's types a field can't be both a text and bytes.
    ValueKind(8, bytes, bytes, bytes, bytes),
    # Containers, for where there is no tree: inside keys, sets, and a state dict's _metadata.
    ValueKind(16, tuple, _Items, _wire_list, lambda wire: tuple(_unwire_list(wire))),
    ValueKind(17, list, _Items, _wire_list, _unwire_list),
    ValueKind(18, dict, _Pairs, _wire_pairs, lambda wire: dict(_unwire_pairs(wire))),
    ValueKind(19, OrderedDict, tuple[_Pairs, _Pairs], lambda d: [_wire_pairs(d), _wire_pairs(vars(d))],
              _unwire_ordered),
    ValueKind(20, set, _Items, _sorted_wire, lambda wire: set(_unwire_members(wire))),
    ValueKind(21, frozenset, _Items, _sorted_wire, lambda wire: frozenset(_unwire_members(wire))),
    ValueKind(32, torch.Size, tuple[int, ...], list, torch.Size),
    ValueKind(33, torch.dtype, str, str, _named(torch.dtype)),
    ValueKind(34, torch.layout, str, str, _named(torch.layout)),
    ValueKind(35, torch.memory_format, str, str, _named(torch.memory_format)),
    ValueKind(36, torch.qscheme, str, str, _named(torch.qscheme)),
    ValueKind(37, torch.device, str, str, torch.device),
)  # fmt: skip

_by_type = {kind.type: kind for kind in _KINDS}
_by_code = {kind.code: kind for kind in (*_KINDS, _SURROGATES, _ENUM, _NUMPY_SCALAR)}
_decoders = {kind.code: Decoder(kind.payload) for kind in _by_code.values()}
