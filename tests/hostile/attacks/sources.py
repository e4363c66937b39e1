"""Attacks of a malicious source on a receiver that fetches: what it answers instead of the truth.

A change gets a request, and the status and body that an honest source answers. It returns what is sent.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from tests.support.http_peers import Asked, Change, response

DOCUMENTS = ("leases", "manifest", "digests", "chunks", "result")
"""What a receiver asks for, in this order."""


def document_of(asked: Asked) -> str:
    """Return which document a request asks for, or to which one it posts."""
    return next(part for part in reversed(asked.path.split("/")) if part.isalpha())


@dataclass(frozen=True)
class SourceAttack:
    """A change of the answers about one document. `waits` if the receiver can only end it by its timeout."""

    document: str
    name: str
    change: Change
    waits: bool = False

    def __str__(self) -> str:
        return f"{self.document}-{self.name}"


Answer = Callable[[int, bytes], "bytes | Iterator[bytes]"]


def _at(document: str, answer: Answer) -> Change:
    def change(asked: Asked, status: int, body: bytes) -> bytes | Iterator[bytes] | None:
        return answer(status, body) if document_of(asked) == document else None

    return change


# Answers about any document.


def _with_status(wanted: int, _status: int, body: bytes) -> bytes:
    return response(wanted, body)


def _with_reason(wanted: int, _status: int, _body: bytes) -> bytes:
    return response(wanted, msgspec.msgpack.encode({"reason": "\x1b[31m\nforged line " + "x" * 3000}))


def _truncated(_status: int, body: bytes) -> Iterator[bytes]:
    yield response(200, body)[: -len(body) // 2 or -5]
    raise ConnectionError


def _closed(_status: int, _body: bytes) -> Iterator[bytes]:
    yield b""
    raise ConnectionError


def _flipped(status: int, body: bytes) -> bytes:
    middle = len(body) // 2
    return response(status, body[:middle] + bytes([body[middle] ^ 1]) + body[middle + 1 :] if body else b"x")


def _shorter(status: int, body: bytes) -> bytes:
    return response(status, body[:-1])


def _longer(status: int, body: bytes) -> bytes:
    return response(status, body + b"\0")


def _with_length(nbytes: str, status: int, body: bytes) -> Iterator[bytes]:
    yield f"HTTP/1.1 {status} x\r\nContent-Length: {nbytes}\r\n\r\n".encode() + body
    raise ConnectionError


def _endless(status: int, body: bytes) -> Iterator[bytes]:
    yield response(status, body)
    yield from itertools.repeat(b"\0" * 65536, 10_000)


def _endless_head(_status: int, _body: bytes) -> Iterator[bytes]:
    yield b"HTTP/1.1 200 x\r\n"
    yield from (f"X-{number}: {'x' * 1000}\r\n".encode() for number in range(10_000))


def _interim(_status: int, _body: bytes) -> Iterator[bytes]:
    yield from itertools.repeat(b"HTTP/1.1 100 Continue\r\n\r\n", 10_000)


def _two_responses(status: int, body: bytes) -> bytes:
    return 2 * response(status, body)


def _silent(_status: int, _body: bytes) -> Iterator[bytes]:
    yield b""
    _sleep_while_connected()
    raise ConnectionError


def _silent_in_the_middle(status: int, body: bytes) -> Iterator[bytes]:
    whole = response(status, body)
    yield whole[: -len(body) // 2 or -1]
    _sleep_while_connected()
    raise ConnectionError


def _by_the_byte(status: int, body: bytes) -> Iterator[bytes]:
    for byte in response(status, body + bytes(1000)):
        yield bytes([byte])
        time.sleep(0.02)
    raise ConnectionError


def _sleep_while_connected() -> None:
    # Longer than the timeout of the tests. Nothing here waits for it: it only keeps the connection open.
    time.sleep(4.0)


STATUSES = (200, 201, 202, 204, 206, 301, 302, 304, 400, 401, 403, 404, 409, 410, 418, 429, 500, 503, 999)

QUICK: dict[str, Answer] = {
    **{f"status_{status}": partial(_with_status, status) for status in STATUSES},
    **{f"reason_{status}": partial(_with_reason, status) for status in (400, 404, 409, 410, 500)},
    "empty": lambda status, _: response(status),
    "truncated": _truncated,
    "closed": _closed,
    "flipped": _flipped,
    "shorter": _shorter,
    "longer": _longer,
    "zeros": lambda status, body: response(status, bytes(len(body))),
    "huge_length": partial(_with_length, str(2**62)),
    "length_beyond_63_bits": partial(_with_length, "9" * 30),
    "negative_length": partial(_with_length, "-1"),
    "endless": _endless,
    "endless_head": _endless_head,
    "interim_responses": _interim,
    "two_responses": _two_responses,
    "garbage": lambda _status, _body: b"\xff" * 1000 + b"\r\n\r\n",
    "a_bomb": lambda status, _: response(status, b"\xdd\x00\x0f\x42\x40" + b"\x90" * 60_000),
}

WAITING: dict[str, Answer] = {
    "silent": _silent,
    "silent_in_the_middle": _silent_in_the_middle,
    "by_the_byte": _by_the_byte,
}

# Grants that lie.

NUMBERS = ("version", "payload_bytes", "chunk_bytes", "pack_bytes", "chunks", "port")
DIGESTS = ("lease", "root", "metadata", "memory")
FLAGS = ("snapshot",)
OTHERS: dict[str, tuple[Any, ...]] = {
    "memory": (0, "", "0" * 31, "0" * 32, "../x"),
    "port": (None, -1, 1, 65536, "80"),
    "peers": (
        None,
        "10.0.0.1:80",
        [None],
        [["127.0.0.1", 1]],
        [{"host": "127.0.0.1", "port": 0}],
        [{"host": "127.0.0.1", "port": 1}],
        [{"host": "127.0.0.1", "port": 65536}],
        [{"host": "", "port": 1}],
        [{"host": "localhost", "port": 1}],
        [{"host": "no-such-host.invalid", "port": 1}],
        [{"host": "127.0.0.1\r\nX: y", "port": 1}],
        [{"host": "127.0.0.1\0", "port": 1}],
        [{"host": "\N{LATIN SMALL LETTER E WITH ACUTE}" * 100, "port": 1}],
        [{"host": "fe80::1%no-such-interface", "port": 1}],
        [{"host": "x" * 60_000, "port": 1}],
        [{"host": "127.0.0.1", "port": 1}] * 8,
        [{"host": "127.0.0.1", "port": 1}] * 9,
        [{"host": "127.0.0.1", "port": 1}] * 1000,
        [{"host": "127.0.0.1", "port": 1, "token": "x"}],
    ),
    "peer_token": (None, "", "0" * 63, "0" * 64, "\r\n" * 32, "x" * 60_000),
}
"""Values of the fields that a receiver can do without."""


def _with_field(name: str, value: Any, status: int, body: bytes) -> bytes:
    grant = msgspec.msgpack.decode(body)
    return response(status, msgspec.msgpack.encode({**grant, name: value}))


def _without_field(name: str, status: int, body: bytes) -> bytes:
    grant = msgspec.msgpack.decode(body)
    return response(status, msgspec.msgpack.encode({key: grant[key] for key in grant if key != name}))


def _near(name: str, change: Callable[[int], int], status: int, body: bytes) -> bytes:
    return _with_field(name, change(msgspec.msgpack.decode(body)[name]), status, body)


ABSURD = (
    0,
    1,
    15,
    16,
    17,
    -1,
    2**18 + 1,
    2**30,
    2**40,
    2**62,
    2**63 - 1,
    2**63,
    2**64 - 1,
    1.5,
    True,
    None,
    "1",
)
TEXTS = (
    "",
    "0" * 31,
    "0" * 33,
    "A" * 32,
    "0" * 31 + "\n",
    "../" * 10 + "ab",
    "0" * 16,
    "0" * 32,
    7,
    None,
    b"0",
)

GRANTS: dict[str, Answer] = {
    **{f"{name}_{value}": partial(_with_field, name, value) for name in NUMBERS for value in ABSURD},
    **{
        f"{name}_{value!r}": partial(_with_field, name, value) for name in FLAGS for value in (None, 1, "yes")
    },
    **{f"{name}_plus_1": partial(_near, name, lambda value: value + 1) for name in NUMBERS},
    **{f"{name}_minus_1": partial(_near, name, lambda value: value - 1) for name in NUMBERS},
    **{
        f"{name}_text_{number}": partial(_with_field, name, value)
        for name in DIGESTS
        for number, value in enumerate(TEXTS)
    },
    **{f"without_{name}": partial(_without_field, name) for name in (*NUMBERS, *DIGESTS)},
    **{
        f"{name}_{number}": partial(_with_field, name, value)
        for name, values in OTHERS.items()
        for number, value in enumerate(values)
    },
    "with_another_field": partial(_with_field, "address", "http://127.0.0.1:1/"),
    "with_a_field_that_forges_a_line": partial(_with_field, "x\n\x1b[31mERROR forged", 1),
    "with_a_field_of_60_KB": partial(_with_field, "x" * 60_000, 1),
    "of_nested_lists": lambda status, _: response(status, b"\x91" * 60_000),
    "of_a_map_that_claims_more": lambda status, _: response(status, b"\xdf\xff\xff\xff\xff"),
}

SOURCE_ATTACKS = [
    SourceAttack(document, name, _at(document, answer))
    for document in DOCUMENTS
    for name, answer in QUICK.items()
]
SOURCE_ATTACKS += [
    SourceAttack("leases", f"grant_{name}", _at("leases", answer)) for name, answer in GRANTS.items()
]
SOURCE_ATTACKS += [
    SourceAttack(document, name, _at(document, answer), waits=True)
    for document in DOCUMENTS
    for name, answer in WAITING.items()
]
