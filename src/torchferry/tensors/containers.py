"""Containers: `take_apart` splits a container into keys and children, `container_builder` rebuilds it.

The exact type decides: a subclass of dict is not handled as a dict.
"""

import argparse
import dataclasses
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple, TypeAlias

import torch

from torchferry.core.manifest import Branch, Value
from torchferry.core.text import show, show_name
from torchferry.errors import BadManifest, UnknownType, Unsendable
from torchferry.tensors import registry, values
from torchferry.tensors.kinds import ndarray

_FACTORIES: dict[str | None, Any] = {None: None} | {
    cls.__name__: cls for cls in (int, float, bool, str, list, dict, set, tuple, OrderedDict, Counter)
}
"""The factories that a defaultdict may have, by name."""

_ITEMS = "<items>"
"""The key for the items of a dataclass that is also a dict or list. No field can have this name."""


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
        if kind.name in _WITHOUT_KEYS:
            children = list(value)
            return ContainerParts(kind.name, range(len(children)), children, kind.extra(value))
        mapping = vars(value) if cls in _NAMESPACES else value
        return ContainerParts(kind.name, *_split_items(mapping.items()), kind.extra(value))
    if cls.__module__ == "torch.return_types" and vars(torch.return_types).get(cls.__name__) is cls:
        return ContainerParts("return_type", cls.__match_args__, tuple(value), cls.__name__)
    if ndarray.is_masked(value):
        return ContainerParts("masked", _MASKED, ndarray.split_masked(value), bool(value.hardmask))
    if registry.is_record(cls) and registry.is_registered(cls):
        return _split_fields(value)
    if issubclass(cls, dict) and registry.is_registered(cls):
        return _split_mapping(value)
    return None


def _split_items(items: Iterable[tuple[object, object]]) -> tuple[list[object], list[object]]:
    # Read keys and values at once, because another thread may change the mapping.
    pairs = list(items)
    return [key for key, _ in pairs], [child for _, child in pairs]


def container_builder(branch: Branch) -> BuildContainer:
    """Return a function that builds a peer's container from its children.

    To find errors early, the container is built once here, with None for each child.
    Raises BadManifest if the container is impossible, and UnknownType if its type is not registered.
    """
    build = _builds.get(branch.kind)
    if build is None:
        raise BadManifest(f"a container has the unknown kind {show(branch.kind)}")
    if (branch.keys is None) != (branch.kind in _WITHOUT_KEYS):
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


def _build_deque(keys: list[Any], maxlen: Any, children: list[Any]) -> object:
    if maxlen is not None and (type(maxlen) is not int or maxlen < len(children)):
        raise ValueError(f"{len(children)} items in a deque of maxlen {show(maxlen)}")
    return deque(children, maxlen)


def _namespace_builder(cls: Any) -> Callable[[list[Any], Any, list[Any]], object]:
    return lambda keys, _, children: values.set_attributes(cls(), _make_dict(keys, None, children))


def _make_dict(keys: list[Any], extra: Any, children: list[Any]) -> dict[Any, Any]:
    return dict(zip(keys, children, strict=True))


def _build_return_type(keys: list[Any], name: Any, children: list[Any]) -> object:
    cls: Any = vars(torch.return_types).get(values.require_type(str, name))
    if getattr(cls, "__match_args__", None) != tuple(keys):
        raise UnknownType(f"torch {torch.__version__} has no result {show_name(name)} with these fields")
    return cls(children)


def _build_masked(keys: list[Any], hard: Any, children: list[Any]) -> object:
    data, mask, fill_value = children
    if tuple(keys) != _MASKED or type(hard) is not bool:
        raise ValueError(f"it has the parts {show(keys)}, expected {show(_MASKED)}")
    # `container_builder` builds it once with None for all children.
    return data if data is None else ndarray.make_masked(data, mask, fill_value, hard=hard)


def _builtin_base(cls: type) -> Any:
    return next(base for base in cls.__mro__ if not base.__flags__ & registry.HEAP_TYPE)


def _split_mapping(value: Any) -> ContainerParts:
    """Take a registered subclass of dict apart: its items are children, its attributes are values."""
    name, base = registry.name_of(type(value)), _builtin_base(type(value))
    attributes: Any = object.__getstate__(value)
    if type(attributes) is tuple:
        raise Unsendable(f"a {name} has slots, which would be lost: remove them")
    # Items of some subclasses are their attributes too.
    attributes = True if attributes is value else attributes
    factory = _factory_name(value) if base is defaultdict else None
    try:
        extra = values.to_wire((name, factory, attributes))
    except Unsendable as error:
        raise Unsendable(f"in the attributes of a {name}, {error.what}") from None
    return ContainerParts("mapping", *_split_items(base.items(value)), extra)


def _build_mapping(keys: list[Any], extra: Any, children: list[Any]) -> object:
    """Build a registered subclass of dict without calling its methods."""
    name, factory, attributes = values.require_type(tuple, values.from_wire(extra))
    cls: Any = registry.look_up(name)
    if not issubclass(cls, dict) or registry.is_record(cls):
        raise ValueError(f"{show_name(name)} is not a subclass of dict, or has fields")
    base = _builtin_base(cls)
    built = base.__new__(cls)
    if base is defaultdict:
        built.default_factory = _FACTORIES[factory]
    for key, child in zip(keys, children, strict=True):
        base.__setitem__(built, key, child)
    if attributes is True:
        object.__setattr__(built, "__dict__", built)
    return built if attributes in (True, None) else values.set_attributes(built, attributes)


def _keys_and_base(cls: Any) -> tuple[tuple[str, ...], Any]:
    """Return the keys of a namedtuple or dataclass, and the built-in type that creates its instances."""
    if registry.is_namedtuple(cls):
        return tuple(cls._fields), tuple
    fields = tuple(field.name for field in dataclasses.fields(cls))
    base = _builtin_base(cls)
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
    dict: ContainerKind("dict", _make_dict),
    OrderedDict: ContainerKind(
        "odict", lambda *parts: _fill(OrderedDict(), *parts), values.attributes_to_wire
    ),
    Counter: ContainerKind("counter", lambda *parts: _fill(Counter(), *parts), values.attributes_to_wire),
    defaultdict: ContainerKind(
        "defaultdict",
        lambda keys, name, children: defaultdict(_FACTORIES[name], _make_dict(keys, None, children)),
        _factory_name,
    ),
    MappingProxyType: ContainerKind("mappingproxy", lambda *parts: MappingProxyType(_make_dict(*parts))),
    argparse.Namespace: ContainerKind("namespace", _namespace_builder(argparse.Namespace)),
    SimpleNamespace: ContainerKind("simplenamespace", _namespace_builder(SimpleNamespace)),
}
_WITHOUT_KEYS = ("list", "tuple", "deque")
_NAMESPACES = (argparse.Namespace, SimpleNamespace)
_MASKED = ("data", "mask", "fill_value")
_builds = {kind.name: kind.build for kind in _by_type.values()}
_builds |= {"namedtuple": _build_fields, "dataclass": _build_fields, "mapping": _build_mapping}
_builds |= {"return_type": _build_return_type, "masked": _build_masked}
