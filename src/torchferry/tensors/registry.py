"""The user's own namedtuples, dataclasses and enums that may be sent, by name.

A name on the wire is only looked up here. Nothing is imported, and no constructor runs: instances are
created without `__init__`, from their fields alone.
"""

import dataclasses
import enum
from typing import TypeVar

from torchferry.core.text import show_name
from torchferry.errors import BadArgument, UnknownType

T = TypeVar("T", bound=type)

_types: dict[str, type] = {}


def register(cls: T) -> T:
    """Let instances of a namedtuple, dataclass or enum be sent and received. Usable as a decorator.

    Both sides register their own type. Types are matched by module and qualified name.

    Raises:
        BadArgument: it is not a namedtuple, dataclass or enum, or another type is registered under its name.
    """
    candidate: object = cls
    if not isinstance(candidate, type) or not (
        is_namedtuple(cls) or dataclasses.is_dataclass(cls) or issubclass(cls, enum.Enum)
    ):
        raise BadArgument(
            f"{cls!r} can't be registered: only namedtuples, dataclasses and enums can be rebuilt "
            "from their fields alone"
        )
    name = name_of(cls)
    # This rejects a class of a reloaded module, and classes that are defined in a loop: they reuse a name.
    if _types.setdefault(name, cls) is not cls:
        raise BadArgument(f"another type is registered as {name}: rename one of them, or register once")
    return cls


def is_registered(cls: type) -> bool:
    """Return whether this class itself is registered."""
    return _types.get(name_of(cls)) is cls


def look_up(name: str) -> type:
    """Return the registered type with a name; raises UnknownType if this process has none."""
    try:
        return _types[name]
    except (KeyError, TypeError):
        raise UnknownType(
            f"the type {show_name(str(name))} is not registered in this process: call "
            f"torchferry.register({show_name(str(name).rpartition('.')[2])}) before receiving"
        ) from None


def name_of(cls: type) -> str:
    """Return the name of a type on the wire."""
    # In a process that multiprocessing has spawned, the module of the main script has another name.
    module = "__main__" if cls.__module__ == "__mp_main__" else cls.__module__
    return f"{module}.{cls.__qualname__}"


def is_namedtuple(cls: type) -> bool:
    """Return whether a class is a namedtuple, of `typing` or of `collections`."""
    return issubclass(cls, tuple) and isinstance(getattr(cls, "_fields", None), tuple)
