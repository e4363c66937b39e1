"""Comparing: every difference is listed with its path, before anything is written."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from torchferry.core.compare import Comparison, Extra, Rule, can_copy_as_block, compare
from torchferry.core.manifest import OPAQUE, VALUE, Branch, Leaf, Manifest, TensorSpec


def tensor(
    shape: tuple[int, ...] = (4,),
    stride: tuple[int, ...] = (1,),
    *,
    storage: int = 0,
    offset: int = 0,
    dtype: str = "float32",
) -> TensorSpec:
    return TensorSpec(dtype, 4, shape, stride, storage, offset)


def state(**tensors: TensorSpec) -> Manifest:
    names = tuple(tensors)
    return Manifest(
        -1,
        (Branch("dict", tuple(range(len(names))), names),),
        tuple(Leaf("tensor", (n,)) for n in range(len(names))),
        tuple(tensors.values()),
        (1 << 20,) * 4,
    )


def leaves(**kinds: Leaf) -> Manifest:
    return Manifest(
        -1, (Branch("dict", tuple(range(len(kinds))), tuple(kinds)),), tuple(kinds.values()), (), ()
    )


def properties_of(leaf: Leaf, specs: Sequence[TensorSpec]) -> dict[str, str]:
    shapes = ", ".join(str(list(spec.shape)) for spec in specs)
    return {"dtype": ", ".join(spec.dtype for spec in specs), "shape": shapes, "form": str(leaf.fixed)}


def compared(
    incoming: Manifest, local: Manifest, *, strict: bool = True, extra: Extra | None = None
) -> Comparison:
    return compare(
        incoming, local, properties_of, strict=strict, extra=extra or ("error" if strict else "drop")
    )


def mismatches(incoming: Manifest, local: Manifest, *, strict: bool = True) -> dict[str, str]:
    return {m.path: m.what for m in compared(incoming, local, strict=strict).mismatches}


def test_states_that_fit_have_no_mismatch() -> None:
    comparison = compared(state(a=tensor()), state(a=tensor((4,), (3,), offset=8)), strict=True)
    assert not comparison.mismatches
    assert [(pair.path, pair.incoming, pair.local) for pair in comparison.pairs] == [(("a",), 0, 0)]


def test_every_mismatch_is_listed_with_both_values() -> None:
    incoming = state(a=tensor((4,)), b=tensor(dtype="int32", storage=1), c=tensor(storage=2))
    local = state(a=tensor((2, 2), (2, 1)), b=tensor(storage=1), d=tensor(storage=2))
    found = {m.path: m for m in compared(incoming, local, strict=True).mismatches}
    assert set(found) == {"a", "b", "c", "d"}
    assert (found["a"].incoming, found["a"].local) == ("[4]", "[2, 2]")
    assert (found["b"].incoming, found["b"].local) == ("int32", "float32")
    assert found["c"].local == found["d"].incoming == "nothing"


def test_without_strict_only_common_paths_are_compared() -> None:
    assert mismatches(state(a=tensor(), b=tensor()), state(a=tensor(), c=tensor()), strict=False) == {}
    assert mismatches(state(a=tensor()), state(a=tensor((5,))), strict=False) == {"a": "shape"}


def test_a_key_with_a_dot_is_another_path_than_two_keys() -> None:
    nested = Manifest(
        -1, (Branch("dict", (-2,), ("a",)), Branch("dict", (0,), ("b",))), (Leaf(VALUE),), (), ()
    )
    flat = Manifest(-1, (Branch("dict", (0,), ("a.b",)),), (Leaf(VALUE),), (), ())
    assert len(compared(nested, flat, strict=True).mismatches) == 2


def test_a_value_is_not_a_tensor() -> None:
    assert mismatches(state(a=tensor()), leaves(a=Leaf(VALUE, traits=1))) == {"a": "kind"}
    assert mismatches(leaves(a=Leaf(VALUE)), state(a=tensor())) == {"a": "kind"}
    assert mismatches(leaves(a=Leaf(VALUE)), leaves(a=Leaf(OPAQUE))) == {}


def test_two_values_cannot_share_one_local_storage() -> None:
    incoming = state(a=tensor(storage=0), b=tensor(storage=1))
    assert mismatches(incoming, state(a=tensor(), b=tensor())).keys() == {"b"}
    assert mismatches(incoming, state(a=tensor(), b=tensor(offset=12))).keys() == {"b"}
    assert mismatches(incoming, state(a=tensor(), b=tensor(offset=16))) == {}


def test_neighbouring_columns_do_not_share_memory() -> None:
    incoming = state(a=tensor(storage=0), b=tensor(storage=1))
    assert mismatches(incoming, state(a=tensor((4,), (2,)), b=tensor((4,), (2,), offset=4))) == {}


@pytest.mark.parametrize("local_stride", [(2, 1), (1, 4)])
def test_tensors_tied_on_both_sides_fit(local_stride: tuple[int, int]) -> None:
    turned = (local_stride[1], local_stride[0])
    incoming = state(a=tensor((4, 2), (2, 1)), b=tensor((2, 4), (1, 2)))
    local = state(a=tensor((4, 2), local_stride), b=tensor((2, 4), turned))
    assert mismatches(incoming, local) == {}


def test_tensors_tied_at_the_sender_may_be_separate_here() -> None:
    assert mismatches(state(a=tensor(), b=tensor()), state(a=tensor(), b=tensor(storage=1))) == {}


def test_views_that_overlap_in_the_same_way_on_both_sides_fit_and_others_do_not() -> None:
    incoming = state(a=tensor(), b=tensor(offset=8))
    assert mismatches(incoming, state(a=tensor(offset=40), b=tensor(offset=48))) == {}
    assert mismatches(incoming, state(a=tensor(), b=tensor(offset=4))).keys() == {"b"}


def test_overlapping_local_views_of_another_layout_are_refused() -> None:
    """Both sides have a matrix and its first row, but the local matrix is transposed."""
    incoming = state(matrix=tensor((4, 2), (2, 1)), row=tensor((2,), (1,)))
    local = state(matrix=tensor((4, 2), (1, 4)), row=tensor((2,), (4,)))
    (mismatch,) = compared(incoming, local).mismatches
    assert mismatch.path == "row"
    assert "shares local memory with matrix" in mismatch.what
    assert "clone() one of" in mismatch.what


def test_each_path_that_conflicts_is_listed_once() -> None:
    incoming = state(a=tensor(storage=0), b=tensor(storage=1), c=tensor(storage=2), d=tensor(storage=1))
    found = compared(incoming, state(a=tensor(), b=tensor(), c=tensor(), d=tensor())).mismatches
    assert sorted(mismatch.path for mismatch in found) == ["b", "c", "d"]


def test_a_local_tensor_that_overlaps_itself_fits_only_the_same_layout() -> None:
    expanded = tensor((4,), (0,))
    assert mismatches(state(a=expanded), state(a=expanded)) == {}
    assert mismatches(state(a=tensor()), state(a=expanded)).keys() == {"a"}


def test_strides_of_dimensions_of_size_one_do_not_matter() -> None:
    assert can_copy_as_block(tensor((1, 4), (99, 1)), tensor((1, 4), (4, 1)))
    assert not can_copy_as_block(tensor((2, 4), (99, 1)), tensor((2, 4), (4, 1)))


def by_rule(rule: Rule, incoming: Manifest, local: Manifest, *, strict: bool, extra: Extra) -> Comparison:
    return compare(incoming, local, properties_of, strict=strict, extra=extra, rules=lambda path: rule)


NEW, OLD = state(a=tensor(), new=tensor()), state(a=tensor(), old=tensor())
OPTIONS: list[tuple[bool, Extra]] = [(True, "error"), (False, "drop"), (True, "fresh"), (False, "fresh")]


@pytest.mark.parametrize(("strict", "extra"), OPTIONS)
def test_where_entries_vary_nothing_is_a_mismatch_and_what_does_not_fit_is_fresh(
    strict: bool, extra: Extra
) -> None:
    comparison = by_rule("varies", NEW, OLD, strict=strict, extra=extra)
    assert not comparison.mismatches
    assert [pair.path for pair in comparison.pairs] == [("a",)]
    assert [path for path, _ in comparison.fresh] == [("new",)]
    assert not comparison.local_only
    other = by_rule("varies", state(a=tensor((8,))), state(a=tensor()), strict=strict, extra=extra)
    assert (other.pairs, [path for path, _ in other.fresh]) == ([], [("a",)])
    nothing_shared = by_rule("varies", state(x=tensor()), state(y=tensor()), strict=strict, extra=extra)
    assert not nothing_shared.mismatches


@pytest.mark.parametrize(
    ("strict", "extra", "paths"),
    [
        (True, "error", ["new", "old"]),
        (False, "drop", []),
        (True, "fresh", ["new", "old"]),
        (False, "fresh", ["new"]),
    ],
)
def test_fixed_entries_are_never_fresh(strict: bool, extra: Extra, paths: list[str]) -> None:
    comparison = by_rule("fixed", NEW, OLD, strict=strict, extra=extra)
    assert [each.path for each in comparison.mismatches] == paths
    assert not comparison.fresh


@pytest.mark.parametrize(("strict", "extra"), OPTIONS)
def test_required_entries_must_be_on_both_sides(strict: bool, extra: Extra) -> None:
    comparison = by_rule("required", NEW, OLD, strict=strict, extra=extra)
    assert [each.path for each in comparison.mismatches] == ["new", "old"]


def test_varying_entries_that_share_local_memory_are_received_as_fresh_tensors() -> None:
    separate = state(a=tensor(), b=tensor(storage=1), c=tensor(storage=2))
    shared = state(a=tensor(), b=tensor(offset=4), c=tensor(storage=2))
    comparison = by_rule("varies", separate, shared, strict=True, extra="error")
    assert not comparison.mismatches
    assert [path for path, _ in comparison.fresh] == [("a",), ("b",)]
    only_b = compare(
        separate,
        shared,
        properties_of,
        strict=True,
        extra="error",
        rules=lambda path: "varies" if path == ("b",) else None,
    )
    assert not only_b.mismatches
    assert [path for path, _ in only_b.fresh] == [("b",)]


def test_with_extra_fresh_a_tensor_takes_the_place_of_a_plain_value() -> None:
    local = leaves(a=Leaf(VALUE, traits=None))
    comparison = compared(state(a=tensor()), local, extra="fresh")
    assert not comparison.mismatches
    assert [path for path, _ in comparison.fresh] == [("a",)]
    assert compared(state(a=tensor()), leaves(a=Leaf(OPAQUE, fixed="on meta")), extra="fresh").mismatches
    assert compared(local, state(a=tensor()), extra="fresh").mismatches
