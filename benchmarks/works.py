"""The workloads: which states are sent, how, to how many, by whom, and what must be reached.

`works(size)` is the whole table. Sizes are "full", for which the marks were set; "small", for a quick look;
and "smoke", which shows in seconds that everything still runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from fnmatch import fnmatchcase

from benchmarks.marks import MIB, Figure, Mark, Quantity, faster
from benchmarks.recipes import Gpt, Recipe, Uniform, Views
from torchferry.errors import BadArgument

KIB = 2**10

FERRY = "torchferry"
UNVERIFIED = "torchferry-unverified"
TORCH = "torch-pg"
TORCHFT = "torchft-pg"
HTTP = "torchft-http"
SAVE = "torch-save"
DCP = "dcp"
RAW = "raw"
MEMCPY = "memcpy"
METADATA = "torchferry-metadata"
EVERY = (FERRY, UNVERIFIED, TORCH, TORCHFT, HTTP, SAVE, DCP, RAW, MEMCPY)

# "Not held up": what two runs of the same thing may differ by here.
_NOT_HELD_UP = 1.1
# "The bytes, once": headers, names, digests and TCP's own are allowed for, a second copy is not.
_ONCE = 1.02


class Size(StrEnum):
    """How large the states are."""

    SMOKE = "smoke"
    SMALL = "small"
    FULL = "full"

    @property
    def repeats(self) -> int:
        """How often everything is measured, unless someone says otherwise."""
        return {Size.SMOKE: 1, Size.SMALL: 5, Size.FULL: 9}[self]

    def pick(self, smoke: int, small: int, full: int) -> int:
        """One of three numbers."""
        return {Size.SMOKE: smoke, Size.SMALL: small, Size.FULL: full}[self]


@dataclass(frozen=True)
class Case:
    """One thing to measure. The last receiver sleeps for `asleep_s` before it receives.

    `relay` says whether receivers may forward to each other; `timed` are the
    ranks whose time counts; all of them, if none is named. Without `again` nothing is known of the state from
    earlier transfers, by who can leave it out; the others have sent it once before, to warm up.
    """

    name: str
    recipe: Recipe
    systems: tuple[str, ...] = EVERY
    in_place: bool = False
    receivers: int = 1
    asleep_s: float = 0.0
    relay: bool = False
    timed: tuple[int, ...] = ()
    again: bool = True
    x: float | None = None


@dataclass(frozen=True)
class Work:
    """One question: its cases, and the marks that the answers are held to.

    `axis` is what `x` of its cases counts, if they are points of a curve: "tensors", "receivers" or "bytes".
    If not, `shows` is what of it is drawn: "rate", "time", "wire" or "memory".
    """

    name: str
    title: str
    cases: tuple[Case, ...]
    marks: tuple[Mark, ...] = ()
    axis: str | None = None
    shows: str = "rate"


def works(size: Size) -> list[Work]:
    """All workloads, at this size."""
    return [
        # First, in processes that are new: what another work has left behind can't be used again.
        _memory(size),
        *_small(size),
        _metadata(size),
        *_big(size),
        _views(size),
        _gpt(size),
        _sleeper(size),
        _tensors(size),
        _receivers(size),
        _tensor_size(size),
    ]


def choose(names: Sequence[str], known: Sequence[str], what: str) -> list[str]:
    """Those of the known names that match one of the patterns, in their order; all without patterns.

    Raises:
        BadArgument: a pattern that matches nothing.

    >>> choose(["big-*"], ["big-fresh", "big-in-place", "views"], "work")
    ['big-fresh', 'big-in-place']
    """
    for name in names:
        if not any(fnmatchcase(one, name) for one in known):
            raise BadArgument(f"there is no {what} {name!r}; there are: {', '.join(known)}")
    return [one for one in known if not names or any(fnmatchcase(one, name) for name in names)]


def _small(size: Size) -> list[Work]:
    recipe = Uniform(size.pick(20, 500, 2000), 4 * KIB)
    what = f"{recipe.tensors:,} tensors of 4 KiB"
    fresh, placed = f"{what}, fresh", f"{what}, in place"
    return [
        Work(
            "small-fresh",
            fresh,
            (Case("small-fresh", recipe),),
            (faster(fresh, "small-fresh", FERRY, than=TORCH, by=15.0),),
        ),
        Work(
            "small-in-place",
            placed,
            (Case("small-in-place", recipe, in_place=True),),
            (faster(placed, "small-in-place", FERRY, than=TORCH, by=12.0),),
        ),
    ]


def _metadata(size: Size) -> Work:
    recipe = Uniform(size.pick(80, 500, 2000), 4 * KIB)
    title = f"{recipe.tensors:,} tensors described, encoded, decoded and put together again"
    fresh = Case("metadata-fresh", recipe, (METADATA,), timed=(0,))
    placed = replace(fresh, name="metadata-in-place", in_place=True)
    cases = {
        "fresh": fresh,
        "in place": placed,
        "fresh, for the first time": replace(fresh, name="metadata-fresh-first", again=False),
        "in place, for the first time": replace(placed, name="metadata-in-place-first", again=False),
    }
    marks = [
        Mark(f"{title}, {how}", Figure(case.name, METADATA), 1e-3, 10.0, at_least=False, unit=" ms")
        for how, case in cases.items()
    ]
    return Work("metadata", title, tuple(cases.values()), tuple(marks), shows="time")


def _big(size: Size) -> list[Work]:
    recipe = Uniform(size.pick(2, 4, 8), size.pick(MIB, 16 * MIB, 64 * MIB))
    what = f"{recipe.tensors} × {recipe.tensor_bytes // MIB} MiB"
    fresh, placed = f"{what}, fresh", f"{what}, in place"
    return [
        Work(
            "big-fresh",
            fresh,
            (Case("big-fresh", recipe),),
            (faster(fresh, "big-fresh", FERRY, than=TORCH, by=1.5),),
        ),
        Work(
            "big-in-place",
            placed,
            (Case("big-in-place", recipe, in_place=True),),
            (
                faster(f"{placed}, verify=False", "big-in-place", UNVERIFIED, than=TORCH, by=1.15),
                faster(f"{placed}, verified", "big-in-place", FERRY, than=TORCH, by=1.0),
            ),
        ),
    ]


def _views(size: Size) -> Work:
    recipe = Views(size.pick(10, 100, 1000), 40_000)
    title = f"{recipe.tensors:,} views of one storage of {recipe.needed_bytes / 1e6:g} MB"
    # In place, because fresh torch's PGTransport takes the storage's bytes once for each view: 40 GB.
    case = Case("views", recipe, systems=(FERRY, TORCH, SAVE), in_place=True)
    sent = Figure("views", FERRY, Quantity.WIRE_BYTES)
    mark = Mark(f"{title}: bytes sent", sent, float(recipe.needed_bytes), _ONCE, at_least=False)
    return Work("views", title, (case,), (mark,), shows="wire")


def _gpt(size: Size) -> Work:
    shape = {
        Size.SMOKE: Gpt(layers=2, width=64, vocabulary=512, context=64),
        Size.SMALL: Gpt(layers=4, width=256, vocabulary=8192, context=256),
        Size.FULL: Gpt(layers=12, width=768, vocabulary=50257, context=1024),
    }[size]
    title = f"GPT-2's shapes with AdamW's state ({shape.needed_bytes / 1e9:.2g} GB, tied), in place"
    sent, baseline = (Figure("gpt2", system, Quantity.WIRE_BYTES) for system in (FERRY, TORCH))
    return Work(
        "gpt2",
        title,
        (Case("gpt2", shape, in_place=True),),
        (
            faster(title, "gpt2", FERRY, than=TORCH, by=1.1),
            # The second name of the embedding is a tenth of it; a hundredth is clearly fewer.
            Mark(f"{title}: bytes sent", sent, baseline, 0.99, at_least=False),
        ),
    )


def _sleeper(size: Size) -> Work:
    # Several tensors: with one, torch's PGTransport has posted all there is before it waits for anyone.
    recipe = Uniform(16, size.pick(64 * KIB, MIB, 4 * MIB))
    asleep_s = size.pick(3, 10, 30) / 10
    title = f"{recipe.needed_bytes // MIB} MiB to 3 receivers without relays, one asleep for {asleep_s:g} s"
    awake = Case(
        "sleeper-awake", recipe, (FERRY, TORCH), in_place=True, receivers=3, relay=False, timed=(1, 2)
    )
    asleep = replace(awake, name="sleeper-asleep", asleep_s=asleep_s)
    mark = Mark(
        f"{title}: time of the other two, against all awake",
        Figure("sleeper-asleep", FERRY),
        Figure("sleeper-awake", FERRY),
        _NOT_HELD_UP,
        at_least=False,
    )
    return Work("sleeper", title, (awake, asleep), (mark,), shows="time")


def _memory(size: Size) -> Work:
    recipe = Uniform(size.pick(4, 8, 64), size.pick(4 * MIB, 32 * MIB, 64 * MIB))
    title = f"memory beyond the state, in place, {recipe.needed_bytes / 2**30:.2g} GiB"
    case = Case("memory", recipe, systems=(FERRY, TORCH), in_place=True)
    peak = Figure("memory", FERRY, Quantity.PEAK_BYTES)
    mark = Mark(f"{title}, a side", peak, float(MIB), 64.0, at_least=False, unit=" MiB")
    return Work("memory", title, (case,), (mark,), shows="memory")


def _tensors(size: Size) -> Work:
    counts = {
        Size.SMOKE: (10, 20, 100),
        Size.SMALL: (100, 1000, 2000, 10_000),
        Size.FULL: (100, 1000, 2000, 10_000, 100_000),
    }[size]
    systems = (FERRY, TORCH, SAVE, RAW)
    cases = [Case(f"tensors-{n}", Uniform(n, KIB), systems, x=n) for n in counts]
    few, most = counts[1 if size is Size.SMOKE else 2], counts[-1]
    mark = Mark(
        f"{most:,} tensors of 1 KiB: time per tensor, against that at {few:,}",
        Figure(f"tensors-{most}", FERRY, Quantity.SECONDS_PER_TENSOR),
        Figure(f"tensors-{few}", FERRY, Quantity.SECONDS_PER_TENSOR),
        1.3,
        at_least=False,
    )
    return Work("tensors", "growth by number of tensors, of 1 KiB, fresh", tuple(cases), (mark,), "tensors")


def _receivers(size: Size) -> Work:
    recipe = Uniform(size.pick(4, 16, 16), size.pick(64 * KIB, MIB, 4 * MIB))
    counts = size.pick(2, 4, 4)
    cases = [
        Case(f"receivers-{n}", recipe, (FERRY, TORCH, SAVE, RAW), in_place=True, receivers=n, x=n)
        for n in (1, 2, 4, 8)[:counts]
    ]
    title = f"growth by number of receivers, {recipe.needed_bytes / MIB:g} MiB each, in place"
    return Work("receivers", title, tuple(cases), axis="receivers")


def _tensor_size(size: Size) -> Work:
    total = size.pick(MIB, 16 * MIB, 64 * MIB)
    sizes = [4 * KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB]
    systems = (FERRY, UNVERIFIED, TORCH, SAVE, RAW)
    cases = [
        Case(f"tensor-size-{each // KIB}k", Uniform(total // each, each), systems, in_place=True, x=each)
        for each in sizes
        if each <= total
    ]
    return Work(
        "tensor-size", f"rate by tensor size, {total // MIB} MiB in all, in place", tuple(cases), axis="bytes"
    )
