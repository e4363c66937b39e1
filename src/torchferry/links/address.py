"""Addresses of sources: parsing them, listening on them, and which one peers can reach."""

import fcntl
import ipaddress
import logging
import os
import re
import socket
from contextlib import suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from torchferry.errors import BadArgument, NotAuthorized

logger = logging.getLogger(__name__)

_TOKEN = re.compile(r"(://[^\s'\"#]*#)[^\s'\"]+")
_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^][:@/#?]+))(?::([0-9]{1,5}))?")  # [IPv6] or name, and port
ANY_HOST = "0.0.0.0", "::"
"""What listens on all addresses of a machine."""

_SIOCGIFADDR = 0x8915
_LINK_LOCAL = "20"  # a scope in /proc/net/if_inet6


@dataclass(frozen=True)
class Address:
    """Where a source is, and the token that it asks for. `str` and `repr` do not show the token."""

    host: str
    port: int
    token: str = field(repr=False)
    secure: bool = False

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """The address with the token, as users pass it on."""
        return f"http{'s' if self.secure else ''}://{self}/#{self.token}"


def parse_address(text: object) -> Address:
    """Parse `http://HOST:PORT/#TOKEN`; raises BadArgument, or NotAuthorized if there is no token.

    No message contains a token.

    >>> parse_address("https://[::1]:7000/#0123456789abcdef")
    Address(host='::1', port=7000, secure=True)
    """
    if not isinstance(text, str):
        raise _not_an_address(f"it is a {type(text).__name__}, not a string")
    try:
        parts = urlsplit(text.strip())
        host, port = parts.hostname, parts.port
    except ValueError:
        # The reason may quote the address.
        raise _not_an_address("its host or port is malformed") from None
    if parts.scheme not in ("http", "https"):
        raise _not_an_address("it does not begin with http:// or https://")
    if not host or not port:
        raise _not_an_address("it has no host or no port")
    if not _is_host(host):
        raise _not_an_address("its host is not printable ASCII")
    if parts.path not in ("", "/") or parts.query or parts.username is not None:
        raise _not_an_address("it has more than a host, a port and a token")
    if not parts.fragment:
        raise NotAuthorized("the address has no token: pass `source.address`, which has one after the #")
    if not is_token(parts.fragment):
        raise _not_an_address("it has no valid token after the #")
    return Address(host, port, parts.fragment, parts.scheme == "https")


def _not_an_address(reason: str) -> BadArgument:
    return BadArgument(
        f"not the address of a source: {reason}. Pass `source.address`, which looks like "
        "http://HOST:PORT/#TOKEN"
    )


def is_token(text: str) -> bool:
    """Return whether a text can stand in an address and in an HTTP header."""
    return text.isascii() and text.isprintable() and not set(text) & set(" #%")


def _is_host(text: str) -> bool:
    """Return whether a text can stand in an HTTP header as a host."""
    return text.isascii() and text.isprintable() and " " not in text


def is_numeric(host: str) -> bool:
    """Return whether a host is an IP address, not a name.

    >>> is_numeric("10.0.0.7"), is_numeric("fe80::1%eth0"), is_numeric("trainer"), is_numeric("")
    (True, True, False, False)
    """
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return _is_host(host)


def parse_host(text: str, port: int) -> tuple[str, int]:
    """Parse `HOST` or `HOST:PORT`; an IPv6 address with a port is in brackets. Raises BadArgument.

    >>> parse_host("trainer", 80), parse_host("[::1]:81", 80), parse_host("::1", 80)
    (('trainer', 80), ('::1', 81), ('::1', 80))
    """
    found = _HOST.fullmatch(f"[{text}]" if text.count(":") > 1 and "[" not in text else text)
    if found is None or not _is_host(text) or not 0 < int(found[3] or 1) <= 65535:
        raise BadArgument(f"advertise must be HOST or HOST:PORT, not {without_token(repr(text))}")
    return found[1] or found[2], int(found[3] or port)


def listen(host: str, port: int) -> socket.socket:
    """Listen on an address, a host name, or the first address of a network interface, such as "eth0".

    Raises:
        BadArgument: there is no such host or interface, or the port is in use.
    """
    found = host
    if host in [name for _, name in socket.if_nameindex()]:
        found = _ipv4_address(host) or _ipv6_address(host) or host
    try:
        family, _, _, _, where = socket.getaddrinfo(
            found, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        # On Linux, this sets SO_REUSEADDR, so a fixed port can be used again at once.
        return socket.create_server(where[:2], family=family, backlog=1024)
    except (OSError, OverflowError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        shown = without_token(repr(host))
        raise BadArgument(f"can't listen on host {shown}, port {port}: {reason}") from None


def reachable_host(listener: socket.socket) -> str:
    """Return an address under which peers can reach a listener, which may listen on all addresses."""
    host: str = listener.getsockname()[0]
    if host not in ANY_HOST:
        return host
    with suppress(OSError):
        return _own_address_towards("192.0.2.1" if host == "0.0.0.0" else "2001:db8::1")
    # Without a default route, take the first interface that has an address.
    lookup = _ipv4_address if host == "0.0.0.0" else _ipv6_address
    found = [lookup(name) for _, name in socket.if_nameindex() if name != "lo"]
    return next(filter(None, found), "127.0.0.1" if host == "0.0.0.0" else "::1")


def own_host(*peers: str | None) -> str:
    """Return where a member of a job listens so that the other members can reach it.

    That is the first interface of GLOO_SOCKET_IFNAME if that is set, or else this machine's address towards
    the first of `peers` that is given and has a route, or else loopback. A peer is a host, `HOST:PORT` or a
    URL.
    """
    if interface := os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0].strip():
        return interface
    for peer in filter(None, peers):
        try:
            return _own_address_towards(peer)
        except (OSError, ValueError) as error:
            logger.warning("%r has no address that this machine can reach: %s", peer, error)
    return "127.0.0.1"


def _own_address_towards(peer: str) -> str:
    """Return the own address from which packets to a peer are sent; raises OSError or ValueError."""
    if peer.count(":") > 1 and "[" not in peer and "//" not in peer:
        peer = f"[{peer}]"
    host = urlsplit(peer if "//" in peer else f"//{peer}").hostname
    failure = OSError("it names no host")
    for family, kind, protocol, _, where in (
        socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM) if host else ()
    ):
        with socket.socket(family, kind, protocol) as probe:
            try:
                # Connecting a datagram socket sends nothing. It only chooses the own address.
                probe.connect(where)
                return str(probe.getsockname()[0])
            except OSError as error:
                failure = error
    raise failure


def _ipv4_address(interface: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        request = interface.encode()[:15].ljust(256, b"\0")
        return socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24])
    return None


def _ipv6_address(interface: str) -> str | None:
    with suppress(OSError), open("/proc/net/if_inet6") as file:
        for address, *_, scope, _flags, name in map(str.split, file):
            if name == interface and scope != _LINK_LOCAL:
                return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(address))
    return None


def without_token(text: str) -> str:
    """Hide the token of an address that was passed as something else.

    >>> without_token("'http://host:7000/#0123456789abcdef'")
    "'http://host:7000/#…'"
    """
    return _TOKEN.sub(r"\1…", text)
