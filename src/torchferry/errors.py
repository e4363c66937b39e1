"""Every error that torchferry raises, in one tree.

    FerryError                      the root: catch this to catch them all
    ├── StateError                  the state on *this* side is the problem
    │   ├── Unsendable              a leaf that can't travel exactly (sender, before anything is sent)
    │   ├── StateChanged            the state was changed while it was being sent
    │   ├── StateMismatch           what arrives does not fit what would be overwritten (nothing was)
    │   ├── TargetTorn              a failure left the local state partly overwritten
    │   │   ├── TornAndLate         … because the deadline passed         (also TimeoutError)
    │   │   └── TornAndBroken       … because the connection was lost     (also ConnectionError)
    │   └── BadArgument             a rank, timeout or device that can't be right  (also ValueError)
    ├── PeerError                   what the other side sent is the problem
    │   ├── BadManifest             metadata that is malformed, or of another version
    │   ├── PickleRefused           metadata or a leaf that could run code
    │   ├── UnknownType             a type that this process has not registered, or can't build
    │   ├── StepMismatch            the peer's state is of another step
    │   └── PeerGaveUp              the sender, or who was to forward, ended the transfer half-way
    └── LinkError                   the way between the two is the problem
        ├── LinkBroken              the connection is gone                         (also ConnectionError)
        ├── LinkTimeout             the deadline passed                            (also TimeoutError)
        │   └── LinkStalled         no message was completed for stall_timeout
        ├── Corrupted               bytes arrived that are not those that were sent
        ├── GroupBroken             an earlier transfer failed: rebuild the group      (also ConnectionError)
        └── SendFailed              several receivers, and not all of them got the state
            ├── SendLate            … because the deadline passed for one      (also TimeoutError)
            └── SendBroken          … because the connection to one was lost   (also ConnectionError)

The branches say whose fault it is, because that decides what to do: mend the state, mend the peer, or
rebuild the group. Each error carries `peer` (a rank in the group), `path` and `phase` where it has them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class FerryError(Exception):
    """The root of all errors of torchferry.

    `peer`, `path` and `phase` are None until someone who knows them fills them in: the describer knows
    the path, the engine the peer and the phase.
    """

    def __init__(
        self,
        what: str,
        *,
        peer: int | None = None,
        path: str | None = None,
        phase: str | None = None,
    ) -> None:
        super().__init__(what)
        self.what = what
        self.peer = peer
        self.path = path
        self.phase = phase

    def __str__(self) -> str:
        known = []
        if self.peer is not None:
            known.append(f"peer: rank {self.peer}")
        if self.phase is not None:
            known.append(f"phase: {self.phase}")
        return f"{self.what} [{', '.join(known)}]" if known else self.what

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions cross process boundaries in launchers and tests; keyword-only arguments would be
        # lost by the default, which calls the class with `args` alone.
        return (_revive, (type(self), self.args, self.__dict__))


def _revive(cls: type[FerryError], args: tuple[object, ...], fields: dict[str, object]) -> FerryError:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(fields)
    return error


class StateError(FerryError):
    """The state on this side can't be sent, or can't take what arrives."""


class Unsendable(StateError):
    """A leaf, key or container can't travel exactly. Nothing was sent."""


class StateChanged(StateError):
    """The state was changed while it was being sent, so what arrived is no state that ever was.

    `paths` names the leaves that changed.
    """

    def __init__(self, paths: Sequence[str], *, peer: int | None = None) -> None:
        self.paths = tuple(paths)
        super().__init__(
            f"the state was changed while it was being sent ({_shown(self.paths)}); receivers "
            "refuse it where it would be a mixture. Send a copy, or hold the training step back until the "
            "send returns",
            peer=peer,
            path=self.paths[0] if self.paths else None,
        )


class TargetTorn(StateError):
    """A failure came after local tensors were written: some hold the new values, some a mixture.

    `whole` names the paths that arrived complete and verified, `torn` those that may hold a mixture of
    old and new bytes, `untouched` those that still hold the old. The failure itself is `__cause__`.
    """

    def __init__(
        self,
        cause: BaseException,
        *,
        whole: Sequence[str],
        torn: Sequence[str],
        untouched: Sequence[str],
    ) -> None:
        known = cause if isinstance(cause, FerryError) else FerryError(f"{type(cause).__name__}: {cause}")
        self.whole = tuple(whole)
        self.torn = tuple(torn)
        self.untouched = tuple(untouched)
        super().__init__(
            f"{_torn(self.whole, self.torn, self.untouched)}. Receive again before using it. What happened: "
            f"{known.what}",
            peer=known.peer,
            path=known.path,
            phase=known.phase,
        )


class TornAndLate(TargetTorn, TimeoutError):
    """The deadline passed after local tensors were written."""


class TornAndBroken(TargetTorn, ConnectionError):
    """The connection was lost after local tensors were written."""


class BadArgument(StateError, ValueError):
    """An argument that can't be right, such as a rank outside the group."""


class Mismatch(NamedTuple):
    """One path at which what arrives and what is here do not fit."""

    path: str
    what: str
    incoming: str
    local: str

    def __str__(self) -> str:
        return f"{self.path}: {self.what}: incoming {self.incoming}, local {self.local}"


class StateMismatch(StateError):
    """What arrives does not fit the local state; no local tensor was changed.

    `mismatches` has one entry for each path at fault, in the order of the incoming state; `hints` say what
    may be behind them.
    """

    _SHOWN = 50

    def __init__(
        self, mismatches: Sequence[Mismatch], *, hints: Sequence[str] = (), peer: int | None = None
    ) -> None:
        self.mismatches = tuple(mismatches)
        self.hints = tuple(hints)
        count = len(self.mismatches)
        lines = [str(mismatch) for mismatch in self.mismatches[: self._SHOWN]]
        if count > self._SHOWN:
            lines.append(f"… and {count - self._SHOWN} more, all in .mismatches")
        lines += self.hints
        super().__init__(
            f"the incoming state does not fit the local one in {count} "
            f"place{'s' if count != 1 else ''}; nothing was overwritten:\n  " + "\n  ".join(lines),
            peer=peer,
            path=self.mismatches[0].path if self.mismatches else None,
            phase="compare",
        )


class PeerError(FerryError):
    """What the peer sent can't be used."""


class BadManifest(PeerError):
    """Metadata that is not what it claims to be. Nothing was loaded from it."""


class PickleRefused(PeerError):
    """Metadata, or a leaf in it, that only pickle can load, and pickle is off."""


class UnknownType(PeerError):
    """A type in the incoming state that this process does not know or can't build."""


class StepMismatch(PeerError):
    """The peer's state belongs to another step than the one asked for."""

    def __init__(self, *, wanted: int, got: int | None, peer: int | None = None) -> None:
        self.wanted = wanted
        self.got = got
        sent = "without a step" if got is None else f"as step {got}"
        super().__init__(
            f"asked for the state of step {wanted}, but the peer sent its state {sent}; nothing was "
            "overwritten. Agree on the step first, or leave step= out on this side",
            peer=peer,
            phase="compare",
        )


class PeerGaveUp(PeerError):
    """The transfer was ended before it was complete, by its sender or by who was to forward it.

    `culprit` is the rank whose fault it is, if that is known: not always the one that said so.
    """

    def __init__(self, what: str, *, culprit: int | None = None, peer: int | None = None) -> None:
        super().__init__(what, peer=peer)
        self.culprit = culprit


class LinkError(FerryError):
    """Bytes could not be moved."""


class LinkBroken(LinkError, ConnectionError):
    """The backend reports that the connection is gone; the group must be rebuilt."""


class LinkTimeout(LinkError, TimeoutError):
    """The deadline passed before the transfer was complete."""


class LinkStalled(LinkTimeout):
    """No message was completed for as long as `stall_timeout` allows."""


class Corrupted(LinkError):
    """Bytes arrived that are not those that the sender read. `paths` names the leaves they belong to."""

    def __init__(self, paths: Sequence[str], *, peer: int | None = None) -> None:
        self.paths = tuple(paths)
        super().__init__(
            f"what arrived is not what was sent ({_shown(self.paths)}): bytes were changed on the way, or "
            "the sender's tensors were changed while they were being sent",
            peer=peer,
            path=self.paths[0] if self.paths else None,
        )


class GroupBroken(LinkError, ConnectionError):
    """An earlier transfer failed on this process group, so nothing more can be trusted to match on it."""


class SendFailed(LinkError):
    """Not every receiver got the state. `delivered` lists those that did, `failed` has the others' errors."""

    def __init__(self, delivered: Sequence[int], failed: Mapping[int, FerryError]) -> None:
        self.delivered = tuple(delivered)
        self.failed = dict(failed)
        got = ", ".join(str(rank) for rank in self.delivered) or "none"
        lines = [f"rank {rank}: {error}" for rank, error in self.failed.items()]
        super().__init__(
            f"the state did not reach {'ranks' if len(self.failed) > 1 else 'rank'} "
            f"{', '.join(str(rank) for rank in self.failed)} "
            f"(it reached: {got}):\n  " + "\n  ".join(lines),
            phase="send tensors",
        )


class SendLate(SendFailed, TimeoutError):
    """The deadline passed before every receiver had the state."""


class SendBroken(SendFailed, ConnectionError):
    """The connection to a receiver was lost; no other was late."""


def _torn(whole: Sequence[str], torn: Sequence[str], untouched: Sequence[str]) -> str:
    if not torn and not untouched:
        return (
            f"all {len(whole)} paths of the local state were overwritten, but the transfer did not end well"
        )
    if not torn:
        return (
            f"the local state is half new: {len(whole)} paths arrived whole, {len(untouched)} are untouched"
        )
    return (
        f"the local state is torn: {len(torn)} paths may hold a mixture of old and new ({_shown(torn)}), "
        f"{len(whole)} arrived whole, {len(untouched)} are untouched"
    )


def _shown(paths: Sequence[str], most: int = 10) -> str:
    shown = ", ".join(paths[:most]) or "none"
    return f"{shown}, … and {len(paths) - most} more" if len(paths) > most else shown
