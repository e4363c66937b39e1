"""Random states, there and back: in one process, and between two over gloo.

A failing example is printed as the recipe of its state, which can be pasted as it stands:
`build(Recipe(…))` makes the same state again, in any process.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from tests.properties.memory import sharing, used_bytes
from tests.properties.strategies import recipes
from tests.support.cluster import Cluster
from tests.support.equality import assert_same
from tests.support.sizes import examples
from tests.support.states import Recipe, build
from tests.support.transfer import transfer
from torchferry import PGTransport
from torchferry.core.plan import CHUNK_BYTES
from torchferry.engine import Workspace

TIMEOUT_S = 20.0

CHUNKS = st.sampled_from((CHUNK_BYTES, 16, 48, 64, 1000))


@examples(250)
@given(recipes(), CHUNKS, st.booleans())
def test_a_state_arrives_as_it_was_sent(recipe: Recipe, chunk_bytes: int, own_buffers: bool) -> None:
    sent = build(recipe).state
    received = transfer(sent, chunk_bytes=chunk_bytes, own_buffers=own_buffers).state
    assert_same(received, build(recipe).state)
    assert sharing(received) == sharing(sent)
    assert_same(sent, build(recipe).state)


@examples(60)
@given(st.lists(st.tuples(recipes(), CHUNKS), min_size=2, max_size=3), st.permutations(range(6)))
def test_what_one_transfer_leaves_to_the_next_changes_nothing(
    parcels: list[tuple[Recipe, int]], order: list[int]
) -> None:
    workspaces = Workspace(torch.device("cpu")), Workspace(torch.device("cpu"))
    for recipe, chunk_bytes in [(parcels * 3)[number] for number in order]:
        received = transfer(build(recipe).state, chunk_bytes=chunk_bytes, workspaces=workspaces).state
        expected = build(recipe).state
        assert_same(received, expected)
        assert sharing(received) == sharing(expected)


@examples(150)
@given(recipes(), CHUNKS)
def test_the_bytes_on_the_wire_are_those_that_leaves_use_each_once(recipe: Recipe, chunk_bytes: int) -> None:
    built = build(recipe)
    ferried = transfer(built.state, chunk_bytes=chunk_bytes)
    assert ferried.payload_bytes == len(used_bytes(built.state))
    assert ferried.report.payload_bytes == ferried.payload_bytes


@examples(60)
@given(recipes())
def test_a_state_arrives_in_another_process_as_it_was_sent(pair: Cluster, recipe: Recipe) -> None:
    sent_bytes, (received_bytes, difference) = pair.run_each([(send, (recipe,)), (receive, (recipe,))])
    assert not difference, difference
    assert sent_bytes == received_bytes == len(used_bytes(build(recipe).state))


def transport() -> PGTransport:
    return PGTransport(dist.group.WORLD, TIMEOUT_S, "cpu")


def send(rank: int, recipe: Recipe) -> int:
    """In rank 0: send the state, and give the bytes of payload."""
    sender = transport()
    sender.send_checkpoint([1], build(recipe).state)
    assert sender.last_report is not None
    return sender.last_report.payload_bytes


def receive(rank: int, recipe: Recipe) -> tuple[int, str]:
    """In rank 1: receive the state, and give the bytes of payload and how it differs from what it should be.

    The difference is an answer and no exception, so that the workers live on while the example shrinks.
    """
    receiver = transport()
    received = receiver.recv_checkpoint(0)
    assert receiver.last_report is not None
    expected = build(recipe).state
    try:
        assert_same(received, expected)
        assert sharing(received) == sharing(expected), "memory is shared in another way"
    except AssertionError as error:
        return receiver.last_report.payload_bytes, str(error) or repr(error)
    return receiver.last_report.payload_bytes, ""
