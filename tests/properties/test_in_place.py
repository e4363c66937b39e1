"""Random states received into random targets: exactly, or rejected without any change.

A failing example is printed as two recipes, of the state and of its target; `build` creates both again.
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
from torchferry.engine.push import ReceiveOptions, SendOptions, receive_state, send_state
from torchferry.tensors.describe import describe
from torchferry.testing import MemoryNetwork


def assert_received_in_place(source: Any, target: Any, result: Any) -> None:
    """Check that the result has the target's tensors with the values of the source, bit for bit."""
    sent, local, received = leaves_of(source), leaves_of(target), leaves_of(result)
    assert [path for path, _ in received] == [path for path, _ in sent]
    for (path, sent_leaf), (_, local_leaf), (_, leaf) in zip(sent, local, received, strict=True):
        assert leaf is local_leaf, f"{path}: not the target's own object"
        assert logical_bytes(leaf) == logical_bytes(sent_leaf), f"{path}: {sent_leaf} became {leaf}"
    assert_same(values_of(result), values_of(source))


@examples(200)
@given(st.data(), recipes(), CHUNKS, st.booleans())
def test_a_state_is_received_into_any_layout_and_other_bytes_keep_their_values(
    data: st.DataObject, recipe: Recipe, chunk_bytes: int, own_buffers: bool
) -> None:
    source, local = build(recipe), build(data.draw(targets(recipe)))
    neighbours = unused_contents(local.state, local.pools)
    result = transfer(source.state, into=local.state, chunk_bytes=chunk_bytes, own_buffers=own_buffers).state
    assert_received_in_place(source.state, local.state, result)
    assert unused_contents(local.state, local.pools) == neighbours


@examples(150)
@given(views_of_two_layouts(), CHUNKS, st.booleans())
def test_views_of_another_layout_are_received_exactly_or_rejected_without_a_change(
    recipes_of_both: tuple[Recipe, Recipe], chunk_bytes: int, own_buffers: bool
) -> None:
    """Views that share no local memory are always accepted. Views that share local memory may be rejected."""
    source, local = map(build, recipes_of_both)
    neighbours, before = unused_contents(local.state, local.pools), contents(local.pools)
    views = [extent for spec in describe(local.state).manifest.tensors for extent in footprint(spec)]
    try:
        result = transfer(
            source.state, into=local.state, chunk_bytes=chunk_bytes, own_buffers=own_buffers
        ).state
    except StateMismatch as mismatch:
        unexplained = [str(each) for each in mismatch.mismatches if "clone() one of" not in each.what]
        assert not unexplained
        assert not are_disjoint(views)
        assert contents(local.pools) == before
        return
    assert_received_in_place(source.state, local.state, result)
    assert unused_contents(local.state, local.pools) == neighbours


@examples(500)
@given(st.data(), flat_recipes(kinds=(draw_view,), most_pools=1, most_values=0), CHUNKS, st.booleans())
def test_two_different_values_are_never_written_to_one_byte(
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
        # Targets whose overlapping views get equal values only by chance may be rejected too.
        event("rejected, with a clash" if clash else "rejected, without a clash")
        assert contents(local.pools) == before
        return
    event("accepted")
    assert not clash, "accepted, although two values are written to one byte"
    assert_received_in_place(source.state, local.state, result)
    assert unused_contents(local.state, local.pools) == neighbours


@examples(200)
@given(st.data(), flat_recipes(), CHUNKS)
def test_every_mismatched_path_is_listed_and_nothing_is_changed(
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
    with pytest.raises(StateMismatch) as raised:
        receive_state(
            network.link(1), 0, ReceiveOptions(TIMEOUT_S, MAX_METADATA_BYTES, local_state=lambda: local.state)
        )
    assert {each.path for each in raised.value.mismatches} == faulty
    assert contents(local.pools) == before
    assert not any(network._boxes.values()), "some messages were not received"


@examples(100)
@given(st.data(), flat_recipes(), CHUNKS)
def test_without_strict_common_paths_are_received_and_others_are_unchanged(
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
    transferred = transfer(source, into=local.state, strict=False, chunk_bytes=chunk_bytes)
    assert {*transferred.report.dropped} == {format_path((name,)) for name in names if name not in kept}
    assert transferred.report.kept == ("own",)
    result = transferred.state
    assert list(result) == list(local.state)
    assert result.pop("own") == 1
    del local.state["own"]
    assert_received_in_place({name: source[name] for name in result}, local.state, result)
    assert unused_contents(local.state, local.pools) == neighbours


def _only(tree: Node, names: set[str], more: list[tuple[Value, Value | Use]]) -> Node:
    """Return a dict with `more`, and then some of the items of `tree`."""
    items = [item for item in zip(tree.keys, tree.children, strict=True) if item[0].data in names]
    keys, children = zip(*more, *items, strict=True)
    return Node("dict", children, keys)


@examples(30)
@given(st.data(), recipes())
def test_a_state_is_received_in_place_in_another_process(
    pair: Cluster, data: st.DataObject, recipe: Recipe
) -> None:
    target = data.draw(targets(recipe))
    _, difference = pair.run_each([(send, (recipe,)), (receive_in_place, (recipe, target))])
    assert not difference, difference


def receive_in_place(rank: int, recipe: Recipe, target: Recipe) -> str:
    """In rank 1: receive the state into the target, and return the difference."""
    local = build(target)
    neighbours = unused_contents(local.state, local.pools)
    result = PGTransport(dist.group.WORLD, TIMEOUT_S, "cpu", lambda: local.state).recv_checkpoint(0)
    try:
        assert_received_in_place(build(recipe).state, local.state, result)
        assert unused_contents(local.state, local.pools) == neighbours, "other bytes were overwritten"
    except AssertionError as error:
        return str(error) or repr(error)
    return ""
