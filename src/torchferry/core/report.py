"""What a finished transfer says of itself."""

from __future__ import annotations

from dataclasses import dataclass

WAIT = "wait"
"""The phase in which a receiver waits for its sender to begin."""


@dataclass(frozen=True)
class Report:
    """Bytes, messages and seconds of one transfer, as this side saw it.

    `payload_bytes` and `messages` count one copy of the state, however many peers it went to. `step` is the
    step that the sender gave, or None. After a receive in place, `dropped` and `fresh` list the paths that
    only the peer has: `dropped` if they were left out, `fresh` if they arrived as fresh tensors. `kept` lists
    the paths that only the local state has, which did not change.
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
    step: int | None = None
    dropped: tuple[str, ...] = ()
    fresh: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """The whole time, all phases together."""
        return sum(self.phases_s.values())

    @property
    def bytes_per_second(self) -> float:
        """Payload over the time without the phase "wait"; 0 if there was no time."""
        busy_s = self.seconds - self.phases_s.get(WAIT, 0.0)
        return self.payload_bytes / busy_s if busy_s > 0 else 0.0

    def __str__(self) -> str:
        peers = f"rank {', '.join(map(str, self.peers))}" if self.peers else "nobody"
        if self.forwarded_by is not None:
            peers += f" by way of rank {self.forwarded_by}"
        phases = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in self.phases_s.items())
        step = "" if self.step is None else f" (step {self.step})"
        counts = {"dropped": self.dropped, "fresh": self.fresh, "kept": self.kept}
        odd = "".join(f"; {len(paths)} paths {name}" for name, paths in counts.items() if paths)
        return (
            f"{self.payload_bytes:,} bytes in {self.messages} messages with {peers}{step}, "
            f"{self.seconds:.3f} s ({phases}){odd}"
        )
