"""What ships for tests: a link in memory, and the kit that every link has to pass."""

from torchferry.testing.link_kit import check_link
from torchferry.testing.memory_link import MemoryLink, MemoryNetwork

__all__ = ["MemoryLink", "MemoryNetwork", "check_link"]
