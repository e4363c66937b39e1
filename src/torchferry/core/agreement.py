"""What the ranks of a sync tell the coordinating rank, and what it answers: data, and the rules of each step.

Every rank posts the same steps: `join`, `inventory`, `ready`, `done`. The coordinator answers a step when all
ranks that are not lost have posted it.
"""

from collections.abc import Collection, Mapping
from typing import Literal, TypeAlias

from msgspec import Struct
from msgspec.msgpack import Decoder

from torchferry.core.assignment import Assignment
from torchferry.errors import (
    BadArgument,
    Difference,
    FerryError,
    LinkTimeout,
    LostPart,
    NoSuchVersion,
    PartsLost,
    ReplicasDiffer,
    show_ranks,
)

# The status of an answer that is not 200.
OTHER_CALL = 409  # this is the coordinator of an earlier call
COORDINATOR_CLOSED = 410  # its call is over; the body says why


class Join(Struct, frozen=True):
    """A rank joins. `call` must be equal on all ranks. `coordinator` and `source` are its two addresses."""

    global_rank: int
    version: int | None
    call: str
    trust: int | None
    coordinator: str
    source: str


class Inventory(Struct, frozen=True):
    """What a rank has: a `Table`, with its manifest encoded. `version` is the target version."""

    version: int
    manifest: bytes
    digests: bytes = b""
    per_rank: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()


class Post(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What a rank posts. Fields that it posted before may be left out, unless the coordinator is a new one.

    `ready` names the assignment that it is ready for, by the coordinator that made it. A rank that `failed`
    leaves the sync. `lost` has the coordinators that were lost, with the reasons. `left_s` is how long the
    rank can wait for the answer.
    """

    rank: int
    join: Join | None = None
    inventory: Inventory | None = None
    ready: int | None = None
    done: bool = False
    failed: str | None = None
    lost: dict[int, str] = {}
    left_s: float | None = None


class TargetVersion(Struct, frozen=True, tag="Target"):
    """Answers `join`: the version that all ranks shall have, and how to reach each rank."""

    version: int
    ranks: dict[int, Join]


class RankBundle(Struct, frozen=True):
    """A bundle as one rank sees it. `numbers` are occurrences in its tree."""

    name: str
    numbers: tuple[int, ...]
    sources: tuple[int, ...]
    receivers: tuple[int, ...]


class RankAssignment(Struct, frozen=True, tag=True):
    """Answers `inventory`: the bundles that a rank serves and receives.

    `tree` is the encoded manifest that its state gets; empty if it keeps its own.
    """

    coordinator: int
    serves: tuple[RankBundle, ...] = ()
    receives: tuple[RankBundle, ...] = ()
    tree: bytes = b""


class Proceed(Struct, frozen=True, tag=True):
    """Answers `ready`: all bundles are served."""


class Finished(Struct, frozen=True, tag=True):
    """Answers `done`: all ranks are done, except those that failed, with the reasons."""

    failed: dict[int, str]


class Refusal(Struct, frozen=True, tag=True):
    """Answers any step before the ranks are ready: the sync fails on every rank."""

    kind: Literal["late", "nothing", "argument", "differ", "lost"]
    what: str
    differences: tuple[Difference, ...] = ()
    parts: tuple[LostPart, ...] = ()

    def error(self) -> FerryError:
        """Return the error that every rank raises."""
        if self.kind == "differ":
            return ReplicasDiffer(self.differences, self.what)
        if self.kind == "lost":
            return PartsLost(self.parts, self.what)
        return {"late": LinkTimeout, "nothing": NoSuchVersion, "argument": BadArgument}[self.kind](self.what)


Answer: TypeAlias = TargetVersion | RankAssignment | Proceed | Finished | Refusal

post_decoder = Decoder(Post)
answer_decoder: Decoder[Answer] = Decoder(Answer)


def choose_target(joined: Mapping[int, Join], lost: Mapping[int, str]) -> TargetVersion | Refusal:
    """Return the version that all ranks shall have: the highest that a rank has."""
    calls = {rank: join.call for rank, join in sorted(joined.items())}
    if len({*calls.values()}) > 1:
        listed = ", ".join(f"rank {rank} {call}" for rank, call in calls.items())
        return Refusal(
            "argument", f"the ranks made different calls: {listed}. Make the same call on all ranks"
        )
    versions = [join.version for join in joined.values() if join.version is not None]
    if not versions:
        why = "".join(f"; rank {rank} failed: {reason}" for rank, reason in lost.items())
        what = f"no rank has a version to take over: {show_ranks(sorted(joined))} passed version=None{why}"
        return Refusal("nothing", f"{what}. Load a checkpoint on one rank, or pass the version that it has")
    trust = next(iter(joined.values())).trust
    if trust is not None and (trust not in joined or joined[trust].version != max(versions)):
        has = "did not join" if trust not in joined else f"passed version={joined[trust].version}"
        what = f"trust={trust}: rank {trust} {has}, and the highest version is {max(versions)}"
        return Refusal("argument", f"{what}. Trust a rank that has it")
    return TargetVersion(max(versions), dict(joined))


def refusal_of(error: PartsLost | ReplicasDiffer) -> Refusal:
    """Return the refusal from which every rank builds an equal error."""
    if isinstance(error, PartsLost):
        return Refusal("lost", error.advice, parts=error.parts)
    return Refusal("differ", error.advice, differences=error.differences)


def assignment_for(
    rank: int, coordinator: int, assignment: Assignment, manifests: Mapping[int, bytes]
) -> RankAssignment:
    """Return what one rank serves and receives."""
    serves: list[RankBundle] = []
    receives: list[RankBundle] = []
    for number, bundle in enumerate(assignment.bundles):
        for ranks, bundles in ((bundle.sources, serves), (bundle.receivers, receives)):
            if rank in ranks:
                name, numbers = f"sync {coordinator}.{number}", tuple(bundle.numbers[rank])
                bundles.append(RankBundle(name, numbers, bundle.sources, bundle.receivers))
    tree = assignment.trees.get(rank, rank)
    encoded = manifests[tree] if tree != rank else b""
    return RankAssignment(coordinator, tuple(serves), tuple(receives), encoded)


def late(missing: Collection[int], step: str, call: str) -> Refusal:
    """Return the refusal that says which ranks did not post a step of this call in time."""
    function = call.partition("(")[0]
    did_not = {"join": f"call {function}", "inventory": "describe the state", "ready": "serve the state"}[
        step
    ]
    return Refusal(
        "late",
        f"{show_ranks(sorted(missing))} did not {did_not} in time; nothing was written. If they are "
        "alive, pass a longer timeout; if not, create a group without them",
    )
