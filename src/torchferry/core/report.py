"""What a finished transfer says of itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Report:
    """Bytes, messages and seconds of one transfer, as this side saw it.

    `payload_bytes` and `messages` count one copy of the state, however many peers it went to.
    `forwarded_to` is the peer that this one passed it on to, if it did; `not_forwarded` says why it could
    not.
    """

    peers: tuple[int, ...]
    payload_bytes: int
    metadata_bytes: int
    messages: int
    phases_s: dict[str, float]
    forwarded_to: int | None = None
    not_forwarded: str | None = None

    @property
    def seconds(self) -> float:
        """The whole time, all phases together."""
        return sum(self.phases_s.values())

    @property
    def bytes_per_second(self) -> float:
        """Payload over the whole time; 0 if there was no time."""
        return self.payload_bytes / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        ranks = ", ".join(str(peer) for peer in self.peers)
        phases = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in self.phases_s.items())
        return (
            f"{self.payload_bytes:,} bytes in {self.messages} messages with rank {ranks}, "
            f"{self.seconds:.3f} s ({phases})"
        )
