"""Hypothesis strategies for recipes of states (tests/support/states.py): small states of all kinds.

Sizes are small on purpose. Errors of layouts appear with three items as with three million, and leaves that
share a few hundred bytes overlap in more ways than those of a real state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import strategies as st

from tests.support.states import (
    DTYPES,
    ENUMS,
    FACTORIES,
    NUMPY_DTYPES,
    PREFABS,
    RECORDS,
    Array,
    Leaf,
    Node,
    Pool,
    Prefab,
    Recipe,
    Sparse,
    Tree,
    Use,
    Value,
    View,
    field_names,
    make_value,
)

Draw = Callable[[st.SearchStrategy[Any]], Any]
Shape = tuple[int, ...]

_SPARSE_DTYPES = ("float32", "bool", "uint8", "int32", "int64", "bfloat16", "float16", "float64", "complex64")
_TORCH_NAMES = (
    *("float32", "bfloat16", "float8_e4m3fn", "uint4", "bits8", "complex32", "quint8"),
    *("strided", "sparse_csr", "channels_last", "preserve_format", "per_channel_affine"),
)


def _bits(nbytes: int, special: Sequence[str]) -> st.SearchStrategy[str]:
    return st.sampled_from(special) | st.binary(min_size=nbytes, max_size=nbytes).map(bytes.hex)


_FLOATS = (
    "0" * 16,
    "8" + "0" * 15,
    "7ff0000000000000",
    "fff8000000000000",
    "7ff4000000000001",
    "3ff8000000000000",
)
_TEXT = st.text(st.characters(exclude_categories=()), max_size=4)
_INTS = st.sampled_from((0, -1, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**64, 2**64 - 1)) | st.integers()


def _numpy_values() -> st.SearchStrategy[Value]:
    def content(name: str) -> st.SearchStrategy[Value]:
        size = NUMPY_DTYPES[name].itemsize
        return st.binary(min_size=size, max_size=size).map(lambda data: Value("numpy", (name, data.hex())))

    # A copy of a long double need not keep its padding.
    names = [name for name, dtype in NUMPY_DTYPES.items() if dtype.itemsize and name != "g"]
    return st.sampled_from(names).flatmap(content)


def _plain(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Value]:
    return values.map(lambda value: Value("plain", value))


_SIMPLE = st.one_of(
    _plain(st.none() | st.booleans() | _INTS | _TEXT | st.binary(max_size=4)),
    st.sampled_from(
        [Value("enum", (name, member)) for name, cls in ENUMS.items() for member in cls.__members__]
    ),
    st.sampled_from((0, 3, (1 << 70) + 1)).map(lambda data: Value("flags", data)),
    st.sampled_from(_TORCH_NAMES).map(lambda name: Value("torch", name)),
    st.sampled_from(("cpu", "cpu:0", "cuda", "cuda:3", "meta")).map(lambda name: Value("device", name)),
    st.lists(st.integers(0, 2**40), max_size=3).map(lambda sizes: Value("size", tuple(sizes))),
)
_ZONES = st.none() | st.integers(-1439, 1439)
_TIMES = st.tuples(*(st.integers(0, most) for most in (23, 59, 59, 999_999)), _ZONES, st.integers(0, 1))
_DATES = st.tuples(st.integers(1, 9999), st.integers(1, 12), st.integers(1, 28))
_MORE = st.one_of(
    _TEXT.map(lambda text: Value("text", text)),
    _TEXT.filter(lambda text: "\0" not in text).map(lambda text: Value("path", text)),
    st.decimals().map(lambda number: Value("decimal", str(number))),
    st.tuples(_INTS, _INTS.filter(bool)).map(lambda data: Value("fraction", data)),
    st.integers(0, 2**128 - 1).map(lambda number: Value("uuid", number)),
    st.tuples(*[st.integers(-(10**6), 10**6)] * 3).map(lambda data: Value("timedelta", data)),
    _TIMES.map(lambda data: Value("time", data)),
    _DATES.map(lambda data: Value("date", data)),
    st.tuples(_DATES, _TIMES).map(lambda pair: Value("datetime", pair[0] + pair[1])),
    st.sampled_from(sorted(NUMPY_DTYPES)).map(lambda name: Value("numpy dtype", name)),
)
LARGE_VALUES = st.builds(
    Value,
    st.sampled_from(("large bytes", "large stream", "large array", "large bytearray")),
    st.tuples(st.integers((1 << 16) - 2, (1 << 16) + 9), st.integers(0, 9)),
)
_NUMBERS = _bits(8, _FLOATS).map(lambda data: Value("float", data)) | st.tuples(
    _bits(8, _FLOATS), _bits(8, _FLOATS)
).map(lambda pair: Value("complex", "".join(pair)))


def _made_of(values: st.SearchStrategy[Value], *kinds: str) -> st.SearchStrategy[Value]:
    return st.builds(Value, st.sampled_from(kinds), st.lists(values, max_size=3).map(tuple))


KEYS = _SIMPLE | _made_of(_SIMPLE | _made_of(_SIMPLE, "tuple"), "tuple", "frozenset")
VALUES = st.one_of(
    _SIMPLE,
    _NUMBERS,
    _numpy_values(),
    _made_of(_SIMPLE, "set", "frozenset"),
    st.binary(max_size=4).map(lambda data: Value("bytearray", data)),
    st.tuples(_INTS, _INTS, _INTS.filter(bool)).map(lambda data: Value("range", data)),
    st.tuples(*[st.none() | _INTS] * 3).map(lambda data: Value("slice", data)),
    st.just(Value("ellipsis")),
    _MORE,
    st.tuples(st.binary(max_size=4), st.integers(0, 6)).map(lambda data: Value("stream", data)),
    st.binary(max_size=4).map(lambda data: Value("array", data)),
    st.sampled_from(("float32", "float8_e5m2")).map(lambda name: Value("finfo", name)),
)


def fit(shape: Sequence[int], stride: Sequence[int], capacity: int) -> Shape:
    """Shrink a shape until its tensor spans at most `capacity` items."""
    sizes = list(shape)
    if 0 in sizes:
        return tuple(sizes)
    if capacity == 0:
        return (0, *sizes[1:]) if sizes else ()
    while 1 + sum((n - 1) * step for n, step in zip(sizes, stride, strict=True)) > capacity:
        widest = max(range(len(sizes)), key=lambda d: (sizes[d] - 1) * stride[d])
        sizes[widest] -= 1
    return tuple(sizes)


def span(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Count the items from the first to the last, with gaps."""
    if 0 in shape:
        return 0
    return 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))


def dense_stride(draw: Draw, shape: Sequence[int], gaps: st.SearchStrategy[int]) -> Shape:
    """Draw strides for a shape such that no two items share memory: any order, with gaps."""
    stride = [1] * len(shape)
    step = 1
    for dim in draw(st.permutations(range(len(shape)))):
        step += draw(gaps)
        stride[dim] = step
        step *= max(shape[dim], 1)
    return tuple(stride)


def _tight_stride(draw: Draw, shape: Sequence[int]) -> Shape:
    """Draw strides that barely nest: each row begins as soon as the one before has ended."""
    stride = [1] * len(shape)
    reach = 0
    for dim in draw(st.permutations(range(len(shape)))):
        stride[dim] = reach + 1 + draw(st.integers(0, 1))
        reach += (max(shape[dim], 1) - 1) * stride[dim]
    return tuple(stride)


def row_major(shape: Sequence[int]) -> Shape:
    """Return the strides of a contiguous tensor."""
    stride: list[int] = []
    step = 1
    for size in reversed(shape):
        stride.insert(0, step)
        step *= max(size, 1)
    return tuple(stride)


_SHAPES = st.lists(st.sampled_from((2, 1, 3, 0, 4, 5)), max_size=4)


def stride_for(draw: Draw, shape: Sequence[int]) -> Shape:
    """Draw strides for a shape: in order, permuted, with gaps, expanded, sliding, interlocked."""
    form = draw(st.sampled_from(("row major", "dense", "gaps", "tight", "expanded", "windows", "free")))
    if form == "row major":
        return row_major(shape)
    if form == "dense":
        return dense_stride(draw, shape, st.just(0))
    if form == "gaps":
        return dense_stride(draw, shape, st.integers(0, 2))
    if form == "tight":
        return _tight_stride(draw, shape)
    if form == "expanded":
        inner = dense_stride(draw, shape, st.integers(0, 1))
        return tuple(step * draw(st.booleans()) for step in inner)
    highest = 2 if form == "windows" else 7
    return tuple(draw(st.integers(1 if form == "windows" else 0, highest)) for _ in shape)


def _layout(draw: Draw, capacity: int, shape: Sequence[int] | None = None) -> tuple[Shape, Shape, int]:
    wanted = draw(_SHAPES) if shape is None else shape
    stride = stride_for(draw, wanted)
    fitted = fit(wanted, stride, capacity)
    stride = stride[: len(fitted)]
    return fitted, stride, draw(st.integers(0, max(capacity - span(fitted, stride), 0)))


def _grad(draw: Draw, dtype: str) -> int:
    kind = DTYPES[dtype]
    return (
        int(draw(st.integers(0, 3)))
        if kind.is_floating_point or kind.is_complex
        else draw(st.sampled_from((0, 2)))
    )


def draw_view(draw: Draw, pools: Sequence[Pool]) -> View:
    """Draw a strided tensor somewhere in the pools."""
    pool = draw(st.integers(0, len(pools) - 1))
    name = draw(st.sampled_from(("float32", "uint8", "complex64", *sorted(DTYPES))))
    dtype = DTYPES[name]
    shape, stride, offset = _layout(draw, pools[pool].nbytes // dtype.itemsize)
    if not shape and not pools[pool].nbytes // dtype.itemsize:
        shape, stride = (0,), (1,)
    return View(
        pool,
        name,
        shape,
        stride,
        offset,
        conj=dtype.is_complex and draw(st.booleans()),
        neg=(dtype.is_complex or name in ("float16", "float32", "float64", "bfloat16"))
        and draw(st.booleans()),
        grad=_grad(draw, name),
    )


def draw_array(draw: Draw, pools: Sequence[Pool]) -> Array:
    """Draw an ndarray somewhere in the pools."""
    pool = draw(st.integers(0, len(pools) - 1))
    name = draw(st.sampled_from(sorted(NUMPY_DTYPES)))
    size = NUMPY_DTYPES[name].itemsize
    nbytes = pools[pool].nbytes
    # The unit of the strides need not be the item size: items may overlap and be unaligned.
    unit = max(draw(st.sampled_from((size, size, 1))), 1)
    shape, stride, offset = _layout(draw, max(nbytes - size, 0) // unit if nbytes >= size else 0)
    if nbytes < size or (not shape and not nbytes):
        shape, stride = (0,), (1,)
    # numpy gives arrays of items without bytes zero strides.
    strides = [step * unit if size else 0 for step in stride]
    first = min(offset * unit, nbytes)
    for axis, count in enumerate(shape):
        if count and 0 not in shape and draw(st.booleans()) and draw(st.booleans()):
            first += (count - 1) * strides[axis]
            strides[axis] = -strides[axis]
    low = first + sum((n - 1) * step for n, step in zip(shape, strides, strict=True) if step < 0 and n)
    start = draw(st.sampled_from((0, low))) if 0 not in shape else 0
    return Array(pool, name, shape, tuple(strides), first, start, writeable=draw(st.integers(0, 3)) > 0)


def draw_sparse(draw: Draw, pools: Sequence[Pool]) -> Sparse:
    """Draw a sparse tensor whose values are somewhere in the pools."""
    layout = draw(st.sampled_from(("coo", "coo", "csr", "csc", "bsr", "bsc")))
    pool = draw(st.integers(0, len(pools) - 1))
    dtype = draw(st.sampled_from(_SPARSE_DTYPES))
    size = tuple(draw(st.lists(st.integers(1, 3), min_size=2, max_size=3 if layout == "coo" else 2)))
    places = 1
    for n in size:
        places *= n
    nnz = draw(st.integers(0, min(places, 4)))
    beyond = draw(st.lists(st.integers(1, 2), max_size=2))
    blocks = [draw(st.integers(1, 2)), draw(st.integers(1, 2))] if layout.startswith("b") else []
    shape = [nnz, *blocks, *beyond]
    capacity = pools[pool].nbytes // DTYPES[dtype].itemsize
    stride = stride_for(draw, shape)
    if span(shape, stride) > capacity:
        stride = row_major(shape)
    if span(shape, stride) > capacity:
        shape[0] = 0
    offset = draw(st.integers(0, max(capacity - span(shape, stride), 0)))
    view = View(pool, dtype, tuple(shape), stride, offset)
    return Sparse(
        layout,
        size,
        view,
        seed=draw(st.integers(0, 99)),
        coalesced=draw(st.booleans()),
        index_dtype=draw(st.sampled_from(("int64", "int32"))),
        grad=_grad(draw, dtype),
    )


MakeLeaf = Callable[[Draw, Sequence[Pool]], Leaf]
_ALL_KINDS: tuple[MakeLeaf, ...] = (draw_view, draw_view, draw_view, draw_view, draw_array, draw_sparse)


def draw_leaves(
    draw: Draw, pools: Sequence[Pool], most: int, kinds: Sequence[MakeLeaf] = _ALL_KINDS
) -> tuple[Leaf, ...]:
    """Draw some leaves of the given kinds."""
    makers = draw(st.lists(st.sampled_from(kinds), max_size=most))
    return tuple(make(draw, pools) for make in makers)


@st.composite
def _pools(draw: Draw, most: int = 3) -> tuple[Pool, ...]:
    sizes = draw(st.lists(st.sampled_from((64, 200, 48, 17, 0, 512)), min_size=1, max_size=most))
    return tuple(Pool(size, draw(st.integers(0, 999)), draw(st.booleans())) for size in sizes)


def _containers(children: st.SearchStrategy[Tree]) -> st.SearchStrategy[Node]:
    @st.composite
    def container(draw: Draw) -> Node:
        kind = draw(
            st.sampled_from(
                (
                    *("dict", "list", "tuple", "ordered", "counter", "deque", "defaultdict", "record"),
                    *("namespace", "simple namespace", "mapping proxy", "table"),
                )
            )
        )
        if kind == "record":
            name = draw(st.sampled_from(sorted(RECORDS)))
            return Node(kind, tuple(draw(children) for _ in field_names(name)), extra=name)
        within = tuple(draw(st.lists(children, max_size=3)))
        if kind in ("list", "tuple", "namespace", "simple namespace"):
            return Node(kind, within)
        if kind == "deque":
            return Node(kind, within, extra=draw(st.none() | st.integers(len(within), 9)))
        keys = draw(st.lists(KEYS, min_size=len(within), max_size=len(within), unique_by=make_value))
        extra = None
        if kind == "defaultdict":
            extra = draw(st.sampled_from(sorted(FACTORIES)))
        elif kind == "ordered" and draw(st.booleans()):
            extra = {"": {"version": draw(_INTS)}, draw(_TEXT): {}}
        elif kind == "table":
            extra = draw(st.none() | _TEXT)
        return Node(kind, within, tuple(keys), extra)

    return container()


@st.composite
def recipes(draw: Draw, most_leaves: int = 7) -> Recipe:
    """Draw a recipe of a state: every leaf is used in at least one place of the tree."""
    pools = draw(_pools())
    leaves = draw_leaves(draw, pools, most_leaves)
    twigs: list[st.SearchStrategy[Tree]] = [
        VALUES,
        st.builds(Prefab, st.sampled_from(sorted(PREFABS)), st.integers(0, 9)),
    ]
    if leaves:
        uses = st.integers(0, len(leaves) - 1).map(Use)
        twigs = [uses, uses, VALUES, uses, VALUES, uses, *twigs[1:]]
    branches = st.recursive(st.one_of(twigs), _containers, max_leaves=6)
    trees: list[Tree] = [*map(Use, range(len(leaves))), *draw(st.lists(branches, max_size=3))]
    if not trees:
        return Recipe(draw(branches), leaves, pools)
    keys = draw(st.lists(KEYS, min_size=len(trees), max_size=len(trees), unique_by=make_value))
    return Recipe(Node("dict", tuple(trees), tuple(keys)), leaves, pools)


@st.composite
def flat_recipes(
    draw: Draw, kinds: Sequence[MakeLeaf] = _ALL_KINDS, most_pools: int = 3, most_values: int = 1
) -> Recipe:
    """Draw a recipe of a dict of leaves, whose keys have the numbers of the leaves."""
    pools = draw(_pools(most_pools))
    leaves = draw_leaves(draw, pools, 5, kinds)
    children = (*map(Use, range(len(leaves))), *draw(st.lists(VALUES, max_size=most_values)))
    keys = tuple(Value("plain", f"leaf {number}") for number in range(len(children)))
    return Recipe(Node("dict", children, keys), leaves, pools)
