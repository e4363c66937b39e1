"""The connection of an HTTP/1.1 client, over TCP or over a Unix socket to a source on the same machine.

Bodies go into the caller's memory without a copy. Over the Unix socket, they may come from shared memory.
"""

import errno
import os
import select
import socket
import ssl
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import h11

from torchferry.errors import LinkBroken, LinkTimeout
from torchferry.links import sockets
from torchferry.links.address import Address
from torchferry.links.http import MAX_HEAD_BYTES, READ_BYTES, RING_HEADER, reason_of
from torchferry.links.lifecycle import close_after_fork
from torchferry.links.ring import Ring, address_of, map_ring
from torchferry.links.shared_memory import close_all, close_memfds, sealed_bytes

_BATCH_BYTES, _BATCH_S = 512 << 10, 0.005
"""Over TCP, a thread that reads a body wakes up when _BATCH_BYTES have arrived, or after _BATCH_S. Waking up
for every few packets takes more time than copying them."""


class MemoryUnusable(LinkBroken):
    """A body can't come through memory. It may come over TCP."""


class Unreachable(LinkBroken):
    """The other machine did not answer when this one tried to connect: waiting longer is not worth it."""


class ResponseHead:
    """The status and the length of a response, and whether its body comes through a ring."""

    def __init__(self, event: h11.Response) -> None:
        self.status = event.status_code
        self.in_ring = any(name == RING_HEADER.lower().encode() for name, _ in event.headers)
        lengths = [bytes(value) for name, value in event.headers if name == b"content-length"]
        length = b"0" if event.status_code == 204 else b"".join(lengths)
        if not length.isdigit() or len(length) > 18:
            raise ConnectionError("the source sent a response without a valid length")
        self.nbytes = int(length)


class HttpConnection:
    """A connection to a server. One thread at a time uses it; any thread may shut it down.

    `heard_s` is when it last received something, and `opened_s` until then. `connecting` is called with this
    object before it connects, so that another thread can shut it down while it connects. With `local`, it
    connects to the Unix socket of that name. Every method raises LinkBroken if the connection fails, and
    LinkTimeout if no bytes arrive in time.
    """

    def __init__(
        self,
        address: Address,
        tls: ssl.SSLContext | None,
        timeout_s: float,
        connecting: Callable[["HttpConnection"], object] = lambda _: None,
        local: str | None = None,
    ) -> None:
        self.address = address
        self.is_local = local is not None
        self._local = local
        self._descriptors: list[int] = []
        self._offset: int | None = None  # of the next bytes in the file that came with a response
        self._ring: Ring | None = None
        self._in_ring = False  # whether the body of the current response comes through the ring
        self.opened_s = self.heard_s = time.monotonic()
        self._parsers: deque[h11.Connection] = deque()  # of the responses that are due
        self._rest: bytes | bytearray = b""  # what was received after a head, and not read yet
        self._readable: select.poll | None = None  # for plain TCP
        self._low_water = 1
        self._body_left = 0  # bytes of the current response that were not read yet
        self._shut_down_reason = ""
        self._lock = threading.Lock()
        self._sock: socket.socket
        try:
            self._connect(sockets.timeout_of(timeout_s), connecting)
            if address.secure and local is None:
                context = tls or ssl.create_default_context()
                # The handshake comes afterwards, so that `shut_down` can end it.
                with self._lock:
                    self._sock = context.wrap_socket(
                        self._sock, server_hostname=address.host, do_handshake_on_connect=False
                    )
                self._raise_if_shut_down()
                self._sock.do_handshake()
            elif local is None:
                self._readable = select.poll()
                self._readable.register(self._sock, select.POLLIN)
        except Unreachable:
            self.close()
            raise
        except (OSError, UnicodeError) as error:
            with suppress(AttributeError):  # there is no socket if the host has no address
                self.close()
            raise self._translated(error, "could not connect within") from error

    def _raise_if_shut_down(self) -> None:
        if self._shut_down_reason:
            raise ConnectionError(self._shut_down_reason)

    def _connect(self, timeout_s: float, connecting: Callable[["HttpConnection"], object]) -> None:
        """Connect to the first address of the host that answers, as socket.create_connection does."""
        found: Sequence[Any] = [(socket.AF_UNIX, socket.SOCK_STREAM, 0, "", self._local)]
        if self._local is None:
            found = socket.getaddrinfo(self.address.host, self.address.port, type=socket.SOCK_STREAM)
        for number, (family, kind, protocol, _, where) in enumerate(found, 1):
            self._sock = socket.socket(family, kind, protocol)
            try:
                close_after_fork(self)
                connecting(self)
                self._sock.settimeout(min(timeout_s, sockets.LOST_S))
                sockets.prepare(self._sock, sockets.LOST_S)
                self._raise_if_shut_down()
                if self._local is None:
                    self._sock.connect(where)
                else:
                    sockets.connect_locally(self._sock, where)
                self._sock.settimeout(timeout_s)
                return
            except OSError as error:
                self._sock.close()
                if number < len(found):
                    continue
                if isinstance(error, TimeoutError) and timeout_s > sockets.LOST_S:
                    what = (
                        f"its machine has not answered for {sockets.LOST_S} s: it is down, or the network is"
                    )
                    raise Unreachable(what, peer=str(self.address)) from None
                raise

    @property
    def own_host(self) -> str:
        """The address of this end."""
        return str(self._sock.getsockname()[0])

    def request(self, method: str, path: str, body: bytes = b"", *, timeout_s: float) -> ResponseHead:
        """Send a request and read the head of its response. `read_into` or `read` then reads the body."""
        self.send(method, path, body, timeout_s=timeout_s)
        return self.read_head()

    def send(self, method: str, path: str, body: bytes = b"", *, timeout_s: float) -> None:
        """Send a request. Several may be sent before the first response is read.

        `timeout_s` limits every wait for the next bytes, also those of the body.
        """
        parser = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD_BYTES)
        headers = [
            ("Host", str(self.address)),
            ("Authorization", f"Bearer {self.address.token}"),
            ("Content-Length", str(len(body))),
        ]
        try:
            self._sock.settimeout(sockets.timeout_of(timeout_s))
            head = parser.send(h11.Request(method=method, target=path, headers=headers)) or b""
            sockets.limit_unacknowledged(self._sock, len(body))
            self._sock.sendall(head + body)
            self._parsers.append(parser)
        except OSError as error:
            raise self._translated(error, "the source took no bytes of the request for") from error

    def read_head(self) -> ResponseHead:
        """Read the head of the next response. The whole body of the one before must have been read.

        Descriptors that come with the response are kept until the next one.
        """
        parser = self._parsers.popleft()
        try:
            self._forget_descriptors()
            self._offset = None
            if self._rest:
                parser.receive_data(bytes(self._rest))
            while (event := parser.next_event()) is h11.NEED_DATA:
                if not (data := self._receive()):
                    raise ConnectionError("the source closed the connection")
                parser.receive_data(data)
                self.heard_s = time.monotonic()
            if not isinstance(event, h11.Response):
                raise ConnectionError("the source sent an interim response")
            self._rest, _ = parser.trailing_data
            head = ResponseHead(event)
        except OSError as error:
            raise self._translated(error) from error
        except h11.ProtocolError as error:
            raise LinkBroken(reason_of(error), peer=str(self.address)) from None
        self._in_ring = head.in_ring
        self._body_left = head.nbytes
        if head.in_ring:
            self._open_ring()
        return head

    def _receive(self) -> bytes:
        if self._local is None:
            self._set_low_water(1)
            return self._sock.recv(READ_BYTES)
        data, descriptors, _, _ = socket.recv_fds(self._sock, READ_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
        self._descriptors += descriptors
        # Keep only one, so that a source can't exhaust the descriptors of this process.
        close_all(self._descriptors[1:])
        del self._descriptors[1:]
        return data

    def use_memory(self, offset: int, nbytes: int) -> None:
        """Let `read_into` take the next bytes from the memory whose descriptor came with the response.

        Raises MemoryUnusable if that is not possible.
        """
        with self._using_memory() as descriptor:
            held = sealed_bytes(descriptor)
            if offset + nbytes > held:
                raise OSError(f"the chunks end at byte {offset + nbytes}, but the source's memory has {held}")
            self._offset = offset

    @contextmanager
    def _using_memory(self) -> Iterator[int]:
        try:
            if not self._descriptors:
                raise OSError("the source sent no descriptor of its memory")
            yield self._descriptors[0]
        except OSError as error:
            raise MemoryUnusable(error.strerror or str(error), peer=str(self.address)) from None

    def _open_ring(self) -> None:
        with self._using_memory() as descriptor:
            if self._ring is None:
                self._ring = map_ring(self._sock, descriptor, self._wait_for_slots)

    def _forget_descriptors(self) -> None:
        close_all(self._descriptors)
        self._descriptors = []

    @property
    def reads_memory(self) -> bool:
        """Whether `read_into` takes bytes from the memory that `use_memory` chose."""
        return self._offset is not None

    def read_into(self, *views: memoryview) -> None:
        """Fill buffers with the next bytes of a body, or of the memory that `use_memory` chose."""
        try:
            if self._offset is not None:
                self._offset = self._read_memory(views, self._offset)
                return
            for view in views:
                if self._in_ring and self._ring is not None:
                    self._ring.empty(address_of(view), len(view))
                else:
                    self._read_socket(view)
        except OSError as error:
            raise self._translated(error) from error

    def _read_memory(self, views: Sequence[memoryview], offset: int) -> int:
        # Reading the file is faster than mapping it, which takes a page fault for every few pages.
        while views:
            ready = os.preadv(self._descriptors[0], views, offset)
            self.heard_s = time.monotonic()
            offset += ready
            while views and ready >= len(views[0]):
                ready -= len(views[0])
                views = views[1:]
            views = [views[0][ready:], *views[1:]] if views else views
        return offset

    def _read_socket(self, view: memoryview) -> None:
        ready = min(len(view), len(self._rest))
        view[:ready] = self._rest[:ready]
        self._rest = self._rest[ready:]
        self._body_left -= ready
        while ready < len(view):
            if self._readable is None:
                received = self._sock.recv_into(view[ready:])
            else:
                received = self._read_batch(self._readable, view[ready:])
            if not received:
                raise ConnectionError("the source closed the connection before the end of its response")
            self.heard_s = time.monotonic()
            self._body_left -= received
            ready += received

    def _read_batch(self, readable: select.poll, view: memoryview) -> int:
        """Wait for more than a few packets, but not for long, and read what has arrived."""
        self._set_low_water(max(min(self._body_left, _BATCH_BYTES), 1))
        if not readable.poll(_BATCH_S * 1e3):
            self._set_low_water(1)
            if not readable.poll((self._sock.gettimeout() or 0.0) * 1e3):
                raise TimeoutError
        return os.readv(self._sock.fileno(), [view])

    def _set_low_water(self, nbytes: int) -> None:
        """Set how many bytes must have arrived before the socket counts as readable."""
        if nbytes != self._low_water:
            with suppress(OSError):  # a sandbox may not have it: then this end wakes up more often
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)
            self._low_water = nbytes

    def _wait_for_slots(self, most: int) -> int:
        # Bytes that came with the head are the first signals.
        signals, self._rest = self._rest, b""
        # A reset is a close: the source may close before it has read all signals of this end.
        with suppress(ConnectionResetError):
            signals = signals or self._sock.recv(most)
        if not signals:
            raise ConnectionError("the source closed the connection before the end of its response")
        self.heard_s = time.monotonic()
        return len(signals)

    def read(self, nbytes: int) -> bytes:
        """Return the next bytes of a body. The caller limits how many."""
        body = bytearray(nbytes)
        self.read_into(memoryview(body))
        return bytes(body)

    def shut_down(self, reason: str = "the fetch is over") -> None:
        """End the connection. The thread that waits for it gets an error."""
        with self._lock:
            self._shut_down_reason = self._shut_down_reason or reason
            # Let close() reset the connection. Otherwise a server that sends may not notice for a minute.
            with suppress(OSError):
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sockets.shut_down(self._sock)

    def close(self) -> None:
        """Close the socket. No other thread may use the connection."""
        self._forget_descriptors()
        if self._ring is not None:
            self._ring.close()
            self._ring = None  # it refers to this object
        with self._lock:
            self._sock.close()

    def close_inherited(self) -> None:
        """Close the descriptors in a forked child. The server does not notice."""
        self._forget_descriptors()
        if self.is_local:
            close_memfds()
        sockets.close_descriptor(self._sock)

    def _translated(
        self, error: Exception, late: str = "the source sent nothing for"
    ) -> LinkBroken | LinkTimeout:
        peer = str(self.address)
        if isinstance(error, OSError) and error.errno == errno.ETIMEDOUT:
            what = (
                f"its machine has acknowledged nothing for {sockets.LOST_S} s: it is down, or the network is"
            )
            return LinkBroken(what, peer=peer)
        if isinstance(error, TimeoutError):
            return LinkTimeout(f"{late} {self._sock.gettimeout() or 0:.3g} s", peer=peer)
        if self._shut_down_reason:
            return LinkBroken(self._shut_down_reason, peer=peer)
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        return LinkBroken(reason or type(error).__name__, peer=peer)
