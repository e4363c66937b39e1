"""Every error that torchferry raises, in one tree.

    FerryError                      the root: catch this to catch them all
    ├── StateError                  this side is the problem: its state, or an argument
    │   ├── Unsendable              the state can't be sent exactly (raised before any of it is sent)
    │   ├── StateChanged            the state changed while it was being sent or published
    │   ├── StateMismatch           the incoming state does not fit the local one (nothing was overwritten)
    │   ├── TargetTorn              a failure left the local state partly overwritten
    │   │   ├── TornAndLate         … because the deadline passed              (also TimeoutError)
    │   │   └── TornAndBroken       … because the connection was lost          (also ConnectionError)
    │   ├── ReadersRemain           readers of a served version did not finish (also TimeoutError)
    │   ├── ReplicasDiffer          ranks that have the same version have different values in sync
    │   ├── PartsLost               no rank has some part of the state in sync (also LookupError)
    │   └── BadArgument             a rank, timeout or device is invalid       (also ValueError)
    ├── PeerError                   what the peer sent is the problem
    │   ├── BadManifest             the metadata is malformed, or of another version
    │   ├── PickleRefused           the metadata or a leaf is a pickle, and pickle is not allowed
    │   ├── UnknownType             a type is not registered in this process, or can't be built
    │   ├── StepMismatch            the peer's state belongs to another step
    │   ├── NoSuchVersion           no source has the name or the version      (also LookupError)
    │   └── PeerGaveUp              the sender or a forwarding receiver aborted, or a served state changed
    └── LinkError                   the connection is the problem
        ├── LinkBroken              the connection is gone                     (also ConnectionError)
        ├── LinkTimeout             the deadline passed                        (also TimeoutError)
        │   ├── LinkStalled         nothing arrived for stall_timeout
        │   └── CheckpointTimeout   … of a transport for torchft               (also RuntimeError)
        ├── Corrupted               the received bytes differ from the sent bytes
        ├── NotAuthorized           a source does not accept the token         (also PermissionError)
        ├── SourcesLost             no source is left to fetch from            (also ConnectionError)
        ├── GroupBroken             an earlier transfer failed on this group   (also ConnectionError)
        └── SendFailed              sending to at least one of several receivers failed
            ├── SendLate            … because the deadline passed for one      (also TimeoutError)
            └── SendBroken          … because the connection to one was lost   (also ConnectionError)

Errors have `peer` (a rank in the group, or the address of a source), `path` and `phase` where they are known.
"""

import copy
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, Self, TypeVar

E = TypeVar("E")


class FerryError(Exception):
    """The root of all errors of torchferry. An error is not changed once it exists.

    `what` says what happened. `peer`, `path` and `phase` are None where they are not known. The message,
    which `str`, `repr` and `args` agree on, is `what` with the peer and the phase.
    """

    def __init__(
        self, what: str, *, peer: int | str | None = None, path: str | None = None, phase: str | None = None
    ) -> None:
        self.what, self.peer, self.path, self.phase = what, peer, path, phase
        super().__init__(self._message())

    def _message(self) -> str:
        context = (
            [f"peer: {self.peer if isinstance(self.peer, str) else f'rank {self.peer}'}"]
            if self.peer is not None
            else []
        )
        context += [f"phase: {self.phase}"] if self.phase is not None else []
        return f"{self.what} [{', '.join(context)}]" if context else self.what

    def at(self, path: str) -> Self:
        """Return this error for a leaf: its message begins with the leaf's path."""
        return self._copy(what=f"{path}: {self.what}", path=path)

    def with_context(
        self,
        *,
        peer: int | str | None = None,
        path: str | None = None,
        phase: str | None = None,
        more: str = "",
    ) -> Self:
        """Return this error with the context that it lacks, and `more` appended to `what`."""
        context = {"peer": peer, "path": path, "phase": phase}
        lacking = {name: value for name, value in context.items() if getattr(self, name) is None}
        return self._copy(what=self.what + more, **lacking)

    def _copy(self, **fields: object) -> Self:
        copied = copy.copy(self)
        vars(copied).update(fields)
        copied.args = (copied._message(),)
        copied.__cause__, copied.__suppress_context__ = self.__cause__, self.__suppress_context__
        return copied.with_traceback(self.__traceback__)

    def __reduce__(self) -> tuple[object, ...]:
        # Launchers and tests pickle exceptions. The default calls the class with `args` alone, and would
        # lose the keyword arguments.
        return type(self).__new__, (type(self),), {**vars(self), "args": self.args}


class StateError(FerryError):
    """The local state can't be sent or written, or an argument is invalid."""


class Unsendable(StateError):
    """The state, or something in it, can't be sent exactly. None of it was sent."""


class StateChanged(StateError):
    """The state changed while it was being sent or published. `paths` lists the leaves that changed."""

    def __init__(self, paths: Sequence[str], *, peer: int | str | None = None) -> None:
        self.paths = tuple(paths)
        super().__init__(
            f"the state changed while it was being sent or published ({_in_line(self.paths)}); receivers "
            "reject inconsistent data. Pass a copy, or do not modify the state until the call returns",
            peer=peer,
            path=self.paths[0] if self.paths else None,
        )


class TargetTorn(StateError):
    """The transfer failed after local tensors were written.

    `whole` lists the paths that hold the new values, verified unless verification is off; `torn` those that
    may hold old and new bytes mixed; `untouched` those that hold the old values. `__cause__` is the failure.
    """

    def __init__(
        self, cause: BaseException, *, whole: Sequence[str], torn: Sequence[str], untouched: Sequence[str]
    ) -> None:
        failure = cause if isinstance(cause, FerryError) else FerryError(what_of(cause))
        self.whole, self.torn, self.untouched = tuple(whole), tuple(torn), tuple(untouched)
        super().__init__(
            f"{self._damage()}. Receive again before using it. The failure: {failure.what}",
            peer=failure.peer,
            path=failure.path,
            phase=failure.phase,
        )

    def _damage(self) -> str:
        counts = f"{len(self.whole)} paths are whole, {len(self.untouched)} are untouched"
        if self.torn:
            return (
                f"the local state is torn: {len(self.torn)} paths may hold old and new bytes mixed "
                f"({_in_line(self.torn)}), {counts}"
            )
        if self.untouched:
            return f"the local state is partly overwritten: {counts}"
        return f"all {len(self.whole)} paths of the local state were overwritten, but the transfer failed"


class TornAndLate(TargetTorn, TimeoutError):
    """The deadline passed after local tensors were written."""


class TornAndBroken(TargetTorn, ConnectionError):
    """The connection was lost after local tensors were written."""


def torn_after(
    cause: BaseException, *, whole: Sequence[str], torn: Sequence[str], untouched: Sequence[str]
) -> TargetTorn:
    """Return the TargetTorn that fits a failure, with the failure as its `__cause__`."""
    error_class = _fitting([cause], TornAndLate, TornAndBroken, TargetTorn)
    error = error_class(cause, whole=whole, torn=torn, untouched=untouched)
    error.__cause__ = cause
    return error


class ReadersRemain(StateError, TimeoutError):
    """Readers of a served version did not finish in time. `readers` describes each."""

    def __init__(self, readers: Sequence[str], what: str = "readers did not finish in time") -> None:
        self.readers = tuple(readers)
        did_not = f"; {len(self.readers)} did not:" if self.readers else ""
        super().__init__("\n  ".join([what + did_not, *self.readers]))


class Difference(NamedTuple):
    """A leaf that differs between ranks of equal version: `groups` are the ranks that agree with each other.

    `position` is that of the shard; empty for a leaf that is not sharded.
    """

    path: str
    position: str
    groups: tuple[tuple[int, ...], ...]

    def __str__(self) -> str:
        part = f" {self.position}" if self.position else ""
        return f"{self.path}{part}: differs between " + " and ".join(map(show_ranks, self.groups))


class ReplicasDiffer(StateError):
    """Ranks that have the same version have different values; nothing was written on any rank.

    `differences` has an entry for each path and position of a shard.
    """

    def __init__(self, differences: Sequence[Difference], advice: str) -> None:
        self.differences, self.advice = tuple(differences), advice
        what = f"ranks of equal version differ in {_count(differences, 'place')}; nothing was written"
        shown = _listed(what, differences, ".differences", advice)
        super().__init__(shown, path=_first_path(differences), phase="compare")


class LostPart(NamedTuple):
    """A part of the state that no rank has: its path, the position of the shard, and who needs it."""

    path: str
    position: str
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        part = f"the shard at {self.position}" if self.position else "all of it"
        return f"{self.path}: {part}, needed by {show_ranks(self.ranks)}"


class PartsLost(StateError, LookupError):
    """No rank has some parts of the state; nothing was written on any rank. `parts` lists each of them."""

    def __init__(self, parts: Sequence[LostPart], advice: str) -> None:
        self.parts, self.advice = tuple(parts), advice
        lost = _count(parts, "part")
        what = f"no rank of the highest version has {lost} of the state; nothing was written"
        super().__init__(_listed(what, parts, ".parts", advice), path=_first_path(parts), phase="compare")


class BadArgument(StateError, ValueError):
    """An argument is invalid, such as a rank outside the group."""


class Mismatch(NamedTuple):
    """One path at which the incoming and the local state do not fit."""

    path: str
    what: str
    incoming: str
    local: str

    def __str__(self) -> str:
        return f"{self.path}: {self.what}: incoming {self.incoming}, local {self.local}"


class StateMismatch(StateError):
    """The incoming state does not fit the local one; no local tensor was changed.

    `mismatches` has an entry for each path, in the order of the incoming state; `hints` name likely causes.
    """

    def __init__(
        self, mismatches: Sequence[Mismatch], *, hints: Sequence[str] = (), peer: int | str | None = None
    ) -> None:
        self.mismatches, self.hints = tuple(mismatches), tuple(hints)
        places = _count(mismatches, "place")
        what = f"the incoming state does not fit the local one in {places}; nothing was overwritten"
        shown = _listed(what, mismatches, ".mismatches", *hints)
        super().__init__(shown, peer=peer, path=_first_path(mismatches), phase="compare")


class PeerError(FerryError):
    """What the peer sent can't be used."""


class BadManifest(PeerError):
    """The metadata is malformed. Nothing was loaded from it."""


class PickleRefused(PeerError):
    """The metadata, or a leaf in it, is a pickle, and pickle is not allowed."""


class UnknownType(PeerError):
    """The incoming state has a type that this process has not registered or can't build."""


class StepMismatch(PeerError):
    """The peer's state belongs to another step than the requested one."""

    def __init__(self, *, wanted: int, got: int | None, peer: int | str | None = None) -> None:
        self.wanted, self.got = wanted, got
        sent = "without a step" if got is None else f"as step {got}"
        super().__init__(
            f"asked for the state of step {wanted}, but the peer sent its state {sent}; nothing was "
            "overwritten. Pass the same step= on both sides, or none on this side",
            peer=peer,
            phase="compare",
        )


class NoSuchVersion(PeerError, LookupError):
    """No source has the name or the version that was asked for."""


class PeerGaveUp(PeerError):
    """The sender, or a receiver that forwards the state, aborted the transfer; or a served state changed.

    `failed_rank` is the rank that caused the abort, if known; `peer` is the rank that reported it.
    """

    def __init__(self, what: str, *, failed_rank: int | None = None, peer: int | str | None = None) -> None:
        super().__init__(what, peer=peer)
        self.failed_rank = failed_rank


class LinkError(FerryError):
    """Bytes could not be moved."""


class LinkBroken(LinkError, ConnectionError):
    """The connection to the peer is lost. Over a process group: create a new group."""


class LinkTimeout(LinkError, TimeoutError):
    """The deadline passed before the transfer was complete."""


class LinkStalled(LinkTimeout):
    """Nothing arrived for `stall_timeout`: no byte of a fetch, or no whole message over a process group."""


class CheckpointTimeout(LinkTimeout, RuntimeError):
    """The deadline of a transport for torchft passed. `__cause__` is the error of the transfer."""


class Corrupted(LinkError):
    """The received bytes differ from those that the sender read. `paths` lists the leaves they belong to."""

    def __init__(self, paths: Sequence[str], what: str = "", *, peer: int | str | None = None) -> None:
        self.paths = tuple(paths)
        super().__init__(
            what
            or f"the received bytes differ from the sent bytes ({_in_line(self.paths)}): they were damaged "
            "on the way, or the sender's tensors changed while they were being sent",
            peer=peer,
            path=self.paths[0] if self.paths else None,
        )


class NotAuthorized(LinkError, PermissionError):
    """A source does not accept the token."""


class SourcesLost(LinkError, ConnectionError):
    """No source can be reached, or all were lost. `reasons` says why, by address."""

    def __init__(self, reasons: Mapping[str, str]) -> None:
        self.reasons = dict(reasons)
        lines = [f"{address}: {reason}" for address, reason in self.reasons.items()]
        super().__init__("\n  ".join(["no source is left to fetch from:", *lines]))


class GroupBroken(LinkError, ConnectionError):
    """An earlier transfer failed on this process group, so messages of that transfer may still arrive."""


class SendFailed(LinkError):
    """Sending to at least one of several receivers failed.

    `delivered` lists the ranks whose send completed, which they do not acknowledge; `failed` maps the other
    ranks to errors.
    """

    def __init__(self, delivered: Sequence[int], failed: Mapping[int, FerryError]) -> None:
        self.delivered, self.failed = tuple(delivered), dict(failed)
        ranks = "ranks" if len(self.failed) > 1 else "rank"
        missed, reached = ", ".join(map(str, self.failed)), ", ".join(map(str, self.delivered)) or "none"
        lines = [f"rank {rank}: {error.what}" for rank, error in self.failed.items()]
        what = f"sending to {ranks} {missed} failed (completed: {reached}):\n  " + "\n  ".join(lines)
        super().__init__(what, phase="send tensors")


class SendLate(SendFailed, TimeoutError):
    """The deadline passed before every receiver had the state."""


class SendBroken(SendFailed, ConnectionError):
    """The connection to a receiver was lost, and no send timed out."""


def _in_line(paths: Sequence[str], limit: int = 10) -> str:
    more = [f"… and {len(paths) - limit} more"] if len(paths) > limit else []
    return ", ".join([*paths[:limit], *more]) or "none"


def _count(entries: Sequence[object], noun: str) -> str:
    return f"{len(entries)} {noun}{'s' if len(entries) != 1 else ''}"


def _listed(what: str, entries: Sequence[object], name: str, *advice: str, limit: int = 50) -> str:
    """Return a message with a line for each of the first entries. `name` is the attribute that has all."""
    more = [f"… and {len(entries) - limit} more, all in {name}"] if len(entries) > limit else []
    return "\n  ".join([f"{what}:", *map(str, entries[:limit]), *more, *advice])


def _first_path(entries: Sequence[Difference | LostPart | Mismatch]) -> str | None:
    return entries[0].path if entries else None


def show_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as text.

    >>> show_ranks([3]), show_ranks([0, 1, 2])
    ('rank 3', 'ranks 0, 1, 2')
    """
    return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(map(str, ranks))}"


def send_failed(delivered: Sequence[int], failed: Mapping[int, FerryError]) -> SendFailed:
    """Return the SendFailed that fits the errors of several receivers."""
    return _fitting(failed.values(), SendLate, SendBroken, SendFailed)(delivered, failed)


def _fitting(causes: Collection[BaseException], late: type[E], broken: type[E], other: type[E]) -> type[E]:
    """Return `late` if one of the causes is a timeout, or else `broken` if one is a lost connection."""
    kinds = (late, TimeoutError), (broken, ConnectionError)
    return next((each for each, kind in kinds if any(isinstance(cause, kind) for cause in causes)), other)


def what_of(error: BaseException) -> str:
    """Return what an error says: `what` of a FerryError, or else its class and its message."""
    try:
        shown = f": {error}" if str(error) else ""
        return error.what if isinstance(error, FerryError) else f"{type(error).__name__}{shown}"
    except Exception:  # from its `__str__`
        return type(error).__name__
