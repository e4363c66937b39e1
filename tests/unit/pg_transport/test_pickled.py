"""Pickles are refused before anything is loaded, unless `allow_pickle` is set."""

from __future__ import annotations

import os
import pickle
import pickletools
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_flatten_with_path

from tests.support.equality import assert_same
from tests.unit.pg_transport.fake_group import TransportPair
from torchferry import BadManifest, PeerError, PickleRefused, StateMismatch, Unsendable
from torchferry.core.push import TransferId
from torchferry.links.base import FRAME_TAG, LENGTH_TAG
from torchferry.pg_transport import _prepare_state_dict, _StateDictMeta

# A warning of torch when it unpickles a tree.
pytestmark = pytest.mark.filterwarnings("ignore:`isinstance\\(treespec")

PROTO = b"\x80\x04"


def short(text: str) -> bytes:
    """Return the opcode that pushes a text."""
    return b"\x8c" + bytes([len(text)]) + text.encode()


def push_pickle(transports: TransportPair, frame: bytes, payload: list[torch.Tensor] | None = None) -> None:
    """Send a frame as metadata, as a peer other than torchferry might."""
    link = transports.sender._link
    link.send(torch.tensor([len(frame)]), 1, LENGTH_TAG)
    link.send(torch.frombuffer(bytearray(frame), dtype=torch.uint8), 1, FRAME_TAG)
    channel = link.channel(1, TransferId(0, 0, b""))
    for tensor in payload or []:
        channel.send(tensor)


def received(frame: bytes, **keywords: Any) -> Any:
    transports = TransportPair(**keywords)
    push_pickle(transports, frame)
    return transports.receiver.recv_checkpoint(0)


class Touch:
    """An object that creates a directory when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return (os.mkdir, (str(self._path),))


@pytest.fixture
def evidence(tmp_path: Path) -> Path:
    return tmp_path / "the-code-has-run"


# Each calls os.mkdir with the path, by another opcode, when it is unpickled.
CODE_BY_OPCODE: dict[str, Callable[[Path], bytes]] = {
    "GLOBAL": lambda path: f"cos\nmkdir\n(V{path}\ntR.".encode(),
    "STACK_GLOBAL": lambda path: pickle.dumps(Touch(path), protocol=4),
    "INST": lambda path: f"(V{path}\nios\nmkdir\n.".encode(),
    "OBJ": lambda path: f"(cos\nmkdir\nV{path}\no.".encode(),
}


@pytest.mark.parametrize("name", CODE_BY_OPCODE)
def test_the_code_runs_where_pickle_is_allowed(name: str, evidence: Path) -> None:
    with pytest.raises(BadManifest):
        received(CODE_BY_OPCODE[name](evidence), allow_pickle=True)
    assert evidence.exists()


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("wrap", [lambda v: v, lambda v: {"w": [v]}, lambda v: (1, {2: v})])
def test_the_code_of_a_pickled_leaf_does_not_run(
    protocol: int, wrap: Callable[[object], object], evidence: Path
) -> None:
    with pytest.raises(PickleRefused):
        received(pickle.dumps(wrap(Touch(evidence)), protocol=protocol))
    assert not evidence.exists()


@pytest.mark.parametrize("name", CODE_BY_OPCODE)
def test_code_after_plain_data_does_not_run(name: str, evidence: Path) -> None:
    harmless = PROTO + b"]\x94(K\x01K\x02e0"  # builds a list and drops it again
    with pytest.raises(PickleRefused, match="could run code"):
        received(harmless + CODE_BY_OPCODE[name](evidence))
    assert not evidence.exists()


MEMO = b"\x94"
REFUSED_OPCODES = {
    "GLOBAL": b"cos\ngetcwd\n.",
    "STACK_GLOBAL": PROTO + short("os") + short("getcwd") + b"\x93.",
    "REDUCE": PROTO + b"N)R.",
    "INST": b"(ios\ngetcwd\n.",
    "OBJ": b"(No.",
    "NEWOBJ": PROTO + b"N)\x81.",
    "NEWOBJ_EX": PROTO + b"N)}\x92.",
    "BUILD": PROTO + b"]}b.",
    "EXT1": PROTO + b"\x82\x01.",
    "EXT2": PROTO + b"\x83\x01\x00.",
    "EXT4": PROTO + b"\x84\x01\x00\x00\x00.",
    "PERSID": b"Pname\n.",
    "BINPERSID": PROTO + b"NQ.",
    "BYTEARRAY8": b"\x80\x05\x96" + struct.pack("<Q", 1) + b"a.",
    "NEXT_BUFFER": b"\x80\x05\x97.",
    "READONLY_BUFFER": b"\x80\x05N\x98.",
    "PUT": b"]p1000000000\n.",
    "LONG_BINPUT": PROTO + b"]r\xff\xff\xff\x3f.",
    "DICT": b"(NNd.",
    "SETITEM": PROTO + b"}NNs.",
    "SETITEMS": PROTO + b"}(NNu.",
    "ADDITEMS": PROTO + b"\x8f(N\x90.",
    "FROZENSET": PROTO + b"(N\x91.",
}


@pytest.mark.parametrize("name", REFUSED_OPCODES)
def test_a_pickle_is_refused_before_loading(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickle, "loads", lambda frame: pytest.fail("the pickle was loaded"))
    with pytest.raises(PickleRefused, match="could run code here; nothing was loaded") as raised:
        received(REFUSED_OPCODES[name])
    assert "allow_pickle=True" in str(raised.value)
    assert (raised.value.peer, raised.value.phase) == (0, "receive metadata")


@pytest.mark.parametrize("opcode", pickletools.opcodes, ids=lambda opcode: opcode.name)
def test_metadata_that_begins_with_any_opcode_is_refused(
    opcode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pickle, "loads", lambda frame: pytest.fail("the pickle was loaded"))
    with pytest.raises(PickleRefused):
        received(opcode.code.encode("latin-1") + b"anything")


def test_the_unpickler_stops_at_a_first_byte_that_is_no_opcode() -> None:
    """torchferry relies on that: it calls `pickle.loads` for such metadata."""
    opcodes = {opcode.code.encode("latin-1") for opcode in pickletools.opcodes}
    others = [bytes([byte]) for byte in range(256) if bytes([byte]) not in opcodes]
    assert len(others) > 150
    for byte in others:
        with pytest.raises(pickle.UnpicklingError, match="invalid load key"):
            pickle.loads(byte + b"cos\ngetcwd\n)R.")


UNREADABLE = {
    "nothing": b"\x80",
    "a text": PROTO + b"\x8c\x10abc",
    "a line": b"Vno end of line",
    "no stop": PROTO + b"]",
    "a number that is none": b"Iseven\n.",
    "a number too long": b"I" + b"9" * 5000 + b"\n.",
    "bytes that claim to be many": PROTO + b"\x8e" + struct.pack("<Q", 2**62) + b"abc.",
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_a_pickle_that_can_t_be_parsed_to_its_end_is_refused(name: str) -> None:
    """The unpickler may accept what the parser does not, and load what follows."""
    with pytest.raises(PickleRefused, match="nothing was loaded"):
        received(UNREADABLE[name])


def test_nested_shared_tuples_are_refused_quickly() -> None:
    """The pickle has only data, but hashing it would take 2**50 steps."""
    bomb = PROTO + b"\x8f(K\x01" + b"2\x86" * 50 + b"\x90."
    started = time.monotonic()
    with pytest.raises(PickleRefused):
        received(bomb)
    assert time.monotonic() - started < 5


DATA_ONLY: list[object] = [
    None,
    True,
    3,
    2**100,
    1.5,
    "text",
    b"bytes",
    [],
    [1, ["x", "x"]],
    (),
    (1, (2,)),
    {},
    set(),
]


@pytest.mark.parametrize("value", DATA_ONLY, ids=repr)
def test_a_pickle_of_plain_data_is_refused_or_is_not_a_manifest(value: object) -> None:
    with pytest.raises(PickleRefused):
        received(pickle.dumps(value))
    with pytest.raises(BadManifest, match=f"a pickled {type(value).__name__}, not that of a state"):
        received(pickle.dumps(value), allow_pickle=True)


@pytest.mark.parametrize("allow_pickle", [False, True])
@pytest.mark.parametrize("frame", [b"\x00", b"\x00" * 100, b"\xff\xfe", b"\x00garbage", b"TFRY"], ids=repr)
def test_garbage_is_a_bad_manifest(frame: bytes, allow_pickle: bool) -> None:
    with pytest.raises(BadManifest):
        received(frame, allow_pickle=allow_pickle)


@pytest.mark.parametrize("frame", [b".", b"0.", PROTO + b"\x00", b"\x80\x63N."], ids=repr)
def test_a_broken_pickle_is_a_bad_manifest_where_pickle_is_allowed(frame: bytes) -> None:
    with pytest.raises(PickleRefused):
        received(frame)
    with pytest.raises(BadManifest):
        received(frame, allow_pickle=True)


def test_random_bytes_raise_a_peer_error() -> None:
    import random

    rng = random.Random(11)
    for _ in range(2000):
        frame = rng.randbytes(rng.randrange(1, 40))
        with pytest.raises(PeerError):
            received(frame)


class PickledOnly:
    """A type that torchferry can only send as a pickle."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PickledOnly) and other.number == self.number

    def __hash__(self) -> int:
        return self.number


def both_allow(local: object = None, **receiver: Any) -> TransportPair:
    return TransportPair(local, sender={"allow_pickle": True}, allow_pickle=True, **receiver)


class Subclass(torch.Tensor):
    pass


def test_other_types_are_sent_with_pickle_allowed_on_both_sides() -> None:
    state = {"model": {"w": torch.arange(3.0)}, "odd": [PickledOnly(3), len, {PickledOnly(4): 1}]}
    received = both_allow().transfer(state)
    assert received["odd"] == state["odd"]
    assert torch.equal(received["model"]["w"], torch.arange(3.0))


def test_a_tensor_subclass_is_sent_with_pickle_allowed() -> None:
    subclass = torch.ones(2).as_subclass(Subclass)
    received = both_allow().transfer({"s": subclass})
    assert type(received["s"]) is Subclass
    assert received["s"].tolist() == [1, 1]


def test_tensors_are_sent_as_payload_and_received_in_place_with_pickle_allowed() -> None:
    local = torch.zeros(1000)
    transports = both_allow({"w": local, "odd": None})
    received = transports.transfer({"w": torch.ones(1000), "odd": PickledOnly(1)})
    assert received["w"] is local
    assert received["odd"] == PickledOnly(1)
    assert transports.receiver.last_report is not None
    assert transports.receiver.last_report.payload_bytes == 4000
    assert transports.receiver.last_report.metadata_bytes < 1000


def test_a_pickled_leaf_in_place_of_a_tensor_is_a_mismatch() -> None:
    with pytest.raises(StateMismatch, match="odd: kind: incoming a pickled object, local tensor"):
        both_allow({"odd": torch.zeros(2)}).transfer({"odd": PickledOnly(1)})


def test_a_pickled_leaf_is_refused_with_its_path_if_only_the_sender_allows_pickle(evidence: Path) -> None:
    transports = TransportPair(sender={"allow_pickle": True})
    transports.sender.send_checkpoint([1], {"w": torch.ones(2), "model": {"odd": Touch(evidence)}})
    with pytest.raises(PickleRefused, match=r"^model\.odd: .*allow_pickle=True on this side too") as raised:
        transports.receiver.recv_checkpoint(0)
    assert raised.value.path == "model.odd"
    assert not evidence.exists()
    assert transports.mailboxes.unread() == 0


def test_the_sender_refuses_other_types_if_only_the_receiver_allows_pickle() -> None:
    transports = TransportPair(allow_pickle=True)
    with pytest.raises(
        Unsendable, match=r"^model\.odd: .*test_pickled\.PickledOnly.*allow_pickle=True on both"
    ):
        transports.sender.send_checkpoint([1], {"model": {"odd": PickledOnly(1)}})
    assert transports.mailboxes.unread() == 2, "not exactly the length and the text of the abort"


def test_the_sender_refuses_a_leaf_that_can_t_be_pickled() -> None:
    transports = both_allow()
    with pytest.raises(Unsendable, match=r"^odd\[0\]: a function can't be pickled either"):
        transports.sender.send_checkpoint([1], {"odd": [lambda: 1]})
    assert transports.mailboxes.unread() == 2, "not exactly the length and the text of the abort"


def test_a_pickled_leaf_that_can_t_be_loaded_is_a_bad_manifest_with_its_path(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    transports = both_allow()
    transports.sender.send_checkpoint([1], {"odd": PickledOnly(1), "w": torch.ones(2)})
    monkeypatch.delattr(f"{__name__}.PickledOnly")
    with pytest.raises(BadManifest, match=r"^odd: a pickled leaf can't be loaded here"):
        transports.receiver.recv_checkpoint(0)
    assert transports.mailboxes.unread() == 0


# The frames of torch's PGTransport: a pickled _StateDictMeta, then a message with the storage of each tensor.


CONTRACT_STATE = {
    "w": torch.arange(12.0).view(3, 4),
    "column": torch.arange(12.0).view(3, 4)[:, 1],
    "nested": [torch.arange(3), {"lr": 0.5, "name": "x"}],
}


def send_as_torch_does(transports: TransportPair, state: object = CONTRACT_STATE) -> None:
    meta, storages = _prepare_state_dict(state, torch.device("cpu"))
    push_pickle(transports, pickle.dumps(meta), storages)


def test_a_state_from_torch_is_received_with_pickle_allowed() -> None:
    transports = TransportPair(allow_pickle=True)
    send_as_torch_does(transports)
    received = transports.receiver.recv_checkpoint(0)
    assert_same(CONTRACT_STATE, received)
    assert transports.mailboxes.unread() == 0


def test_a_state_from_torch_is_checked_and_received_in_place() -> None:
    local: dict[str, Any] = {
        "w": torch.zeros(4, 3).t(),
        "column": torch.zeros(3),
        "nested": [torch.zeros(3), {}],
    }
    local["nested"][0] = torch.zeros(3, dtype=torch.int64)
    local["nested"][1] = {"lr": 0.0, "name": ""}
    transports = TransportPair(local, allow_pickle=True)
    send_as_torch_does(transports)
    received: Any = transports.receiver.recv_checkpoint(0)
    assert received["w"] is local["w"]
    assert torch.equal(local["w"], CONTRACT_STATE["w"])  # type: ignore[arg-type]
    assert local["column"].tolist() == [1, 5, 9]
    transports = TransportPair({"w": torch.zeros(5)}, allow_pickle=True)
    send_as_torch_does(transports)
    with pytest.raises(StateMismatch):
        transports.receiver.recv_checkpoint(0)
    assert transports.mailboxes.unread() == 0


def test_a_state_from_torch_is_refused_without_pickle() -> None:
    transports = TransportPair()
    send_as_torch_does(transports)
    with pytest.raises(PickleRefused):
        transports.receiver.recv_checkpoint(0)


def test_invalid_metadata_from_torch_is_a_bad_manifest() -> None:
    meta, _ = _prepare_state_dict({"w": torch.arange(4.0)}, torch.device("cpu"))
    leaf: Any = meta.non_tensor_leaves[0]
    for change in (
        {"nbytes": 3},
        {"nbytes": -1},
        {"storage_offset": -1},
        {"stride": (100,)},
        {"stride": (1.0,)},
        {"stride": (2**70,)},
        {"nbytes": 2**70},
        {"shape": None},
    ):
        broken = type(leaf)(**{**vars(leaf), **change})
        frame = pickle.dumps(_StateDictMeta(meta.treespec, meta.paths, [broken]))
        with pytest.raises(BadManifest):
            received(frame, allow_pickle=True)
    too_few = pickle.dumps(_StateDictMeta(meta.treespec, meta.paths, []))
    with pytest.raises(BadManifest):
        received(too_few, allow_pickle=True)


class Number:
    """An integer that is not an int, like numpy's."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __index__(self) -> int:
        return self.number


@pytest.mark.parametrize("kind", [Number, float], ids=["whole", "not whole"])
def test_integers_of_other_types_are_converted_and_floats_are_refused(
    kind: Callable[[int], Any],
) -> None:
    state = {"w": torch.arange(35.0).view(5, 7)}
    meta, storages = _prepare_state_dict(state, torch.device("cpu"))
    leaf: Any = meta.non_tensor_leaves[0]
    odd = type(leaf)(**{**vars(leaf), "stride": tuple(map(kind, leaf.stride))})
    transports = TransportPair(allow_pickle=True)
    push_pickle(transports, pickle.dumps(_StateDictMeta(meta.treespec, meta.paths, [odd])), storages)
    if kind is Number:
        assert_same(transports.receiver.recv_checkpoint(0), state)
    else:
        with pytest.raises(BadManifest, match=r"size, stride or offset 7\.0"):
            transports.receiver.recv_checkpoint(0)
    transports = TransportPair()
    transports.sender.send_checkpoint([1], state)
    assert_same(transports.receiver.recv_checkpoint(0), state)


def test_metadata_for_torch_follows_the_contract() -> None:
    meta, storages = _prepare_state_dict(CONTRACT_STATE, torch.device("cpu"))
    assert [path for path, _ in tree_flatten_with_path(CONTRACT_STATE)[0]] == meta.paths
    assert [storage.numel() for storage in storages] == [48, 48, 24]
