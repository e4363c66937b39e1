"""A real source with malicious requests, all with the token: 4xx or the end of the connection, no more."""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch

import torchferry
from tests.hostile.mutations import MessageMutator
from tests.support.children import wait_until
from tests.support.http_peers import connect, exchange, request, status_of
from tests.support.sizes import count
from torchferry.core.pull import LeaseRequest, Result
from torchferry.links.address import parse_address
from torchferry.serving import Source

MUTATIONS = count("FUZZ_MUTATIONS", full=5000, quick=1000) // 10
FIRST_SEED = int(os.environ.get("FUZZ_SEED", "0"))

STATE: dict[str, Any] = {"w": torch.arange(700_000.0), "n": 3}


@pytest.fixture(scope="module")
def source() -> Iterator[Source]:
    with torchferry.serve(STATE, 7) as served:
        yield served


@pytest.fixture(autouse=True)
def _serves_afterwards(source: Source) -> Iterator[None]:
    """Check that an honest reader gets the state after each test, and that no lease is left open."""
    threads = threading.excepthook
    failed: list[Any] = []
    threading.excepthook = failed.append
    yield
    threading.excepthook = threads
    assert not failed, "a thread of the source ended with an exception"
    assert torch.equal(torchferry.fetch(source.address, timeout=10).state["w"], STATE["w"])
    wait_until(lambda: all(reader.state != "reading" for reader in source.status().readers), 5.0)


def ask(source: Source, method: str, path: str, body: bytes = b"") -> bytes:
    return exchange(source.address, request(method, path, parse_address(source.address).token, body))


LEASE: dict[str, Any] = {"name": "state", "receiver": "test"}

BAD_LEASES: dict[str, Any] = {
    "nothing": None,
    "a list": [],
    "an empty map": {},
    "no name": {"receiver": "test"},
    "no receiver": {"name": "state"},
    "another field": {**LEASE, "token": "x"},
    "a name that is a number": {**LEASE, "name": 7},
    "a name that is too long": {**LEASE, "name": "x" * 201},
    "a receiver that is too long": {**LEASE, "receiver": "x" * 201},
    "a version beyond 63 bits": {**LEASE, "version": 2**63},
    "a version that is a text": {**LEASE, "version": "7"},
    "a version that is a float": {**LEASE, "version": 7.5},
    "a negative wait": {**LEASE, "newer_than": 7, "wait_s": -1.0},
    "a wait that is not a number": {**LEASE, "newer_than": 7, "wait_s": float("nan")},
    "a negative port": {**LEASE, "port": -1},
    "a port that is too high": {**LEASE, "port": 65536},
    "a port that is a text": {**LEASE, "port": "80"},
    "a port with a host": {**LEASE, "port": ["10.0.0.1", 80]},
    "another host": {**LEASE, "port": 80, "host": "10.0.0.1"},
    "a wait that is a text": {**LEASE, "newer_than": 7, "wait_s": "1"},
}


@pytest.mark.parametrize("message", BAD_LEASES.values(), ids=list(BAD_LEASES))
def test_a_malformed_request_for_a_lease_is_rejected(source: Source, message: Any) -> None:
    answer = ask(source, "POST", "/v1/leases", msgspec.msgpack.encode(message))
    assert status_of(answer) == 400
    assert msgspec.msgpack.decode(answer.partition(b"\r\n\r\n")[2])["reason"]


@pytest.mark.parametrize(
    "body",
    [b"", b"\xc1", b"\x91" * 60_000, b"\xdf\xff\xff\xff\xff", b"\xdd\x00\x00\xff\xff" + b"\x90" * 60_000],
)
def test_a_body_that_is_not_a_message_is_rejected(source: Source, body: bytes) -> None:
    assert status_of(ask(source, "POST", "/v1/leases", body)) == 400


def test_an_endless_wait_is_limited_and_ends_with_the_connection(source: Source) -> None:
    body = msgspec.msgpack.encode({**LEASE, "newer_than": 2**62, "wait_s": float("inf")})
    with connect(source.address) as sock:
        sock.sendall(request("POST", "/v1/leases", parse_address(source.address).token, body))
        began_s = time.monotonic()
        torchferry.fetch(source.address, timeout=10)
        assert time.monotonic() < began_s + 1.0


class Leased:
    """A lease on a connection, and requests about it on the same connection."""

    def __init__(self, source: Source) -> None:
        self.token = parse_address(source.address).token
        self.sock = connect(source.address)
        self.sock.sendall(request("POST", "/v1/leases", self.token, msgspec.msgpack.encode(LEASE)))
        self.grant = msgspec.msgpack.decode(self.sock.recv(1 << 16).partition(b"\r\n\r\n")[2])

    def ask(self, method: str, what: str, body: bytes = b"") -> bytes:
        path = f"/v1/leases/{self.grant['lease']}/{what}"
        self.sock.sendall(request(method, path, self.token, body))
        return self.sock.recv(1 << 16)

    def __enter__(self) -> Leased:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()


@pytest.mark.parametrize(
    "chunks",
    [
        *("0-0", "1-0", "0-4", "3-4", "0-999999999", "999999998-999999999", "0-9999999999", "-1-1", "0--1"),
        *(
            "0",
            "0-",
            "-1",
            "0-1-2",
            "a-b",
            "0-1/",
            "0-1?x",
            "0x0-0x1",
            "٠-١".encode().hex(),
            "0-1%00",
            "+0-1",
        ),
    ],
)
@pytest.mark.parametrize("work", ["chunks", "damaged"])
def test_chunks_that_are_not_there_are_rejected(source: Source, work: str, chunks: str) -> None:
    with Leased(source) as leased:
        assert leased.grant["chunks"] == 3
        method = "GET" if work == "chunks" else "POST"
        assert status_of(leased.ask(method, f"{work}/{chunks}")) in (400, 404)
        # The lease is still good.
        assert status_of(leased.ask("GET", "digests")) == 200


@pytest.mark.parametrize(
    "message",
    [
        None,
        {},
        {"outcome": "done"},
        {"outcome": "confirmed", "reason": "x" * 4001},
        {"outcome": 1},
        ["confirmed"],
    ],
)
def test_a_malformed_result_is_rejected_and_confirms_nothing(source: Source, message: Any) -> None:
    confirmed = [reader.state for reader in source.status().readers].count("confirmed")
    with Leased(source) as leased:
        assert status_of(leased.ask("POST", "result", msgspec.msgpack.encode(message))) == 400
        assert status_of(leased.ask("GET", "digests")) == 200
        states = [reader.state for reader in source.status().readers]
        assert (states.count("confirmed"), states[-1]) == (confirmed, "reading")


def test_a_result_ends_the_lease_and_what_follows_is_gone(source: Source) -> None:
    with Leased(source) as leased:
        result = msgspec.msgpack.encode(Result("failed", "\x1b[31m\nforged line"))
        assert status_of(leased.ask("POST", "result", result)) == 204
        for method, what in (("POST", "result"), ("GET", "manifest"), ("GET", "chunks/0-1")):
            assert status_of(leased.ask(method, what, result)) == 410
    assert source.status().readers[-1].reason == "[31m forged line"
    assert str(source.status()).replace("\n", "").isprintable()


def test_the_name_of_a_receiver_can_not_forge_a_line(source: Source) -> None:
    body = msgspec.msgpack.encode(LeaseRequest("state", "evil\n\x1b[31mother: confirmed"))
    assert status_of(ask(source, "POST", "/v1/leases", body)) == 201
    wait_until(lambda: source.status().readers[-1].state == "lost")
    assert str(source.status().readers[-1]).isprintable()


def test_a_lease_can_not_be_guessed_or_used_by_its_prefix(source: Source) -> None:
    with Leased(source) as leased:
        lease = leased.grant["lease"]
        for wrong in (lease[:-1], lease + "0", lease.upper() + "x", "0" * 32, lease[:8]):
            assert status_of(ask(source, "GET", f"/v1/leases/{wrong}/manifest")) in (404, 410)


def test_requests_in_any_order_do_no_harm(source: Source) -> None:
    rng = random.Random(FIRST_SEED)
    whats = [
        "manifest",
        "digests",
        "chunks/0-1",
        "chunks/1-3",
        "chunks/2-2",
        "damaged/0-1",
        "result",
        "nothing",
    ]
    bodies = [b"", b"x", *(msgspec.msgpack.encode(Result(o)) for o in ("confirmed", "refused", "failed"))]
    token = parse_address(source.address).token
    for _ in range(30):
        with Leased(source) as leased:
            lease = leased.grant["lease"]
            asked = [
                request(
                    rng.choice(("GET", "POST")),
                    f"/v1/leases/{lease}/{rng.choice(whats)}",
                    token,
                    rng.choice(bodies),
                )
                for _ in range(20)
            ]
            answer = exchange(source.address, b"".join(asked))
            assert status_of(answer) in (200, 204, 400, 404, 410)


def test_every_mutated_request_is_answered_or_ends_its_connection(source: Source) -> None:
    """`make fuzz` runs 10,000. A failure prints its seed: FUZZ_SEED=… FUZZ_MUTATIONS=10 replays it alone."""
    token = parse_address(source.address).token
    messages = [
        # Not both: a source may wait for as long as it is asked to.
        msgspec.msgpack.encode({**LEASE, "version": 7, "wait_s": 0.0}),
        msgspec.msgpack.encode({**LEASE, "newer_than": 6, "port": 80}),
        msgspec.msgpack.encode(Result("failed", "reason")),
    ]
    outcomes: Counter[int | None] = Counter()
    for seed in range(FIRST_SEED, FIRST_SEED + MUTATIONS):
        mutator = MessageMutator(messages, seed)
        rng = random.Random(seed)
        body = mutator.next()
        path = rng.choice(("/v1/leases", "/v1/leases", f"/v1/leases/{'0' * 32}/result", "/v1/leases/x"))
        data = request(rng.choice(("POST", "POST", "POST", "GET")), path, token, body)
        if rng.random() < 0.5:
            data = mutator.damage(data)
        began_s = time.monotonic()
        try:
            outcomes[status_of(exchange(source.address, data))] += 1
            assert time.monotonic() < began_s + 2.0
        except BaseException as error:
            error.add_note(
                f"seed {seed}: replay with FUZZ_SEED={seed} FUZZ_MUTATIONS=10; data {data[:2000]!r}"
            )
            raise
    print(f"\n{MUTATIONS} requests from seed {FIRST_SEED}: {dict(outcomes)}")
    assert {*outcomes} <= {None, 201, 204, 400, 401, 404, 410}
    if MUTATIONS >= 100:
        assert all(outcomes[each] > MUTATIONS // 100 for each in (None, 201, 400, 404)), outcomes
