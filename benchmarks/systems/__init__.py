"""The systems that the benchmark compares, in the order of the tables."""

from benchmarks.systems import baselines, metadata, transports
from benchmarks.systems.session import System

_ALL = (*transports.FERRY_SYSTEMS, *metadata.SYSTEMS, *transports.OTHER_SYSTEMS, *baselines.SYSTEMS)
SYSTEMS: dict[str, System] = {system.name: system for system in _ALL}
