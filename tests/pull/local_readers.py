"""Receivers on the machine of a source that do one step at a time, through its Unix socket."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

from tests.support.http_peers import TIMEOUT_S, request
from torchferry import Source
from torchferry.core.pull import Grant, LeaseRequest, Result
from torchferry.engine.pull.remote import RemoteSource
from torchferry.links.address import parse_address
from torchferry.links.http_client import HttpConnection
from torchferry.links.shared_memory import close_all


def bytes_of(descriptor: int | None) -> bytes:
    """Return all bytes of a file in memory."""
    assert descriptor is not None
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0)


class LocalReader:
    """Holds a lease, and reads chunks over the Unix socket when the test says so."""

    def __init__(self, source: Source | str, name: str = "state") -> None:
        self.address = parse_address(source if isinstance(source, str) else source.address)
        self.remote = RemoteSource(self.address, None, 1 << 20)
        grant = self.remote.open(LeaseRequest(name, "local reader"), time.monotonic() + TIMEOUT_S)
        assert grant is not None
        assert grant.memory is not None
        self.grant: Grant = grant
        self.remote.grant = grant
        self.connections = [self.connect()]

    def connect(self) -> HttpConnection:
        """Open one more connection to the Unix socket."""
        return HttpConnection(self.address, None, TIMEOUT_S, local=self.grant.memory)

    def request(self, first: int, end: int, nbytes: int, connection: HttpConnection | None = None) -> None:
        """Ask for chunks. Those of a snapshot are mapped then."""
        asks = connection or self.connections[0]
        self.remote.request_chunks(asks, range(first, end), TIMEOUT_S)
        self.remote.read_chunks_head(asks, nbytes)

    def read(self, nbytes: int) -> bytes:
        """Read bytes of the chunks that were requested."""
        return self.connections[0].read(nbytes)

    def file(self, connection: HttpConnection | None = None) -> int | None:
        """Return the descriptor of the memory that the source passed last; None if it sent bytes instead."""
        return next(iter((connection or self.connections[0])._descriptors), None)

    def inode(self, connection: HttpConnection | None = None) -> int:
        """Return the number of that file."""
        return os.fstat(self.file(connection) or -1).st_ino

    def shared_bytes(self) -> bytes:
        """Return all that the memory holds now."""
        return bytes_of(self.file())

    def tell(self, outcome: str) -> bool:
        """End the lease with a result."""
        return self.remote.tell(Result(outcome), TIMEOUT_S)  # type: ignore[arg-type]

    def close(self) -> None:
        """Close all connections, as a process that dies does."""
        for connection in self.connections:
            connection.close()
        self.remote.shut_down()

    def __enter__(self) -> LocalReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class LocalClient:
    """A connection to a Unix socket that sends any bytes."""

    def __init__(self, name: str) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(TIMEOUT_S)
        self.sock.connect(f"\0torchferry-{name}")

    def ask(self, method: str, path: str, token: str | None, body: bytes = b"") -> tuple[bytes, list[int]]:
        """Send a request, and return all of the first answer that comes at once, with its descriptors."""
        self.sock.sendall(request(method, path, token, body))
        data, descriptors, _, _ = socket.recv_fds(self.sock, 1 << 16, 8)
        return data, descriptors

    def close(self) -> None:
        self.sock.close()

    def __enter__(self) -> LocalClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def passed_descriptor(reader: LocalReader) -> int:
    """Return the descriptor that the source passes for the first chunk. The caller closes it."""
    assert reader.grant.memory is not None
    with LocalClient(reader.grant.memory) as client:
        path = f"/v1/leases/{reader.grant.lease}/chunks/0-1"
        _, (descriptor, *more) = client.ask("GET", path, reader.address.token)
        close_all(more)
        return descriptor


def unix_sockets(name: str | None) -> int:
    """Count the Unix sockets of a source: its listener, and the connections that it accepted."""
    lines = Path("/proc/net/unix").read_text().splitlines()
    return sum(f"@torchferry-{name}" in line for line in lines)


def shared_memory_of(pid: int | str = "self") -> list[str]:
    """List the mappings and descriptors of shared memory of a process."""
    found = [
        line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "memfd:torchferry" in line
    ]
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            where = str(link.readlink())
        except OSError:
            continue  # it was closed meanwhile
        found += [where] if "memfd:torchferry" in where else []
    return found
