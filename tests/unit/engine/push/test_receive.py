"""Receiving: the frame is checked before the payload, and a rejected payload is drained."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import pytest
import torch

from tests.support.links import FreeingLink
from torchferry.core.codec import Frame, encode
from torchferry.core.manifest import Leaf, Manifest, TensorSpec
from torchferry.core.push import MAX_METADATA_BYTES
from torchferry.engine import sink, target
from torchferry.engine.push import ReceiveOptions, SendOptions, receive_state, send_state
from torchferry.engine.source import digest
from torchferry.errors import (
    BadManifest,
    Corrupted,
    FerryError,
    LinkTimeout,
    StateError,
    StateMismatch,
    StepMismatch,
    TargetTorn,
    UnknownType,
)
from torchferry.links.base import FRAME_TAG, LENGTH_TAG
from torchferry.tensors import registry
from torchferry.testing import MemoryNetwork


def sent(state: object, **options: Any) -> MemoryNetwork:
    network = MemoryNetwork()
    send_state(network.link(0), [1], state, SendOptions(5, MAX_METADATA_BYTES, **options))
    return network


def sent_frame(frame: bytes, length: int | None = None) -> MemoryNetwork:
    network = MemoryNetwork()
    link = network.link(0)
    link.send(torch.tensor([len(frame) if length is None else length]), 1, LENGTH_TAG)
    link.send(torch.frombuffer(bytearray(frame or b"\0"), dtype=torch.uint8), 1, FRAME_TAG)
    return network


def receive(network: MemoryNetwork, **options: Any) -> Any:
    state, _ = receive_state(
        network.link(1), 0, ReceiveOptions(options.pop("timeout_s", 5), MAX_METADATA_BYTES, **options)
    )
    return state


def waiting_messages(network: MemoryNetwork) -> int:
    return sum(len(box) for box in network._boxes.values())


STATE = {"a": torch.arange(10.0), "b": torch.arange(3)}
SPEC = TensorSpec("float32", 4, (2, 2), (2, 1), 0, 0)


def raising() -> object:
    raise KeyError("an error of the callback")


class Checked:
    """A field that accepts only tensors."""

    def __get__(self, instance: Any, owner: Any) -> Any:
        return None if instance is None else instance.__dict__["field"]

    def __set__(self, instance: Any, value: Any) -> None:
        assert isinstance(value, torch.Tensor)
        instance.__dict__["field"] = value


@dataclasses.dataclass
class WithCheckedField:
    field: Checked = Checked()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (
            {"local_state": lambda: {"a": torch.zeros(9), "b": torch.zeros(3, dtype=torch.int64)}},
            StateMismatch,
        ),
        ({"step": 4}, StepMismatch),
        ({"local_state": raising}, KeyError),
    ],
)
def test_a_receiver_that_rejects_a_state_drains_every_message(
    options: dict[str, Any], error: type[Exception]
) -> None:
    network = sent(STATE, step=3)
    with pytest.raises(error):
        receive(network, **options)
    assert waiting_messages(network) == 0


def test_a_local_type_that_rejects_placeholders_does_not_hide_the_mismatch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry, "_types", {})
    registry.register(WithCheckedField)
    local = {**STATE, "c": WithCheckedField(torch.ones(2))}
    network = sent(STATE)
    with pytest.raises(StateMismatch, match=r"c\.field"):
        receive(network, local_state=lambda: local)
    assert waiting_messages(network) == 0


def test_a_mismatch_names_the_peer_and_the_phase() -> None:
    with pytest.raises(StateMismatch) as raised:
        receive(sent(STATE), local_state=lambda: {"a": torch.zeros(10)})
    assert (raised.value.peer, raised.value.phase) == (0, "compare")


def test_a_state_that_is_rejected_is_the_sender_s_also_if_another_rank_forwards_it() -> None:
    network = MemoryNetwork()
    state = {"a": torch.ones(600_000)}
    send_state(network.link(0), [1, 2], state, SendOptions(10, MAX_METADATA_BYTES, relay=True))
    errors: list[StateMismatch] = []

    def reject() -> None:
        with pytest.raises(StateMismatch) as raised:
            receive_state(
                network.link(2), 0, ReceiveOptions(10, MAX_METADATA_BYTES, local_state=lambda: {"b": 1})
            )
        errors.append(raised.value)

    rejecting = threading.Thread(target=reject)
    rejecting.start()
    receive_state(network.link(1), 0, ReceiveOptions(10, MAX_METADATA_BYTES))
    rejecting.join()
    assert [error.peer for error in errors] == [0]


def test_a_step_is_ignored_if_none_is_requested() -> None:
    assert list(receive(sent(STATE, step=3))) == ["a", "b"]
    assert list(receive(sent(STATE, step=3), step=3)) == ["a", "b"]


@pytest.mark.parametrize("length", [0, -5, MAX_METADATA_BYTES + 1, 2**62])
def test_an_invalid_length_is_rejected(length: int) -> None:
    with pytest.raises(BadManifest, match=str(length)):
        receive(sent_frame(b"", length))


def one_tensor(**changes: Any) -> bytes:
    fields = {"dtype": "float32", "itemsize": 4, "shape": (4,), "stride": (1,), "storage": 0, "offset": 0}
    spec = TensorSpec(**{**fields, **changes})
    return encode(Frame(Manifest(0, (), (Leaf("tensor", (0,)),), (spec,), (16,)), 1 << 20))


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (one_tensor(dtype="float31"), "float31"),
        (one_tensor(dtype="int64"), "int64 has 8 bytes"),
        (one_tensor(dtype="quint8", itemsize=1), "quint8"),
        (one_tensor(conj=True), "conj"),
        (encode(Frame(Manifest(0, (), (Leaf("hologram"),), (), ()), 1 << 20)), "hologram"),
    ],
)
def test_a_leaf_that_can_t_be_built_is_rejected_before_the_payload(frame: bytes, reason: str) -> None:
    # The receiver drains until the deadline, because no payload arrives. It still raises the first error.
    with pytest.raises(BadManifest, match=reason):
        receive(sent_frame(frame), timeout_s=0.1)


def test_a_state_too_large_for_memory_is_rejected_and_drained() -> None:
    spec = TensorSpec("uint8", 1, (2,), (2**60,), 0, 0)
    frame = encode(Frame(Manifest(0, (), (Leaf("tensor", (0,)),), (spec,), (2**60 + 1,)), 1 << 20))
    with pytest.raises(StateError, match="no memory"):
        receive(sent_frame(frame), timeout_s=0.1)


def test_a_wait_for_a_frame_ends_at_the_deadline() -> None:
    with pytest.raises(LinkTimeout) as raised:
        receive(MemoryNetwork(), timeout_s=0.05, question="Is rank {peer} there?")
    assert (raised.value.peer, raised.value.phase) == (0, "wait")
    assert "Is rank 0 there? The timeout was 0.05 s" in str(raised.value)


def test_a_wait_for_another_transfer_with_the_same_peer_is_in_the_phase_wait() -> None:
    link = MemoryNetwork().link(1)
    options = ReceiveOptions(timeout_s=0.05, max_metadata_bytes=1000)
    with link.frames(0, "receive", 1.0), pytest.raises(LinkTimeout) as raised:
        receive_state(link, 0, options)
    assert (raised.value.peer, raised.value.phase) == (0, "wait")
    assert "another transfer with rank 0" in str(raised.value)
    assert "The timeout was 0.05 s" in str(raised.value)


def test_the_question_is_left_out_once_the_peer_has_sent_a_message() -> None:
    network = MemoryNetwork()
    network.link(0).send(torch.tensor([100]), 1, LENGTH_TAG)
    with pytest.raises(LinkTimeout) as raised:
        receive(network, timeout_s=0.05, question="Is rank {peer} there?")
    assert "nothing came from rank 0 in time. The timeout was 0.05 s" in str(raised.value)


def test_an_unregistered_type_is_named_with_its_path(monkeypatch: pytest.MonkeyPatch) -> None:
    import collections

    point = collections.namedtuple("point", "x y")
    monkeypatch.setattr(registry, "_types", {})
    registry.register(point)
    network = sent({"first": [1], "model": {"at": point(1, torch.ones(2))}})
    registry._types.clear()
    with pytest.raises(UnknownType, match=r"model\.at: .*point") as raised:
        receive(network)
    assert raised.value.path == "model.at"
    assert waiting_messages(network) == 0


def test_every_error_of_a_transfer_is_a_ferry_error() -> None:
    with pytest.raises(FerryError):
        receive(sent_frame(b"not metadata at all"), timeout_s=0.1)


def test_only_written_tensors_get_a_new_version_for_autograd() -> None:
    local = {"a": torch.zeros(10), "mine": torch.zeros(3)}
    before = [tensor._version for tensor in local.values()]
    receive(sent(STATE), local_state=lambda: local, strict=False)
    assert [tensor._version for tensor in local.values()] == [before[0] + 1, before[1]]
    assert torch.equal(local["a"], STATE["a"])


def failing_digest(monkeypatch: pytest.MonkeyPatch, number: int, error: BaseException) -> None:
    """Raise `error` at the digest of chunk number `number`."""
    hashed = [0]

    def fail(buffer: torch.Tensor) -> int:
        hashed[0] += 1
        if hashed[0] == number:
            raise error
        return digest(buffer)

    monkeypatch.setattr(sink, "digest", fail)


def test_a_foreign_error_during_the_payload_raises_target_torn(monkeypatch: pytest.MonkeyPatch) -> None:
    network, local = sent(STATE), {"a": torch.zeros(10), "b": torch.zeros(3, dtype=torch.int64)}
    failing_digest(monkeypatch, 2, RuntimeError("out of memory"))
    with pytest.raises(TargetTorn, match="RuntimeError: out of memory") as raised:
        receive(network, local_state=lambda: local)
    assert isinstance(raised.value.__cause__, RuntimeError)
    assert (raised.value.whole, raised.value.torn) == (("a",), ("b",))
    assert (raised.value.peer, raised.value.phase) == (0, "receive tensors")


def test_system_exit_is_raised_with_a_note_about_the_torn_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    network, local = sent(STATE), {"a": torch.zeros(10), "b": torch.zeros(3, dtype=torch.int64)}
    failing_digest(monkeypatch, 2, SystemExit(3))
    with pytest.raises(SystemExit) as raised:
        receive(network, local_state=lambda: local)
    assert "the local state is torn" in raised.value.__notes__[0]


def test_dropped_paths_are_not_listed_in_target_torn(monkeypatch: pytest.MonkeyPatch) -> None:
    network, local = sent(STATE), {"a": torch.zeros(10)}
    failing_digest(monkeypatch, 2, RuntimeError("out of memory"))
    with pytest.raises(TargetTorn) as raised:
        receive(network, local_state=lambda: local, strict=False)
    assert (raised.value.whole, raised.value.torn, raised.value.untouched) == (("a",), (), ())


def test_an_error_without_a_written_byte_has_no_cause() -> None:
    envelope = encode(Frame(Manifest(0, (), (Leaf("tensor", (0,)),), (SPEC,), (16,)), 1 << 20))
    with pytest.raises(LinkTimeout, match="nothing was overwritten") as raised:
        receive(sent_frame(envelope), local_state=lambda: torch.zeros(2, 2).t(), timeout_s=0.1)
    assert raised.value.__cause__ is None


def test_a_failure_during_assembly_raises_target_torn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object, **__: object) -> object:
        raise MemoryError("no more")

    monkeypatch.setattr(target, "assemble_in_place", fail)
    local = {"a": torch.zeros(10), "b": torch.zeros(3, dtype=torch.int64)}
    with pytest.raises(TargetTorn, match="MemoryError") as raised:
        receive(sent(STATE), local_state=lambda: local)
    assert raised.value.torn == ("a", "b")
    assert raised.value.phase == "assemble"


def test_dropped_paths_may_have_unregistered_types(monkeypatch: pytest.MonkeyPatch) -> None:
    import collections

    point = collections.namedtuple("point", "x y")
    monkeypatch.setattr(registry, "_types", {})
    registry.register(point)
    network = sent({**STATE, "at": point(1, torch.ones(2)), "deep": {"er": [point(2, 3)]}})
    registry._types.clear()
    local = torch.zeros(10)
    state = receive(network, local_state=lambda: {"a": local, "mine": 5}, strict=False)
    assert (list(state), state["mine"]) == (["a", "mine"], 5)
    assert torch.equal(local, STATE["a"])
    assert waiting_messages(network) == 0


@pytest.mark.parametrize("layout", ["coo", "csr", "csc"])
def test_invalid_sparse_indices_are_rejected_in_place(layout: str) -> None:
    def sparse() -> torch.Tensor:
        tensor = torch.eye(3)
        return tensor.to_sparse() if layout == "coo" else getattr(tensor, f"to_sparse_{layout}")()

    state, local = {"good": torch.ones(3), "s": sparse()}, {"good": torch.zeros(3), "s": sparse()}
    indices = {"coo": "_indices", "csr": "col_indices", "csc": "row_indices"}[layout]
    getattr(state["s"], indices)().fill_(2**40)
    with pytest.raises(TargetTorn, match=r"s: a sparse can't be built") as raised:
        receive(sent(state), local_state=lambda: local)
    assert isinstance(raised.value.__cause__, BadManifest)


def test_a_path_whose_copy_failed_is_not_listed_as_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = {f"t{n:03}": torch.full((1000,), n, dtype=torch.int32) for n in range(600)}
    original, calls = sink.scatter, []  # type: ignore[attr-defined]

    def fail_at_the_second(memories: Any, pieces: Any, buffer: Any) -> None:
        calls.append(len(pieces))
        if len(calls) == 2:
            raise StateError("the memory of a tensor was freed during the transfer")
        original(memories, pieces, buffer)

    monkeypatch.setattr(sink, "scatter", fail_at_the_second)
    local = {key: torch.zeros_like(value) for key, value in state.items()}
    with pytest.raises(TargetTorn, match="freed") as raised:
        receive(sent(state, hash_first_bytes=1 << 30), local_state=lambda: local)
    assert len(raised.value.whole) == calls[0]
    assert all(torch.equal(local[path], state[path]) for path in raised.value.whole)


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("nbytes", [1000, 48_000_000])
def test_memory_that_is_freed_after_a_receive_is_not_read(nbytes: int, verify: bool) -> None:
    local = torch.zeros(nbytes, dtype=torch.uint8)
    network = sent({"a": torch.ones(nbytes, dtype=torch.uint8)}, verify=verify)
    options = ReceiveOptions(5, MAX_METADATA_BYTES, local_state=lambda: {"a": local}, verify=verify)
    with pytest.raises(TargetTorn, match="freed during the transfer"):
        receive_state(FreeingLink(network, 1, local), 0, options)


def test_memory_that_is_freed_after_a_send_is_not_read() -> None:
    state = torch.ones(48_000_000, dtype=torch.uint8)
    with pytest.raises(StateError, match="freed during the transfer"):
        send_state(
            FreeingLink(MemoryNetwork(), 0, state), [1], {"a": state}, SendOptions(5, MAX_METADATA_BYTES)
        )


def test_a_digest_block_of_another_transfer_is_not_accepted() -> None:
    network = MemoryNetwork()
    link = network.link(0)
    options = SendOptions(10, MAX_METADATA_BYTES)
    state = {"a": torch.ones(3 << 20, dtype=torch.uint8)}
    send_state(link, [1], state, options)
    boxes = {address: list(box) for address, box in network._boxes.items() if box}
    # The payload of another process with the same serial number: its messages match its digest blocks.
    other = MemoryNetwork()
    send_state(other.link(0), [1], {"a": torch.full((3 << 20,), 2, dtype=torch.uint8)}, options)
    for address in list(boxes)[2:]:
        network._boxes[address] = other._boxes[address]
    with pytest.raises(Corrupted) as raised:
        receive(network)
    assert raised.value.paths == ("a",)
