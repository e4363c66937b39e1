"""What the coordinator tells, as it happens, to whoever watches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Starting:
    """The workers are being started."""

    workers: int


@dataclass(frozen=True)
class Started:
    """A worker runs."""

    rank: int
    pid: int
    replacement: bool


@dataclass(frozen=True)
class Training:
    """A run goes on, or starts, in the group of this generation."""

    generation: int
    disturbed: bool


@dataclass(frozen=True)
class Stepped:
    """All workers have completed this step."""

    step: int
    loss: float


@dataclass(frozen=True)
class Killed:
    """SIGKILL was sent to a worker that has the gradients of this step on their way."""

    rank: int
    pid: int
    step: int


@dataclass(frozen=True)
class Died:
    """The killed worker is gone, as the operating system says."""

    rank: int
    signal_name: str
    seconds_after_kill: float


@dataclass(frozen=True)
class Noticed:
    """A survivor got an error from the all-reduce of this step."""

    rank: int
    step: int
    reason: str
    seconds_after_kill: float


@dataclass(frozen=True)
class StillBlocked:
    """Survivors that got no error; they are called out of their all-reduce."""

    ranks: tuple[int, ...]
    seconds_after_kill: float


@dataclass(frozen=True)
class CaughtUp:
    """A worker got the state of this step from a living peer."""

    rank: int
    source: int
    step: int
    payload_bytes: int
    seconds: float
    replacement: bool


@dataclass(frozen=True)
class Completed:
    """All workers have taken the last step."""

    step: int
    loss: float
    disturbed: bool


Happening = (
    Starting | Started | Training | Stepped | Killed | Died | Noticed | StillBlocked | CaughtUp | Completed
)
Watcher = Callable[[Happening], None]
