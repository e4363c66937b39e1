"""The types that may be sent besides the built-in ones, by name: the user's own, and those of libraries.

A name on the wire is only looked up here. Nothing is imported, and no constructor runs: instances are
created without `__init__`, from their fields or items alone. The exception is a tensor subclass: its
`__tensor_unflatten__` is called with the tensors that were received.
"""

import dataclasses
import enum
import sys
from collections.abc import Iterable
from typing import TypeVar

import torch
from torch.torch_version import TorchVersion

from torchferry.core.text import show_name
from torchferry.errors import BadArgument, UnknownType
from torchferry.torch_internals import nested_tensor_class

T = TypeVar("T", bound=type)

HEAP_TYPE = 1 << 9  # CPython's flag for classes that are not built in

_types: dict[str, type] = {"torch.torch_version.TorchVersion": TorchVersion}


def register(cls: T) -> T:
    """Let instances of a type be sent and received. Usable as a decorator.

    The type is a namedtuple, a dataclass, an enum, a subclass of dict, str or int, or a subclass of Tensor
    that has `__tensor_flatten__` and `__tensor_unflatten__`. Both sides register their own type. Types are
    matched by module and qualified name.

    Raises:
        BadArgument: it is none of these, or another type is registered under its name.
    """
    candidate: object = cls
    if not isinstance(candidate, type) or not (
        is_record(cls)
        or issubclass(cls, enum.Enum)
        or is_tensor_subclass(cls)
        or (issubclass(cls, (dict, str, int)) and cls.__flags__ & HEAP_TYPE)
    ):
        raise BadArgument(
            f"{cls!r} can't be registered: only namedtuples, dataclasses, enums, subclasses of dict, str and "
            "int, and tensor subclasses with __tensor_flatten__ and __tensor_unflatten__ can be rebuilt "
            "from what they hold"
        )
    name = name_of(cls)
    # This rejects a class of a reloaded module, and classes that are defined in a loop: they reuse a name.
    if _types.setdefault(name, cls) is not cls:
        raise BadArgument(f"another type is registered as {name}: rename one of them, or register once")
    return cls


def register_known(library: str) -> tuple[type, ...]:
    """Register the tensor subclasses of a library, "torch" or "torchao", and the types that they need.

    For torch, these are jagged nested tensors and semi-structured sparse tensors. For torchao, they are the
    classes of its quantized and float8 weights and its optimizer states, with their enums and dataclasses.
    Returns the registered types.

    Raises:
        BadArgument: the library is unknown, or not installed.
    """
    if library not in _KNOWN:
        raise BadArgument(f"register_known({library!r}): the known libraries are {', '.join(_KNOWN)}")
    try:
        return tuple(map(register, dict.fromkeys(_KNOWN[library]())))
    except ImportError as error:
        raise BadArgument(
            f"register_known({library!r}): {library} can't be imported here ({error}): install it"
        ) from None


def _types_of_torch() -> Iterable[type]:
    from torch.sparse import SparseSemiStructuredTensorCUSPARSELT, SparseSemiStructuredTensorCUTLASS

    return nested_tensor_class(), SparseSemiStructuredTensorCUSPARSELT, SparseSemiStructuredTensorCUTLASS


def _types_of_torchao() -> Iterable[type]:
    import torchao.float8
    import torchao.optim
    import torchao.quantization  # noqa: F401

    # All classes of the modules that this has imported. Some have a `__module__` that is another module.
    for name in [name for name in sys.modules if name.startswith("torchao.")]:
        for found in list(vars(sys.modules[name]).values()):
            is_own = isinstance(found, type) and found.__module__.startswith("torchao.")
            if is_own and (is_record(found) or is_tensor_subclass(found) or issubclass(found, enum.Enum)):
                yield found


_KNOWN = {"torch": _types_of_torch, "torchao": _types_of_torchao}


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


def is_tensor_subclass(cls: type) -> bool:
    """Return whether a class is a subclass of Tensor that names the tensors which it holds."""
    methods = ("__tensor_flatten__", "__tensor_unflatten__")
    return issubclass(cls, torch.Tensor) and all(hasattr(cls, method) for method in methods)


def is_record(cls: type) -> bool:
    """Return whether a class is a namedtuple or a dataclass, whose instances are built from their fields."""
    # An enum may also be a dataclass, but its members can't be built from fields.
    is_enum = issubclass(cls, enum.Enum)
    return not is_enum and (is_namedtuple(cls) or dataclasses.is_dataclass(cls))


def is_namedtuple(cls: type) -> bool:
    """Return whether a class is a namedtuple, of `typing` or of `collections`."""
    return issubclass(cls, tuple) and isinstance(getattr(cls, "_fields", None), tuple)
