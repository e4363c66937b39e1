"""Strategies for local states that match a given state, and for some that do not.

A target has the tree, dtypes and shapes of the state. Everything else may differ: strides, offsets, the bytes
around it, ties, conj and neg bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from hypothesis import strategies as st

from tests.properties.strategies import Draw, Shape, dense_stride, row_major, span, stride_for
from tests.support.states import (
    DTYPES,
    NUMPY_DTYPES,
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
)

_REAL_NEG = ("float16", "float32", "float64", "bfloat16")
# Prefabs whose structure depends on the seed.
_SHAPED_BY_SEED = ("scheduler",)


@dataclass
class _TargetBuilder:
    """A target under construction: leaves with their own memory are placed in the first pool."""

    leaves: list[Leaf] = field(default_factory=list)
    mirrors: dict[int, tuple[int, int]] = field(default_factory=dict)
    pools: list[Pool] = field(default_factory=lambda: [Pool(0, 1)])
    end: int = 0

    def add(self, leaf: Leaf) -> int:
        self.leaves.append(leaf)
        return len(self.leaves) - 1

    def reserve(self, draw: Draw, nbytes: int, unit: int) -> int:
        """Reserve bytes of the first pool, with unused bytes around them."""
        start: int = -(-(self.end + draw(st.integers(0, 9))) // unit) * unit
        self.end = start + nbytes + draw(st.integers(0, 3))
        return start

    def mirror(self, draw: Draw, pool: int, nbytes: int) -> tuple[int, int]:
        """Return a pool with the layout of the state's pool, and the shift of all offsets in it."""
        if pool not in self.mirrors:
            shift = draw(st.sampled_from((0, 16, 48)))
            self.mirrors[pool] = (len(self.pools), shift)
            self.pools.append(
                Pool(nbytes + shift + draw(st.integers(0, 9)), draw(st.integers(0, 99)), draw(st.booleans()))
            )
        return self.mirrors[pool]

    def recipe(self, draw: Draw, tree: Tree) -> Recipe:
        first = Pool(self.end, draw(st.integers(0, 99)), draw(st.booleans()))
        return Recipe(tree, tuple(self.leaves), (first, *self.pools[1:]))


@st.composite
def targets(draw: Draw, recipe: Recipe) -> Recipe:
    """Draw a target that matches the state: leaves that share memory in it share memory in the state."""
    site = _TargetBuilder()
    own = [draw(st.booleans()) for _ in recipe.leaves]
    chosen = [
        _relaid(draw, site, leaf, recipe.pools, alone) for leaf, alone in zip(recipe.leaves, own, strict=True)
    ]
    numbers = [site.add(leaf) for leaf in chosen]

    def place(leaf: int) -> Use:
        how = draw(st.sampled_from(("same object", "same object", "same memory", "elsewhere")))
        if how == "same memory" and not isinstance(chosen[leaf], Sparse):
            return Use(site.add(chosen[leaf]))
        if how == "elsewhere":
            return Use(site.add(_relaid(draw, site, recipe.leaves[leaf], recipe.pools, True)))
        return Use(numbers[leaf])

    def copy(tree: Tree) -> Tree:
        match tree:
            case Use(leaf):
                return place(leaf)
            case Node():
                return replace(tree, children=tuple(map(copy, tree.children)))
            case Prefab(kind, seed):
                return Prefab(kind, seed if kind in _SHAPED_BY_SEED else seed + 1)
            case Value():
                return draw(st.sampled_from((tree, Value("plain", "another value"))))  # type: ignore[no-any-return]

    return site.recipe(draw, copy(recipe.tree))


def _relaid(draw: Draw, site: _TargetBuilder, leaf: Leaf, pools: Sequence[Pool], alone: bool) -> Leaf:
    if isinstance(leaf, Sparse):
        values = _relaid(draw, site, leaf.values, pools, alone)
        assert isinstance(values, View)
        return replace(
            leaf,
            values=replace(values, conj=False, neg=False, grad=0),
            seed=leaf.seed + 1,
            coalesced=draw(st.booleans()),
        )
    if alone:
        return _own_array(draw, site, leaf) if isinstance(leaf, Array) else _own_view(draw, site, leaf)
    pool, shift = site.mirror(draw, leaf.pool, pools[leaf.pool].nbytes)
    if isinstance(leaf, Array):
        return replace(leaf, pool=pool, offset=leaf.offset + shift, writeable=True)
    moved = leaf.offset + shift // DTYPES[leaf.dtype].itemsize
    return replace(leaf, pool=pool, offset=moved, grad=_another_grad(draw, leaf))


def _another_grad(draw: Draw, view: View) -> int:
    differentiable = DTYPES[view.dtype].is_floating_point or DTYPES[view.dtype].is_complex
    return int(draw(st.integers(0, 3))) if differentiable else 0


def _own_view(draw: Draw, site: _TargetBuilder, view: View) -> View:
    """Draw another layout for a tensor, in its own memory; expanded dimensions may stay expanded."""
    dtype = DTYPES[view.dtype]
    kept = [d for d, step in enumerate(view.stride) if step or draw(st.booleans())]
    inner = dense_stride(draw, [view.shape[d] for d in kept], st.integers(0, 2))
    stride = [0] * len(view.shape)
    for d, step in zip(kept, inner, strict=True):
        stride[d] = step
    start = site.reserve(draw, span(view.shape, stride) * dtype.itemsize, dtype.itemsize)
    return View(
        0,
        view.dtype,
        view.shape,
        tuple(stride),
        start // dtype.itemsize,
        conj=dtype.is_complex and draw(st.booleans()),
        neg=(dtype.is_complex or view.dtype in _REAL_NEG) and draw(st.booleans()),
        grad=_another_grad(draw, view),
    )


def _own_array(draw: Draw, site: _TargetBuilder, array: Array) -> Array:
    size = NUMPY_DTYPES[array.dtype].itemsize
    step = size
    strides = [0] * len(array.shape)
    for axis in draw(st.permutations(range(len(array.shape)))):
        step += draw(st.integers(0, 3)) if size else 0
        strides[axis] = step
        step *= max(array.shape[axis], 1)
    nbytes = (
        0 if 0 in array.shape else size + sum((n - 1) * s for n, s in zip(array.shape, strides, strict=True))
    )
    first = site.reserve(draw, nbytes, 1)
    for axis, old in enumerate(array.strides):
        # An array with a negative stride is only received into one with a negative stride.
        if old < 0:
            first += max(array.shape[axis] - 1, 0) * strides[axis]
            strides[axis] = -strides[axis]
    return Array(0, array.dtype, array.shape, tuple(strides), first)


@st.composite
def overlays(draw: Draw, recipe: Recipe) -> Recipe:
    """Draw a target for a state of views in which all views may overlap."""
    nbytes = max(draw(st.sampled_from((64, 128, 32))), *(pool.nbytes for pool in recipe.pools))
    leaves = tuple(_overlaid(draw, leaf, nbytes) for leaf in recipe.leaves if isinstance(leaf, View))
    return Recipe(recipe.tree, leaves, (Pool(nbytes, 5),))


def _overlaid(draw: Draw, view: View, nbytes: int) -> View:
    dtype = DTYPES[view.dtype]
    stride = draw(st.sampled_from((view.stride, stride_for(draw, view.shape))))
    room = nbytes // dtype.itemsize - span(view.shape, stride)
    if room < 0:
        return view
    offset = draw(st.just(view.offset) | st.integers(0, room)) if view.offset <= room else 0
    conj = dtype.is_complex and draw(st.booleans())
    return replace(view, stride=stride, offset=offset, conj=conj)


@st.composite
def views_of_two_layouts(draw: Draw) -> tuple[Recipe, Recipe]:
    """Draw some views of a tensor, and the same views of a tensor of another layout."""
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    dtype = draw(st.sampled_from(("float32", "uint8", "complex64", "complex128", "int16", "float64")))
    sides = [
        View(
            0,
            dtype,
            shape,
            dense_stride(draw, shape, st.integers(0, 2)),
            draw(st.integers(0, 3)),
            conj=DTYPES[dtype].is_complex and draw(st.booleans()),
        )
        for _ in range(2)
    ]
    cuts = [_cut(draw, shape) for _ in range(draw(st.integers(1, 4)))]
    names = tuple(Value("plain", f"view {number}") for number in range(len(cuts)))
    tree = Node("dict", tuple(map(Use, range(len(cuts)))), names)
    source, target = (
        Recipe(tree, tuple(_sliced(side, cut) for cut in cuts), (_pool_for(side, seed),))
        for seed, side in enumerate(sides)
    )
    return source, target


Cut = tuple[tuple[int, ...], tuple[range, ...]]


def _cut(draw: Draw, shape: Shape) -> Cut:
    """Draw an order of the dimensions, and a slice of each."""
    kept = []
    for size in shape:
        start = draw(st.integers(0, size - 1))
        kept.append(range(start, draw(st.integers(start + 1, size)), draw(st.sampled_from((1, 1, 2)))))
    return tuple(draw(st.permutations(range(len(shape))))), tuple(kept)


def _sliced(view: View, cut: Cut) -> View:
    order, kept = cut
    offset = view.offset + sum(r.start * step for r, step in zip(kept, view.stride, strict=True))
    shape = tuple(len(kept[d]) for d in order)
    stride = tuple(view.stride[d] * kept[d].step for d in order)
    return replace(view, shape=shape, stride=stride, offset=offset)


def _pool_for(view: View, seed: int) -> Pool:
    return Pool((view.offset + span(view.shape, view.stride) + 2) * DTYPES[view.dtype].itemsize, seed)


@st.composite
def unfit_targets(draw: Draw, recipe: Recipe) -> tuple[Recipe, frozenset[str]]:
    """Draw a target for a flat state that has mismatches, and their paths."""
    target = draw(targets(recipe))
    assert isinstance(recipe.tree, Node)
    assert isinstance(target.tree, Node)
    places = list(range(len(target.tree.children)))
    wrong = draw(st.lists(st.sampled_from(places), min_size=1, unique=True)) if places else []
    leaves, pools = list(target.leaves), list(target.pools)
    items = dict(zip((str(key.data) for key in target.tree.keys), target.tree.children, strict=True))
    faulty = set()
    for place in wrong:
        name, child = f"leaf {place}", recipe.tree.children[place]
        kinds = ["gone", "other leaf"] if isinstance(child, Value) else ["gone", "value", "other leaf"]
        how = draw(st.sampled_from(kinds))
        faulty.add(name)
        if how == "gone":
            del items[name]
        elif how == "value":
            items[name] = Value("plain", 1)
        else:
            old = recipe.leaves[child.leaf] if isinstance(child, Use) else None
            leaves.append(_unlike(draw, old, len(pools)))
            pools.append(Pool(4096, 7))
            items[name] = Use(len(leaves) - 1)
    if not wrong or draw(st.booleans()):
        faulty.add("more")
        items["more"] = Value("plain", 1)
    names = draw(st.permutations(sorted(items)))
    tree = Node("dict", tuple(items[name] for name in names), tuple(Value("plain", name) for name in names))
    return Recipe(tree, tuple(leaves), tuple(pools)), frozenset(faulty)


def _unlike(draw: Draw, leaf: Leaf | None, pool: int) -> Leaf:
    """Draw a leaf that does not match the given one."""
    if isinstance(leaf, View):
        if draw(st.booleans()):
            dtype = draw(st.sampled_from(sorted(DTYPES.keys() - {leaf.dtype})))
            return View(pool, dtype, leaf.shape, row_major(leaf.shape))
        shape = _another_shape(draw, leaf.shape)
        return View(pool, leaf.dtype, shape, row_major(shape))
    if isinstance(leaf, Array):
        how = draw(st.sampled_from(("dtype", "shape", "read-only")))
        name = (
            draw(st.sampled_from(sorted(NUMPY_DTYPES.keys() - {leaf.dtype})))
            if how == "dtype"
            else leaf.dtype
        )
        shape = _another_shape(draw, leaf.shape) if how == "shape" else leaf.shape
        strides = tuple(step * NUMPY_DTYPES[name].itemsize for step in row_major(shape))
        return Array(pool, name, shape, strides, writeable=how != "read-only")
    if isinstance(leaf, Sparse):
        wider = (*leaf.size[:-1], leaf.size[-1] + 1)
        values = replace(leaf.values, pool=pool, stride=row_major(leaf.values.shape), offset=0)
        return replace(leaf, values=values, size=wider, grad=0)
    return View(pool, "float32", (1,), (1,))


def _another_shape(draw: Draw, shape: Shape) -> Shape:
    others = [(*shape, 1), (1, *shape), (*shape, 0)] + ([shape[:-1]] if shape else [])
    return tuple(draw(st.sampled_from([other for other in others if other != shape])))
