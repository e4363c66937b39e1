"""Tools for tests: a link in memory, the conformance kit for links, and the simulation."""

from torchferry.testing.link_kit import check_link
from torchferry.testing.memory_link import MemoryLink, MemoryNetwork

__all__ = ["MemoryLink", "MemoryNetwork", "check_link"]
