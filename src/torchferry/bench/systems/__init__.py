"""The systems that are compared, in the order in which they are shown."""

from torchferry.bench.systems import ancestors, disk, ferry, limits, metadata
from torchferry.bench.systems.base import Session, Site, System

SYSTEMS: dict[str, System] = {
    system.name: system
    for system in (
        *ferry.SYSTEMS,
        *metadata.SYSTEMS,
        *ancestors.SYSTEMS,
        *disk.SYSTEMS,
        *limits.SYSTEMS,
    )
}

__all__ = ["SYSTEMS", "Session", "Site", "System"]
