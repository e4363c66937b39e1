"""The rules of the architecture, and pure functions that find the breaches in a module.

A module belongs to a layer, by its name. A layer may import the layers that `MAY_IMPORT` lists, and
from outside torchferry what the functions below leave it. Imports are read from the syntax tree, so
one inside a function, or only for type checkers, counts like any other.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

PACKAGE = "torchferry"
PUBLIC = {PACKAGE, "torchferry.torchft"}

# The layer of a module is the first entry that equals its name or is a parent of it.
LAYERS = {
    "torchferry.engine.push": "push",
    "torchferry.engine.pull": "pull",
    "torchferry.engine.sync": "sync",
    "torchferry.errors": "errors",
    "torchferry.torch_internals": "torch",
    "torchferry.core": "core",
    "torchferry.tensors": "tensors",
    "torchferry.links": "links",
    "torchferry.engine": "engine",
    "torchferry.testing": "testing",
    "torchferry.pg_transport": "front door",
    "torchferry.serving": "front door",
    "torchferry.fetching": "front door",
    "torchferry.syncing": "front door",
    "torchferry.torchft": "front door",
    "torchferry.arguments": "front door",
    "torchferry.cli": "front door",
    "torchferry.compat": "compat",
    "torchferry.__main__": "front door",
}
# An import of the bare package runs its __init__, which imports the public modules.
ROOT_LAYER = "front door"

MAY_IMPORT = {
    "errors": set[str](),
    "torch": set[str](),
    "core": {"core", "errors"},
    "tensors": {"tensors", "core", "errors", "torch"},
    "links": {"links", "core", "errors", "torch"},
    "compat": {"tensors", "core", "errors", "torch"},
    "engine": {"engine", "compat", "tensors", "links", "core", "errors"},
    "push": {"push", "engine", "compat", "tensors", "links", "core", "errors"},
    "pull": {"pull", "engine", "compat", "tensors", "links", "core", "errors"},
    "sync": {"sync", "pull", "engine", "compat", "tensors", "links", "core", "errors"},
    "testing": {"testing", "push", "engine", "tensors", "links", "core", "errors"},
    "front door": {
        *("front door", "push", "pull", "sync"),
        *("engine", "compat", "tensors", "links", "core", "errors", "torch"),
    },
}

# The modules that core/ may import: no clock, no random numbers, no threads, no I/O.
PURE = {
    "__future__",
    "abc",
    "bisect",
    "collections",
    "dataclasses",
    "enum",
    "functools",
    "heapq",
    "itertools",
    "math",
    "msgspec",
    "xxhash",
    "operator",
    "struct",
    "types",
    "typing",
}
IMPURE_CALLS = {"__import__", "breakpoint", "eval", "exec", "input", "open", "print"}
IMPORT_CALLS = {"__import__", "import_module"}

# Modules that do I/O or wait.
OUTSIDE_WORLD = {
    "asyncio",
    "concurrent",
    "http",
    "mmap",
    "multiprocessing",
    "queue",
    "select",
    "selectors",
    "shutil",
    "signal",
    "socket",
    "ssl",
    "subprocess",
    "tempfile",
    "threading",
    "time",
    "urllib",
}

TERMINAL = {"typer", "rich"}
TERMINAL_MODULES = (
    "torchferry.cli",
    "torchferry.__main__",
)

# Modules that execute code from bytes.
PICKLES = {"_pickle", "cloudpickle", "dill", "marshal", "pickle", "shelve"}
PICKLE_MODULES = {"torchferry.compat"}

# Private APIs of torch differ between versions, so one module has all of them, each with a fallback.
TORCH_MODULES = {"torchferry.torch_internals"}
# Names with an underscore that are not private: those of namedtuples.
PUBLIC_UNDERSCORES = {"_fields", "_replace", "_asdict"}

# The user may set torch's default device, so every constructor names a device.
CONSTRUCTORS = {
    "arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "ones", "rand",
    "randint", "randn", "randperm", "scalar_tensor", "sparse_bsc_tensor", "sparse_bsr_tensor",
    "sparse_compressed_tensor", "sparse_coo_tensor", "sparse_csc_tensor", "sparse_csr_tensor", "tensor",
    "zeros",
}  # fmt: skip

BANNED_NAMES = {"utils", "util", "helpers", "common", "misc", "types"}


class Module(NamedTuple):
    """A module of the package: its name, its source, and whether it is a package's __init__."""

    name: str
    source: str
    is_package: bool = False


@dataclass(frozen=True)
class Import:
    """One imported module. `lazy` is one that a missing package does not stop: it is inside a
    function, under TYPE_CHECKING, or in a try that catches ImportError.
    """

    name: str
    line: int
    lazy: bool

    @property
    def top(self) -> str:
        return self.name.partition(".")[0]


def imports_of(module: Module, known: frozenset[str] = frozenset()) -> list[Import]:
    """Every import of a module, by absolute name, also those made with `importlib` or `__import__`.

    `from a import b` counts as a.b if that is one of the `known` modules, and as a if not.

    >>> source = "from . import tree\\ndef late(): import numpy.random"
    >>> module = Module("torchferry.core.codec", source)
    >>> [(i.name, i.lazy) for i in imports_of(module, frozenset({"torchferry.core.tree"}))]
    [('torchferry.core.tree', False), ('numpy.random', True)]
    """
    return [
        Import(name, getattr(node, "lineno", 0), lazy)
        for node, lazy in _walk(ast.parse(module.source), lazy=False)
        for name in _names(node, module, known)
    ]


def layer_of(name: str) -> str | None:
    """The layer of a module, None if it has none.

    >>> layer_of("torchferry.core.codec"), layer_of("torchferry"), layer_of("torchferry.stray")
    ('core', 'front door', None)
    """
    if name == PACKAGE:
        return ROOT_LAYER
    for prefix, layer in LAYERS.items():
        if is_beneath(name, prefix):
            return layer
    return None


def is_beneath(name: str, prefix: str) -> bool:
    """Whether a module is `prefix` or lies in it."""
    return name == prefix or name.startswith(f"{prefix}.")


def layer_breaches(module: Module, known: frozenset[str] = frozenset()) -> list[str]:
    """Imports from one layer of torchferry into another that it may not know."""
    own = layer_of(module.name)
    if own is None:
        return [f"{module.name} belongs to no layer: give it one in LAYERS"]
    return [
        f"{module.name}:{i.line} is of layer '{own}' and imports {i.name}"
        for i in imports_of(module, known)
        if i.top == PACKAGE and layer_of(i.name) not in MAY_IMPORT[own]
    ]


def example_breaches(module: Module) -> list[str]:
    """Imports by an example of anything in torchferry but the public modules."""
    return [
        f"{module.name}:{i.line} imports {i.name}: an example imports only what is public"
        for i in imports_of(module)
        if i.top == PACKAGE and i.name not in PUBLIC
    ]


def purity_breaches(module: Module) -> list[str]:
    """Imports and calls of I/O, clocks or threads in `core/` or `tensors/`, and of torch in `core/`."""
    layer = layer_of(module.name)
    outside = [i for i in imports_of(module) if i.top != PACKAGE]
    if layer == "core":
        impure = [(i.line, f"imports {i.name}") for i in outside if i.top not in PURE]
        impure += [(c.lineno, f"calls {name}") for c, name in _calls(module) if name in IMPURE_CALLS]
    elif layer == "tensors":
        impure = [(i.line, f"imports {i.name}") for i in outside if i.top in OUTSIDE_WORLD]
    else:
        impure = []
    return [f"{module.name}:{line} is of layer '{layer}' and {what}" for line, what in impure]


def terminal_breaches(module: Module) -> list[str]:
    """Imports of what only the command line needs, and loads when it runs."""
    if any(is_beneath(module.name, home) for home in TERMINAL_MODULES):
        return []
    return [f"{module.name}:{i.line} imports {i.name}" for i in imports_of(module) if i.top in TERMINAL]


def numpy_breaches(module: Module) -> list[str]:
    """Imports of numpy that fail where numpy is not installed."""
    return [
        f"{module.name}:{i.line} imports numpy unguarded, at the top level"
        for i in imports_of(module)
        if i.top == "numpy" and not i.lazy
    ]


def pickle_breaches(module: Module) -> list[str]:
    """Imports of pickle and its kin outside the modules that guard it."""
    if module.name in PICKLE_MODULES:
        return []
    return [f"{module.name}:{i.line} imports {i.name}" for i in imports_of(module) if i.top in PICKLES]


def computed_import_breaches(module: Module) -> list[str]:
    """Imports of a module whose name is not written in the source: it might come off the wire."""
    return [
        f"{module.name}:{call.lineno} imports a module by a computed name"
        for call, name in _calls(module)
        if name in IMPORT_CALLS and _literal(call) is None
    ]


def undeclared_breaches(module: Module, declared: set[str]) -> list[str]:
    """Imports of packages that pyproject.toml does not list."""
    expected = {PACKAGE, *declared, *sys.stdlib_module_names}
    return [
        f"{module.name}:{i.line} imports {i.name}, which pyproject.toml does not list"
        for i in imports_of(module)
        if i.top not in expected
    ]


def private_torch_breaches(module: Module) -> list[str]:
    """Private parts of torch outside the module that has them all.

    That is what is imported from torch by a private name, and what is taken from another object than `self`
    by one that the module does not define itself.
    """
    if module.name in TORCH_MODULES:
        return []
    tree = ast.parse(module.source)
    own = {name for node in ast.walk(tree) for name in _defined(node)} | PUBLIC_UNDERSCORES
    found = []
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(base), names=aliases) if base.partition(".")[0] == "torch":
                path = [*base.split("."), *(alias.name for alias in aliases)]
                found += [(node.lineno, f"imports {part} of {base}") for part in path if _is_private(part)]
            case ast.Import(names=aliases):
                parts = [part for alias in aliases for part in alias.name.split(".")]
                is_torch = parts[0] == "torch"
                found += [
                    (node.lineno, f"imports {part}") for part in parts if is_torch and _is_private(part)
                ]
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                pass
            case ast.Attribute(attr=name) if _is_private(name) and name not in own:
                found.append((node.lineno, f"uses {name}"))
    return [f"{module.name}:{line} {what}" for line, what in found]


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _defined(node: ast.AST) -> list[str]:
    match node:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
            return [name]
        case ast.Name(id=name, ctx=ast.Store()):
            return [name]
    return []


def device_breaches(module: Module) -> list[str]:
    """Tensors that are made on whatever device the user has set as the default one."""
    found: list[str] = []
    for node in ast.walk(ast.parse(module.source)):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr=name)) if name in CONSTRUCTORS:
                if "device" not in [keyword.arg for keyword in node.keywords]:
                    found.append(f"{module.name}:{node.lineno} calls torch.{name} without a device")
    return found


def shape_breaches(module: Module) -> list[str]:
    """A module whose name says nothing of what is in it."""
    if banned := BANNED_NAMES.intersection(module.name.split(".")):
        return [f"{module.name} is called {banned.pop()}: name what it holds"]
    return []


def _walk(node: ast.AST, *, lazy: bool) -> Iterator[tuple[ast.AST, bool]]:
    """All nodes beneath one, each with whether it is guarded against a missing package."""
    guarded = {id(child) for child in _guarded(node)}
    for child in ast.iter_child_nodes(node):
        child_lazy = lazy or id(child) in guarded
        yield child, child_lazy
        yield from _walk(child, lazy=child_lazy)


def _guarded(node: ast.AST) -> list[ast.stmt]:
    match node:
        case ast.FunctionDef(body=body) | ast.AsyncFunctionDef(body=body):
            return body
        case ast.If(test=ast.Name(id="TYPE_CHECKING"), body=body):
            return body
        case ast.If(test=ast.Attribute(attr="TYPE_CHECKING"), body=body):
            return body
        case ast.Try(body=body, handlers=handlers):
            caught = [n.id for h in handlers if h.type for n in ast.walk(h.type) if isinstance(n, ast.Name)]
            return body if {"ImportError", "ModuleNotFoundError"}.intersection(caught) else []
    return []


def _names(node: ast.AST, module: Module, known: frozenset[str]) -> list[str]:
    """The modules that one node imports, by absolute name."""
    match node:
        case ast.Import(names=aliases):
            return [alias.name for alias in aliases]
        case ast.ImportFrom(names=aliases):
            base = _absolute(node, module)
            full = [f"{base}.{alias.name}" for alias in aliases]
            return list(dict.fromkeys(name if name in known else base for name in full))
        case ast.Call() if _called(node) in IMPORT_CALLS and (name := _literal(node)):
            return [name]
    return []


def _absolute(node: ast.ImportFrom, module: Module) -> str:
    if not node.level:
        return node.module or ""
    parts = module.name.split(".")
    base = parts[: len(parts) - node.level + module.is_package]
    return ".".join([*base, *([node.module] if node.module else [])])


def _calls(module: Module) -> list[tuple[ast.Call, str]]:
    nodes = ast.walk(ast.parse(module.source))
    return [(node, _called(node)) for node in nodes if isinstance(node, ast.Call)]


def _called(call: ast.Call) -> str:
    match call.func:
        case ast.Name(id=name) | ast.Attribute(attr="import_module" as name):
            return name
    return ""


def _literal(call: ast.Call) -> str | None:
    match call.args:
        case [ast.Constant(value=str(name)), *_]:
            return name
    return None
