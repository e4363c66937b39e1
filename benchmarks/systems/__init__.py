"""The systems that the benchmark compares, in the order of the tables."""

from benchmarks.systems import files, limits, metadata, transports
from benchmarks.systems.session import System

SYSTEMS: dict[str, System] = {
    system.name: system
    for system in (
        *transports.FERRY_SYSTEMS,
        *metadata.SYSTEMS,
        *transports.OTHER_SYSTEMS,
        *files.SYSTEMS,
        *limits.SYSTEMS,
    )
}
