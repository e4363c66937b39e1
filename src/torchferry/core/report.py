"""The report of a finished transfer."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Report:
    """Bytes, messages and seconds of one transfer, as this side saw it.

    `payload_bytes` and `messages` count one copy of the state, however many peers it went to; `messages` are
    its chunks, without frames and digest blocks. `phases_s` has the seconds of each phase; in the phase
    "wait" a receiver waits for its sender to begin. `step` is the step that the sender gave, or None. `via`
    is how the bytes went: "memory" between processes of one machine, "group", "memory and group" if a sender
    had receivers of both kinds, and empty if it sent no payload.

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
    via: str = ""

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
        step = "" if self.step is None else f" (step {self.step})"
        via = f" by {self.via}" if self.via else ""
        return (
            f"{self.payload_bytes:,} bytes in {self.messages} messages with {peers}{via}{step}, "
            f"{_show_phases(self)}{_show_unmatched(self)}"
        )


@dataclass
class SourceReport:
    """What one source delivered, and what went wrong with it.

    `via` is how its bytes came: "memory" if it is on the same machine, or "tcp". If memory was not used,
    `why_tcp` says why.
    """

    bytes: int = 0
    chunks: int = 0
    via: str = ""
    why_tcp: str = ""
    failures: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class FetchReport:
    """Bytes and seconds of one fetch.

    `bytes_total` is the size of the state, `bytes_moved` what was received, and `bytes_skipped` what the
    local state already had. `phases_s` has the seconds of each phase; "connect" (with `newer_than`, "wait")
    includes describing the local state. `extra_bytes` is the memory that `atomic=True` took. `sources` is by
    address. If not `confirmed`, a source in use does not know that the fetch is complete. `loaded` lists the
    objects that were given a state dict, by path. The rest is as in `Report`, but entries of objects are not
    listed.
    """

    version: int
    root: str
    bytes_total: int
    bytes_moved: int
    bytes_skipped: int
    extra_bytes: int
    phases_s: dict[str, float]
    sources: dict[str, SourceReport]
    verified: bool
    confirmed: bool
    dropped: tuple[str, ...] = ()
    fresh: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    loaded: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """The time of all phases together."""
        return sum(self.phases_s.values())

    @property
    def bytes_per_second(self) -> float:
        """The bytes moved over the seconds of moving them; 0 if there was no time."""
        moving_s = self.phases_s.get("receive tensors", 0.0)
        return self.bytes_moved / moving_s if moving_s > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the same as plain data."""
        return {**asdict(self), "seconds": self.seconds, "bytes_per_second": self.bytes_per_second}

    def __str__(self) -> str:
        sources = ", ".join(
            f"{address} ({each.bytes:,} bytes{each.via and f' by {each.via}'})"
            for address, each in self.sources.items()
        )
        notes = _show_unmatched(self)
        notes += f"; {self.extra_bytes:,} bytes of extra memory" if self.extra_bytes else ""
        notes += "" if self.verified else ", not verified"
        notes += "" if self.confirmed else ", not confirmed"
        return (
            f"version {self.version}: {self.bytes_moved:,} of {self.bytes_total:,} bytes moved at "
            f"{self.bytes_per_second / 1e6:,.0f} MB/s from {sources}, {_show_phases(self)}{notes}"
        )


def merge_reports(reports: Sequence[FetchReport]) -> FetchReport:
    """Return one report for several fetches that ran at the same time. The root is that of the first."""
    sources: dict[str, SourceReport] = {}
    for report in reports:
        for address, each in report.sources.items():
            known = sources.setdefault(address, SourceReport(via=each.via, why_tcp=each.why_tcp))
            known.bytes, known.chunks = known.bytes + each.bytes, known.chunks + each.chunks
            known.failures += each.failures
    longest = max(reports, key=lambda report: report.seconds)
    return replace(
        longest,
        root=reports[0].root,
        bytes_total=sum(report.bytes_total for report in reports),
        bytes_moved=sum(report.bytes_moved for report in reports),
        bytes_skipped=sum(report.bytes_skipped for report in reports),
        extra_bytes=sum(report.extra_bytes for report in reports),
        sources=sources,
        confirmed=all(report.confirmed for report in reports),
    )


def _show_phases(report: Report | FetchReport) -> str:
    phases = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in report.phases_s.items())
    return f"{report.seconds:.3f} s ({phases})"


def _show_unmatched(report: Report | FetchReport) -> str:
    unmatched = {"dropped": report.dropped, "fresh": report.fresh, "kept": report.kept}
    return "".join(f"; {len(paths)} paths {name}" for name, paths in unmatched.items() if paths)
