"""Options and ends of sockets, and Unix sockets between processes of one user on one machine."""

import os
import socket
import struct
from contextlib import suppress

_MAX_WAIT_S = 1e6
"""The longest timeout of a socket, about 11 days. The system counts milliseconds in 31 bits."""
_MIN_WAIT_S = 0.001
"""The shortest: 0 would make it non-blocking."""

LOST_S = 10
"""A TCP connection is lost if the kernel of the other machine acknowledges nothing for so many seconds: that
machine is down, or a firewall has forgotten the connection. A process that is slow or stopped is not lost."""
SERVER_LOST_S = 20
"""The same at a server. It is longer, so that a client that lost all connections can open a new one first."""
_FITS_BYTES = 16 << 10
"""So many bytes always fit into the buffers of the other end."""
_PROBES = 4
"""How many probes of a silent connection must go unanswered."""

_TCP_INFO = struct.Struct("=8B13I")  # the first fields
_UCRED = struct.Struct("3i")  # process, user, group


def timeout_of(timeout_s: float) -> float:
    """Return a timeout that a socket can have."""
    return min(max(timeout_s, _MIN_WAIT_S), _MAX_WAIT_S)


def prepare(sock: socket.socket, lost_s: int) -> None:
    """Set the options of a TCP connection: send at once, notice a lost one, and use CUBIC instead of BBR.

    Call it before the socket connects. Connections that a listener accepts have the options of the listener.
    The kernel probes a connection while it is silent, and finds after `lost_s` seconds that it is lost.
    """
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    probe_s = max(lost_s // (_PROBES + 1), 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, probe_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, probe_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
    # BBR, the default of some machines, paces connections: on loopback, to half the speed. A connection that
    # began with BBR is paced for ever, also if it uses CUBIC later.
    with suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")


def limit_unacknowledged(sock: socket.socket, nbytes: int) -> None:
    """Let a TCP connection fail if the next bytes that this end sends are not acknowledged for LOST_S.

    Probes end only a connection on which no sent byte is unacknowledged. Many bytes may take longer: if
    the process at the other end is stopped, and its buffers are full, the kernel counts that time too.
    """
    if sock.family != socket.AF_UNIX:
        limit_ms = LOST_S * 1000 if nbytes <= _FITS_BYTES else 0
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit_ms)


def is_lost(sock: socket.socket) -> bool:
    """Return whether bytes were sent again, and nothing was acknowledged for SERVER_LOST_S.

    If the process at the other end is stopped, its kernel goes on to acknowledge, until its buffers are full;
    then nothing is sent again.
    """
    if sock.family == socket.AF_UNIX:
        return False
    found = _TCP_INFO.unpack(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size))
    times_sent_again, acknowledged_ms_ago = int(found[2]), int(found[20])
    return times_sent_again > 0 and acknowledged_ms_ago > SERVER_LOST_S * 1000


def listen_locally(name: str) -> socket.socket:
    """Listen on an abstract Unix socket, which leaves no file behind; raises OSError."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(_abstract(name))
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    return listener


def _abstract(name: str) -> str:
    return f"\0torchferry-{name}"


def connect_locally(sock: socket.socket, name: str) -> None:
    """Connect a Unix socket to a listener of the same user; raises OSError, which says why that failed."""
    try:
        sock.connect(_abstract(name))
    except ConnectionRefusedError:
        where = "on another host, in another network namespace, or closed"
        raise ConnectionError(f"the source is {where}") from None
    if user_of(sock) != os.geteuid():
        raise ConnectionError(f"the source runs as user {user_of(sock)}, this process as {os.geteuid()}")


def user_of(sock: socket.socket) -> int:
    """Return the user id of the process at the other end of a Unix socket."""
    _, user, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return int(user)


def shut_down(sock: socket.socket) -> None:
    """End a connection that another thread uses. That thread closes it, so its descriptor is not reused."""
    with suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


def close_descriptor(sock: socket.socket) -> None:
    """Close an inherited socket in a forked child. The peer does not notice."""
    with suppress(OSError):
        os.close(sock.detach())
