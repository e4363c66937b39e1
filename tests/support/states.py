"""Random states as recipes: plain data from which any process builds the same state.

A recipe consists of frozen dataclasses. Their repr is the expression that creates them, so that the output of
a failing test can be pasted into a test. They can be pickled, so that two processes can build one recipe.

All tensors and arrays are views of pools: aliases, overlaps and views of one storage under several dtypes are
leaves of the same pool. The tree refers to leaves by number; the same number in two places of the tree is the
same object.
"""

from __future__ import annotations

import argparse
import array
import enum
import io
import pathlib
import random
import struct
import uuid
import warnings
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

import torchferry

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not str(dtype).startswith("torch.q")
}
"""Every dtype of torch that is not quantized."""

NUMPY_DTYPES = {
    name: np.dtype(name)
    for name in (
        *("?", "i1", "u1", "<i2", ">u2", ">i4", "<u4", "<i8", "<u8"),
        *("<f2", ">f4", "<f8", "g", "<c8", ">c16"),
        *("S1", "S3", "<U2", ">U1", "V5"),
    )
} | {
    "datetime": np.dtype("<M8[ns]"),
    "steps": np.dtype(">M8[25s]"),
    "delta": np.dtype("<m8[D]"),
    "fields": np.dtype([("a", "u1"), ("b", ">f8", (2,)), ("s", [("x", "<i2"), ("y", "S2")])]),
    "titled": np.dtype([(("a title", "a"), "<f4"), ("b", "?")]),
    "nothing": np.dtype([]),
}


class Colour(enum.Enum):
    RED = "red"
    GREEN = (1, 2)


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2**40


class Mode(enum.StrEnum):
    TRAIN = "train"
    EVAL = "eval"


class Access(enum.Flag):
    READ = 1
    WRITE = 2
    RUN = 1 << 70


class Interval(NamedTuple):
    low: Any
    high: Any


# A namedtuple made by the function.
Plain = namedtuple("Plain", "only")


@dataclass
class Progress:
    step: Any
    best: Any = None


@dataclass(frozen=True, slots=True)
class Frozen:
    weight: Any
    extra: Any = field(kw_only=True, default=0)


class Text(str):
    pass


class Table(dict[Any, Any]):
    """A dict with attributes."""


class Coded(torch.Tensor):
    """A tensor subclass as quantized weights are: codes and a scale, which may be one of these again."""

    codes: torch.Tensor
    scale: torch.Tensor
    progress: Any

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, progress: Any) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, codes.shape, dtype=torch.bfloat16, device=codes.device
        )

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, progress: Any) -> None:
        self.codes, self.scale, self.progress = codes, scale, progress

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], {"progress": self.progress}

    @staticmethod
    def __tensor_unflatten__(tensors: Any, context: Any, size: Any, stride: Any) -> Coded:
        return Coded(tensors["codes"], tensors["scale"], context["progress"])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError(f"no operation of a subclass may run: {func}")


REGISTERED = (Colour, Level, Mode, Access, Interval, Plain, Progress, Frozen, Text, Table, Coded)
for _cls in REGISTERED:
    torchferry.register(_cls)

RECORDS: dict[str, Callable[..., Any]] = {cls.__name__: cls for cls in (Interval, Plain, Progress, Frozen)}
ENUMS: dict[str, type[enum.Enum]] = {cls.__name__: cls for cls in (Colour, Level, Mode, Access)}


class _ShortRepr:
    """A repr with only the fields that differ from their defaults."""

    def __repr__(self) -> str:
        given = [(f, getattr(self, f.name)) for f in fields(self)]  # type: ignore[arg-type]
        shown = [f"{f.name}={value!r}" for f, value in given if f.default is MISSING or value != f.default]
        return f"{type(self).__name__}({', '.join(shown)})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        # By default, Hypothesis prints every field of a dataclass.
        printer.text(repr(self))


@dataclass(frozen=True, repr=False)
class Pool(_ShortRepr):
    """Memory filled with random bytes, of an ndarray or a tensor."""

    nbytes: int
    seed: int
    numpy: bool = False


@dataclass(frozen=True, repr=False)
class View(_ShortRepr):
    """A strided tensor. `grad` is 1 for requires_grad, 2 for a Parameter, 3 for both."""

    pool: int
    dtype: str
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    offset: int = 0
    conj: bool = False
    neg: bool = False
    grad: int = 0


@dataclass(frozen=True, repr=False)
class Array(_ShortRepr):
    """An ndarray over the pool from byte `start` on; strides and offset count bytes of the pool."""

    pool: int
    dtype: str
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    offset: int = 0
    start: int = 0
    writeable: bool = True


@dataclass(frozen=True, repr=False)
class Sparse(_ShortRepr):
    """A sparse tensor whose values are a view; its indices come from a seed.

    `size` is that of the sparse dimensions; the shape of the values has the dense ones.
    """

    layout: str
    size: tuple[int, ...]
    values: View
    seed: int = 0
    coalesced: bool = False
    index_dtype: str = "int64"
    grad: int = 0


Leaf: TypeAlias = View | Array | Sparse


@dataclass(frozen=True, repr=False)
class Use(_ShortRepr):
    """A place in the tree that has a leaf of the recipe."""

    leaf: int


@dataclass(frozen=True, repr=False)
class Value(_ShortRepr):
    """A value without tensors, by the name of its maker in `MAKERS`."""

    kind: str
    data: Any = None


@dataclass(frozen=True, repr=False)
class Node(_ShortRepr):
    """A container, by the name of its maker in `CONTAINERS`."""

    kind: str
    children: tuple[Tree, ...] = ()
    keys: tuple[Value, ...] = ()
    extra: Any = None


@dataclass(frozen=True, repr=False)
class Prefab(_ShortRepr):
    """A state that a component of torch, numpy or Python creates, like an optimizer."""

    kind: str
    seed: int = 0


Tree: TypeAlias = Use | Value | Node | Prefab


@dataclass(frozen=True, repr=False)
class Recipe(_ShortRepr):
    tree: Tree
    leaves: tuple[Leaf, ...] = ()
    pools: tuple[Pool, ...] = ()


@dataclass(frozen=True)
class Built:
    """A state, and the bytes of each of its pools as a tensor."""

    state: Any
    leaves: tuple[Any, ...]
    pools: tuple[torch.Tensor, ...]


def build(recipe: Recipe) -> Built:
    """Build a state; the same recipe makes the same state in every process."""
    pools = tuple(map(_build_pool, recipe.pools))
    leaves = tuple(_build_leaf(leaf, pools) for leaf in recipe.leaves)
    return Built(_build_tree(recipe.tree, leaves), leaves, pools)


def _build_pool(pool: Pool) -> torch.Tensor:
    data = bytearray(random.Random(pool.seed).randbytes(pool.nbytes))
    if not pool.nbytes:
        return torch.empty(0, dtype=torch.uint8)
    if pool.numpy:
        return torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy())
    return torch.frombuffer(data, dtype=torch.uint8).clone()


def _build_leaf(leaf: Leaf, pools: tuple[torch.Tensor, ...]) -> Any:
    if isinstance(leaf, View):
        return _build_view(leaf, pools)
    if isinstance(leaf, Array):
        return _build_array(leaf, pools)
    return _build_sparse(leaf, pools)


def _build_view(view: View, pools: tuple[torch.Tensor, ...]) -> torch.Tensor:
    storage = pools[view.pool].untyped_storage()
    tensor = torch.empty(0, dtype=DTYPES[view.dtype]).set_(storage, view.offset, view.shape, view.stride)
    if view.conj:
        tensor = tensor.conj()
    if view.neg:
        tensor = torch._neg_view(tensor)
    return _with_grad(tensor, view.grad)


def _with_grad(tensor: torch.Tensor, grad: int) -> torch.Tensor:
    if grad & 2:
        return torch.nn.Parameter(tensor, requires_grad=bool(grad & 1))
    return tensor.requires_grad_() if grad else tensor


def _build_array(array: Array, pools: tuple[torch.Tensor, ...]) -> Any:
    dtype = NUMPY_DTYPES[array.dtype]
    # An array of a part of the pool, whose base does not have the bounds of the memory.
    buffer = pools[array.pool][array.start :].numpy()
    if buffer.size:
        built = np.ndarray(array.shape, dtype, buffer, array.offset - array.start, array.strides)
    else:
        built = np.ndarray(array.shape, dtype, strides=array.strides)
    built.flags.writeable = array.writeable
    return built


def _build_sparse(sparse: Sparse, pools: tuple[torch.Tensor, ...]) -> torch.Tensor:
    values = _build_view(sparse.values, pools)
    source = random.Random(sparse.seed)
    if sparse.layout == "coo":
        # Indices of a coalesced tensor are sorted and distinct; others may repeat.
        places = list(np.ndindex(*sparse.size))
        picked = (
            sorted(source.sample(places, len(values)))
            if sparse.coalesced
            else [source.choice(places) for _ in values]
        )
        indices = torch.tensor(picked, dtype=torch.int64).reshape(len(values), len(sparse.size)).T
        built = torch.sparse_coo_tensor(
            indices,
            values,
            (*sparse.size, *values.shape[1:]),
            is_coalesced=sparse.coalesced,
            check_invariants=True,
        )
        return _with_grad(built, sparse.grad)
    # `size` counts rows and columns of blocks here.
    count, other = sparse.size if sparse.layout in ("csr", "bsr") else sparse.size[::-1]
    picked = sorted(source.sample(list(np.ndindex(count, other)), len(values)))
    kind = DTYPES[sparse.index_dtype]
    starts = torch.tensor([sum(r < row for r, _ in picked) for row in range(count + 1)], dtype=kind)
    plain = torch.tensor([column for _, column in picked], dtype=kind)
    blocks = tuple(values.shape[1:3]) if sparse.layout.startswith("b") else (1, 1)
    beyond = values.shape[3:] if sparse.layout.startswith("b") else values.shape[1:]
    size = (sparse.size[0] * blocks[0], sparse.size[1] * blocks[1], *beyond)
    built = torch.sparse_compressed_tensor(
        starts, plain, values, size, layout=getattr(torch, f"sparse_{sparse.layout}"), check_invariants=True
    )
    return _with_grad(built, sparse.grad)


def _build_tree(tree: Tree, leaves: tuple[Any, ...]) -> Any:
    match tree:
        case Use(leaf):
            return leaves[leaf]
        case Value():
            return make_value(tree)
        case Prefab(kind, seed):
            return PREFABS[kind](seed)
        case Node():
            children = [_build_tree(child, leaves) for child in tree.children]
            return CONTAINERS[tree.kind]([make_value(key) for key in tree.keys], children, tree.extra)


def make_value(value: Value) -> Any:
    """Make a value without tensors."""
    return MAKERS[value.kind](value.data)


def _numpy_scalar(data: tuple[str, str]) -> Any:
    dtype, content = NUMPY_DTYPES[data[0]].newbyteorder("="), bytes.fromhex(data[1])
    if dtype.kind == "S":
        return np.bytes_(content)
    if dtype.kind == "U":
        return np.str_("".join(map(chr, content)))
    return np.frombuffer(content, dtype)[0]


def _timezone(minutes: int | None) -> timezone | None:
    return None if minutes is None else timezone(timedelta(minutes=minutes))


def _stream(data: tuple[bytes, int]) -> io.BytesIO:
    stream = io.BytesIO(data[0])
    stream.seek(data[1])
    return stream


MAKERS: dict[str, Callable[[Any], Any]] = {
    # None, bool, int, str and bytes are stored directly.
    "plain": lambda data: data,
    # Floats are stored as bits, because NaNs have no distinct repr.
    "float": lambda data: struct.unpack(">d", bytes.fromhex(data))[0],
    "complex": lambda data: complex(*struct.unpack(">dd", bytes.fromhex(data))),
    "bytearray": bytearray,
    "size": torch.Size,
    "torch": lambda name: getattr(torch, name),
    "device": torch.device,
    "range": lambda data: range(*data),
    "slice": lambda data: slice(*data),
    "ellipsis": lambda _: ...,
    "tuple": lambda data: tuple(make_value(item) for item in data),
    "set": lambda data: {make_value(item) for item in data},
    "frozenset": lambda data: frozenset(make_value(item) for item in data),
    "enum": lambda data: ENUMS[data[0]][data[1]],
    "flags": lambda data: Access(data),
    "numpy": _numpy_scalar,
    "numpy dtype": lambda name: NUMPY_DTYPES[name],
    "text": Text,
    "path": pathlib.PurePosixPath,
    "decimal": Decimal,
    "fraction": lambda data: Fraction(*data),
    "uuid": lambda number: uuid.UUID(int=number),
    "timedelta": lambda data: timedelta(*data),
    "datetime": lambda data: datetime(*data[:7]).replace(tzinfo=_timezone(data[7]), fold=data[8]),
    "date": lambda data: date(*data),
    "time": lambda data: time(*data[:4]).replace(tzinfo=_timezone(data[4]), fold=data[5]),
    "stream": _stream,
    "array": lambda data: array.array("B", data),
    "finfo": lambda name: torch.finfo(getattr(torch, name)),
    # The size and the seed of bytes that are payload.
    "large bytes": lambda data: random.Random(data[1]).randbytes(data[0]),
    "large stream": lambda data: _stream((random.Random(data[1]).randbytes(data[0]), data[1])),
    "large array": lambda data: array.array("H", random.Random(data[1]).randbytes(2 * data[0])),
    "large bytearray": lambda data: bytearray(random.Random(data[1]).randbytes(data[0])),
}


def _ordered(keys: list[Any], children: list[Any], metadata: Any) -> Any:
    built = OrderedDict(zip(keys, children, strict=True))
    if metadata is not None:
        built._metadata = OrderedDict(metadata)  # type: ignore[attr-defined]
    return built


def _counter(keys: list[Any], children: list[Any], _: Any) -> Any:
    built: Counter[Any] = Counter()
    dict.update(built, zip(keys, children, strict=True))
    return built


def _namespace(keys: list[Any], children: list[Any], cls: Any) -> Any:
    return cls(**{f"name{number}": child for number, child in enumerate(children)})


def _table(keys: list[Any], children: list[Any], note: Any) -> Any:
    built = Table(zip(keys, children, strict=True))
    if note is not None:
        built.note = note  # type: ignore[attr-defined]
    return built


def _record(_: list[Any], children: list[Any], name: str) -> Any:
    return RECORDS[name](**dict(zip(field_names(name), children, strict=True)))


def field_names(record: str) -> tuple[str, ...]:
    """Name the fields of a registered namedtuple or dataclass."""
    cls: Any = RECORDS[record]
    return tuple(f.name for f in fields(cls)) if is_dataclass(cls) else tuple(cls._fields)


FACTORIES: dict[str, Any] = {"None": None, "int": int, "list": list, "dict": dict, "Ordered": OrderedDict}

CONTAINERS: dict[str, Callable[[list[Any], list[Any], Any], Any]] = {
    "dict": lambda keys, children, _: dict(zip(keys, children, strict=True)),
    "list": lambda _, children, __: children,
    "tuple": lambda _, children, __: tuple(children),
    "ordered": _ordered,
    "counter": _counter,
    "deque": lambda _, children, maxlen: deque(children, maxlen),
    "defaultdict": lambda keys, children, factory: defaultdict(
        FACTORIES[factory], zip(keys, children, strict=True)
    ),
    "record": _record,
    "namespace": lambda keys, children, _: _namespace(keys, children, argparse.Namespace),
    "simple namespace": lambda keys, children, _: _namespace(keys, children, SimpleNamespace),
    "mapping proxy": lambda keys, children, _: MappingProxyType(dict(zip(keys, children, strict=True))),
    "table": _table,
}


def _module(seed: int) -> torch.nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = torch.nn.Sequential(
            torch.nn.Embedding(5, 3), torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(3, 5)
        )
    # Tied weights, like those of an embedding and the last layer.
    model[3].weight = model[0].weight
    return model


def _optimizer(seed: int) -> Any:
    model = _module(seed)
    groups: list[dict[str, Any]] = [
        {"params": [model[0].weight]},
        {"params": list(model[1].parameters()), "lr": torch.tensor(0.5)},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.25)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    optimizer.step()
    return optimizer.state_dict()


def _scheduler(seed: int) -> Any:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(seed % 3 + 1))], lr=0.1)
    return torch.optim.lr_scheduler.MultiStepLR(
        optimizer, milestones=[seed + 1, seed + 1, seed + 4]
    ).state_dict()


def _coded(seed: int) -> Coded:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-128, 128, (3, 4), dtype=torch.int8, generator=generator)
    return Coded(codes, torch.rand(3, 1, generator=generator), Progress(Level.LOW, (torch.float32, None)))


def _quantized(seed: int) -> torch.Tensor:
    values = torch.rand(3, 4, generator=torch.Generator().manual_seed(seed))
    scales, zeros = values[:, 0] + 0.5, torch.arange(3) + seed
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates them
        return torch.quantize_per_channel(values, scales, zeros, 0, torch.qint32)


PREFABS: dict[str, Callable[[int], Any]] = {
    "tensor subclasses": lambda seed: [_coded(seed), Coded(_coded(seed), torch.ones(1) * seed, None)],
    "quantized": _quantized,
    "result of max": lambda seed: torch.max(torch.tensor([[1.0, seed], [3.0, 2.0]]), 1),
    "module": lambda seed: _module(seed).state_dict(),
    "module with keep_vars": lambda seed: _module(seed).state_dict(keep_vars=True),
    "optimizer": _optimizer,
    "scheduler": _scheduler,
    "python random": lambda seed: random.Random(seed).getstate(),
    "numpy legacy random": lambda seed: np.random.RandomState(seed).get_state(legacy=False),
    "numpy random": lambda seed: np.random.default_rng(seed).bit_generator.state,
    "torch random": lambda seed: torch.Generator().manual_seed(seed).get_state(),
}
