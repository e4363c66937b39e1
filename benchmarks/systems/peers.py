"""The transports that torchferry descends from: torch's own, and torchft's two."""

from __future__ import annotations

from datetime import timedelta
from importlib.util import find_spec
from typing import Any

import torch

from benchmarks.portrait import leaves
from benchmarks.systems.base import SENDER, Session, Site, System
from benchmarks.works import HTTP, TORCH, TORCHFT

_CPU = torch.device("cpu")
_STEP = 1


def _open_torch(site: Site) -> Session:
    from torch.distributed.checkpoint._pg_transport import PGTransport

    transport = PGTransport(site.group, timedelta(seconds=site.timeout_s), _CPU, _target_of(site))
    return Session(
        send=lambda: transport.send_checkpoint(site.receivers, site.source),
        receive=lambda: transport.recv_checkpoint(SENDER),
        source=site.source,
        target=site.target,
    )


def _open_torchft(site: Site) -> Session:
    from torchft.checkpointing.pg_transport import PGTransport

    timeout = timedelta(seconds=site.timeout_s)
    transport: Any = PGTransport(site.group, timeout, _CPU, _target_of(site))
    return Session(
        send=lambda: transport.send_checkpoint(site.receivers, _STEP, site.source, timeout),
        receive=lambda: transport.recv_checkpoint(SENDER, transport.metadata(), _STEP, timeout),
        source=site.source,
        target=site.target,
    )


def _open_http(site: Site) -> Session:
    from torchft.checkpointing.http_transport import HTTPTransport

    timeout = timedelta(seconds=site.timeout_s)
    transport: Any = HTTPTransport(timeout, num_chunks=0)
    address = site.share(transport.metadata().encode())[SENDER].decode()

    def receive() -> object:
        received = transport.recv_checkpoint(SENDER, address, _STEP, timeout)
        if site.target is None:
            return received
        return copied_into(site.target, received)

    return Session(
        send=lambda: transport.send_checkpoint(site.receivers, _STEP, site.source, timeout),
        receive=receive,
        source=site.source,
        target=site.target,
        # As its manager does after every step; until the next send, readers wait.
        settle=transport.disallow_checkpoint,
        close=transport.shutdown,
    )


def copied_into(target: object, received: object) -> object:
    """Copy a received state into the tensors of a local one, which is what `load_state_dict` does."""
    arrived = dict(leaves(received))
    for path, leaf in leaves(target):
        if isinstance(leaf, torch.Tensor):
            value = arrived[path]
            assert isinstance(value, torch.Tensor), f"{path} arrived as {type(value)}"
            leaf.copy_(value)
    return target


def _target_of(site: Site) -> Any:
    return (lambda: site.target) if site.target is not None else None


def _numpy_missing() -> str | None:
    return None if find_spec("numpy") else "needs numpy: pip install numpy"


def _torchft_missing() -> str | None:
    return _numpy_missing() if find_spec("torchft") else "is not installed: it is in the extra bench"


SYSTEMS = (
    System(TORCH, "torch's PGTransport", "peer", _open_torch, missing=_numpy_missing),
    System(TORCHFT, "torchft's PGTransport", "peer", _open_torchft, missing=_torchft_missing),
    # It opens a connection for each transfer, and closes it.
    System(HTTP, "torchft's HTTPTransport", "peer", _open_http, wired=False, missing=_torchft_missing),
)
