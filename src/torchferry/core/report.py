"""What a finished transfer says of itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Report:
    """Bytes, messages and seconds of one transfer, as this side saw it.

    `payload_bytes` and `messages` count one copy of the state, however many peers it went to.
    `forwarded_by` is the peer that passed it on to this one, if it did not come from the sender itself;
    `forwarded_to` the one that this one was to pass it on to; `not_forwarded` says why it could not.
    """

    peers: tuple[int, ...]
    payload_bytes: int
    metadata_bytes: int
    messages: int
    phases_s: dict[str, float]
    forwarded_to: int | None = None
    not_forwarded: str | None = None
    forwarded_by: int | None = None

    @property
    def seconds(self) -> float:
        """The whole time, all phases together."""
        return sum(self.phases_s.values())

    @property
    def bytes_per_second(self) -> float:
        """Payload over the whole time; 0 if there was no time."""
        return self.payload_bytes / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        peers = f"rank {', '.join(map(str, self.peers))}" if self.peers else "nobody"
        if self.forwarded_by is not None:
            peers += f" by way of rank {self.forwarded_by}"
        phases = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in self.phases_s.items())
        return (
            f"{self.payload_bytes:,} bytes in {self.messages} messages with {peers}, "
            f"{self.seconds:.3f} s ({phases})"
        )
