"""Whether two runs ended with the same state: every tensor of every worker, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import xxhash

Portrait = Mapping[str, bytes]
"""The bytes of every tensor of one worker's final state, by name."""

_WEIGHTS = "model."


@dataclass(frozen=True)
class Comparison:
    """One worker's final state in both runs. The digests are of its weights."""

    rank: int
    disturbed_digest: str
    undisturbed_digest: str
    differences: tuple[str, ...]


@dataclass(frozen=True)
class Verdict:
    """The comparisons of all workers, and how much was compared for each."""

    comparisons: tuple[Comparison, ...]
    tensors: int
    compared_bytes: int

    @property
    def identical(self) -> bool:
        """Whether not a single bit differs, in any worker."""
        return bool(self.comparisons) and not any(one.differences for one in self.comparisons)


def compare(disturbed: Mapping[int, Portrait], undisturbed: Mapping[int, Portrait]) -> Verdict:
    """Compare both runs' portraits, by rank.

    The yardstick is one worker of the undisturbed run, and all others of both runs are held against
    it: so the workers of a run must agree with each other too.

    Raises:
        ValueError: the runs do not have the same workers, or there is nothing to compare.
    """
    if not undisturbed or disturbed.keys() != undisturbed.keys():
        raise ValueError(
            "the two runs can't be compared: they ended with the workers "
            f"{sorted(disturbed)} and {sorted(undisturbed)}"
        )
    yardstick = undisturbed[min(undisturbed)]
    if not any(name.startswith(_WEIGHTS) for name in yardstick):
        raise ValueError("the undisturbed run ended without weights: there is nothing to compare")
    return Verdict(
        comparisons=tuple(
            Comparison(
                rank,
                weights_digest(disturbed[rank]),
                weights_digest(undisturbed[rank]),
                (
                    *(f"disturbed run, {line}" for line in _differences(disturbed[rank], yardstick)),
                    *(f"undisturbed run, {line}" for line in _differences(undisturbed[rank], yardstick)),
                ),
            )
            for rank in sorted(disturbed)
        ),
        tensors=len(yardstick),
        compared_bytes=sum(map(len, yardstick.values())),
    )


def weights_digest(portrait: Portrait) -> str:
    """A short name for these weights: the XXH3 digest of their names and bytes."""
    digest = xxhash.xxh3_64()
    for name in sorted(portrait):
        if name.startswith(_WEIGHTS):
            digest.update(f"{name}:{len(portrait[name])}:".encode())
            digest.update(portrait[name])
    return digest.hexdigest()


def _differences(portrait: Portrait, yardstick: Portrait) -> Iterator[str]:
    for name in sorted(portrait.keys() | yardstick.keys()):
        mine, theirs = portrait.get(name), yardstick.get(name)
        if mine is None or theirs is None:
            yield f"{name}: {'missing' if mine is None else 'not expected'}"
        elif len(mine) != len(theirs):
            yield f"{name}: {len(mine)} bytes instead of {len(theirs)}"
        elif mine != theirs:
            wrong = sum(one != other for one, other in zip(mine, theirs, strict=True))
            yield f"{name}: {wrong} of {len(mine)} bytes differ"
