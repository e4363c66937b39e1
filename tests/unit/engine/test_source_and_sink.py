"""A source and a sink, without a protocol between them: chunks in any order, digests, changes, outcomes."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tests.support.equality import assert_same
from torchferry.core.outcome import ChunkState, Outcome
from torchferry.core.plan import Chunk
from torchferry.engine import metadata
from torchferry.engine.sink import Sink
from torchferry.engine.source import ChunkSource
from torchferry.engine.target import Target, target_in_new_memory, target_in_place
from torchferry.engine.workspace import Workspace
from torchferry.errors import StateError
from torchferry.tensors import fresh
from torchferry.tensors.describe import describe, describe_target
from torchferry.tensors.kinds import RebuildContext

CPU = torch.device("cpu")
CHUNK_BYTES = 1 << 12


def state(fill: float) -> dict[str, Any]:
    """Return large tensors, which are split, and small ones, which are packed."""
    generator = torch.Generator().manual_seed(int(fill))
    large = {f"large{n}": torch.randn(3000 + n, generator=generator) for n in range(3)}
    return {**large, **{f"small{n}": torch.full((n + 1,), fill + n) for n in range(100)}}


class Bench:
    """A source of `sent`, and a sink for it: in new memory, or in the local state `into`."""

    def __init__(self, sent: dict[str, Any], into: dict[str, Any] | None = None) -> None:
        workspace = Workspace(CPU)
        described = describe(sent)
        cache = workspace.cache
        encoded = metadata.encode(described.manifest, cache)
        self.plan = metadata.plan(encoded, cache, CHUNK_BYTES)
        self.source = ChunkSource(
            described, self.plan, workspace.staging, lambda device: device.type == "cpu"
        )
        self.source.hash_all()
        context = RebuildContext()
        self.target: Target
        if into is None:
            self.target = target_in_new_memory(encoded, self.plan, context, cache)
        else:
            local = describe_target(into)
            self.target = target_in_place(
                encoded, self.plan, local, context, cache, strict=True, extra="error"
            )

    @property
    def sink(self) -> Sink:
        return self.target.sink

    def missing(self) -> list[int]:
        """List the chunks that are not whole."""
        return [number for number, state in enumerate(self.sink._states) if state != ChunkState.WHOLE]

    def move(self, chunk: Chunk, *, damaged: bool = False) -> None:
        """Read a chunk from the source, and write it to the sink."""
        buffer = self.source.read(chunk).clone()
        if damaged:
            buffer[0] ^= 1
        self.sink.add_digest(chunk, buffer)
        self.sink.write(chunk, buffer)

    def paths_of(self, chunk: Chunk) -> set[str]:
        """Return the paths with bytes in a chunk. Every tensor of `state` is one extent."""
        names = list(state(0.0))
        return {names[piece.storage] for piece in chunk.pieces}


@pytest.mark.parametrize("in_place", [False, True], ids=["fresh", "in place"])
@pytest.mark.parametrize("seed", range(5))
def test_chunks_land_in_any_order_and_the_outcome_is_true_after_each(in_place: bool, seed: int) -> None:
    sent, into = state(1.0), state(2.0) if in_place else None
    bench = Bench(sent, into)
    bench.sink.expect(0, bench.source.digests)
    chunks = list(bench.plan.chunks)
    random.Random(seed).shuffle(chunks)
    left = {path: {c.number for c in chunks if path in bench.paths_of(c)} for path in sent}
    begun: set[str] = set()
    for chunk in chunks:
        bench.move(chunk)
        bench.sink.verify()
        begun |= bench.paths_of(chunk)
        for path in bench.paths_of(chunk):
            left[path].discard(chunk.number)
        outcome = bench.sink.outcome()
        assert set(outcome.whole) == {path for path in sent if not left[path]}
        assert set(outcome.untouched) == sent.keys() - begun
        assert set(outcome.torn) == {path for path in begun if left[path]}
    assert bench.missing() == []
    assert_same(bench.target.assemble(), sent)


def test_digests_may_be_known_before_or_after_their_chunks() -> None:
    bench = Bench(state(1.0), state(2.0))
    first, *rest = bench.plan.chunks
    bench.move(first)
    bench.sink.verify()
    assert bench.missing() == [chunk.number for chunk in bench.plan.chunks]
    bench.sink.expect(0, bench.source.digests)
    bench.sink.verify()
    assert bench.missing() == [chunk.number for chunk in rest]


def test_a_damaged_chunk_can_be_written_again_and_a_whole_one_is_not() -> None:
    sent, into = state(1.0), state(2.0)
    bench = Bench(sent, into)
    chunk = bench.plan.chunks[-1]
    bench.sink.expect(0, bench.source.digests)
    bench.move(chunk, damaged=True)
    bench.sink.verify()
    assert set(bench.sink.damaged_paths()) == bench.paths_of(chunk) == set(bench.sink.outcome().torn)
    bench.sink.expect(0, bench.source.digests)
    bench.move(chunk)
    bench.sink.verify()
    assert chunk.number not in bench.missing()
    before = {name: tensor.clone() for name, tensor in into.items()}
    bench.move(chunk, damaged=True)
    assert_same(into, before)


def test_memory_that_was_opened_for_a_link_counts_as_torn() -> None:
    bench = Bench(state(1.0), state(2.0))
    chunk = bench.plan.chunks[-1]
    place = bench.sink.direct_place(chunk, lambda device: True)
    assert place is not None
    bench.sink.open(chunk, place)
    assert set(bench.sink.outcome().torn) == bench.paths_of(chunk)


def test_chunks_that_are_dropped_for_lack_of_memory_are_not_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(state(1.0))

    def fail(*args: object) -> object:
        raise StateError("no memory")

    monkeypatch.setattr(fresh.FreshMemory, "unpack", fail)
    packed = bench.plan.chunks[0]
    bench.move(packed)
    bench.sink.mark_whole(packed)
    assert bench.sink.failure is not None
    assert packed.number in bench.missing()


def test_a_sink_without_memory_drops_everything() -> None:
    bench = Bench(state(1.0))
    dropping = Sink(bench.source.description.manifest, bench.plan)
    for chunk in bench.plan.chunks:
        dropping.write(chunk, bench.source.read(chunk))
        dropping.mark_whole(chunk)
    assert dropping.outcome() == Outcome((), (), tuple(state(1.0)))


WRITES = {
    "counted": lambda tensor: tensor.add_(1),
    "uncounted": lambda tensor: tensor.data.add_(1),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("name", ["small0", "small50", "small99", "large1"])
def test_only_the_tensor_that_changed_is_named(name: str, write: Any) -> None:
    sent = state(1.0)
    bench = Bench(sent)
    assert not bench.source.find_changes()
    write(sent[name])
    assert bench.source.find_changes()
    assert bench.source.changed_paths() == [name]


def test_an_uncounted_neighbour_is_not_blamed_for_another_tensor() -> None:
    numpy = pytest.importorskip("numpy")
    sent = {**state(1.0), "array": numpy.zeros(5)}
    bench = Bench(sent)
    sent["small50"].data.add_(1)
    assert bench.source.find_changes()
    assert bench.source.changed_paths() == ["small50"]
