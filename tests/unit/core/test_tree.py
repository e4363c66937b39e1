"""The tree: every leaf has its path, and rebuilding puts every value at its path."""

from __future__ import annotations

import pytest

from torchferry.core.codec import encode_value
from torchferry.core.manifest import Branch, Leaf, Manifest, Special, Value
from torchferry.core.tree import format_path, merge, occurrences, rebuild, rebuild_places

STATE = Manifest(
    -1,
    (
        Branch("dict", (-2, 0, -4), ("model", "step", "empty")),
        Branch("list", (1, -3, 0)),
        Branch("dict", (2,), (7,)),
        Branch("list", ()),
    ),
    (Leaf("value", traits="zero"), Leaf("value", traits="one"), Leaf("value", traits="two")),
    (),
    (),
)


def test_every_path_is_listed_in_order_even_if_its_leaf_occurs_again() -> None:
    assert occurrences(STATE) == [
        (("model", 0), 1),
        (("model", 1, 7), 2),
        (("model", 2), 0),
        (("step",), 0),
    ]


def test_rebuilding_puts_values_at_their_paths() -> None:
    def build(index: int, children: list[object]) -> object:
        branch = STATE.branches[index]
        return children if branch.keys is None else dict(zip(branch.keys, children, strict=True))

    assert rebuild_places(STATE, ["a", "b", "c", "d"], build) == {
        "model": ["a", {7: "b"}, "c"],
        "step": "d",
        "empty": [],
    }
    assert rebuild(STATE, ["second", "a", "b"], build) == {
        "model": ["a", {7: "b"}, "second"],
        "step": "second",
        "empty": [],
    }


def test_a_state_may_be_a_single_leaf() -> None:
    single = Manifest(0, (), (Leaf("value"),), (), ())
    assert occurrences(single) == [((), 0)]
    assert rebuild(single, ["it"], lambda index, children: None) == "it"
    assert rebuild_places(single, ["it"], lambda index, children: None) == "it"


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        (("optimizer", "state", 0, "exp_avg"), "optimizer.state[0].exp_avg"),
        (("optimizer", "state", "0", "exp_avg"), "optimizer.state['0'].exp_avg"),
        (("model", "w0"), "model.w0"),
        (("model", "layers.0.weight"), "model.layers.0.weight"),
        ((0, "w"), "[0].w"),
        (("0",), "['0']"),
        (("a", "-1.5"), "a['-1.5']"),
        (("a", "1e3"), "a['1e3']"),
        (("a", "inf"), "a['inf']"),
        (("a", " 5"), "a[' 5']"),
        (("a", Special(16, encode_value([1, "x"]))), "a[(1, 'x')]"),
        (("a", ""), "a['']"),
        (("a", "b[0]"), "a['b[0]']"),
        (("a", True), "a[True]"),
        (("a", None), "a[None]"),
        (("a", 1.5), "a[1.5]"),
        (("a", "line\nbreak"), "a['line\\nbreak']"),
        ((), "(the state itself)"),
    ],
)
def test_paths_are_formatted_like_python_expressions(path: tuple[Value, ...], shown: str) -> None:
    assert format_path(path) == shown


@pytest.mark.parametrize("data", [encode_value([[1]]), b"\xc1", bytes(500)])
def test_a_key_that_cannot_be_decoded_is_shown_by_its_code(data: bytes) -> None:
    assert "16:" in format_path((Special(16, data),))


def test_a_merged_tree_has_the_paths_of_both() -> None:
    theirs = Manifest(
        -1,
        (
            Branch("odict", (-2, 0, -3), ("model", "step", "theirs")),
            Branch("list", (1, -5, 0, 1)),
            Branch("dict", (0, -4), ("x", "y")),
            Branch("list", (1,)),
            Branch("dict", (), ()),
        ),
        (Leaf("value"),) * 2,
        (),
        (),
    )
    merged = merge(STATE, theirs)
    assert [path for path, _ in occurrences(merged)] == [
        ("model", 0),
        ("model", 1, 7),
        ("model", 2),
        ("model", 3),
        ("step",),
        ("theirs", "x"),
        ("theirs", "y", 0),
    ]
    assert [merged.branches[0].kind, merged.branches[1].kind] == ["dict", "list"]
    local = dict(occurrences(STATE))
    for path, leaf in occurrences(merged):
        assert leaf == local.get(path, 0)


def test_a_list_merged_with_a_dict_becomes_the_dict_if_keys_are_added() -> None:
    ours = Manifest(-1, (Branch("list", (0,)),), (Leaf("value"),), (), ())
    theirs = Manifest(-1, (Branch("dict", (0, 0), (0, "more")),), (Leaf("value"),), (), ())
    merged = merge(ours, theirs)
    assert (merged.branches[0].kind, merged.branches[0].keys) == ("dict", (0, "more"))


def test_below_a_path_that_varies_the_merged_tree_is_the_incoming_one() -> None:
    ours = Manifest(
        -1,
        (
            Branch("dict", (-2, 0, -3), ("o", "x", "kept")),
            Branch("dict", (1, 2, -4), ("old", "both", "now_a_leaf")),
            Branch("dict", (1,), ("a",)),
            Branch("list", (1,)),
        ),
        (Leaf("value"),) * 3,
        (),
        (),
    )
    theirs = Manifest(
        -1,
        (
            Branch("dict", (-2, 0, 0), ("o", "x", "dropped")),
            Branch("odict", (0, -3, 0), ("now_a_leaf", "new", "both")),
            Branch("list", (0, 0)),
        ),
        (Leaf("value"),),
        (),
        (),
    )

    def varies(path: tuple[Value, ...]) -> bool:
        return path[:1] == ("o",)

    merged = merge(ours, theirs, adds=varies, varies=varies)
    assert [path for path, _ in occurrences(merged)] == [
        ("o", "now_a_leaf"),
        ("o", "new", 0),
        ("o", "new", 1),
        ("o", "both"),
        ("x",),
        ("kept", "a"),
    ]
    assert [branch.kind for branch in merged.branches] == ["dict", "odict", "dict", "list"]


def test_what_is_put_at_a_path_can_be_chosen_while_building() -> None:
    placed = []

    def place(path: tuple[Value, ...], built: object) -> object:
        placed.append(path)
        return "object" if path == ("model",) else built

    values = [leaf for _, leaf in occurrences(STATE)]
    built = rebuild_places(STATE, values, lambda number, children: [number, *children], place)
    assert built == [0, "object", 0, [3]]
    assert placed[-1] == ()
