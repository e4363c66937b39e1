"""Types of the user's own that may travel: namedtuples, dataclasses and enums, by name.

A name on the wire is only ever looked up here. Nothing is imported, and nothing of the type is called:
instances are made without `__init__`, from the fields alone.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import TypeVar

from torchferry.core.text import show_name
from torchferry.errors import BadArgument, UnknownType

T = TypeVar("T", bound=type)

_types: dict[str, type] = {}


def register(cls: T) -> T:
    """Let instances of a namedtuple, dataclass or enum travel. Usable as a decorator.

    Both sides register their own type; they are matched by module and qualified name.

    Raises:
        BadArgument: it is none of the three, or another type has that name already.
    """
    known: object = cls
    if not isinstance(known, type) or not (
        is_namedtuple(cls) or dataclasses.is_dataclass(cls) or issubclass(cls, enum.Enum)
    ):
        raise BadArgument(
            f"{cls!r} can't be registered: only namedtuples, dataclasses and enums can be rebuilt "
            "from their fields alone"
        )
    name = name_of(cls)
    if _types.setdefault(name, cls) is not cls:
        # A module that is reloaded, or a class made in a loop, defines the same name again.
        raise BadArgument(f"another type is registered as {name} already")
    return cls


def is_registered(cls: type) -> bool:
    """Say whether instances of this very class may travel."""
    return _types.get(name_of(cls)) is cls


def look_up(name: str) -> type:
    """Find a registered type by its name on the wire.

    Raises:
        UnknownType: it is not registered in this process.
    """
    try:
        return _types[name]
    except (KeyError, TypeError):
        raise UnknownType(
            f"the type {show_name(str(name))} is not registered in this process: call "
            f"torchferry.register({show_name(str(name).rpartition('.')[2])}) before receiving"
        ) from None


def name_of(cls: type) -> str:
    """Give the name under which a type travels.

    A process that multiprocessing has spawned knows the script it was started from as `__mp_main__`, and the
    classes in it are the same.
    """
    module = "__main__" if cls.__module__ == "__mp_main__" else cls.__module__
    return f"{module}.{cls.__qualname__}"


def is_namedtuple(cls: type) -> bool:
    """Say whether a class is a namedtuple, made by either of the two standard ways."""
    return issubclass(cls, tuple) and isinstance(getattr(cls, "_fields", None), tuple)
