"""Large bytes, bytearrays, streams and arrays are payload, and replace a local value."""

from __future__ import annotations

import array
import io
import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

from tests.support.equality import assert_same
from tests.support.transfer import transfer
from torchferry import fetch, serve
from torchferry.errors import StateMismatch
from torchferry.tensors.describe import describe
from torchferry.tensors.kinds.buffer import MIN_BYTES

DATA = random.Random(0).randbytes(3 * MIN_BYTES)


def stream(position: int) -> io.BytesIO:
    built = io.BytesIO(DATA)
    built.seek(position)
    return built


EXAMPLES: dict[str, Callable[[], Any]] = {
    "bytes": lambda: DATA,
    "bytearray": lambda: bytearray(DATA),
    "BytesIO": lambda: stream(70_000),
    "array": lambda: array.array("H", DATA),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_large_value_is_payload_and_arrives(name: str) -> None:
    state = {"value": EXAMPLES[name](), "w": torch.arange(4.0)}
    transferred = transfer(state)
    assert_same(state, transferred.state)
    assert transferred.report.metadata_bytes < 1000
    assert transferred.payload_bytes >= len(DATA)


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize(
    "local", [None, b"small", bytes(len(DATA)), bytearray(7 * len(DATA)), io.BytesIO()], ids=type
)
def test_in_place_a_large_value_replaces_the_local_value(name: str, local: Any) -> None:
    state = {"value": EXAMPLES[name](), "w": torch.arange(4.0)}
    weight = torch.zeros(4)
    before = bytes(local) if isinstance(local, (bytes, bytearray)) else None
    transferred = transfer(state, into={"value": local, "w": weight})
    assert_same(state, transferred.state)
    assert transferred.state["w"] is weight
    assert before is None or bytes(local) == before, "a local value was overwritten"


def test_a_small_value_replaces_a_large_local_one() -> None:
    assert transfer({"value": b"small"}, into={"value": DATA}).state == {"value": b"small"}


def test_a_value_below_the_limit_is_metadata() -> None:
    assert describe({"value": DATA[: MIN_BYTES - 1]}).manifest.tensors == ()
    assert len(describe({"value": DATA[:MIN_BYTES]}).manifest.tensors) == 1


def test_one_value_in_two_places_is_sent_once() -> None:
    transferred = transfer({"a": DATA, "b": [DATA]})
    assert transferred.state["a"] is transferred.state["b"][0]
    assert transferred.payload_bytes < len(DATA) + 1000


def test_bytes_that_share_memory_with_an_array_arrive() -> None:
    state = {"array": numpy.frombuffer(DATA, "u1"), "bytes": DATA}
    received = transfer(state).state
    assert_same(state, received)
    assert transfer(state).payload_bytes < len(DATA) + 1000


def test_a_large_value_does_not_land_in_a_tensor() -> None:
    with pytest.raises(StateMismatch, match="kind: incoming buffer uint8"):
        transfer({"a": DATA}, into={"a": torch.zeros(len(DATA), dtype=torch.uint8)})


def test_the_root_depends_on_the_bytes_and_on_the_type_of_a_large_value() -> None:
    values = [DATA, bytearray(DATA), stream(0), stream(1), DATA[:-1] + b"\0", DATA]
    roots = []
    for value in values:
        with serve({"value": value}, version=1) as source:
            roots.append(fetch(source.address).report.root)
    assert len(set(roots)) == len(values) - 1
    assert roots[0] == roots[-1]


_FETCH = """
import sys
import torchferry

def peak(): return int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) << 10
def resident(): return int(open("/proc/self/status").read().split("VmRSS:")[1].split()[0]) << 10

into = {"value": b"", "step": 0} if sys.argv[2] == "in place" else None
before = resident()
state = torchferry.fetch(sys.argv[1], into=into).state
print((peak() - before) / len(state["value"]), state["value"][-1])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
@pytest.mark.parametrize("where", ["fresh", "in place"])
def test_a_large_value_is_received_in_memory_of_its_size(where: str) -> None:
    with serve({"value": bytes(100 << 20) + b"\7", "step": 1}, version=1) as source:
        command = [sys.executable, "-c", _FETCH, source.address, where]
        printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    ratio, last = printed.split()
    assert float(ratio) < 1.5
    assert int(last) == 7


VIEWS: dict[str, Callable[[], memoryview]] = {
    "of bytes": lambda: memoryview(DATA),
    "of a part of bytes": lambda: memoryview(DATA)[1:-1],
    "of a bytearray": lambda: memoryview(bytearray(DATA)),
    "of an array": lambda: memoryview(array.array("H", DATA)),
    "with steps": lambda: memoryview(DATA)[::2],
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_large_memoryview_is_payload_and_arrives_as_bytes(name: str) -> None:
    view = VIEWS[name]()
    (leaf,) = describe(view).manifest.leaves
    assert leaf.parts
    assert_same(transfer(view).state, bytes(view))
    with serve({"view": view}, version=1) as source:
        assert_same(fetch(source.address, into={"view": b""}).state, {"view": bytes(view)})


def test_a_stream_goes_on_sharing_its_bytes() -> None:
    shared = io.BytesIO(DATA)
    address = describe(DATA).memories[0].storage.data_ptr()
    for _ in range(2):
        assert describe(shared).memories[0].storage.data_ptr() == address
