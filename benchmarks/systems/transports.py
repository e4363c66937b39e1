"""torchferry's PGTransport, torch's PGTransport, and torchft's two transports."""

from __future__ import annotations

import inspect
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch

from benchmarks.systems.session import SENDER, Session, Setup, System, copy_into
from benchmarks.workloads import FERRY, GLOO, HTTP, TORCH, TORCHFT, UNVERIFIED
from torchferry.pg_transport import PGTransport

_CPU = torch.device("cpu")
_STEP = 1


def _open_ferry(setup: Setup, *, verify: bool = True, same_host: bool = True) -> Session:
    options = {"state_dict": _state_dict(setup), "verify": verify, "relay": setup.case.relay}
    # Without this parameter, all bytes go over the process group.
    if "same_host" in inspect.signature(PGTransport).parameters:
        options["same_host"] = same_host
    transport = PGTransport(setup.group, setup.timeout_s, "cpu", **options)

    def phases() -> dict[str, float]:
        return dict(transport.last_report.phases_s) if transport.last_report else {}

    return _session(setup, transport, phases=phases)


def _open_torch(setup: Setup) -> Session:
    from torch.distributed.checkpoint._pg_transport import PGTransport

    timeout = timedelta(seconds=setup.timeout_s)
    return _session(setup, PGTransport(setup.group, timeout, _CPU, _state_dict(setup)))


def _session(setup: Setup, transport: Any, **more: Any) -> Session:
    return Session(
        send=lambda: transport.send_checkpoint(setup.receivers, setup.source),
        receive=lambda: transport.recv_checkpoint(SENDER),
        source=setup.source,
        target=setup.target,
        **more,
    )


def _open_torchft(setup: Setup) -> Session:
    from torchft.checkpointing.pg_transport import PGTransport

    timeout = timedelta(seconds=setup.timeout_s)
    transport: Any = PGTransport(setup.group, timeout, _CPU, _state_dict(setup))
    return Session(
        send=lambda: transport.send_checkpoint(setup.receivers, _STEP, setup.source, timeout),
        receive=lambda: transport.recv_checkpoint(SENDER, transport.metadata(), _STEP, timeout),
        source=setup.source,
        target=setup.target,
    )


def _open_http(setup: Setup) -> Session:
    from torchft.checkpointing.http_transport import HTTPTransport

    timeout = timedelta(seconds=setup.timeout_s)
    transport: Any = HTTPTransport(timeout, num_chunks=0)
    address = setup.share(transport.metadata())[SENDER]

    def receive() -> object:
        return copy_into(setup.target, transport.recv_checkpoint(SENDER, address, _STEP, timeout))

    return Session(
        send=lambda: transport.send_checkpoint(setup.receivers, _STEP, setup.source, timeout),
        receive=receive,
        source=setup.source,
        target=setup.target,
        # torchft's manager does this after every step. Readers then wait for the next send.
        settle=transport.disallow_checkpoint,
        close=transport.shutdown,
    )


def _state_dict(setup: Setup) -> Any:
    return (lambda: setup.target) if setup.target is not None else None


def _missing(*packages: str) -> str | None:
    installed = all(find_spec(package) for package in packages)
    return None if installed else f"needs {' and '.join(packages)}: pip install 'torchferry[bench]'"


_numpy_missing = partial(_missing, "numpy")
_torchft_missing = partial(_missing, "torchft", "numpy")
FERRY_SYSTEMS = (
    System(FERRY, "torchferry's PGTransport", "torchferry", _open_ferry),
    System(
        UNVERIFIED,
        "torchferry's PGTransport, verify=False",
        "torchferry",
        partial(_open_ferry, verify=False),
    ),
    System(
        GLOO,
        "torchferry's PGTransport, same_host=False",
        "torchferry",
        partial(_open_ferry, same_host=False),
    ),
)
OTHER_SYSTEMS = (
    System(TORCH, "torch's PGTransport", "transport", _open_torch, missing=_numpy_missing),
    System(TORCHFT, "torchft's PGTransport", "transport", _open_torchft, missing=_torchft_missing),
    # HTTPTransport opens and closes a connection for each transfer, so its bytes can't be counted.
    System(HTTP, "torchft's HTTPTransport", "transport", _open_http, wired=False, missing=_torchft_missing),
)
