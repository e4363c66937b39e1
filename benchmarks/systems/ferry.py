"""torchferry itself, by its public interface."""

from __future__ import annotations

from functools import partial

from benchmarks.systems.base import SENDER, Phases, Session, Site, System
from benchmarks.works import FERRY, UNVERIFIED
from torchferry.pg_transport import PGTransport


def _open(site: Site, *, verify: bool) -> Session:
    transport = PGTransport(
        site.group,
        site.timeout_s,
        "cpu",
        state_dict=(lambda: site.target) if site.target is not None else None,
        verify=verify,
        relay=site.case.relay,
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
