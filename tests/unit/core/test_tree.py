"""The tree: every leaf at its path, and back into its place."""

from __future__ import annotations

from torchferry.core.codec import pack
from torchferry.core.manifest import Branch, Leaf, Manifest, Special
from torchferry.core.tree import format_path, occurrences, rebuild, rebuild_places

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


def test_every_place_is_listed_in_order_even_if_its_leaf_was_there_before() -> None:
    assert occurrences(STATE) == [
        (("model", 0), 1),
        (("model", 1, 7), 2),
        (("model", 2), 0),
        (("step",), 0),
    ]


def test_values_go_back_to_their_places() -> None:
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


def test_a_path_is_shown_as_people_write_it() -> None:
    assert format_path(("optimizer", "state", 0, "exp_avg")) == "optimizer.state.0.exp_avg"
    assert format_path(()) == "(the state itself)"
    assert "16" in format_path((Special(16, pack([1])),))
