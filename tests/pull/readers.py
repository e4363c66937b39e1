"""A reader that takes its time: it holds a lease, and reads chunks when the test says so."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from torchferry import Source
from torchferry.core.pull import Grant, LeaseRequest, Result
from torchferry.engine.pull.remote import RemoteSource
from torchferry.links.address import parse_address

TIMEOUT_S = 10.0


class SlowReader:
    """Holds a lease on the current version of a source."""

    def __init__(self, source: Source, name: str = "state") -> None:
        self.remote = RemoteSource(parse_address(source.address), None, 1 << 20)
        grant = self.remote.open(LeaseRequest(name, "slow reader"), time.monotonic() + TIMEOUT_S)
        assert grant is not None
        self.grant: Grant = grant
        self.remote.grant = grant
        self._connection = self.remote.connect(TIMEOUT_S)

    def request(self, first: int, end: int, nbytes: int) -> None:
        """Ask for chunks, without reading them."""
        self.remote.request_chunks(self._connection, range(first, end), TIMEOUT_S)
        self.remote.read_chunks_head(self._connection, nbytes)

    def read(self, nbytes: int) -> bytes:
        """Read bytes of the chunks that were requested."""
        return self._connection.read(nbytes)

    def confirm(self) -> bool:
        """End the lease as a complete fetch does."""
        return self.remote.tell(Result("confirmed"), TIMEOUT_S)

    def close(self) -> None:
        """Close all connections, as a process that dies does."""
        self.remote.shut_down()


@contextmanager
def slow_reader(source: Source, name: str = "state") -> Iterator[SlowReader]:
    reader = SlowReader(source, name)
    try:
        yield reader
    finally:
        reader.close()
