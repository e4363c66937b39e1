"""What is said of a state after a failure."""

from __future__ import annotations

from torchferry.core.manifest import Branch, Leaf, Manifest, TensorSpec
from torchferry.core.plan import make_plan
from torchferry.core.torn import Truth, truth

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
    fate = truth(MANIFEST, PLAN, posted=2, verified={0}, scratched=(), kept=PATHS)
    assert fate == Truth(("a",), ("b",), ("c",))


def test_what_is_still_in_scratch_is_not_called_whole() -> None:
    fate = truth(MANIFEST, PLAN, posted=2, verified={0, 1}, scratched={1}, kept=PATHS)
    assert fate == Truth(("a",), ("b",), ("c",))


def test_only_paths_that_are_kept_are_spoken_of() -> None:
    fate = truth(MANIFEST, PLAN, posted=3, verified={0, 1, 2}, scratched=(), kept={("b",)})
    assert fate == Truth(("b",), (), ())
