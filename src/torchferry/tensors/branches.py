"""Containers: how each is taken apart and put together again.

One entry for one type, with both halves. Exact types only; a subclass is another type. `keys` are kept as
wire values, and a container without keys of its own (a list) has None.
"""

from __future__ import annotations

import dataclasses
import enum
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, TypeVar

from torchferry.core.manifest import Branch, Value
from torchferry.core.text import MAX_CHARACTERS, show, show_name
from torchferry.errors import BadManifest, UnknownType, Unsendable
from torchferry.tensors import registry
from torchferry.tensors.values import can_travel, distinct, from_wire, set_attributes, to_wire

T = TypeVar("T")

_FACTORIES: dict[str, type] = {
    cls.__name__: cls for cls in (int, float, bool, str, list, dict, set, tuple, OrderedDict, Counter)
}


_FIELDS_SHOWN = 20


class Opened(NamedTuple):
    """A container taken apart; keys are still the user's own."""

    kind: str
    keys: Sequence[object] | None
    children: Sequence[object]
    extra: Value = None


class BranchKind(NamedTuple):
    """How one type of container is taken apart and put together."""

    name: str
    take_apart: Callable[[Any], Opened]
    put_together: Callable[[list[Any], list[object], Value], object]


def open_branch(value: object) -> Opened | None:
    """Take a container apart; None if it is not one that may travel as such.

    Raises:
        Unsendable: it holds something beside its items that can't travel.
    """
    cls = type(value)
    kind = _by_type.get(cls)
    # An enum may be a namedtuple or dataclass too, but its members are not made of fields.
    if kind is None and registry.is_registered(cls) and not issubclass(cls, enum.Enum):
        if registry.is_namedtuple(cls):
            kind = _NAMEDTUPLE
        elif dataclasses.is_dataclass(cls):
            kind = _DATACLASS
    return None if kind is None else kind.take_apart(value)


_ODDITIES = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, MemoryError)
"""What Python raises of keys, children and fields that can't be."""


class Container:
    """A container that can be put together here: its type is known, and its keys are decoded."""

    def __init__(self, branch: Branch) -> None:
        """Look up the type, decode the keys, and try it with placeholders for children.

        Raises:
            BadManifest: there is no such container, or these can't be its children.
            UnknownType: its type is not registered in this process.
        """
        kind = _by_name.get(branch.kind)
        if kind is None:
            raise BadManifest(f"a container of unknown kind {show(branch.kind)}")
        if (branch.keys is None) != (branch.kind in _WITHOUT_KEYS):
            raise BadManifest(f"a {branch.kind} {'without' if branch.keys is None else 'with'} keys")
        self._kind = kind
        self._extra = branch.extra
        self._keys: Collection[object] = ()
        try:
            self._keys = distinct(key if type(key) is str else from_wire(key) for key in branch.keys or ())
        except _ODDITIES as error:
            raise self._blamed(error) from None
        self.build([None] * len(branch.children))

    def build(self, children: list[object]) -> object:
        """Put it together.

        Raises:
            BadManifest: these can't be its children.
            UnknownType: its type is not registered in this process any more.
        """
        try:
            return self._kind.put_together([*self._keys], children, self._extra)
        except _ODDITIES as error:
            raise self._blamed(error) from None

    def _blamed(self, error: Exception) -> BadManifest:
        said = str(error)[:MAX_CHARACTERS]
        return BadManifest(f"a {self._kind.name} that can't be put together: {said}")


def _open_mapping(name: str, extra: Callable[[Any], Value]) -> Callable[[Any], Opened]:
    def take_apart(mapping: Any) -> Opened:
        # All at once: somebody may be changing it.
        items = list(mapping.items())
        return Opened(name, [k for k, _ in items], [v for _, v in items], extra(mapping))

    return take_apart


def _attributes(value: Any) -> Value:
    """Carry what is set on the container itself, such as a state dict's `_metadata`."""
    attributes = vars(value)
    if not attributes:
        return None
    try:
        return to_wire(attributes)
    except Unsendable as error:
        named = next((name for name in attributes if not can_travel(attributes[name])), None)
        raise Unsendable(f"in its attribute {named}, {error.what}") from None


def _set_attributes(built: object, extra: Value) -> None:
    attributes = from_wire(extra)
    if isinstance(attributes, dict):
        set_attributes(built, attributes)
    elif attributes is not None:
        raise TypeError("attributes that are no dict")


def _build_ordered(keys: list[Any], children: list[object], extra: Value) -> object:
    built = OrderedDict(zip(keys, children, strict=True))
    _set_attributes(built, extra)
    return built


def _factory_name(mapping: defaultdict[Any, Any]) -> Value:
    factory = mapping.default_factory
    if factory is None:
        return None
    name = getattr(factory, "__name__", "")
    if _FACTORIES.get(name) is not factory:
        raise Unsendable(
            f"a defaultdict whose factory is {factory!r} can't travel: only "
            f"{', '.join(_FACTORIES)} and None are known by name. Convert it to a dict"
        )
    return name


def _build_default(keys: list[Any], children: list[object], extra: Value) -> object:
    factory = None if extra is None else _FACTORIES[extra]  # type: ignore[index]
    return defaultdict(factory, zip(keys, children, strict=True))


def _build_counter(keys: list[Any], children: list[Any], extra: Value) -> object:
    # Counter's own constructor would count the pairs, or drop what is not a number.
    built: Counter[Any] = Counter()
    dict.update(built, zip(keys, children, strict=True))
    _set_attributes(built, extra)
    return built


def _build_deque(children: list[object], maxlen: Value) -> object:
    if maxlen is not None and (type(maxlen) is not int or maxlen < len(children)):
        raise ValueError(f"{len(children)} items in a deque for {show(maxlen)}")
    return deque(children, maxlen)


_HEAP_TYPE = 1 << 9
"""The flag that CPython sets for classes that are not built in."""

_ITEMS = "<items>"
"""The key for the items of a dataclass that is also a dict or list. No field can have that name."""


def _open_fields(kind: str) -> Callable[[Any], Opened]:
    def take_apart(value: Any) -> Opened:
        cls = type(value)
        fields = field_names(cls)
        if unknown := [name for name in _attribute_names(value) if name not in fields]:
            raise Unsendable(
                f"a {registry.name_of(cls)} has attributes beside its fields ({', '.join(unknown)}), "
                "which would be lost: remove them, or make them fields"
            )
        if kind == "namedtuple":
            return Opened(kind, fields, tuple(value), registry.name_of(cls))
        if unset := [name for name in fields if not hasattr(value, name)]:
            raise Unsendable(
                f"a {registry.name_of(cls)} has fields that were never set ({', '.join(unset)}): set them"
            )
        children = [getattr(value, name) for name in fields]
        base = _items_base(cls)
        if base is None:
            return Opened(kind, fields, children, registry.name_of(cls))
        items = list(base.__iter__(value)) if base is list else dict(base.items(value))
        return Opened(kind, (*fields, _ITEMS), [*children, items], registry.name_of(cls))

    return take_apart


def _attribute_names(value: object) -> list[str]:
    """List the attributes of an object: those in its `__dict__`, and the slots that are set."""
    names = list(getattr(value, "__dict__", {}))
    for cls in type(value).__mro__:
        slots = vars(cls).get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            mangled = f"_{cls.__name__.lstrip('_')}{slot}" if _is_private(slot) else slot
            if slot not in ("__dict__", "__weakref__") and hasattr(value, mangled):
                names.append(mangled)
    return names


def _is_private(name: str) -> bool:
    return name.startswith("__") and not name.endswith("__")


def _items_base(cls: type) -> Any:
    """Return which container a dataclass is derived from: OrderedDict, dict or list; None for a plain one.

    Raises:
        Unsendable: it is derived from another built-in type, and can't be rebuilt from its fields.
    """
    built_in = next(base for base in cls.__mro__ if not base.__flags__ & _HEAP_TYPE)
    if built_in is object:
        return None
    if built_in in (OrderedDict, dict, list):
        return built_in
    raise Unsendable(
        f"a {registry.name_of(cls)} can't be rebuilt from its fields, because it is also a "
        f"{built_in.__name__}: convert it to a dict"
    )


def field_names(cls: type) -> tuple[str, ...]:
    """List the fields of a registered namedtuple or dataclass."""
    if registry.is_namedtuple(cls):
        return tuple(cls._fields)  # type: ignore[attr-defined]
    return tuple(field.name for field in dataclasses.fields(cls))


def _build_fields(keys: list[Any], children: list[object], extra: Value) -> object:
    cls = registry.look_up(extra)  # type: ignore[arg-type]
    fields = field_names(cls)
    is_tuple = registry.is_namedtuple(cls)
    base = None if is_tuple else _items_base(cls)
    if tuple(keys) != (fields if base is None else (*fields, _ITEMS)):
        theirs = ", ".join(show_name(str(key)) for key in keys[:_FIELDS_SHOWN])
        raise UnknownType(
            f"{extra} has the fields {', '.join(fields)} here and {theirs} at the peer: "
            "run the same code on both sides"
        )
    if len(children) != len(keys):
        raise ValueError(f"{len(children)} values for {len(keys)} fields")
    if is_tuple:
        return tuple.__new__(cls, children)
    built: Any = (base or object).__new__(cls)
    for name, child in zip(fields, children[: len(fields)], strict=True):
        object.__setattr__(built, name, child)
    if base is not None:
        _fill(built, base, children[-1])
    return built


def _fill(built: Any, base: Any, items: object) -> None:
    """Add items to a dataclass that is also a container, without calling its own methods."""
    if items is None:
        # A placeholder: the container is built once without its children, to see whether it can be.
        return
    if base is list:
        list.extend(built, _of(list, items))
    else:
        for key, value in _of(dict, items).items():
            base.__setitem__(built, key, value)


def _of(kind: type[T], value: object) -> T:
    if type(value) is not kind:
        raise TypeError(f"{type(value).__qualname__} for the items of a {kind.__qualname__}")
    return value


_NAMEDTUPLE = BranchKind("namedtuple", _open_fields("namedtuple"), _build_fields)
_DATACLASS = BranchKind("dataclass", _open_fields("dataclass"), _build_fields)

_by_type: dict[type, BranchKind] = {
    dict: BranchKind(
        "dict",
        _open_mapping("dict", lambda _: None),
        lambda keys, children, _: dict(zip(keys, children, strict=True)),
    ),
    list: BranchKind("list", lambda v: Opened("list", None, v), lambda _, children, __: children),
    tuple: BranchKind("tuple", lambda v: Opened("tuple", None, v), lambda _, children, __: tuple(children)),
    OrderedDict: BranchKind("odict", _open_mapping("odict", _attributes), _build_ordered),
    defaultdict: BranchKind("defaultdict", _open_mapping("defaultdict", _factory_name), _build_default),
    Counter: BranchKind("counter", _open_mapping("counter", _attributes), _build_counter),
    deque: BranchKind(
        "deque",
        lambda v: Opened("deque", None, list(v), v.maxlen),
        lambda _, children, maxlen: _build_deque(children, maxlen),
    ),
}
_WITHOUT_KEYS = frozenset({"list", "tuple", "deque"})
_by_name = {kind.name: kind for kind in (*_by_type.values(), _NAMEDTUPLE, _DATACLASS)}
