"""Every error that torchferry raises, in one tree.

    FerryError                      the root: catch this to catch them all
    ├── StateError                  the state on *this* side is the problem
    │   ├── Unsendable              a leaf that can't travel exactly (sender, before anything is sent)
    │   ├── StateMismatch           what arrives does not fit what would be overwritten (nothing was)
    │   └── BadArgument             a rank, timeout or device that can't be right  (also ValueError)
    ├── PeerError                   what the other side sent is the problem
    │   ├── BadManifest             metadata that is malformed, or of another version
    │   ├── PickleRefused           metadata or a leaf that could run code
    │   ├── UnknownType             a type that this process has not registered, or can't build
    │   └── StepMismatch            the peer's state is of another step
    └── LinkError                   the way between the two is the problem
        ├── LinkBroken              the backend says that the connection is gone  (also ConnectionError)
        └── LinkTimeout             the deadline passed                            (also TimeoutError)

The branches say whose fault it is, because that decides what to do: mend the state, mend the peer, or
rebuild the group. Each error carries `peer` (a rank in the group), `path` and `phase` where it has them.
"""

from __future__ import annotations

from collections.abc import Sequence
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

    `mismatches` has one entry for each path at fault, in the order of the incoming state.
    """

    _SHOWN = 50

    def __init__(self, mismatches: Sequence[Mismatch], *, peer: int | None = None) -> None:
        self.mismatches = tuple(mismatches)
        count = len(self.mismatches)
        lines = [str(mismatch) for mismatch in self.mismatches[: self._SHOWN]]
        if count > self._SHOWN:
            lines.append(f"… and {count - self._SHOWN} more, all in .mismatches")
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
            phase="metadata",
        )


class LinkError(FerryError):
    """Bytes could not be moved."""


class LinkBroken(LinkError, ConnectionError):
    """The backend reports that the connection is gone; the group must be rebuilt."""


class LinkTimeout(LinkError, TimeoutError):
    """The deadline passed before the transfer was complete."""
