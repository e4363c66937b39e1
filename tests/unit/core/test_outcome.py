"""What a failed transfer did to the local state."""

from __future__ import annotations

from torchferry.core.manifest import Branch, Leaf, Manifest, TensorSpec
from torchferry.core.outcome import ChunkState, Outcome, outcome_of, paths_of
from torchferry.core.plan import make_plan

NAMES = ("a", "b", "c")
MANIFEST = Manifest(
    -1,
    (Branch("dict", (0, 1, 2), NAMES),),
    tuple(Leaf("tensor", (number,)) for number in range(3)),
    tuple(TensorSpec("uint8", 1, (8,), (1,), number, 0) for number in range(3)),
    (8, 8, 8),
)
PLAN = make_plan(MANIFEST)
WHOLE, WRITTEN, UNTOUCHED, DAMAGED = (
    ChunkState.WHOLE,
    ChunkState.WRITTEN,
    ChunkState.UNTOUCHED,
    ChunkState.DAMAGED,
)


def test_the_state_of_a_chunk_is_the_outcome_of_its_path() -> None:
    assert outcome_of(MANIFEST, PLAN, [WHOLE, WRITTEN, UNTOUCHED]) == Outcome(("a",), ("b",), ("c",))
    assert outcome_of(MANIFEST, PLAN, [UNTOUCHED, DAMAGED, WHOLE]) == Outcome(("c",), ("b",), ("a",))


def test_a_tensor_that_is_still_in_scratch_memory_is_not_whole() -> None:
    states = [WHOLE, WHOLE, UNTOUCHED]
    assert outcome_of(MANIFEST, PLAN, states, unfinished={1}) == Outcome(("a",), ("b",), ("c",))


def test_only_paths_that_both_sides_have_are_listed() -> None:
    assert outcome_of(MANIFEST, PLAN, [WHOLE] * 3, paired={("b",)}) == Outcome(("b",), (), ())


IRREGULAR = Manifest(
    -1,
    (Branch("dict", (0, 1, 2), NAMES),),
    tuple(Leaf("tensor", (number,)) for number in range(3)),
    (
        TensorSpec("float32", 4, (30_000,), (2,), 0, 0),
        TensorSpec("float32", 4, (20_000,), (3,), 0, 0),
        TensorSpec("uint8", 1, (8,), (1,), 1, 0),
    ),
    (240_000, 8),
)
"""Two views that overlap too irregularly to tell which bytes are whose, and a third tensor."""


class TestViewsThatOverlapTooIrregularly:
    """They share one outcome: neither is whole unless all chunks of the storage are."""

    plan = make_plan(IRREGULAR, pack_bytes=0)
    third = next(n for n, chunk in enumerate(plan.chunks) if chunk.pieces[0].storage == 1)

    def test_are_torn_if_some_chunks_were_written(self) -> None:
        states = [WRITTEN] * len(self.plan.chunks)
        states[0] = states[self.third] = WHOLE
        assert outcome_of(IRREGULAR, self.plan, states) == Outcome(("c",), ("a", "b"), ())

    def test_are_untouched_if_no_chunk_was_written(self) -> None:
        assert outcome_of(IRREGULAR, self.plan, [UNTOUCHED] * len(self.plan.chunks)) == Outcome((), (), NAMES)

    def test_are_whole_if_all_chunks_are(self) -> None:
        assert outcome_of(IRREGULAR, self.plan, [WHOLE] * len(self.plan.chunks)) == Outcome(NAMES, (), ())

    def test_are_named_together_when_a_chunk_was_damaged(self) -> None:
        assert paths_of(IRREGULAR, self.plan, {0}) == ["a", "b"]
        assert paths_of(IRREGULAR, self.plan, {self.third}) == ["c"]


def test_an_empty_tensor_does_not_make_an_untouched_leaf_torn() -> None:
    """A CSR tensor without items has bytes in one of its three tensors."""
    specs = tuple(TensorSpec("int64", 8, (size,), (1,), number, 0) for number, size in enumerate((4, 0, 0)))
    manifest = Manifest(0, (), (Leaf("sparse", (0, 1, 2)),), specs, (32, 0, 0))
    plan = make_plan(manifest)
    assert outcome_of(manifest, plan, [UNTOUCHED]).untouched == ("(the state itself)",)
    assert outcome_of(manifest, plan, [WHOLE]).whole == ("(the state itself)",)
    empty = Manifest(0, (), (Leaf("tensor", (0,)),), specs[1:2], (0, 0, 0))
    assert outcome_of(empty, make_plan(empty), []).whole == ("(the state itself)",)
