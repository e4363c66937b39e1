"""Who can read what: tokens, TLS, proxies, interfaces, and where a token is never shown."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import resource
import socket
import ssl
import threading
import time
import traceback
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import trustme

import torchferry
from tests.support.children import wait_until
from tests.support.equality import assert_same
from tests.support.http_peers import (
    Asked,
    connect,
    exchange,
    forwarding,
    request,
    response,
    serving,
    status_of,
)
from torchferry.core.pull import LeaseRequest
from torchferry.links.address import parse_address
from torchferry.serving import Source

STATE = {"secret-path": torch.arange(100), "value": "secret-value"}
UNAUTHORIZED = b"HTTP/1.1 401 \r\nWWW-Authenticate: Bearer\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


@pytest.fixture
def source() -> Iterator[Source]:
    with torchferry.serve(STATE, 7, name="secret-name") as served:
        yield served
        # The source waits for readers when it is closed.
        while _kept:
            _kept.pop().close()


def token_of(source: Source) -> str:
    return parse_address(source.address).token


def lease(source: Source) -> str:
    """Open a lease with the token, on a connection that stays open until the source is closed."""
    wanted = msgspec.msgpack.encode(LeaseRequest("secret-name", "test"))
    sock = connect(source.address)
    sock.sendall(request("POST", "/v1/leases", token_of(source), wanted))
    grant = msgspec.msgpack.decode(sock.recv(1 << 16).partition(b"\r\n\r\n")[2])
    _kept.append(sock)
    return str(grant["lease"])


_kept: list[socket.socket] = []


# Tokens.


@pytest.mark.parametrize(
    "method", ["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "TRACE", "CONNECT", "X"]
)
@pytest.mark.parametrize("token", [None, "wrong-0123456789abcdef", pytest.param("", marks=pytest.mark.slow)])
def test_without_the_token_every_request_gets_the_same_answer(
    source: Source, method: str, token: str | None
) -> None:
    found, unknown = lease(source), "0" * 32
    paths = ["/", "*", "/v1/leases", "/v2", "/favicon.ico", "/" + "x" * 10_000]
    for known in (found, unknown):
        paths += [f"/v1/leases/{known}/{what}" for what in ("manifest", "digests", "result", "chunks/0-1")]
    bodies = [b"", b"x" * 1000]
    bodies += [
        msgspec.msgpack.encode(LeaseRequest(name, "test", version))
        for name in ("secret-name", "unknown")
        for version in (None, 7, 8)
    ]
    answers = {exchange(source.address, request(method, path, token)) for path in paths}
    answers |= {exchange(source.address, request(method, "/v1/leases", token, body)) for body in bodies}
    assert answers == {UNAUTHORIZED}
    (reader,) = source.status().readers
    assert (reader.state, reader.bytes_sent) == ("reading", 0)


def test_a_wrong_token_is_a_permission_error_that_does_not_show_it(source: Source) -> None:
    wrong = "wrong-0123456789abcdef"
    address = source.address.replace(token_of(source), wrong)
    for options in ({}, {"name": "secret-name"}, {"name": "unknown"}, {"version": 7}, {"newer_than": 6}):
        with pytest.raises(PermissionError, match="does not accept the token") as caught:
            torchferry.fetch(address, timeout=10, **options)
        assert isinstance(caught.value, torchferry.FerryError)
        shown = "".join(traceback.format_exception(caught.value))
        assert wrong not in shown
        assert token_of(source) not in shown
    assert source.status().readers == ()


def test_one_right_token_of_two_sources_is_enough(source: Source) -> None:
    wrong = source.address.replace(token_of(source), "wrong-0123456789abcdef")
    got = torchferry.fetch([wrong, source.address], name="secret-name", timeout=10)
    assert_same(got.state, STATE)


def test_a_token_has_256_random_bits_by_default() -> None:
    with Source() as one, Source() as two:
        assert token_of(one) != token_of(two)
        assert len(token_of(one)) == 43  # 32 bytes in base64


@pytest.mark.parametrize(
    "token", ["", "short-012345678", "x" * 15 + "\n" + "x" * 15, "é" * 16, "a b" * 10, 5]
)
def test_a_token_that_is_short_or_not_printable_is_refused_without_showing_it(token: Any) -> None:
    with pytest.raises(torchferry.BadArgument, match="token must be") as caught:
        Source(token=token)
    assert not token or str(token) not in str(caught.value)


TOKEN = "tell-nobody-0123456789abcdef"


class Everything(logging.Handler):
    """Keeps every record of every logger, formatted with its traceback."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(logging.Formatter("%(threadName)s %(message)s %(args)s").format(record))


@pytest.fixture
def logged() -> Iterator[Everything]:
    root, handler = logging.getLogger(), Everything()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    yield handler
    root.removeHandler(handler)
    root.setLevel(level)


def test_a_token_is_shown_by_the_address_and_by_nothing_else(logged: Everything) -> None:
    shown: list[str] = []
    threads: set[str] = set()

    def on_progress(event: torchferry.ProgressEvent) -> None:
        threads.update(thread.name for thread in threading.enumerate())
        shown.append(repr(event))

    with torchferry.serve(STATE, 1, token=TOKEN) as source:
        assert source.address.endswith(f"/#{TOKEN}")
        got = torchferry.fetch(source.address, on_progress=on_progress)
        shown += [repr(source), str(source), repr(got), str(got.report), repr(got.report.to_dict())]
        shown += [str(source.status()), repr(source.status()), repr(source.status().to_dict())]

        def raises(kind: type[BaseException], *addresses: str, **options: Any) -> None:
            with pytest.raises(kind) as caught:
                torchferry.fetch(list(addresses), timeout=5, **options)
            error = caught.value
            shown.extend([*traceback.format_exception(error), repr(error), str(error), repr(vars(error))])
            shown.append(repr(pickle.dumps(error)))

        raises(LookupError, source.address, name="unknown")
        raises(LookupError, source.address, version=2)
        raises(torchferry.StateMismatch, source.address, into={"other": torch.zeros(3)})
        raises(PermissionError, source.address + "x")
        raises(ValueError, source.address + " x")
        raises(ValueError, source.address, "http://x/#" + TOKEN)
        raises(ValueError, source.address, tls=ssl.create_default_context())
        raises(ValueError, source.address, compare="yes")
        with pytest.raises(TypeError) as caught:
            torchferry.fetch(source.address, into=lambda: 1 + "x")  # type: ignore[operator]
        shown += traceback.format_exception(caught.value)
        # Bytes that do not speak HTTP, with the token in them.
        for line in (f"Authorization : Bearer {TOKEN}", f"{TOKEN}"):
            exchange(source.address, f"GET /x HTTP/1.1\r\nHost: x\r\n{line}\r\n\r\n".encode())

    raises(ConnectionError, source.address)
    for answer in (
        f"HTTP/1.1 200 OK\r\nBearer {TOKEN}\r\n\r\n".encode(),
        f"Bearer {TOKEN}\r\n\r\n".encode(),
        response(302, b"", f"Location: http://127.0.0.1:1/#{TOKEN}"),
        response(500, f"Bearer {TOKEN}".encode()),
        b"",
    ):
        with serving(partial(_then_close, answer), TOKEN) as server:
            raises(ConnectionError, server.address)
    assert len(logged.lines) > 20
    for text in (*shown, *logged.lines, *threads):
        assert TOKEN not in text


def _then_close(answer: bytes, _: Asked) -> Iterator[bytes]:
    yield answer
    raise ConnectionError


def test_a_token_is_not_in_the_process_list_or_the_names_of_threads() -> None:
    with torchferry.serve(STATE, 1, token=TOKEN):
        for task in Path("/proc/self/task").iterdir():
            assert TOKEN not in (task / "comm").read_text()
        assert all(TOKEN not in repr(thread) for thread in threading.enumerate())


# Where it listens, and whom it asks.


def test_nothing_listens_beyond_loopback_by_default(source: Source) -> None:
    port = parse_address(source.address).port
    listening = set()
    for file in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{file}").read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            if state == "0A" and local.endswith(f":{port:04X}"):
                listening.add(local.partition(":")[0])
    assert listening == {"0100007F"}  # 127.0.0.1
    own = socket.gethostbyname_ex(socket.gethostname())[2]
    for host in {*own, "127.0.0.2", "::1"} - {"127.0.0.1"}:
        with pytest.raises(OSError):  # noqa: PT011
            socket.create_connection((host, port), 1).close()


def test_ipv6_works_from_end_to_end() -> None:
    with torchferry.serve(STATE, 1, host="::1") as source:
        assert source.address.startswith("http://[::1]:")
        got = torchferry.fetch(source.address)
        assert_same(got.state, STATE)
        assert list(got.report.sources) == [source.address.split("/")[2]]
        assert repr(source) == f"Source({source.address.split('/')[2]})"


def test_the_address_names_what_advertise_says() -> None:
    with torchferry.serve(STATE, 1, advertise="localhost") as source:
        assert source.address.startswith("http://localhost:")
        assert_same(torchferry.fetch(source.address).state, STATE)
    with torchferry.serve(STATE, 1, advertise="trainer.example:99") as source:
        assert source.address == f"http://trainer.example:99/#{token_of(source)}"


def test_proxies_of_the_environment_are_not_used(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(lambda _: response(200)) as proxy:
        for name in ("http_proxy", "https_proxy", "all_proxy", "socks_proxy"):
            for variable in (name, name.upper()):
                monkeypatch.setenv(variable, f"http://127.0.0.1:{proxy.port}")
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        assert_same(torchferry.fetch(source.address, name="secret-name").state, STATE)
        assert proxy.asked == []


@pytest.mark.parametrize(
    "status", [302, *(pytest.param(each, marks=pytest.mark.slow) for each in (301, 303, 307, 308))]
)
@pytest.mark.parametrize("path", ["leases", "manifest", "digests", "chunks", "result"])
def test_redirects_are_not_followed(source: Source, path: str, status: int) -> None:
    def redirect(asked: Asked, _status: int, _body: bytes) -> bytes | None:
        last = asked.path.split("/")[-1 if "chunks" not in asked.path else -2]
        return response(status, b"", f"Location: {elsewhere.address}") if last == path else None

    with serving(lambda _: response(200)) as elsewhere, forwarding(source.address, redirect) as server:
        if path == "result":
            # Everything has arrived, but the source does not know.
            assert not torchferry.fetch(server.address, name="secret-name", timeout=10).report.confirmed
        else:
            with pytest.raises(ConnectionError, match=f"answers with HTTP status {status}"):
                torchferry.fetch(server.address, name="secret-name", timeout=10)
        assert elsewhere.asked == []


# Slow and silent clients of a real source.


@contextlib.contextmanager
def _files(needed: int) -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[1] != resource.RLIM_INFINITY and limits[1] < needed:
        pytest.skip(f"this process may open only {limits[1]} files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(needed, limits[0]), limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_thousand_silent_connections_do_not_stop_a_fetch(source: Source) -> None:
    with _files(8192), contextlib.ExitStack() as stack:
        for _ in range(1000):
            stack.enter_context(connect(source.address))
        began_s = time.monotonic()
        assert_same(torchferry.fetch(source.address, name="secret-name", timeout=10).state, STATE)
        assert time.monotonic() < began_s + 2.0


def test_a_source_without_descriptors_serves_again_when_it_has_some(source: Source) -> None:
    used = len(os.listdir("/proc/self/fd"))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    guests: list[socket.socket] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 40, limits[1]))
        with contextlib.suppress(OSError):
            while True:
                guests.append(connect(source.address))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    try:
        assert_same(torchferry.fetch(source.address, name="secret-name", timeout=10).state, STATE)
    finally:
        for guest in guests:
            guest.close()


def test_a_reader_that_takes_a_byte_at_a_time_does_not_hold_up_others() -> None:
    state = {"w": torch.zeros(1 << 24)}
    with torchferry.serve(state, 1) as source, contextlib.ExitStack() as stack:
        wanted = msgspec.msgpack.encode(LeaseRequest("state", "slow"))
        slow = [stack.enter_context(connect(source.address)) for _ in range(10)]
        for sock in slow:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.sendall(request("POST", "/v1/leases", token_of(source), wanted))
            grant = msgspec.msgpack.decode(sock.recv(1 << 16).partition(b"\r\n\r\n")[2])
            sock.sendall(
                request("GET", f"/v1/leases/{grant['lease']}/chunks/0-{grant['chunks']}", token_of(source))
            )
        for _ in range(5):
            for sock in slow:
                assert sock.recv(1)
            began_s = time.monotonic()
            assert torch.equal(torchferry.fetch(source.address, timeout=10).state["w"], state["w"])
            assert time.monotonic() < began_s + 2.0
        states = [reader.state for reader in source.status().readers]
        assert (states.count("reading"), states.count("confirmed")) == (10, 5)
        # And the source can be rid of them.
        source.withdraw(readers="drop", timeout=2)


# TLS.


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def server_context(authority: trustme.CA, *names: str, clients: trustme.CA | None = None) -> ssl.SSLContext:
    """A source's context, with a certificate for these names. Only `clients` certificates are accepted."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert(*names).configure_cert(context)
    if clients is not None:
        clients.configure_trust(context)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(authority: trustme.CA | None, own: trustme.CA | None = None) -> ssl.SSLContext:
    """A receiver's context, which trusts an authority and has a certificate of its own."""
    context = ssl.create_default_context()
    if authority is not None:
        authority.configure_trust(context)
    if own is not None:
        own.issue_cert("receiver@example.com").configure_cert(context)
    return context


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_a_fetch_over_tls_arrives(authority: trustme.CA, host: str) -> None:
    state = {"w": torch.arange(1 << 16)}
    with torchferry.serve(state, 1, host=host, advertise=host, tls=server_context(authority, host)) as source:
        assert source.address.startswith("https://")
        for via in (None, "tcp"):
            got = torchferry.fetch(source.address, tls=client_context(authority), via=via)
            assert_same(got.state, state)
        source.wait(1, receivers=2, timeout=5)
        # The state does not cross the network in plain text: HTTP is not even understood.
        plain = source.address.replace("https", "http")
        with pytest.raises(ConnectionError):
            torchferry.fetch(plain, timeout=5)
        assert exchange(plain, request("GET", "/", token_of(source)))[:4] != b"HTTP"


def test_a_certificate_of_an_unknown_authority_is_refused(authority: trustme.CA) -> None:
    with torchferry.serve(STATE, 1, tls=server_context(authority, "127.0.0.1")) as source:
        for tls in (None, client_context(None), client_context(trustme.CA())):
            with pytest.raises(ConnectionError, match=r"CERTIFICATE_VERIFY_FAILED|certificate verify failed"):
                torchferry.fetch(source.address, tls=tls, timeout=5)
        # The token was not sent to it.
        assert source.status().readers == ()
        assert_same(torchferry.fetch(source.address, tls=client_context(authority)).state, STATE)


def test_a_certificate_for_another_host_is_refused(authority: trustme.CA) -> None:
    for name in ("other.example", "127.0.0.2"):
        with (
            torchferry.serve(STATE, 1, tls=server_context(authority, name)) as source,
            pytest.raises(ConnectionError, match="not valid for"),
        ):
            torchferry.fetch(source.address, tls=client_context(authority), timeout=5)


def test_a_client_certificate_is_required_if_the_source_says_so(authority: trustme.CA) -> None:
    clients = trustme.CA()
    with torchferry.serve(STATE, 1, tls=server_context(authority, "127.0.0.1", clients=clients)) as source:
        got = torchferry.fetch(source.address, tls=client_context(authority, clients))
        assert_same(got.state, STATE)
        for own in (None, trustme.CA(), authority):
            began_s = time.monotonic()
            with pytest.raises(ConnectionError):
                torchferry.fetch(source.address, tls=client_context(authority, own), timeout=10)
            assert time.monotonic() < began_s + 5
        assert [reader.state for reader in source.status().readers] == ["confirmed"]
        # A client without a certificate does not disturb those that have one.
        assert_same(torchferry.fetch(source.address, tls=client_context(authority, clients)).state, STATE)


def test_a_wrong_token_is_a_permission_error_over_tls_too(authority: trustme.CA) -> None:
    with torchferry.serve(STATE, 1, tls=server_context(authority, "127.0.0.1")) as source:
        wrong = source.address.replace(token_of(source), "wrong-0123456789abcdef")
        with pytest.raises(PermissionError):
            torchferry.fetch(wrong, tls=client_context(authority), timeout=5)


def test_tls_for_an_address_without_it_is_an_invalid_argument(authority: trustme.CA, source: Source) -> None:
    with pytest.raises(torchferry.BadArgument, match="begins with http://, not https://") as caught:
        torchferry.fetch(source.address, tls=client_context(authority))
    assert token_of(source) not in str(caught.value)
    for wrong in (True, "cert.pem", object()):
        with pytest.raises(torchferry.BadArgument, match=r"tls must be an ssl\.SSLContext"):
            torchferry.fetch(source.address.replace("http", "https"), tls=wrong)  # type: ignore[arg-type]
        with pytest.raises(torchferry.BadArgument, match=r"tls must be an ssl\.SSLContext"):
            Source(tls=wrong)  # type: ignore[arg-type]


def test_clients_that_do_not_finish_the_handshake_do_not_hold_up_others(authority: trustme.CA) -> None:
    with (
        torchferry.serve(STATE, 1, tls=server_context(authority, "127.0.0.1")) as source,
        contextlib.ExitStack() as stack,
    ):
        hello = _client_hello()
        for number in range(60):
            sock = stack.enter_context(connect(source.address))
            # Nothing, a part, all of the first message, garbage, or gone at once.
            sock.sendall((b"", hello[:20], hello, b"\0" * 100)[number % 4])
            if number % 5 == 0:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                sock.close()
        began_s = time.monotonic()
        assert_same(torchferry.fetch(source.address, tls=client_context(authority), timeout=10).state, STATE)
        assert time.monotonic() < began_s + 2.0


def _client_hello() -> bytes:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = ssl.create_default_context().wrap_bio(incoming, outgoing, server_hostname="x")
    with contextlib.suppress(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


def test_a_source_that_does_not_finish_the_handshake_is_a_timeout(authority: trustme.CA) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"https://127.0.0.1:{silent.getsockname()[1]}/#{TOKEN}"
        began_s = time.monotonic()
        with pytest.raises(TimeoutError):
            torchferry.fetch(address, tls=client_context(authority), timeout=0.5)
        assert time.monotonic() < began_s + 1.5
    wait_until(lambda: not any(t.name.startswith("torchferry-fetch") for t in threading.enumerate()))


def test_status_codes_of_a_source_are_four_hundreds_for_what_it_does_not_know(source: Source) -> None:
    token = token_of(source)
    for method, path in (
        *(
            ("GET", "/"),
            ("GET", "*"),
            ("CONNECT", "a:1"),
            ("GET", "/v1/leases"),
            ("GET", "http://x/v1/leases"),
        ),
        *(("PUT", "/v1/leases"), ("POST", "/v1/leases/"), ("POST", "/v1/leases/x/result")),
        *(("GET", f"/v1/leases/{'0' * 32}/manifest"), ("GET", f"/v1/leases/{'0' * 32}/chunks/1-2-3")),
    ):
        answer = exchange(source.address, request(method, path, token))
        assert status_of(answer) in (400, 404, 410), (method, path)


def test_a_context_for_clients_is_refused_at_once() -> None:
    # It would fail with the first connection.
    with pytest.raises(ValueError, match="tls is a context for clients"):
        Source(tls=ssl.create_default_context())


@pytest.mark.parametrize("argument", ["host", "port", "advertise", "token", "version", "timeout", "name"])
def test_an_address_that_is_passed_as_something_else_is_not_shown(argument: str) -> None:
    token = "a-secret-that-nobody-sees"
    address = f"http://127.0.0.1:9/#{token}" + ("x" * 200 if argument == "name" else "")
    call: Any = Source
    if argument in ("version", "timeout", "name"):
        call = partial(torchferry.fetch, address)
    with pytest.raises(torchferry.BadArgument) as caught:
        call(**{argument: address})
    assert token not in "".join(traceback.format_exception(caught.value))
