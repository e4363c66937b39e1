"""Random states are sent and received: in one process, and between two over gloo.

A failing example is printed as the recipe of its state, which can be pasted into a test: `build(Recipe(…))`
creates the same state again, in any process.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from tests.properties.memory import sharing, used_bytes
from tests.properties.strategies import LARGE_VALUES, recipes
from tests.support.cluster import Cluster
from tests.support.equality import assert_same
from tests.support.sizes import examples
from tests.support.states import Recipe, Value, build, make_value
from tests.support.transfer import transfer
from torchferry import PGTransport
from torchferry.core.plan import CHUNK_BYTES
from torchferry.engine.workspace import Workspace

TIMEOUT_S = 20.0

CHUNKS = st.sampled_from((CHUNK_BYTES, 16, 48, 64, 1000))


@examples(250)
@given(recipes(), CHUNKS, st.booleans())
def test_a_state_arrives_exactly(recipe: Recipe, chunk_bytes: int, own_buffers: bool) -> None:
    sent = build(recipe).state
    received = transfer(sent, chunk_bytes=chunk_bytes, own_buffers=own_buffers).state
    assert_same(received, build(recipe).state)
    assert sharing(received) == sharing(sent)
    assert_same(sent, build(recipe).state)


@examples(30)
@given(st.lists(LARGE_VALUES, max_size=3), st.sampled_from((CHUNK_BYTES, 40_000)), st.booleans())
def test_large_values_arrive_exactly(values: list[Value], chunk_bytes: int, in_place: bool) -> None:
    state = [make_value(value) for value in values]
    into = [None] * len(state) if in_place else None
    assert_same(state, transfer(state, into=into, chunk_bytes=chunk_bytes).state)


@examples(60)
@given(st.lists(st.tuples(recipes(), CHUNKS), min_size=2, max_size=3), st.permutations(range(6)))
def test_a_workspace_does_not_change_later_transfers(
    transfers: list[tuple[Recipe, int]], order: list[int]
) -> None:
    workspaces = Workspace(torch.device("cpu")), Workspace(torch.device("cpu"))
    for recipe, chunk_bytes in [(transfers * 3)[number] for number in order]:
        received = transfer(build(recipe).state, chunk_bytes=chunk_bytes, workspaces=workspaces).state
        expected = build(recipe).state
        assert_same(received, expected)
        assert sharing(received) == sharing(expected)


@examples(150)
@given(recipes(), CHUNKS)
def test_the_payload_has_each_byte_that_a_leaf_uses_once(recipe: Recipe, chunk_bytes: int) -> None:
    built = build(recipe)
    transferred = transfer(built.state, chunk_bytes=chunk_bytes)
    assert transferred.payload_bytes == len(used_bytes(built.state))
    assert transferred.report.payload_bytes == transferred.payload_bytes


@examples(60)
@given(recipes())
def test_a_state_arrives_exactly_in_another_process(pair: Cluster, recipe: Recipe) -> None:
    sent_bytes, (received_bytes, difference) = pair.run_each([(send, (recipe,)), (receive, (recipe,))])
    assert not difference, difference
    assert sent_bytes == received_bytes == len(used_bytes(build(recipe).state))


def transport() -> PGTransport:
    return PGTransport(dist.group.WORLD, TIMEOUT_S, "cpu")


def send(rank: int, recipe: Recipe) -> int:
    """In rank 0: send the state, and return the bytes of payload."""
    sender = transport()
    sender.send_checkpoint([1], build(recipe).state)
    assert sender.last_report is not None
    return sender.last_report.payload_bytes


def receive(rank: int, recipe: Recipe) -> tuple[int, str]:
    """In rank 1: receive the state, and return the bytes of payload and the difference.

    The difference is returned and not raised, so that the workers survive while the example shrinks.
    """
    receiver = transport()
    received = receiver.recv_checkpoint(0)
    assert receiver.last_report is not None
    expected = build(recipe).state
    try:
        assert_same(received, expected)
        assert sharing(received) == sharing(expected), "the states share memory in different ways"
    except AssertionError as error:
        return receiver.last_report.payload_bytes, str(error) or repr(error)
    return receiver.last_report.payload_bytes, ""
