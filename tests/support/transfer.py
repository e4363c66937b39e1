"""Transfers of states in one process: the whole engine over a link in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchferry.core.plan import CHUNK_BYTES
from torchferry.core.push import MAX_METADATA_BYTES
from torchferry.core.report import Report
from torchferry.engine.push import ReceiveOptions, SendOptions, receive_state, send_state
from torchferry.engine.workspace import Workspace
from torchferry.testing import MemoryNetwork

TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Transferred:
    """The received state, and the payload that was sent."""

    state: Any
    report: Report
    payload_bytes: int
    payload_messages: int


def transfer(
    state: object,
    *,
    into: object = None,
    strict: bool = True,
    own_buffers: bool = False,
    chunk_bytes: int = CHUNK_BYTES,
    workspaces: tuple[Workspace, Workspace] | tuple[None, None] = (None, None),
    **receive: Any,
) -> Transferred:
    """Send a state and receive it: fresh, or into the tensors of `into`.

    With `own_buffers`, both links accept only their own memory, so that every message is staged. `workspaces`
    are the sender's and the receiver's, for several transfers. Other keywords are fields of ReceiveOptions.
    """
    network = MemoryNetwork()
    sending, receiving = workspaces
    send_state(
        network.link(0, own_buffers=own_buffers),
        [1],
        state,
        SendOptions(TIMEOUT_S, MAX_METADATA_BYTES, chunk_bytes=chunk_bytes),
        sending,
    )
    options = ReceiveOptions(
        TIMEOUT_S,
        MAX_METADATA_BYTES,
        local_state=None if into is None else lambda: into,
        strict=strict,
        **receive,
    )
    received, report = receive_state(network.link(1, own_buffers=own_buffers), 0, options, receiving)
    # A length has 8 bytes.
    payload = network.nbytes - 8 - report.metadata_bytes
    return Transferred(received, report, payload, network.messages - 2)
