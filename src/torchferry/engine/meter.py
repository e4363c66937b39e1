"""How far a transfer with one peer has got. Written by whoever moves bytes, read by whoever watches."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Meter:
    """Bytes done of bytes due with one peer, the message that is next, and when something last moved."""

    peer: int
    phase: str
    moved_s: float
    bytes_due: int = 0
    bytes_done: int = 0
    posted: int = 0
    done: int = 0
    verified: set[int] = field(default_factory=set)

    def __str__(self) -> str:
        return f"{self.bytes_done:,} of {self.bytes_due:,} bytes done"
