"""An invalid leaf or container from a peer raises an error that names its path."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torchferry.core.codec import Frame, encode, pack
from torchferry.core.manifest import FORM, Branch, Leaf, Manifest, Special, TensorSpec
from torchferry.core.plan import make_plan
from torchferry.core.push import TransferId
from torchferry.engine import ReceiveOptions, receive_state
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
    for message in make_plan(manifest).messages:
        channel.send(torch.zeros(message.nbytes, dtype=torch.uint8))
    terms = ReceiveOptions(5, 1 << 20, local_state=None if into is None else lambda: {"model": {"odd": into}})
    try:
        return receive_state(network.link(1), 0, terms)[0]
    finally:
        assert not any(network._boxes.values()), "the receiver left messages of the sender in the network"


def leaf(kind: str, parts: tuple[int, ...], fixed: object = None, traits: object = None) -> Leaf:
    """Describe a leaf. A form that is a dict is packed."""
    forms = [Special(FORM, pack(form)) if isinstance(form, dict) else form for form in (fixed, traits)]
    return Leaf(kind, parts, *forms)  # type: ignore[arg-type]


PLACED = {"placements": [["Shard", 0]], "shape": [4, 2], "mesh": [2], "position": "outside the mesh"}
TRAITS = {"grad": 0, "stride": [2, 1], "mesh": MESH}
VALID = {
    "tensor": (Leaf("tensor", (0,)), WORDS),
    "dtensor": (
        leaf(
            "dtensor",
            (0,),
            PLACED,
            TRAITS,
        ),
        WORDS,
    ),
    "ndarray": (leaf("ndarray", (0,), {"dtype": "<i8", "backwards": [0]}, True), BYTES),
}


@pytest.mark.parametrize("name", VALID)
def test_the_valid_examples_are_received(name: str) -> None:
    assert "odd" in receive(*VALID[name])["model"]


SPARSE_FORM = {"layout": "torch.sparse_coo", "size": [2, 2]}
MALFORMED = {
    "a tensor of no parts": Leaf("tensor", ()),
    "a tensor of two parts": Leaf("tensor", (0, 0)),
    "a tensor with a form": leaf("tensor", (0,), {"x": 1}),
    "a tensor with odd traits": Leaf("tensor", (0,), None, "grad"),
    "a sparse of one part": leaf("sparse", (0,), SPARSE_FORM, {"grad": 0, "coalesced": True}),
    "a sparse without traits": leaf("sparse", (0, 0), SPARSE_FORM),
    "a sparse without size": leaf("sparse", (0, 0), {"layout": "x"}, {"grad": 0, "coalesced": True}),
    "a sparse of a size that fits nothing": leaf(
        "sparse", (0, 0), {"layout": "torch.sparse_coo", "size": [2]}, {"grad": 0, "coalesced": True}
    ),
    "a sparse of an unknown layout": leaf(
        "sparse", (0, 0, 0), {"layout": "torch.wild", "size": [2, 2]}, {"grad": 0, "coalesced": None}
    ),
    "a dtensor without mesh": leaf("dtensor", (0,), PLACED, {"grad": 0, "stride": [2, 1], "mesh": None}),
    "a dtensor on an impossible mesh": leaf(
        "dtensor",
        (0,),
        PLACED,
        {"grad": 0, "stride": [2, 1], "mesh": {**MESH, "sizes": [[7], [3]]}},
    ),
    "a dtensor of an unknown placement": leaf(
        "dtensor",
        (0,),
        {"placements": [["hovering", 0]], "shape": [4, 2], "mesh": [2], "position": "outside the mesh"},
        TRAITS,
    ),
    "a sharded of more shards than parts": leaf(
        "sharded",
        (0,),
        {"size": [4, 2], "shards": []},
        {"all": [], "dtype": Special(33, b""), "requires_grad": False, "memory_format": None},
    ),
    "an ndarray of an unknown dtype": leaf("ndarray", (0,), {"dtype": "<q9", "backwards": []}, True),
    "an ndarray of objects": leaf("ndarray", (0,), {"dtype": "|O", "backwards": []}, True),
    "an ndarray of another item size": leaf("ndarray", (0,), {"dtype": "<i4", "backwards": []}, True),
    "an ndarray without traits": leaf("ndarray", (0,), {"dtype": "<i8", "backwards": []}),
    "a value that is a piece of code": Leaf("value", traits=Special(99, b"\xc0")),
    "a value cut short": Leaf("value", traits=Special(3, b"\xc4\x01a")),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_leaf_raises_an_error_that_names_its_path(name: str) -> None:
    leaf = MALFORMED[name]
    tensors = [BYTES if leaf.kind == "ndarray" else WORDS] if leaf.parts or leaf.kind == "tensor" else []
    with pytest.raises(BadManifest, match=r"^model\.odd: ") as raised:
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


@pytest.mark.parametrize(
    "branch",
    [
        Branch("hologram", (0,)),
        Branch("namedtuple", (0,), ("x",), None),
        Branch("dataclass", (0,), ("x",), "os.system"),
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
    with pytest.raises(FerryError):
        receive_state(network.link(1), 0, ReceiveOptions(5, 1 << 20))
