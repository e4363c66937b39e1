"""What is said of a state after a failure."""

from __future__ import annotations

from torchferry.core.manifest import Branch, Leaf, Manifest, TensorSpec
from torchferry.core.plan import make_plan
from torchferry.core.torn import Truth, paths_of, truth

NAMES = ("a", "b", "c")
MANIFEST = Manifest(
    -1,
    (Branch("dict", (0, 1, 2), NAMES),),
    tuple(Leaf("tensor", (number,)) for number in range(3)),
    tuple(TensorSpec("uint8", 1, (8,), (1,), number, 0) for number in range(3)),
    (8, 8, 8),
)
PLAN = make_plan(MANIFEST)
PATHS = {(name,) for name in NAMES}


def test_what_was_verified_is_whole_and_what_was_not_posted_is_untouched() -> None:
    fate = truth(MANIFEST, PLAN, posted=2, verified={0}, scratched=(), paired=PATHS)
    assert fate == Truth(("a",), ("b",), ("c",))


def test_what_is_still_in_scratch_is_not_called_whole() -> None:
    fate = truth(MANIFEST, PLAN, posted=2, verified={0, 1}, scratched={1}, paired=PATHS)
    assert fate == Truth(("a",), ("b",), ("c",))


def test_only_paths_that_are_kept_are_spoken_of() -> None:
    fate = truth(MANIFEST, PLAN, posted=3, verified={0, 1, 2}, scratched=(), paired={("b",)})
    assert fate == Truth(("b",), (), ())


TANGLED = Manifest(
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
"""Two views that cross each other too often to tell which bytes are whose, and something beside them."""


class TestWhatIsTooTangledToTellApart:
    """It is one in its fate: no part of it is called whole unless all of it is."""

    plan = make_plan(TANGLED)
    beside = next(n for n, chunk in enumerate(plan.chunks) if chunk.piece.storage == 1)

    def fate(self, posted: int, verified: set[int]) -> Truth:
        return truth(TANGLED, self.plan, posted=posted, verified=verified, scratched=())

    def test_is_torn_if_some_of_it_was_written(self) -> None:
        count = len(self.plan.chunks)
        assert self.fate(count, {0, self.beside}) == Truth(("c",), ("a", "b"), ())

    def test_is_untouched_if_none_was(self) -> None:
        assert self.fate(0, set()) == Truth((), (), NAMES)

    def test_is_whole_if_all_of_it_arrived(self) -> None:
        count = len(self.plan.chunks)
        assert self.fate(count, set(range(count))) == Truth(NAMES, (), ())

    def test_is_named_together_when_it_was_damaged(self) -> None:
        assert paths_of(TANGLED, self.plan.extents, {0}) == ["a", "b"]
        number = self.plan.chunks[self.beside].extent
        assert paths_of(TANGLED, self.plan.extents, {number}) == ["c"]
