"""An invalid leaf or container from a peer raises an error that names its path."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest
import torch

from torchferry.core.codec import Frame, encode, encode_value
from torchferry.core.manifest import FORM, Branch, Leaf, Manifest, Special, TensorSpec
from torchferry.core.plan import make_plan
from torchferry.core.push import TransferId
from torchferry.engine.push import ReceiveOptions, receive_state
from torchferry.errors import BadManifest, FerryError
from torchferry.links.base import FRAME_TAG, LENGTH_TAG
from torchferry.testing import MemoryNetwork

WORDS = TensorSpec("int64", 8, (2, 2), (2, 1), 0, 0)
BYTES = TensorSpec("uint8", 1, (2, 8), (8, 1), 0, 0)
MESH = {
    "device": "cpu",
    "ranks": [0, 1],
    "sizes": [[2]],
    "strides": [[1]],
    "coalesced": False,
    "names": None,
}


def receive(leaf: Leaf, *tensors: TensorSpec, into: object = None) -> Any:
    """Receive a state that holds one leaf at `model.odd`, with a payload of zeros."""
    inner, outer = Branch("dict", (0,), ("odd",)), Branch("dict", (~1,), ("model",))
    manifest = Manifest(~0, (outer, inner), (leaf,), tensors, (64,) if tensors else ())
    frame = encode(Frame(manifest, 1 << 20))
    network = MemoryNetwork()
    link = network.link(0)
    link.send(torch.tensor([len(frame)]), 1, LENGTH_TAG)
    link.send(torch.frombuffer(bytearray(frame), dtype=torch.uint8), 1, FRAME_TAG)
    channel = link.channel(1, TransferId(0, 0, b""))
    for chunk in make_plan(manifest).chunks:
        channel.send(torch.zeros(chunk.nbytes, dtype=torch.uint8))
    terms = ReceiveOptions(5, 1 << 20, local_state=None if into is None else lambda: {"model": {"odd": into}})
    try:
        return receive_state(network.link(1), 0, terms)[0]
    finally:
        assert not any(network._boxes.values()), "the receiver left messages of the sender in the network"


def leaf(kind: str, parts: tuple[int, ...], fixed: object = None, traits: object = None) -> Leaf:
    """Describe a leaf. A form that is a dict is packed."""
    forms = [
        Special(FORM, encode_value(form)) if isinstance(form, dict) else form for form in (fixed, traits)
    ]
    return Leaf(kind, parts, *forms)  # type: ignore[arg-type]


PLACED = {
    "placements": [["Shard", 0]],
    "shape": [4, 2],
    "mesh": [2],
    "position": "outside the mesh",
    "local": [],
}
TRAITS = {"grad": 0, "stride": [2, 1], "mesh": MESH, "local": []}
SHARDS = [[[0, 0], [2, 2]], [[2, 0], [2, 2]]]
SHARDED_TRAITS = {
    "all": [[*shard, "rank:0/cpu"] for shard in SHARDS],
    "dtype": "int64",
    "requires_grad": False,
    "memory_format": "torch.contiguous_format",
}
VALID = {
    "tensor": (Leaf("tensor", (0,)), WORDS),
    "dtensor": (leaf("dtensor", (0,), PLACED, TRAITS), WORDS),
    "sharded": (leaf("sharded", (0,), {"size": [4, 2], "shards": SHARDS[:1]}, SHARDED_TRAITS), WORDS),
    "ndarray": (leaf("ndarray", (0,), {"dtype": "<i8", "backwards": [0]}, True), BYTES),
}


@pytest.mark.parametrize("name", VALID)
def test_the_valid_examples_are_received(name: str) -> None:
    assert "odd" in receive(*VALID[name])["model"]


SPARSE_FORM = {"layout": "torch.sparse_coo", "size": [2, 2]}
SPARSE_TRAITS = {"grad": 0, "coalesced": True}
MALFORMED = {
    "a tensor of no parts": (Leaf("tensor", ()), "has 0 tensors, expected 1"),
    "a tensor of two parts": (Leaf("tensor", (0, 0)), "has 2 tensors, expected 1"),
    "a tensor with a form": (leaf("tensor", (0,), {"x": 1}), "Expected `null`"),
    "a tensor with odd traits": (Leaf("tensor", (0,), None, "grad"), "Expected `int | null`"),
    "a sparse of one part": (
        leaf("sparse", (0,), SPARSE_FORM, SPARSE_TRAITS),
        "has 1 tensors, expected 2",
    ),
    "a sparse without traits": (leaf("sparse", (0, 0), SPARSE_FORM), "expected SparseTraits"),
    "a sparse without size": (leaf("sparse", (0, 0), {"layout": "x"}, SPARSE_TRAITS), "field `size`"),
    "a sparse of a size that fits nothing": (
        leaf("sparse", (0, 0), {**SPARSE_FORM, "size": [2]}, SPARSE_TRAITS),
        "sparse can't be built: RuntimeError",
    ),
    "a sparse of an unknown layout": (
        leaf("sparse", (0, 0, 0), {**SPARSE_FORM, "layout": "torch.wild"}, SPARSE_TRAITS),
        "its layout is 'torch.wild'",
    ),
    "a dtensor without mesh": (leaf("dtensor", (0,), PLACED, {**TRAITS, "mesh": None}), "at `$.mesh`"),
    "a dtensor on an impossible mesh": (
        leaf("dtensor", (0,), PLACED, {**TRAITS, "mesh": {**MESH, "sizes": [[7], [3]]}}),
        "mesh, names and placements differ",
    ),
    "a dtensor of an unknown placement": (
        leaf("dtensor", (0,), {**PLACED, "placements": [["hovering", 0]]}, TRAITS),
        "its placement ('hovering', 0) is unknown",
    ),
    "a sharded of more shards than parts": (
        leaf("sharded", (0,), {"size": [4, 2], "shards": SHARDS}, SHARDED_TRAITS),
        "it has 1 tensors, expected one for each of 2 shards",
    ),
    "an ndarray of an unknown dtype": (
        leaf("ndarray", (0,), {"dtype": "<q9", "backwards": []}, True),
        "'<q9' not understood",
    ),
    "an ndarray of objects": (
        leaf("ndarray", (0,), {"dtype": "|O", "backwards": []}, True),
        "items of the dtype object are references, expected bytes",
    ),
    "an ndarray of another item size": (
        leaf("ndarray", (0,), {"dtype": "<i4", "backwards": []}, True),
        "expected uint8[..., 4] for items of int32",
    ),
    "an ndarray without traits": (
        leaf("ndarray", (0,), {"dtype": "<i8", "backwards": []}),
        "Expected `bool`",
    ),
    "a value of an unknown code": (Leaf("value", traits=Special(99, b"\xc0")), "unknown code 99"),
    "a value cut short": (Leaf("value", traits=Special(3, b"\xc4\x01a")), "complex can't be built"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_leaf_raises_an_error_with_its_path_and_the_reason(name: str) -> None:
    leaf, reason = MALFORMED[name]
    tensors = [BYTES if leaf.kind == "ndarray" else WORDS] if leaf.parts or leaf.kind == "tensor" else []
    with pytest.raises(BadManifest, match=rf"^model\.odd: .*{re.escape(reason)}") as raised:
        receive(leaf, *tensors)
    assert (raised.value.path, raised.value.peer) == ("model.odd", 0)


def test_in_place_a_malformed_leaf_raises_before_anything_is_written() -> None:
    local = torch.eye(2, dtype=torch.int64).to_sparse()
    before = local.to_dense()
    form = {"layout": "torch.sparse_coo", "size": [2, 2]}
    values = TensorSpec("int64", 8, (2,), (1,), 0, 32)
    with pytest.raises(BadManifest, match=r"^model\.odd: a malformed sparse"):
        receive(leaf("sparse", (0, 1), form, {"grad": 0}), WORDS, values, into=local)
    assert torch.equal(local.to_dense(), before)


NOT_IMPORTED = "this"
"""A module of the standard library that nothing imports."""


@pytest.mark.parametrize(
    "branch",
    [
        Branch("hologram", (0,)),
        Branch("namedtuple", (0,), ("x",), None),
        Branch("dataclass", (0,), ("x",), "os.system"),
        Branch("dataclass", (0,), ("x",), f"{NOT_IMPORTED}.anything"),
        Branch("namedtuple", (0,), ("x",), NOT_IMPORTED),
        Branch("defaultdict", (0,), ("x",), f"{NOT_IMPORTED}.anything"),
        Branch("dataclass", (0,), (1,), "torch.Tensor"),
        Branch("defaultdict", (0,), ("x",), "eval"),
        Branch("deque", (0,), None, "long"),
        Branch("deque", (0,), None, -1),
        Branch("dict", (0,), (Special(17, b"\x90"),)),
    ],
    ids=lambda branch: f"{branch.kind} {branch.extra}",
)
def test_a_malformed_container_raises_and_imports_nothing(branch: Branch) -> None:
    manifest = Manifest(~0, (branch,), (Leaf("value"),), (), ())
    frame = encode(Frame(manifest, 1 << 20))
    network = MemoryNetwork()
    network.link(0).send(torch.tensor([len(frame)]), 1, LENGTH_TAG)
    network.link(0).send(torch.frombuffer(bytearray(frame), dtype=torch.uint8), 1, FRAME_TAG)
    before = set(sys.modules)
    with pytest.raises(FerryError):
        receive_state(network.link(1), 0, ReceiveOptions(5, 1 << 20))
    assert set(sys.modules) == before
    assert NOT_IMPORTED not in before
