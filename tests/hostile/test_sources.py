"""A real `fetch` from a malicious source: a FerryError or the exact state, in time, with bounded memory."""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch
from xxhash import xxh3_64_intdigest

import torchferry
from tests.hostile.attacks import values
from tests.hostile.attacks.base import ATTACKS, CHUNK_BYTES, Attack
from tests.hostile.attacks.sources import (
    DIGESTS,
    DOCUMENTS,
    FLAGS,
    NUMBERS,
    OTHERS,
    SOURCE_ATTACKS,
    SourceAttack,
    document_of,
)
from tests.hostile.mutations import MessageMutator, Mutator, corpus
from tests.hostile.test_attacks import FAMILIES, bounded, named
from tests.support.http_peers import Asked, Server, forwarding, response, serving
from tests.support.sizes import count
from torchferry.core.codec import decode_manifest, encode_value
from torchferry.core.plan import MAX_CHUNKS, make_plan
from torchferry.core.pull import Grant, encode_digests, metadata_digest
from torchferry.errors import FerryError, StateMismatch, TargetTorn
from torchferry.serving import Source
from torchferry.tensors import registry
from torchferry.tensors.describe import describe

MUTATIONS = max(count("FUZZ_MUTATIONS", full=5000, quick=1000) // 100, 1)
FIRST_SEED = int(os.environ.get("FUZZ_SEED", "0"))

TIMEOUT_S = 1.5
"""Of a fetch that only its timeout can end."""


def honest_state() -> dict[str, Any]:
    return {"w": torch.arange(700_000.0), "small": [torch.full((3,), 7.0), torch.ones(2, 2)], "n": 3}


def blank_state() -> dict[str, Any]:
    return {
        "w": torch.full((700_000,), -1.0),
        "small": [torch.full((3,), -1.0), torch.full((2, 2), -1.0)],
        "n": 0,
    }


@pytest.fixture(scope="module")
def honest() -> Iterator[Source]:
    with torchferry.serve(honest_state(), 7) as source:
        yield source


@pytest.fixture(autouse=True)
def _types_of_the_attacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_types", {registry.name_of(cls): cls for cls in values.REGISTERED})


def leaves(state: Any) -> dict[str, torch.Tensor]:
    return {"w": state["w"], "small[0]": state["small"][0], "small[1]": state["small"][1]}


def is_same(one: Any, two: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(leaves(one).values(), leaves(two).values(), strict=True))


def check_damage(error: FerryError, local: Any) -> None:
    """Check that an error is right about what a failed fetch did to the local state."""
    old, new, now = leaves(blank_state()), leaves(honest_state()), leaves(local)
    if not isinstance(error, TargetTorn):
        assert is_same(local, blank_state()), "tensors were written, and the error does not say so"
        return
    for path in error.untouched:
        assert path == "n" or torch.equal(now[path], old[path]), path
    for path in error.whole:
        assert path == "n" or torch.equal(now[path], new[path]), path


def fetch_from(addresses: list[str], timeout_s: float, into: Any = None, **options: Any) -> Any:
    """Fetch; return the state, or the FerryError. Any other error is raised."""
    began_s = time.monotonic()
    try:
        found = torchferry.fetch(addresses, into, timeout=timeout_s, **options).state
    except FerryError as error:
        found = error
    assert time.monotonic() < began_s + timeout_s + 1.0
    if isinstance(found, FerryError):
        # What a source says is short, and forges no line. A mismatch has at most 50 lines, and hints.
        assert len(str(found)) < (60 if isinstance(found, StateMismatch) else 1) * 3000
        assert str(found).replace("\n  ", "").isprintable()
    return found


def parameters(attacks: list[SourceAttack], quick_step: int = 1) -> pytest.MarkDecorator:
    """Parametrize a test by attack. The quick set runs one of `quick_step`."""
    return pytest.mark.parametrize(
        "attack",
        [
            pytest.param(attack, id=str(attack), marks=[pytest.mark.slow] if number % quick_step else [])
            for number, attack in enumerate(attacks)
        ],
    )


def run(attack: SourceAttack, honest: Source, timeout_s: float) -> None:
    """Fetch from a malicious source, fresh, in place, and atomically in place."""
    with forwarding(honest.address, attack.change) as malicious, bounded(b""):
        fresh = fetch_from([malicious.address], timeout_s)
        assert isinstance(fresh, FerryError) or is_same(fresh, honest_state())
        for atomic in (False, True):
            local = blank_state()
            found = fetch_from([malicious.address], timeout_s, local, atomic=atomic)
            if isinstance(found, FerryError):
                assert not atomic or attack.document == "result" or is_same(local, blank_state())
                check_damage(found, local)
            else:
                assert is_same(local, honest_state())
                assert is_same(found, honest_state())
        if attack.document == "result" and "409" not in attack.name:
            # Everything has arrived. Only the source does not know.
            assert not isinstance(fresh, FerryError)


@parameters([attack for attack in SOURCE_ATTACKS if not attack.waits], quick_step=13)
def test_a_malicious_answer_ends_in_a_ferry_error_or_the_exact_state(
    attack: SourceAttack, honest: Source
) -> None:
    run(attack, honest, timeout_s=8.0)


@pytest.mark.slow
@parameters([attack for attack in SOURCE_ATTACKS if attack.waits])
def test_a_source_that_stalls_is_given_up_at_the_timeout(attack: SourceAttack, honest: Source) -> None:
    # A result that can't be told is given up after five seconds.
    run(attack, honest, timeout_s=TIMEOUT_S if attack.document != "result" else 7.0)


def test_metadata_by_the_byte_is_given_up_at_the_timeout(honest: Source) -> None:
    (attack,) = (each for each in SOURCE_ATTACKS if str(each) == "manifest-by_the_byte")
    with forwarding(honest.address, attack.change) as malicious:
        assert isinstance(fetch_from([malicious.address], 0.7), TimeoutError)


TESTED_ELSEWHERE = ("manifest-by_the_byte", "digests-by_the_byte", "result-by_the_byte", "result-silent")
DAMAGES = (
    "status_401",
    "status_404",
    "status_500",
    "status_503",
    "truncated",
    "closed",
    "flipped",
    "zeros",
    "garbage",
    "endless_head",
    "by_the_byte",
    "silent",
)


@parameters(
    [attack for attack in SOURCE_ATTACKS if attack.name in DAMAGES and str(attack) not in TESTED_ELSEWHERE],
    quick_step=7,
)
def test_with_an_honest_source_too_the_fetch_succeeds(attack: SourceAttack, honest: Source) -> None:
    local = blank_state()
    with forwarding(honest.address, attack.change) as malicious:
        fetched = fetch_from([malicious.address, honest.address], 30.0, local)
    assert not isinstance(fetched, FerryError)
    assert is_same(local, honest_state())


@pytest.mark.slow
@pytest.mark.parametrize("document", ["manifest", "digests"])
def test_metadata_by_the_byte_does_not_stop_a_fetch_that_has_an_honest_source_too(
    document: str, honest: Source
) -> None:
    (attack,) = (each for each in SOURCE_ATTACKS if str(each) == f"{document}-by_the_byte")
    with forwarding(honest.address, attack.change) as malicious:
        assert is_same(fetch_from([malicious.address, honest.address], 20.0), honest_state())


@pytest.mark.parametrize("number", range(len(OTHERS["peers"])))
def test_whatever_a_source_says_of_other_receivers_a_fetch_that_reshares_ends_in_time(
    number: int, honest: Source
) -> None:
    (attack,) = (each for each in SOURCE_ATTACKS if each.name == f"grant_peers_{number}")
    with forwarding(honest.address, attack.change) as malicious:
        found = fetch_from([malicious.address], 8.0, reshare=True, via="tcp")
        assert isinstance(found, FerryError) or is_same(found, honest_state())
        # Names are not looked up. Addresses that can't be reached are given up.
        is_valid = number in (4, 5, *range(7, 14), 15)
        assert isinstance(found, FerryError) != is_valid


# Lies that fit together.


@contextlib.contextmanager
def lying(
    manifest: bytes, digests: bytes, payload: bytes = b"", seed: int | None = None, **numbers: Any
) -> Iterator[Server]:
    """Run a source whose grant fits its manifest and digests, except for `numbers`, and mutated by a seed."""
    version, root = numbers.pop("version", 7), "2" * 32
    grant = {
        "lease": "1" * 32,
        "version": version,
        "root": root,
        "metadata": metadata_digest(manifest, digests, version, root),
        "payload_bytes": len(payload),
        "chunk_bytes": CHUNK_BYTES,
        "pack_bytes": 0,
        "chunks": len(digests) // 8,
        "peers": [{"host": "127.0.0.1", "port": 1}],
        "peer_token": "3" * 64,
        **numbers,
    }
    granted = msgspec.msgpack.encode(grant)
    if seed is not None:
        granted = MessageMutator([granted], seed).next()

    def answer(asked: Asked) -> bytes:
        bodies = {
            "leases": (201, granted),
            "manifest": (200, manifest),
            "digests": (200, digests),
            "chunks": (200, payload),
        }
        return response(*bodies.get(document_of(asked), (204, b"")))

    with serving(answer) as server:
        yield server


def test_a_lying_source_that_tells_the_truth_is_believed() -> None:
    """The attacks below differ from this in one thing each."""
    state = [torch.arange(4.0)]
    payload = bytes(state[0].untyped_storage())
    manifest = encode_value(describe(state).manifest)
    with lying(manifest, encode_digests([xxh3_64_intdigest(payload)]), payload) as server:
        fetched = fetch_from([server.address], 10.0)
    assert torch.equal(fetched[0], state[0])


@pytest.mark.parametrize("verify", [True, False])
def test_bytes_with_another_digest_are_never_delivered_as_verified(verify: bool) -> None:
    manifest = encode_value(describe([torch.arange(4.0)]).manifest)
    with lying(manifest, encode_digests([12345]), bytes(16)) as server:
        local = [torch.ones(4)]
        found = fetch_from([server.address], 10.0, local, verify=verify)
        if verify:
            assert isinstance(found, FerryError)
            assert isinstance(found, (torchferry.Corrupted, TargetTorn))
            assert any("damaged" in asked.path for asked in server.asked)
        else:
            assert torch.equal(found[0], torch.zeros(4))


@pytest.mark.parametrize(
    ("digests", "numbers"),
    [
        (b"", {}),
        (b"", {"chunks": 1}),
        (b"1234567", {"chunks": 1}),
        (b"123456789", {"chunks": 2}),
        (bytes(8), {"chunks": 0}),
        (bytes(16), {"chunks": 1}),
        (bytes(16), {}),
        (bytes(8 * MAX_CHUNKS), {}),
        (bytes(8 * MAX_CHUNKS + 8), {}),
        (bytes(8), {"payload_bytes": 15}),
        (bytes(8), {"payload_bytes": 2**63 - 1}),
        (bytes(8), {"pack_bytes": CHUNK_BYTES + 1}),
        (bytes(8), {"chunk_bytes": 0}),
        (bytes(8), {"chunk_bytes": 1}),
        (bytes(8), {"chunk_bytes": 1 << 30}),
        (bytes(8), {"chunk_bytes": 16, "pack_bytes": 17}),
    ],
)
def test_numbers_that_do_not_fit_the_manifest_are_refused_before_any_chunk(
    digests: bytes, numbers: dict[str, int]
) -> None:
    manifest = encode_value(describe([torch.arange(4.0)]).manifest)
    with lying(manifest, digests, bytes(16), **numbers) as server, bounded(b""):
        found = fetch_from([server.address], 10.0, [torch.ones(4)])
        assert isinstance(found, torchferry.BadManifest)
        assert not any("chunks" in asked.path for asked in server.asked)


def test_a_state_beyond_all_memory_is_refused_before_any_chunk() -> None:
    manifest = [-1, [["list", [0], None, None]], [["tensor", [0], None, None]], [], [2**44]]
    manifest[3] = [["uint8", 1, [2**38 - 1], [1], 0, 0, False, False]]
    chunks = 1 << 18
    grant: dict[str, Any] = {"payload_bytes": 2**38 - 1, "chunk_bytes": 1 << 20, "chunks": chunks}
    with lying(msgspec.msgpack.encode(manifest), bytes(8 * chunks), **grant) as server, bounded(b""):
        assert isinstance(fetch_from([server.address], 30.0), FerryError)
        assert not any("chunks" in asked.path for asked in server.asked)


@pytest.mark.parametrize("document", DOCUMENTS[1:3])
def test_metadata_beyond_the_limit_is_refused_before_it_is_read(document: str, honest: Source) -> None:
    def change(asked: Asked, status: int, body: bytes) -> bytes | None:
        return response(status, bytes(5000)) if document_of(asked) == document else None

    with forwarding(honest.address, change) as malicious:
        found = fetch_from([malicious.address], 10.0, max_metadata_bytes=4000)
    assert isinstance(found, torchferry.BadManifest)
    assert "5000 bytes" in str(found)


# The attacks on the decoder, by a source.


def as_source(frame: bytes) -> tuple[bytes, bytes, dict[str, Any]]:
    """Return the manifest of a frame, with digests and numbers that fit it, as far as it can be decoded."""
    manifest, chunk_bytes = frame, CHUNK_BYTES
    with contextlib.suppress(msgspec.DecodeError, RecursionError, ValueError):
        first, second, *_ = msgspec.msgpack.decode(frame[13:], type=list[msgspec.Raw])
        manifest = bytes(first)
        chunk_bytes = msgspec.msgpack.decode(second, type=int)
    with contextlib.suppress(FerryError, ValueError, ZeroDivisionError, OverflowError):
        plan = make_plan(decode_manifest(manifest), chunk_bytes, 0)
        numbers = {"payload_bytes": plan.payload_bytes, "chunk_bytes": chunk_bytes}
        return manifest, bytes(8 * len(plan.chunks)), numbers
    return manifest, bytes(8), {}


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=[] if name == "envelopes" else [pytest.mark.slow])
        for name in (family.__name__.rpartition(".")[2] for family in FAMILIES)
    ],
)
def test_the_attacks_on_the_decoder_fail_in_a_fetch_too(family: str) -> None:
    for attack in (each for each in ATTACKS if each.family == family):
        _attack_by_source(attack)


def _attack_by_source(attack: Attack) -> None:
    frame = attack.build()
    manifest, digests, numbers = as_source(frame)
    with named(attack), lying(manifest, digests, **numbers) as server:
        local = [torch.arange(4.0)]
        for into in (None, local):
            with bounded(3 * frame):
                # The slow attacks are long, and take most of their time to build and to send.
                found = fetch_from([server.address], 60.0, into)
            assert isinstance(found, FerryError) or not attack.payload
        assert torch.equal(local[0], torch.arange(4.0)) or attack.payload


def test_every_mutated_answer_ends_in_a_ferry_error_or_a_state() -> None:
    """`make fuzz` runs 1,000. A failure prints its seed: FUZZ_SEED=… FUZZ_MUTATIONS=100 replays it alone."""
    bodies = corpus()
    outcomes: Counter[str] = Counter()
    target = {"w": torch.zeros(8, 8), "t": torch.zeros(8, 8), "row": torch.zeros(8), "n": 0}
    for seed in range(FIRST_SEED, FIRST_SEED + MUTATIONS):
        rng = random.Random(seed)
        manifest, digests, numbers = as_source(Mutator(bodies, seed).next())
        if rng.random() < 0.3:
            digests = rng.choice(
                (digests[:-1], digests + bytes(8), digests + b"x", rng.randbytes(len(digests)))
            )
        payload = bytes(min(numbers.get("payload_bytes", 0), 1 << 20))
        try:
            with lying(
                manifest, digests, payload, seed=seed if rng.random() < 0.5 else None, **numbers
            ) as server:
                into = target if rng.random() < 0.5 else None
                verify = rng.random() < 0.5
                options: dict[str, Any] = {"strict": False, "verify": verify, "reshare": verify}
                found = fetch_from([server.address], 10.0, into, **options)
        except BaseException as error:
            error.add_note(f"seed {seed}: replay with FUZZ_SEED={seed} FUZZ_MUTATIONS=100")
            raise
        outcomes[type(found).__name__ if isinstance(found, FerryError) else "a state"] += 1
    print(f"\n{MUTATIONS} fetches from seed {FIRST_SEED}: {dict(outcomes)}")
    assert MUTATIONS < 50 or len(outcomes) > 3


def test_every_field_of_a_grant_is_attacked() -> None:
    assert {*NUMBERS, *DIGESTS, *FLAGS, *OTHERS} == {*Grant.__struct_fields__}
