"""Containers: `take_apart` splits a container into keys and children, `container_builder` rebuilds it.

The exact type decides: a subclass of dict is not handled as a dict.
"""

import dataclasses
import enum
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from torchferry.core.manifest import Branch, Value
from torchferry.core.text import show, show_name
from torchferry.errors import BadManifest, UnknownType, Unsendable
from torchferry.tensors import registry, values

_FACTORIES: dict[str | None, Any] = {None: None} | {
    cls.__name__: cls for cls in (int, float, bool, str, list, dict, set, tuple, OrderedDict, Counter)
}
"""The factories that a defaultdict may have, by name."""

_ITEMS = "<items>"
"""The key for the items of a dataclass that is also a dict or list. No field can have this name."""

_HEAP_TYPE = 1 << 9  # CPython's flag of classes that are not built in


class ContainerParts(NamedTuple):
    """A container taken apart. The keys are a range if it has none of its own, like a list."""

    kind: str
    keys: Sequence[object]
    children: Sequence[object]
    extra: Value


BuildContainer: TypeAlias = Callable[[list[object]], object]


class ContainerKind(NamedTuple):
    """How one built-in type is built from keys, extra and children.

    `extra` returns what a container has besides keys and children, such as the maxlen of a deque.
    """

    name: str
    build: Callable[[list[Any], Any, list[Any]], object]
    extra: Callable[[Any], Value] = lambda container: None


def is_builtin_container(value: object) -> bool:
    """Return whether a value is of a built-in container type."""
    return type(value) in _by_type


def take_apart(value: Any) -> ContainerParts | None:
    """Take a container apart; None if the value is not a container, or of a type that is not registered.

    Raises Unsendable if it holds something besides its items that can't be sent.
    """
    cls = type(value)
    kind = _by_type.get(cls)
    if kind is not None:
        if not issubclass(cls, dict):
            children = list(value)
            return ContainerParts(kind.name, range(len(children)), children, kind.extra(value))
        # Read keys and values at once, because another thread may change the mapping.
        items = list(value.items())
        keys, children = [key for key, _ in items], [child for _, child in items]
        return ContainerParts(kind.name, keys, children, kind.extra(value))
    # An enum may also be a namedtuple or dataclass, but its members can't be built from fields.
    if registry.is_registered(cls) and not issubclass(cls, enum.Enum):
        return _split_fields(value)
    return None


def container_builder(branch: Branch) -> BuildContainer:
    """Return a function that builds a peer's container from its children.

    To find errors early, the container is built once here, with None for each child.
    Raises BadManifest if the container is impossible, and UnknownType if its type is not registered.
    """
    build = _builds.get(branch.kind)
    if build is None:
        raise BadManifest(f"a container has the unknown kind {show(branch.kind)}")
    if (branch.keys is None) != (branch.kind in ("list", "tuple", "deque")):
        raise BadManifest(f"a {branch.kind} {'without' if branch.keys is None else 'with'} keys")
    decoded = [key if type(key) is str else values.from_wire(key) for key in branch.keys or ()]
    keys = values.try_build(branch.kind, values.require_distinct, decoded)
    build_container = partial(values.try_build, branch.kind, build, [*keys], branch.extra)
    build_container([None] * len(branch.children))
    return build_container


def _fill(mapping: Any, keys: list[Any], attributes: Value, children: list[Any]) -> object:
    # Counter.update() would add counts, and raise for children that are not numbers.
    for key, child in zip(keys, children, strict=True):
        mapping[key] = child
    return mapping if attributes is None else values.set_attributes(mapping, values.from_wire(attributes))


def _factory_name(mapping: defaultdict[Any, Any]) -> Value:
    factory = mapping.default_factory
    name = getattr(factory, "__name__", None)
    if _FACTORIES.get(name) is not factory:
        raise Unsendable(
            f"a defaultdict with the factory {factory!r} can't be sent, only with "
            f"{', '.join(map(str, _FACTORIES))}. Convert it to a dict"
        )
    return name


def _build_defaultdict(keys: list[Any], name: Any, children: list[Any]) -> object:
    return defaultdict(_FACTORIES[name], zip(keys, children, strict=True))


def _build_deque(keys: list[Any], maxlen: Any, children: list[Any]) -> object:
    if maxlen is not None and (type(maxlen) is not int or maxlen < len(children)):
        raise ValueError(f"{len(children)} items in a deque of maxlen {show(maxlen)}")
    return deque(children, maxlen)


def _keys_and_base(cls: Any) -> tuple[tuple[str, ...], Any]:
    """Return the keys of a namedtuple or dataclass, and the built-in type that creates its instances."""
    if registry.is_namedtuple(cls):
        return tuple(cls._fields), tuple
    fields = tuple(field.name for field in dataclasses.fields(cls))
    base: type = next(base for base in cls.__mro__ if not base.__flags__ & _HEAP_TYPE)
    if base is object:
        return fields, base
    if base in (OrderedDict, dict, list):
        return (*fields, _ITEMS), base
    raise Unsendable(
        f"a {registry.name_of(cls)} can't be rebuilt from its fields, because it is also a "
        f"{base.__name__}: convert it to a dict"
    )


def _split_fields(value: Any) -> ContainerParts:
    name, (keys, base) = registry.name_of(type(value)), _keys_and_base(type(value))
    fields = [key for key in keys if key is not _ITEMS]
    # The `__dict__`, or a tuple of the `__dict__` and the slots that are set. Either may be None.
    attributes: Any = object.__getstate__(value)
    attributes = attributes if type(attributes) is tuple else (attributes,)
    names = [attribute for part in attributes for attribute in part or ()]
    if unknown := [attribute for attribute in names if attribute not in fields]:
        raise Unsendable(
            f"a {name} has attributes besides its fields ({', '.join(unknown)}), which would be lost: "
            "remove them, or make them fields"
        )
    if base is tuple:
        return ContainerParts("namedtuple", keys, tuple(value), name)
    if unset := [field for field in fields if not hasattr(value, field)]:
        raise Unsendable(f"a {name} has fields that were never set ({', '.join(unset)}): set them")
    children = [getattr(value, field) for field in fields]
    if base is not object:
        children.append(list(base.__iter__(value)) if base is list else dict(base.items(value)))
    return ContainerParts("dataclass", keys, children, name)


def _build_fields(keys: list[Any], name: Any, children: list[Any]) -> object:
    """Build a namedtuple or dataclass without calling its methods."""
    cls: Any = registry.look_up(name)
    expected, base = _keys_and_base(cls)
    if tuple(keys) != expected:
        incoming = ", ".join(show_name(str(key)) for key in keys[:20])
        raise UnknownType(
            f"{name} has the fields {', '.join(expected)} here and {incoming} at the peer: "
            "run the same code on both sides"
        )
    if base is tuple:
        return tuple.__new__(cls, children)
    built = base.__new__(cls)
    for key, child in zip(expected, children, strict=True):
        if key is not _ITEMS:
            object.__setattr__(built, key, child)
        elif child is None:
            pass  # `container_builder` builds it once with None for all children.
        elif base is list:
            list.extend(built, values.require_type(list, child))
        else:
            for inner_key, inner in values.require_type(dict, child).items():
                base.__setitem__(built, inner_key, inner)
    return built


_by_type: dict[type, ContainerKind] = {
    list: ContainerKind("list", lambda keys, _, children: children),
    tuple: ContainerKind("tuple", lambda keys, _, children: tuple(children)),
    deque: ContainerKind("deque", _build_deque, lambda queue: queue.maxlen),
    dict: ContainerKind("dict", lambda keys, _, children: dict(zip(keys, children, strict=True))),
    OrderedDict: ContainerKind(
        "odict", lambda *parts: _fill(OrderedDict(), *parts), values.attributes_to_wire
    ),
    Counter: ContainerKind("counter", lambda *parts: _fill(Counter(), *parts), values.attributes_to_wire),
    defaultdict: ContainerKind("defaultdict", _build_defaultdict, _factory_name),
}
_builds = {kind.name: kind.build for kind in _by_type.values()}
_builds |= {"namedtuple": _build_fields, "dataclass": _build_fields}
