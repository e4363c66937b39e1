"""The systems that are compared, in the order in which they are shown."""

from benchmarks.systems import disk, ferry, limits, metadata, peers
from benchmarks.systems.base import Session, Site, System

SYSTEMS: dict[str, System] = {
    system.name: system
    for system in (
        *ferry.SYSTEMS,
        *metadata.SYSTEMS,
        *peers.SYSTEMS,
        *disk.SYSTEMS,
        *limits.SYSTEMS,
    )
}

__all__ = ["SYSTEMS", "Session", "Site", "System"]
