"""The report of a finished transfer."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Report:
    """Bytes, messages and seconds of one transfer, as this side saw it.

    `payload_bytes` and `messages` count one copy of the state, however many peers it went to; `messages` are
    its chunks, without frames and digest blocks. `phases_s` has the seconds of each phase; in the phase
    "wait" a receiver waits for its sender to begin. `step` is the step that the sender gave, or None.

    After a receive in place, `dropped` and `fresh` list the paths that only the peer has: `dropped` if they
    were left out, `fresh` if they are in the returned state. `kept` lists the paths that only the local state
    has, which did not change.

    If receivers forward the state, `forwarded_by` is the receiver that forwarded it to this process (None if
    it came from the sender), and `forwarded_to` the receiver that this process forwards it to. If that
    failed, `not_forwarded` is the reason.
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
        """The time of all phases together."""
        return sum(self.phases_s.values())

    @property
    def bytes_per_second(self) -> float:
        """Payload over the time of all phases but "wait"; 0 if there was no time."""
        busy_s = self.seconds - self.phases_s.get("wait", 0.0)
        return self.payload_bytes / busy_s if busy_s > 0 else 0.0

    def __str__(self) -> str:
        peers = f"rank {', '.join(map(str, self.peers))}" if self.peers else "no peer"
        if self.forwarded_by is not None:
            peers += f" through rank {self.forwarded_by}"
        phases = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in self.phases_s.items())
        step = "" if self.step is None else f" (step {self.step})"
        unmatched = {"dropped": self.dropped, "fresh": self.fresh, "kept": self.kept}
        listed = "".join(f"; {len(paths)} paths {name}" for name, paths in unmatched.items() if paths)
        return (
            f"{self.payload_bytes:,} bytes in {self.messages} messages with {peers}{step}, "
            f"{self.seconds:.3f} s ({phases}){listed}"
        )
