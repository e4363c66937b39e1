"""Addresses of sources: what is accepted, what is refused without showing the token, and where to listen."""

from __future__ import annotations

import socket
import traceback
from contextlib import suppress
from pathlib import Path

import pytest

from torchferry.errors import BadArgument
from torchferry.links.address import (
    Address,
    is_token,
    listen,
    own_host,
    parse_address,
    parse_host,
    reachable_host,
)

TOKEN = "secret-0123456789abcdef"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"http://127.0.0.1:7000/#{TOKEN}", Address("127.0.0.1", 7000, TOKEN)),
        (f"http://127.0.0.1:7000#{TOKEN}", Address("127.0.0.1", 7000, TOKEN)),
        (f"  http://node-1.cluster:1/#{TOKEN}\n", Address("node-1.cluster", 1, TOKEN)),
        (f"https://[::1]:65535/#{TOKEN}", Address("::1", 65535, TOKEN, secure=True)),
        (f"http://[fe80::1%eth0]:80/#{TOKEN}", Address("fe80::1%eth0", 80, TOKEN)),
        (f"HTTP://Node:80/#{TOKEN}", Address("node", 80, TOKEN)),
        ("http://a:80/#" + "".join(map(chr, range(0x26, 0x7F))), None),
    ],
)
def test_an_address_is_parsed_and_written_again(text: str, expected: Address | None) -> None:
    address = parse_address(text)
    if expected is not None:
        assert address == expected
    assert parse_address(address.url) == address


@pytest.mark.parametrize(
    "text",
    [
        "",
        TOKEN,
        f"127.0.0.1:7000/#{TOKEN}",
        f"ftp://127.0.0.1:7000/#{TOKEN}",
        f"//127.0.0.1:7000/#{TOKEN}",
        f"http:127.0.0.1:7000/#{TOKEN}",
        f"http://:7000/#{TOKEN}",
        f"http:///#{TOKEN}",
        f"http://127.0.0.1/#{TOKEN}",
        f"http://127.0.0.1:/#{TOKEN}",
        f"http://127.0.0.1:0/#{TOKEN}",
        f"http://127.0.0.1:65536/#{TOKEN}",
        f"http://127.0.0.1:-1/#{TOKEN}",
        f"http://127.0.0.1:{TOKEN}/#x",
        f"http://127.0.0.1:7000/{TOKEN}",
        f"http://127.0.0.1:7000/?{TOKEN}",
        f"http://127.0.0.1:7000/state#{TOKEN}",
        f"http://user:{TOKEN}@127.0.0.1:7000/#{TOKEN}",
        f"http://{TOKEN}@127.0.0.1:7000/#{TOKEN}",
        f"http://@127.0.0.1:7000/#{TOKEN}",
        f"http://[::1:7000/#{TOKEN}",
        f"http://::1]:7000/#{TOKEN}",
        f"http://[{TOKEN}]:7000/#{TOKEN}",
        f"http://a b:7000/#{TOKEN}",
        f"http://a\0b:7000/#{TOKEN}",
        f"http://bücher:7000/#{TOKEN}",
        f"http://ｌocalhost:7000/#{TOKEN}",
        f"http://a\N{FULLWIDTH SOLIDUS}b:7000/#{TOKEN}",
        f"http://127.0.0.1:7000/#{TOKEN} x",
        f"http://127.0.0.1:7000/#{TOKEN}#",
        f"http://127.0.0.1:7000/#{TOKEN}%41",
        f"http://127.0.0.1:7000/#{TOKEN}\0",
        f"http://127.0.0.1:7000/#{TOKEN}é",
        TOKEN.encode(),
        None,
        7,
        ("127.0.0.1", 7000, TOKEN),
    ],
)
def test_a_malformed_address_is_refused_without_showing_it(text: object) -> None:
    with pytest.raises(BadArgument, match="not the address of a source") as caught:
        parse_address(text)
    error = caught.value
    assert TOKEN not in f"{error} {error!r} {error.args}"
    # Nor does a chained error, which a traceback would show.
    assert TOKEN not in "".join(traceback.format_exception(error))


@pytest.mark.parametrize(
    "text", ["http://127.0.0.1:7000", "http://127.0.0.1:7000/", "http://127.0.0.1:7000/#"]
)
def test_an_address_without_a_token_is_a_permission_error(text: str) -> None:
    with pytest.raises(PermissionError, match="the address has no token"):
        parse_address(text)


def test_only_the_url_of_an_address_shows_the_token() -> None:
    address = Address("::1", 7000, TOKEN, secure=True)
    assert address.url == f"https://[::1]:7000/#{TOKEN}"
    assert str(address) == "[::1]:7000"
    assert TOKEN not in f"{address!r} {address} {[address]}"


@pytest.mark.parametrize("text", ["a b", "a#b", "a%b", "a\nb", "a\x7fb", "é", "\0"])
def test_what_can_not_stand_in_a_header_is_not_a_token(text: str) -> None:
    assert not is_token(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("node", ("node", 7)),
        ("node:80", ("node", 80)),
        ("10.0.0.1:80", ("10.0.0.1", 80)),
        ("::1", ("::1", 7)),
        ("[::1]", ("::1", 7)),
        ("[fd00::2]:80", ("fd00::2", 80)),
        ("fd00::2", ("fd00::2", 7)),
    ],
)
def test_a_host_is_parsed(text: str, expected: tuple[str, int]) -> None:
    assert parse_host(text, 7) == expected


@pytest.mark.parametrize(
    "text",
    [
        "node:",
        "[::1]x",
        "::1]",
        *("", ":80", "node:x", "node:99999", "node:-1", "[::1"),
        *("http://node", "node/", "node/x", "node?x", "node?", "node#x", "user@node", "a b", "a\tb", "a\rb"),
        *("a\nb", "a\0b", "bücher", "\N{FULLWIDTH LATIN SMALL LETTER A}"),
    ],
)
def test_a_malformed_host_is_refused(text: str) -> None:
    with pytest.raises(BadArgument, match="advertise must be HOST or HOST:PORT"):
        parse_host(text, 7)


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", "127.0.0.1"), ("127.0.0.2", "127.0.0.2"), ("::1", "::1"), ("lo", "127.0.0.1")],
)
def test_a_listener_is_reached_where_it_says(host: str, expected: str) -> None:
    with listen(host, 0) as listener:
        assert reachable_host(listener) == expected
        with socket.create_connection((expected, listener.getsockname()[1]), 5):
            listener.accept()[0].close()


def test_a_listener_on_a_name_is_reached_by_that_name() -> None:
    with listen("localhost", 0) as listener:
        assert listener.getsockname()[0] in ("127.0.0.1", "::1")
        with socket.create_connection(("localhost", listener.getsockname()[1]), 5):
            listener.accept()[0].close()


@pytest.mark.parametrize(("host", "loopback"), [("0.0.0.0", "127.0.0.1"), ("::", "::1")])
def test_a_listener_on_all_addresses_names_one_that_peers_can_reach(host: str, loopback: str) -> None:
    with listen(host, 0) as listener:
        reachable, port = reachable_host(listener), listener.getsockname()[1]
        assert reachable not in ("0.0.0.0", "::")
        for to in (reachable, loopback):
            with socket.create_connection((to, port), 5):
                listener.accept()[0].close()


def _interface_with_an_address() -> tuple[str, str] | None:
    """Return an interface beyond loopback, and its IPv4 address as the routes name it."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        own = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            with suppress(BadArgument), listen(name, 0) as listener:
                if listener.getsockname()[0] == own:
                    return name, own
    return None


def test_a_network_interface_is_a_host() -> None:
    found = _interface_with_an_address()
    if found is None:
        pytest.skip("this machine has no network interface with a route")
    name, own = found
    with listen(name, 0) as listener:
        assert listener.getsockname()[0] == reachable_host(listener) == own
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", listener.getsockname()[1]), 5)


@pytest.mark.parametrize(
    "host", ["no-such-host.invalid", "999.1.1.1", "a\0b", "a" * 300, "192.0.2.77", "[::1]"]
)
def test_a_host_that_is_not_here_is_refused(host: str) -> None:
    with pytest.raises(BadArgument, match="can't listen on host"):
        listen(host, 0)


def test_a_port_in_use_is_refused_with_the_reason() -> None:
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(BadArgument, match=f"port {port}: Address already in use"):
            listen("127.0.0.1", port)


def test_a_fixed_port_can_be_used_again_at_once() -> None:
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port), 5)
        accepted, _ = listener.accept()
    # This side closes first, so its end of the connection stays in TIME_WAIT on the port.
    accepted.close()
    client.recv(1)
    client.close()
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    assert any(
        local.endswith(f":{port:04X}") and state == "06" for _, local, _, state, *_ in map(str.split, lines)
    )
    with listen("127.0.0.1", port) as again:
        assert again.getsockname()[1] == port


@pytest.fixture
def _no_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)


@pytest.mark.usefixtures("_no_interface")
@pytest.mark.parametrize(
    ("peers", "expected"),
    [
        ((), "127.0.0.1"),
        ((None, ""), "127.0.0.1"),
        (("127.0.0.1",), "127.0.0.1"),
        (("127.0.0.5:29500",), "127.0.0.1"),
        (("http://127.0.0.1:29510",), "127.0.0.1"),
        (("::1",), "::1"),
        (("[::1]:80",), "::1"),
        (("http://[::1]:80/path",), "::1"),
        ((None, "http://[::1]:29510", "127.0.0.1"), "::1"),
    ],
)
def test_the_own_host_is_the_address_towards_the_first_peer(
    peers: tuple[str | None, ...], expected: str
) -> None:
    # 127.0.0.5 is loopback too, and packets to it are sent from 127.0.0.1 or from itself.
    assert own_host(*peers) in (expected, "127.0.0.5" if "127.0.0.5" in str(peers) else expected)


@pytest.mark.usefixtures("_no_interface")
def test_the_own_host_towards_another_network_is_what_the_route_says() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no default route")
        expected = probe.getsockname()[0]
    assert own_host("http://192.0.2.1:29510") == expected


@pytest.mark.usefixtures("_no_interface")
def test_a_peer_without_an_address_is_logged_and_skipped(caplog: pytest.LogCaptureFixture) -> None:
    for wrong in ("no-such-host.invalid:80", "http://", "http://[::1"):
        caplog.clear()
        assert own_host(wrong, "::1") == "::1"
        assert "has no address" in caplog.text


def test_the_interface_of_gloo_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eth7")
    assert own_host("192.0.2.1") == "lo"
    with listen(own_host("192.0.2.1"), 0) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
