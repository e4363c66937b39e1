"""numpy scalars arrive bit for bit. Without numpy, all other values can be sent."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest

from tests.support.transfer import transfer
from torchferry.errors import Unsendable

ROOT = Path(__file__).parents[3]

SCALARS = [
    numpy.bool(True), numpy.int8(-3), numpy.uint8(200), numpy.int16(-300), numpy.uint64(2**63),
    numpy.float16(0.1), numpy.float32("nan"), numpy.float64(-0.0), numpy.longdouble(1) / 3,
    numpy.complex64(1 - 2j), numpy.complex128(complex("nan+1j")), numpy.clongdouble(1j) / 3,
    numpy.datetime64("2024-02-29"), numpy.datetime64("NaT"), numpy.timedelta64(3, "ms"),
    numpy.str_("fährt"), numpy.str_(""), numpy.str_("zero\0"), numpy.bytes_(b"ab"), numpy.bytes_(b""),
    numpy.bytes_(b"zero\0\0"), numpy.void(b"abc"), numpy.void(b""),
    numpy.array([(1, 2.5)], dtype=[("a", "i4"), ("b", "f8")])[0],
]  # fmt: skip


@pytest.mark.parametrize("scalar", SCALARS, ids=lambda s: f"{type(s).__name__} {s!s:.8}".replace("\0", "0"))
def test_every_scalar_arrives_with_its_type_and_bits(scalar: Any) -> None:
    received = transfer({"s": scalar}).state["s"]
    assert type(received) is type(scalar)
    assert received.dtype == scalar.dtype
    assert received.tobytes() == scalar.tobytes()
    if isinstance(scalar, (str, bytes)):
        assert len(received) == len(scalar)


def test_a_scalar_can_be_a_key() -> None:
    state = {numpy.int64(3): "a", numpy.str_("k"): "b"}
    received = transfer(state).state
    assert received == state
    assert [type(key) for key in received] == [numpy.int64, numpy.str_]


def test_the_states_of_numpy_s_generators_arrive() -> None:
    """They contain a 128-bit int, arrays, and a tuple."""
    generator, legacy = numpy.random.default_rng(5), numpy.random.RandomState(5)
    received = transfer({"new": generator.bit_generator.state, "old": legacy.get_state()}).state
    other, other_legacy = numpy.random.default_rng(0), numpy.random.RandomState(0)
    other.bit_generator.state = received["new"]
    other_legacy.set_state(received["old"])
    assert other.random() == generator.random()
    assert other_legacy.rand() == legacy.rand()


WITHOUT_NUMPY = """
import sys
sys.modules["numpy"] = None  # importing it fails from here on

import collections, warnings
warnings.simplefilter("ignore")
import torch
from tests.support.equality import assert_same
from tests.support.transfer import transfer
from torchferry.core.codec import Frame, encode
from torchferry.core.manifest import Branch, Leaf, Manifest, Special, TensorSpec
from torchferry.core.codec import encode_value
from torchferry.core.push import TransferId
from torchferry.links.base import FRAME_TAG, LENGTH_TAG
from torchferry.engine.push import ReceiveOptions, receive_state
from torchferry.errors import UnknownType
from torchferry.testing import MemoryNetwork

try:
    torch.ones(1).numpy()
except RuntimeError:
    pass
else:
    raise AssertionError("numpy is installed")

state = {
    "w": torch.nn.Parameter(torch.randn(3, 4)), "half": torch.ones(2, dtype=torch.bfloat16),
    "column": torch.arange(12.0).view(3, 4)[:, 1], "conj": torch.tensor([1 + 2j]).conj(),
    "sparse": torch.eye(3).to_sparse(), "rng": torch.get_rng_state(), "big": 2**125, "inf": float("inf"),
    "sched": collections.Counter({3: 1}), "optim": torch.optim.Adam([torch.ones(2)]).state_dict(),
}
assert_same(state, transfer(state).state)
local = {"t": torch.zeros(4, 3).t()}
transfer({"t": torch.arange(12.0).view(3, 4)}, into=local)
assert torch.equal(local["t"], torch.arange(12.0).view(3, 4))


def incoming(leaf, *tensors):
    network = MemoryNetwork()
    link = network.link(0)
    tree = Branch("dict", (0,), ("found",))
    storages = (16,) * bool(tensors)
    frame = encode(Frame(Manifest(~0, (tree,), (leaf,), tensors, storages), 1 << 20))
    link.send(torch.tensor([len(frame)]), 1, LENGTH_TAG)
    link.send(torch.frombuffer(bytearray(frame), dtype=torch.uint8), 1, FRAME_TAG)
    if tensors:
        link.channel(1, TransferId(0, 0, b"")).send(torch.zeros(16, dtype=torch.uint8))
    try:
        receive_state(network.link(1), 0, ReceiveOptions(5, 1 << 20))
    except UnknownType as error:
        print(error)
    else:
        raise AssertionError("the frame was accepted")


incoming(
    Leaf("ndarray", (0,), Special(0, encode_value({"dtype": "<f8", "backwards": []})), True),
    TensorSpec("uint8", 1, (2, 8), (8, 1), 0, 0),
)
incoming(Leaf("value", traits=Special(41, encode_value(["<f8", b"12345678"]))))
print("done")
"""


def test_without_numpy_all_other_values_arrive_and_an_array_is_an_unknown_type() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_NUMPY],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    array, scalar, last = done.stdout.splitlines()
    for message in (array, scalar):
        assert message.startswith("found: the incoming state holds numpy values")
        assert "pip install numpy" in message
    assert last == "done"


def test_a_scalar_of_a_subclass_is_refused() -> None:
    class Metre(numpy.float64):
        pass

    with pytest.raises(Unsendable, match="Metre"):
        transfer({"length": Metre(3)})


@pytest.mark.parametrize("byte_order", ["<", ">"])
def test_a_string_of_either_byte_order_arrives(byte_order: str) -> None:
    (text,) = numpy.array(["fähre"], dtype=f"{byte_order}U5")
    assert transfer({"text": text}).state["text"] == "fähre"
