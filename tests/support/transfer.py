"""States through torchferry, the short way: the whole engine over a link in memory, in one process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchferry.core.plan import CHUNK_BYTES
from torchferry.core.protocol import MAX_METADATA_BYTES
from torchferry.core.report import Report
from torchferry.engine import Pull, Push, pull, push
from torchferry.engine.group import Group
from torchferry.testing import MemoryNetwork

TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Ferried:
    """What came out, and what went over the link (metadata not counted)."""

    state: Any
    report: Report
    payload_bytes: int
    payload_messages: int


def ferry(
    state: object,
    *,
    into: object = None,
    strict: bool = True,
    own_buffers: bool = False,
    chunk_bytes: int = CHUNK_BYTES,
    groups: tuple[Group, Group] | None = None,
    **receive: Any,
) -> Ferried:
    """Send a state and receive it: fresh, or into the tensors of `into`.

    With `own_buffers`, neither side's link takes any memory but its own, so that all is staged. With
    `groups`, the sender's and the receiver's, it is one of several transfers on them. Other keywords are
    fields of `Pull`.
    """
    network = MemoryNetwork()
    sending, receiving = groups or (Group(), Group())
    push(
        network.link(0, own_buffers=own_buffers),
        [1],
        state,
        Push(TIMEOUT_S, MAX_METADATA_BYTES, chunk_bytes=chunk_bytes),
        sending,
    )
    terms = Pull(
        TIMEOUT_S,
        MAX_METADATA_BYTES,
        target=None if into is None else lambda: into,
        strict=strict,
        **receive,
    )
    received, report = pull(network.link(1, own_buffers=own_buffers), 0, terms, receiving)
    # Beside the payload: the length's eight bytes, and the frame.
    payload = network.nbytes - 8 - report.metadata_bytes
    return Ferried(received, report, payload, network.messages - 2)
