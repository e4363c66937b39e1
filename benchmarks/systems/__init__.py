"""The systems that the benchmark compares, in the order of the tables."""

from benchmarks.systems import baselines, metadata, pulls, transports
from benchmarks.systems.session import System

_OURS = (*transports.FERRY_SYSTEMS, *pulls.SYSTEMS, *metadata.SYSTEMS)
_ALL = (*_OURS, *transports.OTHER_SYSTEMS, *baselines.SYSTEMS)
SYSTEMS: dict[str, System] = {system.name: system for system in _ALL}
