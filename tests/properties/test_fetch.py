"""Random states are served and fetched: fresh, into random targets, again, and atomically."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

import torchferry
from tests.properties.memory import contents, sharing, unused_contents, used_bytes
from tests.properties.strategies import flat_recipes, recipes
from tests.properties.targets import targets, unfit_targets
from tests.properties.test_in_place import assert_received_in_place
from tests.support.equality import assert_same
from tests.support.sizes import examples
from tests.support.states import Recipe, build
from torchferry.engine.pull import published

CHUNKS = st.sampled_from((1 << 20, 16, 48, 64, 1000))


@contextmanager
def served(state: object, chunk_bytes: int, *, snapshot: bool = True) -> Iterator[torchferry.Source]:
    with (
        patch.object(published, "PULL_CHUNK_BYTES", chunk_bytes),
        torchferry.serve(state, version=1, snapshot=snapshot) as source,
    ):
        yield source


@examples(150)
@given(recipes(), CHUNKS, st.booleans(), st.booleans())
def test_a_state_is_fetched_exactly(recipe: Recipe, chunk_bytes: int, snapshot: bool, verify: bool) -> None:
    built = build(recipe)
    with served(built.state, chunk_bytes, snapshot=snapshot) as source:
        got = torchferry.fetch(source.address, verify=verify, timeout=20)
    assert_same(got.state, build(recipe).state)
    assert sharing(got.state) == sharing(built.state)
    assert_same(built.state, build(recipe).state)
    assert got.report.bytes_moved == got.report.bytes_total == len(used_bytes(built.state))
    assert got.report.confirmed


@examples(150)
@given(st.data(), recipes(), CHUNKS, st.booleans())
def test_a_state_is_fetched_into_any_layout_and_other_bytes_keep_their_values(
    data: st.DataObject, recipe: Recipe, chunk_bytes: int, atomic: bool
) -> None:
    source, local = build(recipe), build(data.draw(targets(recipe)))
    neighbours = unused_contents(local.state, local.pools)
    with served(source.state, chunk_bytes) as serving:
        got = torchferry.fetch(serving.address, into=local.state, atomic=atomic, timeout=20)
        assert_received_in_place(source.state, local.state, got.state)
        again = torchferry.fetch(serving.address, into=lambda: local.state, compare=True, timeout=20)
    assert_received_in_place(source.state, local.state, again.state)
    assert unused_contents(local.state, local.pools) == neighbours
    assert again.report.bytes_moved + again.report.bytes_skipped == again.report.bytes_total


@examples(60)
@given(recipes(), CHUNKS)
def test_a_state_that_is_there_already_is_not_moved(recipe: Recipe, chunk_bytes: int) -> None:
    with served(build(recipe).state, chunk_bytes) as source:
        local = torchferry.fetch(source.address, timeout=20).state
        try:
            got = torchferry.fetch(source.address, into=local, compare=True, timeout=20)
        except torchferry.StateMismatch:
            # Views that overlap themselves can't be written.
            reject()
    assert got.report.bytes_moved == 0
    assert_same(local, build(recipe).state)


@examples(60)
@given(st.data(), flat_recipes(), CHUNKS, st.booleans())
def test_a_state_that_does_not_fit_is_refused_before_a_chunk_is_requested(
    data: st.DataObject, recipe: Recipe, chunk_bytes: int, atomic: bool
) -> None:
    target, faulty = data.draw(unfit_targets(recipe))
    local = build(target)
    before = contents(local.pools)
    with served(build(recipe).state, chunk_bytes) as source:
        with pytest.raises(torchferry.StateMismatch) as raised:
            torchferry.fetch(source.address, into=local.state, atomic=atomic, timeout=20)
        (reader,) = source.status().readers
    assert {each.path for each in raised.value.mismatches} == faulty
    assert contents(local.pools) == before
    assert (reader.state, reader.bytes_sent) == ("refused", 0)
    assert "does not fit" in reader.reason
