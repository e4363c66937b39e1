"""torchferry itself, by its public interface."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

from torchferry.bench.systems.base import SENDER, Phases, Session, Site, System
from torchferry.bench.works import FERRY, UNVERIFIED
from torchferry.pg_transport import PGTransport


def _open(site: Site, *, verify: bool) -> Session:
    options: dict[str, Any] = {"verify": verify}
    # Not every version can relay; one that can't need not be told.
    if "relay" in inspect.signature(PGTransport).parameters:
        options["relay"] = site.case.relay
    transport = PGTransport(
        site.group,
        site.timeout_s,
        "cpu",
        state_dict=(lambda: site.target) if site.target is not None else None,
        **options,
    )

    def phases() -> Phases:
        return dict(transport.last_report.phases_s) if transport.last_report else {}

    return Session(
        send=lambda: transport.send_checkpoint(site.receivers, site.source),
        receive=lambda: transport.recv_checkpoint(SENDER),
        source=site.source,
        target=site.target,
        phases=phases,
    )


SYSTEMS = (
    System(FERRY, "torchferry", "ferry", partial(_open, verify=True)),
    System(UNVERIFIED, "torchferry, verify=False", "ferry", partial(_open, verify=False)),
)
