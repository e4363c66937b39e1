"""The pull protocol: its messages, which version is chosen, which sources are combined, and its states."""

from __future__ import annotations

from enum import Enum
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import msgpack
from msgspec.structs import replace

from tests.support.sizes import examples
from torchferry.core.codec import decode_value
from torchferry.core.machine import Machine
from torchferry.core.pull import (
    MAX_NAME_CHARACTERS,
    Failure,
    FetchState,
    Grant,
    LeaseRequest,
    LeaseState,
    Peer,
    Result,
    choose,
    decode_digests,
    encode_digests,
    failure_decoder,
    grant_decoder,
    lease_request_decoder,
    result_decoder,
    why_not_mixed,
)
from torchferry.errors import BadManifest

GRANT = Grant("0" * 32, 7, "1" * 32, "3" * 16, 4 << 20, 1 << 20, 0, 4)


MESSAGES: list[tuple[Any, Any]] = [
    (LeaseRequest("state", "host:1"), lease_request_decoder),
    (LeaseRequest("state", "host:1", 7, -(2**63), 30.0, 65535), lease_request_decoder),
    (GRANT, grant_decoder),
    (replace(GRANT, peers=(Peer("10.0.0.7", 65535),) * 8, peer_token="a" * 64), grant_decoder),
    (Result("refused", "w: shape", verified=False), result_decoder),
    (Failure("no such version"), failure_decoder),
]
MESSAGE_NAMES = [
    "shortest lease request",
    "longest lease request",
    "grant",
    "grant with peers",
    "result",
    "failure",
]


@pytest.mark.parametrize(("message", "decoder"), MESSAGES, ids=MESSAGE_NAMES)
def test_a_message_is_a_map_with_the_names_of_its_fields(message: Any, decoder: Any) -> None:
    encoded = msgpack.encode(message)
    assert msgpack.decode(encoded) == msgspec.json.decode(msgspec.json.encode(message))
    assert decode_value(encoded, decoder) == message


@pytest.mark.parametrize(("message", "decoder"), MESSAGES, ids=MESSAGE_NAMES)
def test_a_field_that_the_protocol_does_not_have_is_refused(message: Any, decoder: Any) -> None:
    with pytest.raises(BadManifest, match="more"):
        decode_value(msgpack.encode({**msgspec.structs.asdict(message), "more": 1}), decoder)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", "n" * (MAX_NAME_CHARACTERS + 1)),
        ("name", b"state"),
        ("receiver", "r" * (MAX_NAME_CHARACTERS + 1)),
        ("receiver", None),
        ("version", 2**63),
        ("version", 1.5),
        ("version", True),
        ("newer_than", 2**64 - 1),
        ("wait_s", -1.0),
        ("wait_s", "1"),
        ("port", -1),
        ("port", 65536),
        ("port", "80"),
        ("port", None),
    ],
)
def test_a_lease_request_with_a_wrong_field_is_refused(field: str, value: object) -> None:
    fields = {"name": "state", "receiver": "host:1", field: value}
    with pytest.raises(BadManifest):
        decode_value(msgpack.encode(fields), lease_request_decoder)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lease", "0" * 31),
        ("lease", "0" * 33),
        ("lease", "../" + "0" * 29),
        ("lease", "0" * 31 + "\n"),
        ("lease", "A" * 32),
        ("root", "1" * 16),
        ("metadata", "2" * 17),
        ("version", 2**63),
        ("payload_bytes", 2**63),
        ("chunk_bytes", 0),
        ("chunk_bytes", 15),
        ("chunk_bytes", 2**30 + 1),
        ("pack_bytes", "0"),
        ("pack_bytes", -1),
        ("pack_bytes", 2**30 + 1),
        ("chunks", None),
        ("port", 65536),
        ("peers", [["10.0.0.7", 80]]),
        ("peers", [{"host": "10.0.0.7"}]),
        ("peers", [{"host": "10.0.0.7", "port": -1}]),
        ("peers", [{"host": "10.0.0.7", "port": 80, "token": "x"}]),
        ("peers", [{"host": "x" * (MAX_NAME_CHARACTERS + 1), "port": 80}]),
        ("peers", [{"host": "10.0.0.7", "port": 80}] * 9),
        ("peer_token", "a" * 63),
        ("peer_token", "A" * 64),
        ("peer_token", "a" * 64 + "\n"),
    ],
)
def test_a_grant_with_a_wrong_field_is_refused(field: str, value: object) -> None:
    with pytest.raises(BadManifest):
        decode_value(msgpack.encode({**msgspec.structs.asdict(GRANT), field: value}), grant_decoder)


@pytest.mark.parametrize(
    "fields",
    [
        {"outcome": "lost"},
        {},
        {"outcome": "failed", "reason": "r" * 4001},
        {"outcome": "failed", "verified": 1},
    ],
)
def test_a_result_with_a_wrong_field_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(BadManifest):
        decode_value(msgpack.encode(fields), result_decoder)


@examples(100)
@given(st.lists(st.integers(0, 2**64 - 1), max_size=20))
def test_digests_are_eight_bytes_each_little_endian(digests: list[int]) -> None:
    data = encode_digests(digests)
    assert data == b"".join(digest.to_bytes(8, "little") for digest in digests)
    assert decode_digests(data) == tuple(digests)


@pytest.mark.parametrize("nbytes", [1, 7, 9, 15])
def test_digests_that_are_not_whole_are_refused(nbytes: int) -> None:
    with pytest.raises(BadManifest, match=f"{nbytes} bytes"):
        decode_digests(bytes(nbytes))


def test_the_highest_version_is_chosen_and_of_equal_ones_that_of_the_first_source() -> None:
    assert choose([]) is None
    assert choose([None, None]) is None
    first, second = replace(GRANT, root="a" * 32), replace(GRANT, root="b" * 32)
    newer, negative = replace(GRANT, version=8), replace(GRANT, version=-1)
    assert choose([None, first, second]) is first
    assert choose([second, first]) is second
    assert choose([first, newer, second]) is newer
    assert choose([None, negative]) is negative


@examples(100)
@given(st.lists(st.none() | st.integers(-3, 3)))
def test_the_choice_is_the_first_of_the_highest(versions: list[int | None]) -> None:
    grants = [None if version is None else replace(GRANT, version=version) for version in versions]
    chosen = choose(grants)
    known = [version for version in versions if version is not None]
    if chosen is None:
        assert not known
    else:
        assert chosen is grants[versions.index(max(known))]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"version": 8}, "version 8, not 7"),
        ({"root": "f" * 32}, "another state"),
    ],
)
def test_only_sources_of_equal_version_and_root_are_combined(changes: dict[str, Any], reason: str) -> None:
    other = replace(GRANT, **changes)
    assert reason in why_not_mixed(other, GRANT)
    assert why_not_mixed(GRANT, other)
    assert not why_not_mixed(other, other)


def test_what_differs_between_two_leases_on_equal_states_does_not_matter() -> None:
    # The manifests differ, for example in requires_grad.
    other = replace(GRANT, lease="f" * 32, metadata="f" * 16)
    assert not why_not_mixed(other, GRANT)


def reachable(start: LeaseState | FetchState) -> set[str]:
    states = {state.label: state for state in type(start)}
    found, todo = {start.label}, [start.label]
    while todo:
        for label in set(states[todo.pop()].following) - found:
            found.add(label)
            todo.append(label)
    return found


@pytest.mark.parametrize(
    ("start", "final"),
    [
        (LeaseState.OPEN, {*LeaseState} - {LeaseState.OPEN}),
        (FetchState.CONNECTING, {FetchState.DONE, FetchState.REFUSED}),
    ],
    ids=["lease", "fetch"],
)
def test_every_state_can_be_reached(start: LeaseState | FetchState, final: set[Enum]) -> None:
    assert {state.label for state in type(start)} == reachable(start)
    assert {state for state in type(start) if not state.following} == final


def test_every_state_of_a_fetch_that_can_fail_has_a_phase() -> None:
    assert all(bool(state.phase) == bool(state.following) for state in FetchState)


def test_a_fetch_requests_no_chunk_before_it_has_compared() -> None:
    machine = Machine(FetchState.CONNECTING)
    machine.advance(FetchState.MANIFEST)
    with pytest.raises(AssertionError, match="not followed by"):
        machine.advance(FetchState.RECEIVING)


@pytest.mark.parametrize("end", [state for state in LeaseState if state is not LeaseState.OPEN])
def test_a_lease_that_has_ended_does_not_change(end: LeaseState) -> None:
    machine = Machine(LeaseState.OPEN)
    machine.advance(end)
    for state in LeaseState:
        with pytest.raises(AssertionError, match="not followed by"):
            machine.advance(state)
    assert machine.state is end
