"""Random states into random targets: what fits lands, and only there; what does not fit touches nothing.

A failing example is printed as two recipes, of the state and of its target; `build` makes both again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import event, given
from hypothesis import strategies as st

from tests.properties.memory import (
    contents,
    leaves_of,
    logical_bytes,
    unused_contents,
    values_of,
    writes_clash,
)
from tests.properties.strategies import draw_view, flat_recipes, recipes
from tests.properties.targets import overlays, targets, unfit_targets, views_of_two_layouts
from tests.properties.test_roundtrip import CHUNKS, TIMEOUT_S, send
from tests.support.cluster import Cluster
from tests.support.equality import assert_same
from tests.support.sizes import examples
from tests.support.states import Node, Recipe, Use, Value, build
from tests.support.transfer import transfer
from torchferry import PGTransport, StateMismatch
from torchferry.core.extents import are_disjoint, footprint
from torchferry.core.push import MAX_METADATA_BYTES
from torchferry.core.tree import format_path
from torchferry.engine import ReceiveOptions, SendOptions, receive_state, send_state
from torchferry.tensors.describe import describe
from torchferry.testing import MemoryNetwork


def assert_landed(source: Any, target: Any, result: Any) -> None:
    """Check that the result is the source in the target's own tensors, bit for bit in value."""
    sent, local, received = leaves_of(source), leaves_of(target), leaves_of(result)
    assert [path for path, _ in received] == [path for path, _ in sent]
    for (path, theirs), (_, ours), (_, leaf) in zip(sent, local, received, strict=True):
        assert leaf is ours, f"{path}: not the target's own object"
        assert logical_bytes(leaf) == logical_bytes(theirs), f"{path}: {theirs} became {leaf}"
    assert_same(values_of(result), values_of(source))


@examples(200)
@given(st.data(), recipes(), CHUNKS, st.booleans())
def test_a_state_lands_in_any_layout_and_its_neighbours_keep_their_values(
    data: st.DataObject, recipe: Recipe, chunk_bytes: int, own_buffers: bool
) -> None:
    source, local = build(recipe), build(data.draw(targets(recipe)))
    neighbours = unused_contents(local.state, local.pools)
    result = transfer(source.state, into=local.state, chunk_bytes=chunk_bytes, own_buffers=own_buffers).state
    assert_landed(source.state, local.state, result)
    assert unused_contents(local.state, local.pools) == neighbours


@examples(150)
@given(views_of_two_layouts(), CHUNKS, st.booleans())
def test_views_of_another_layout_are_received_exactly_or_refused_untouched(
    recipes_of_both: tuple[Recipe, Recipe], chunk_bytes: int, own_buffers: bool
) -> None:
    """Views that share no local memory always fit. Views that do are refused: clone() one of them."""
    source, local = map(build, recipes_of_both)
    neighbours, before = unused_contents(local.state, local.pools), contents(local.pools)
    views = [extent for spec in describe(local.state).manifest.tensors for extent in footprint(spec)]
    try:
        result = transfer(
            source.state, into=local.state, chunk_bytes=chunk_bytes, own_buffers=own_buffers
        ).state
    except StateMismatch as refusal:
        unexplained = [str(each) for each in refusal.mismatches if "clone() one of" not in each.what]
        assert not unexplained
        assert not are_disjoint(views)
        assert contents(local.pools) == before
        return
    assert_landed(source.state, local.state, result)
    assert unused_contents(local.state, local.pools) == neighbours


@examples(500)
@given(st.data(), flat_recipes(kinds=(draw_view,), most_pools=1, most_values=0), CHUNKS, st.booleans())
def test_two_different_values_are_never_put_in_one_place(
    data: st.DataObject, recipe: Recipe, chunk_bytes: int, own_buffers: bool
) -> None:
    source, local = build(recipe), build(data.draw(overlays(recipe)))
    neighbours, before = unused_contents(local.state, local.pools), contents(local.pools)
    clash = writes_clash(source.state, local.state)
    try:
        result = transfer(
            source.state, into=local.state, chunk_bytes=chunk_bytes, own_buffers=own_buffers
        ).state
    except StateMismatch:
        # Targets whose views agree only by chance may be refused too.
        event("refused, and rightly" if clash else "refused, though it happens to agree")
        assert contents(local.pools) == before
        return
    event("accepted")
    assert not clash, "accepted, though two values go to one place"
    assert_landed(source.state, local.state, result)
    assert unused_contents(local.state, local.pools) == neighbours


@examples(200)
@given(st.data(), flat_recipes(), CHUNKS)
def test_what_does_not_fit_is_refused_path_by_path_and_nothing_is_touched(
    data: st.DataObject, recipe: Recipe, chunk_bytes: int
) -> None:
    target, faulty = data.draw(unfit_targets(recipe))
    source, local = build(recipe), build(target)
    before = contents(local.pools)
    network = MemoryNetwork()
    send_state(
        network.link(0),
        [1],
        source.state,
        SendOptions(TIMEOUT_S, MAX_METADATA_BYTES, chunk_bytes=chunk_bytes),
    )
    with pytest.raises(StateMismatch) as refusal:
        receive_state(
            network.link(1), 0, ReceiveOptions(TIMEOUT_S, MAX_METADATA_BYTES, target=lambda: local.state)
        )
    assert {mismatch.path for mismatch in refusal.value.mismatches} == faulty
    assert contents(local.pools) == before
    assert not any(network._boxes.values()), "the sender is left with messages that nobody took"


@examples(100)
@given(st.data(), flat_recipes(), CHUNKS)
def test_when_lenient_what_both_have_lands_and_the_rest_is_left_alone(
    data: st.DataObject, recipe: Recipe, chunk_bytes: int
) -> None:
    target = data.draw(targets(recipe))
    assert isinstance(recipe.tree, Node)
    assert isinstance(target.tree, Node)
    names = [str(key.data) for key in recipe.tree.keys]
    kept = data.draw(st.sets(st.sampled_from(names))) if names else set()
    source = build(recipe).state
    local = build(
        replace(target, tree=_only(target.tree, kept, [(Value("plain", "own"), Value("plain", 1))]))
    )
    neighbours = unused_contents(local.state, local.pools)
    if not kept:
        with pytest.raises(StateMismatch, match="no such path"):
            transfer(source, into=local.state, strict=False, chunk_bytes=chunk_bytes)
        return
    ferried = transfer(source, into=local.state, strict=False, chunk_bytes=chunk_bytes)
    assert {*ferried.report.dropped} == {format_path((name,)) for name in names if name not in kept}
    assert ferried.report.kept == ("own",)
    result = ferried.state
    assert list(result) == list(local.state)
    assert result.pop("own") == 1
    del local.state["own"]
    assert_landed({name: source[name] for name in result}, local.state, result)
    assert unused_contents(local.state, local.pools) == neighbours


def _only(tree: Node, names: set[str], more: list[tuple[Value, Value | Use]]) -> Node:
    """Keep some items of a dict, and add others before them."""
    items = [item for item in zip(tree.keys, tree.children, strict=True) if item[0].data in names]
    keys, children = zip(*more, *items, strict=True)
    return Node("dict", children, keys)


@examples(30)
@given(st.data(), recipes())
def test_a_state_lands_in_place_in_another_process(
    pair: Cluster, data: st.DataObject, recipe: Recipe
) -> None:
    target = data.draw(targets(recipe))
    _, difference = pair.run_each([(send, (recipe,)), (receive_in_place, (recipe, target))])
    assert not difference, difference


def receive_in_place(rank: int, recipe: Recipe, target: Recipe) -> str:
    """In rank 1: receive the state into the target, and say what is wrong with the result."""
    local = build(target)
    neighbours = unused_contents(local.state, local.pools)
    result = PGTransport(dist.group.WORLD, TIMEOUT_S, "cpu", lambda: local.state).recv_checkpoint(0)
    try:
        assert_landed(build(recipe).state, local.state, result)
        assert unused_contents(local.state, local.pools) == neighbours, "neighbours were overwritten"
    except AssertionError as error:
        return str(error) or repr(error)
    return ""
