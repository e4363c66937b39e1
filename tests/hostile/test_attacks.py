"""Every attack, on the decoder and on the receiver: typed errors, bounded time and memory."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from _pytest.mark import ParameterSet

from tests.hostile.attacks import envelopes, extents, kinds, pickles, trees, values
from tests.hostile.attacks.base import ATTACKS, Attack, framed
from torchferry.compat import decode_pickled
from torchferry.core.codec import Frame, decode, encode_value, is_frame
from torchferry.core.compare import compare
from torchferry.core.manifest import FORM, Branch, Leaf, Manifest, Special, TensorSpec
from torchferry.core.plan import Plan
from torchferry.core.push import MAX_METADATA_BYTES, TransferId
from torchferry.engine.metadata import encode as encode_manifest
from torchferry.engine.metadata import plan_incoming
from torchferry.engine.push import ReceiveOptions, receive_state
from torchferry.engine.workspace import Cache
from torchferry.errors import BadManifest, FerryError, StateMismatch
from torchferry.links.base import FRAME_TAG, LENGTH_TAG
from torchferry.tensors import registry
from torchferry.tensors.assemble import prepare
from torchferry.tensors.fresh import FreshMemory
from torchferry.tensors.kinds import RebuildContext, properties_of
from torchferry.testing import MemoryNetwork

FAMILIES = (envelopes, extents, kinds, pickles, trees, values)

MOST_SECONDS = 4.0
"""The CPU time that an attack may cost the receiver."""

MOST_BYTES = 400 << 20
"""The memory that an attack may cost beyond its own frame; decoding a valid frame needs some of it."""

TIMEOUT_S = 5.0


def test_every_family_registers_its_attacks() -> None:
    assert {family.__name__.rpartition(".")[2] for family in FAMILIES} == {
        attack.family for attack in ATTACKS
    }
    names = [str(attack) for attack in ATTACKS]
    assert len(set(names)) == len(names) > 200


@pytest.fixture(autouse=True)
def _types_of_the_attacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_types", {registry.name_of(cls): cls for cls in values.REGISTERED})


@pytest.fixture(autouse=True)
def canary() -> Iterator[Path]:
    yield pickles.CANARY
    if pickles.CANARY.exists():
        pickles.CANARY.rmdir()
        pytest.fail("code of the peer was executed")


@contextmanager
def bounded(frame: bytes) -> Iterator[None]:
    """Check the CPU time and the memory of the block."""
    before = _peak_bytes()
    started = time.process_time()
    yield
    assert time.process_time() - started < MOST_SECONDS
    assert _peak_bytes(reset=False) - before < MOST_BYTES + 4 * len(frame)


def _peak_bytes(*, reset: bool = True) -> int:
    """Return the peak of resident memory since the last reset."""
    if reset:
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


def decode_any(data: bytes, *, allow_pickle: bool = False) -> Frame:
    """Decode metadata as a receiver does: torchferry's own, or else a pickle."""
    return decode(data) if is_frame(data) else decode_pickled(data, allow_pickle=allow_pickle)


def plan(frame: Frame) -> Plan:
    """Plan a transfer as a receiver does."""
    cache = Cache()
    encoded = encode_manifest(frame.manifest, cache)
    return plan_incoming(encoded, cache, frame.chunk_bytes, frame.pack_bytes, frame.digests)


def process_metadata(data: bytes) -> None:
    """Process metadata as a receiver does before the payload."""
    frame = decode_any(data)
    plan(frame)
    prepare(frame.manifest, RebuildContext())
    fresh = FreshMemory(frame.manifest, time.perf_counter)
    for storage in range(len(frame.manifest.storages)):
        fresh.memory(storage)


def receive(frame: bytes, payload: Any = (), **options: Any) -> object:
    network = MemoryNetwork()
    link = network.link(0)
    link.send(torch.tensor([len(frame)]), 1, LENGTH_TAG)
    link.send(torch.frombuffer(bytearray(frame), dtype=torch.uint8), 1, FRAME_TAG)
    channel = link.channel(1, TransferId(0, 0, b""))
    for message in payload:
        channel.send(torch.frombuffer(bytearray(message), dtype=torch.uint8))
    # The sender leaves the network, so that a draining receiver does not wait for it.
    network.close(0)
    terms = ReceiveOptions(TIMEOUT_S, MAX_METADATA_BYTES, **options)
    return receive_state(network.link(1), 0, terms)


def of(family: ModuleType) -> list[Attack]:
    return [attack for attack in ATTACKS if attack.family == family.__name__.rpartition(".")[2]]


@contextmanager
def named(attack: Attack) -> Iterator[None]:
    """Add the name of the attack to errors."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"in the attack {attack}")
        raise


# The only attack whose metadata matches the local state of these tests: only its payload is wrong.
(_FITS,) = (attack for attack in ATTACKS if attack.name == "has_a_digest_of_something_else")
BEFORE_THE_PAYLOAD = [attack for attack in ATTACKS if not attack.payload]

SLOW_ATTACKS = {
    "has_floats_with_colliding_probes",
    "has_dense_keys_with_colliding_probes",
    "has_keys_with_colliding_probes_after_texts",
    "has_encoded_numbers_with_colliding_probes",
    "has_millions_of_references_to_one_list",
    "nests_lists_deep",
}


def with_marks(attack: Attack) -> ParameterSet:
    marks = [pytest.mark.slow] if attack.name in SLOW_ATTACKS else []
    return pytest.param(attack, id=str(attack), marks=marks)


def families(slow: set[ModuleType]) -> pytest.MarkDecorator:
    """Parametrize a test by family. Only the full set runs the slow families."""
    return pytest.mark.parametrize(
        "family",
        [
            pytest.param(
                family,
                id=family.__name__.rpartition(".")[2],
                marks=[pytest.mark.slow] if family in slow else [],
            )
            for family in FAMILIES
        ],
    )


@pytest.mark.parametrize("attack", [with_marks(attack) for attack in BEFORE_THE_PAYLOAD])
def test_an_attack_raises_its_error_before_the_payload(attack: Attack) -> None:
    frame = attack.build()
    with bounded(frame):
        if attack.error is None:
            with suppress(FerryError):
                process_metadata(frame)
        else:
            with pytest.raises(attack.error) as raised:
                process_metadata(frame)
            assert len(str(raised.value)) < 2000


@families(slow={trees})
def test_a_receiver_of_a_fresh_state_raises_a_ferry_error(family: ModuleType) -> None:
    for attack in of(family):
        frame = attack.build()
        with (
            named(attack),
            bounded(frame),
            suppress(FerryError) if attack.error is None else pytest.raises(FerryError),
        ):
            receive(frame, attack.payload)


@pytest.mark.parametrize("attack", [attack for attack in ATTACKS if attack.payload], ids=str)
def test_an_attack_by_the_payload_raises_its_error(attack: Attack) -> None:
    assert attack.error is not None
    with pytest.raises(attack.error):
        receive(attack.build(), attack.payload)


@families(slow={trees, extents, pickles, values})
def test_a_receiver_in_place_raises_a_ferry_error_and_keeps_its_state(family: ModuleType) -> None:
    for attack in of(family):
        frame = attack.build()
        local = [torch.arange(4.0)]
        with named(attack), bounded(frame), suppress(FerryError):
            receive(frame, attack.payload, local_state=lambda local=local: local)
        if attack is not _FITS:
            assert torch.equal(local[0], torch.arange(4.0)), str(attack)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("extra", ["error", "drop", "fresh"])
@pytest.mark.slow
def test_paths_that_collide_do_not_slow_down_a_receiver_in_place(extra: str, strict: bool) -> None:
    frame = trees.has_paths_that_collide()
    local = {"step": 0, "model": {number: {0: number} for number in range(1000)}}
    error, match = (BadManifest, "collide") if extra == "fresh" else (StateMismatch, None)
    with bounded(frame), pytest.raises(error, match=match) if strict or extra != "drop" else nullcontext():
        receive(frame, local_state=lambda: local, strict=strict, extra=extra)


def test_offsets_that_collide_do_not_slow_down_a_comparison() -> None:
    """All incoming tensors have a storage of their own, and all local tensors share one."""
    pairs = trees.colliding_pairs(30_000, sign=-1)
    assert len(set(map(hash, pairs[:100]))) == 1
    names = Branch("dict", tuple(range(len(pairs))), tuple(f"t{n}" for n in range(len(pairs))))
    leaves = tuple(Leaf("tensor", (n,)) for n in range(len(pairs)))
    storages = (2**62,) * (max(first for first, _ in pairs) + 1)
    # The distance between the local and the incoming offset of each tensor is the second number of its pair.
    theirs = tuple(
        TensorSpec("uint8", 1, (1,), (1,), first, n - second) for n, (first, second) in enumerate(pairs)
    )
    incoming = Manifest(-1, (names,), leaves, theirs, storages)
    ours = tuple(TensorSpec("uint8", 1, (1,), (1,), 0, n) for n in range(len(pairs)))
    local = Manifest(-1, (names,), leaves, ours, (len(pairs),))
    with bounded(b""):
        comparison = compare(incoming, local, properties_of, strict=True, extra="error")
    assert not comparison.mismatches


# The shortest encodings of MessagePack, and those that need the most memory for their length.
SHORT_ITEMS = {
    "nothing": b"\xc0",
    "a list": b"\x90",
    "a map": b"\x80",
    "a nested list": b"\x91\x90",
    "a negative number": b"\xec",
    "a number": b"\xcd\x01\x01",
    "a float": b"\xca\x00\x00\x00\x00",
    "a text": b"\xa2ab",
    "bytes": b"\xc4\x02ab",
    "an extension": b"\xd4\x10\x00",
    "a special": b"\x92\x10\xc4\x00",
    "a special of two bytes": b"\x92\x10\xc4\x02ab",
    "a malformed special": b"\x92\x10\xc0",
    "a pair": b"\x92\xc0\xc0",
    "a pair of lists": b"\x92\x90\x90",
    "a shard": b"\x93\x90\x90\xa0",
    "a leaf": b"\x91\xa4abcd",
    "a leaf of a part": b"\x92\xa4abcd\x91\x00",
    "a branch": b"\x92\xa4list\x90",
    "a tensor": b"\x96\xa1f\x04\x90\x90\x00\x00",
    "a field": b"\x92\xa1a\xa1b",
}
MOST_TIMES = 60
"""The bytes of memory per byte of metadata. The worst are small negative numbers: one byte becomes an object
of thirty-two bytes."""


def _form(field: bytes, items: bytes, kind: bytes) -> bytes:
    form = b"\x81" + bytes([0xA0 + len(field)]) + field + items
    return trees.with_leaf(encode_value(Special(FORM, form)), encode_value(Special(FORM, form)), kind)


PLACES: dict[str, Callable[[bytes], bytes]] = {
    "keys": trees.with_keys,
    "extra": trees.with_extra,
    "children": lambda items: framed(trees.HEAD + b"\x91\x92\xa4list" + items + b"\x90\x90\x90\x10"),
    "branches": lambda items: framed(trees.HEAD + items + b"\x90\x90\x90\x10"),
    "leaves": lambda items: framed(trees.HEAD + b"\x90" + items + b"\x90\x90\x10"),
    "tensors": lambda items: framed(trees.HEAD + b"\x90\x90" + items + b"\x90\x10"),
    "storages": lambda items: framed(trees.HEAD + b"\x90\x90\x90" + items + b"\x10"),
    "digests": lambda items: framed(b"\x96\x95\x00\x90\x91\x91\xa5value\x90\x90\x10\xc0\x00\xc4\x00" + items),
    "fixed": lambda items: trees.with_leaf(items, b"\xc0"),
    "traits": lambda items: trees.with_leaf(b"\xc0", items),
    **{
        f"a value of code {code}": lambda items, code=code: trees.with_leaf(  # type: ignore[misc]
            b"\xc0", encode_value(Special(code, items))
        )
        for code in (16, 17, 18, 19, 20, 32, 40, 41)
    },
    "placements": lambda items: _form(b"placements", items, b"\xa7dtensor"),
    "shards": lambda items: _form(b"shards", items, b"\xa7sharded"),
    "all": lambda items: _form(b"all", items, b"\xa7sharded"),
    "size": lambda items: _form(b"size", items, b"\xa6sparse"),
    "dtype": lambda items: _form(b"dtype", items, b"\xa7ndarray"),
}


@pytest.mark.parametrize("place", PLACES)
def test_the_memory_for_a_frame_is_bounded_by_its_length(place: str) -> None:
    for name, item in SHORT_ITEMS.items():
        frame = PLACES[place](trees.many(item, 60_000 // len(item)))
        tracemalloc.start()
        try:
            with suppress(FerryError):
                prepare(decode_any(frame, allow_pickle=False).manifest, RebuildContext())
            times = tracemalloc.get_traced_memory()[1] / len(frame)
        finally:
            tracemalloc.stop()
        assert times < MOST_TIMES, f"{place} filled with {name}: {times:.0f} times the length of the frame"


@pytest.mark.parametrize("name", kinds.VALID)
def test_the_leaf_that_the_attacks_modify_is_valid(name: str) -> None:
    kind, form, specs = kinds.VALID[name]
    process_metadata(kinds.leaf(kind, form, *specs))


SAID = {
    "sparse_of_one_part": "it has 1 tensors, expected 2 for torch.sparse_coo",
    "sparse_of_indices_without_end": "2251799813685248 indices in all, expected at most 16777216",
    "sparse_of_indices_that_many_leaves_expand": "4294967296 indices in all, expected at most 16777216",
    "sparse_of_indices_that_are_complex": "its indices are complex64, expected int64",
    "compressed_of_an_unknown_layout": "its layout is 'torch.strided', expected one of torch.sparse_coo",
    "sharded_of_more_shards_than_parts": "it has 1 tensors, expected one for each of 2 shards",
    "sharded_of_tensors_of_another_shape": "a local shard is float32 (2, 2), expected float32 (4)",
    "sharded_of_another_dtype": "a local shard is float32 (4), expected int8 (4)",
    "sharded_with_placements_that_are_none": "device string: warp",
    "ndarray_of_objects": "items of the dtype object are references, expected bytes",
    "ndarray_of_another_item_size": "its tensor is uint8(4, 4), expected uint8[..., 8] for items of int64",
    "ndarray_backwards_along_no_axis": "its reversed axes are (1), but it has only 1 axes",
    "ndarray_of_more_dimensions_than_numpy_has": "it has 70 axes, expected at most 64",
}


@pytest.mark.parametrize("name", SAID)
def test_the_error_for_a_malformed_leaf_shows_the_value_and_what_is_expected(name: str) -> None:
    (attack,) = (attack for attack in ATTACKS if attack.name == name)
    with pytest.raises(BadManifest) as raised:
        process_metadata(attack.build())
    assert SAID[name] in str(raised.value)


@pytest.mark.parametrize("length", [0, -1, MAX_METADATA_BYTES + 1, 2**40, 2**63 - 1, -(2**63)])
def test_an_invalid_length_is_rejected_before_memory_is_allocated(length: int) -> None:
    network = MemoryNetwork()
    network.link(0).send(torch.tensor([length]), 1, LENGTH_TAG)
    with bounded(b""), pytest.raises(FerryError):
        receive_state(network.link(1), 0, ReceiveOptions(TIMEOUT_S, MAX_METADATA_BYTES))


WITH_LIMITED_ADDRESS_SPACE = """
import resource, sys
sys.path[:0] = {path!r}
from tests.hostile.test_attacks import ATTACKS, FerryError, receive, process_metadata

status = open("/proc/self/status").read()
has = int(status.partition("VmSize:")[2].split()[0]) << 10
resource.setrlimit(resource.RLIMIT_AS, (has + (2 << 30), resource.RLIM_INFINITY))
tried = 0
for attack in ATTACKS:
    if attack.family in ("extents", "kinds", "envelopes"):
        frame = attack.build()
        for run in (process_metadata, receive) if len(frame) < 1 << 20 else ():
            try:
                run(frame)
            except FerryError:
                pass
        tried += 1
print(tried)
"""


@pytest.mark.slow
def test_with_limited_address_space_every_attack_raises_a_ferry_error() -> None:
    root = Path(__file__).parents[2]
    script = WITH_LIMITED_ADDRESS_SPACE.format(path=[str(root), str(root / "src")])
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=root,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) > 100


def test_the_canary_detects_executed_code() -> None:
    """With allow_pickle, the same bytes are executed and create the canary."""
    with suppress(FerryError):
        decode_any(pickles.imports_and_calls(), allow_pickle=True)
    assert pickles.CANARY.exists()
    shutil.rmtree(pickles.CANARY)
