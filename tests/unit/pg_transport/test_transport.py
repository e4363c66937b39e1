"""PGTransport between two ranks: steps, receiving in place, reports and logs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.cluster import Cluster
from tests.unit.pg_transport.fake_group import Group, TransportPair
from torchferry import (
    BadManifest,
    LinkTimeout,
    PeerGaveUp,
    PGTransport,
    StateMismatch,
    StepMismatch,
    UnknownType,
    Unsendable,
)

STATE: dict[str, Any] = {"w": torch.arange(6.0).view(2, 3), "b": torch.arange(3), "lr": 0.5}


@pytest.mark.parametrize(
    ("sent", "requested"), [(None, None), (3, None), (3, 3), (0, 0), (-1, -1), (2**63 - 1, 2**63 - 1)]
)
def test_a_step_is_optional_on_both_sides(sent: int | None, requested: int | None) -> None:
    transports = TransportPair()
    transports.sender.send_checkpoint([1], STATE, step=sent)
    received: Any = transports.receiver.recv_checkpoint(0, step=requested)
    assert received["lr"] == 0.5


@pytest.mark.parametrize(("sent", "shown"), [(3, "as step 3"), (None, "without a step")])
def test_the_requested_step_must_equal_the_sent_step(sent: int | None, shown: str) -> None:
    local = {"w": torch.zeros(2, 3), "b": torch.zeros(3, dtype=torch.int64), "lr": 0.0}
    transports = TransportPair(local)
    transports.sender.send_checkpoint([1], STATE, step=sent)
    with pytest.raises(StepMismatch) as raised:
        transports.receiver.recv_checkpoint(0, step=4)
    assert (raised.value.wanted, raised.value.got, raised.value.peer) == (4, sent, 0)
    assert "step 4" in str(raised.value)
    assert shown in str(raised.value)
    assert torch.equal(local["w"], torch.zeros(2, 3))  # type: ignore[arg-type]
    assert transports.mailboxes.unread() == 0


def test_without_a_callback_tensors_are_fresh_and_on_the_cpu() -> None:
    received = TransportPair().transfer(STATE)
    assert received["w"].device == torch.device("cpu")
    assert received["w"].data_ptr() != STATE["w"].data_ptr()


def test_with_a_callback_the_received_state_has_the_local_tensor_objects() -> None:
    w, parameter = torch.zeros(2, 3), torch.nn.Parameter(torch.zeros(3))
    local = {"model": {"w": w, "p": parameter}, "lr": 0.1}
    transports = TransportPair(local)
    sent = {"model": {"w": torch.ones(2, 3), "p": torch.full((3,), 2.0)}, "lr": 0.2}
    received = transports.transfer(sent)
    assert received["model"]["w"] is w
    assert received["model"]["p"] is parameter
    assert received["lr"] == 0.2
    assert local["lr"] == 0.1, "values are returned, the local containers are not changed"
    assert w.tolist() == [[1, 1, 1], [1, 1, 1]]
    assert parameter.tolist() == [2, 2, 2]
    assert parameter.requires_grad


def test_the_callback_is_called_at_each_receive() -> None:
    tensors = [torch.zeros(2), torch.zeros(2)]
    transports = TransportPair()
    fresh = iter(tensors)
    transports.receiver = PGTransport(transports.group, 10, "cpu", lambda: {"w": next(fresh)})
    for n, tensor in enumerate(tensors):
        assert transports.transfer({"w": torch.full((2,), float(n))})["w"] is tensor
    assert [tensor.tolist() for tensor in tensors] == [[0, 0], [1, 1]]


def test_messages_are_received_directly_into_local_tensors_of_the_same_layout() -> None:
    whole = torch.zeros(10, 4)
    local = {"plain": torch.zeros(3, 5), "turned": torch.zeros(4, 6).t(), "rows": whole[2:5]}
    transports = TransportPair(local)
    transports.transfer({"plain": torch.ones(3, 5), "turned": torch.ones(4, 6).t(), "rows": torch.ones(3, 4)})
    assert transports.group.received_into[2:] == [(t.data_ptr(), t.nbytes) for t in local.values()]
    assert whole.sum() == 12, "bytes outside the view were changed"


def test_a_model_received_in_place_trains_on_like_the_sender_s() -> None:
    def create(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
        batch = torch.randn(16, 4, generator=torch.Generator().manual_seed(seed))
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    healthy, lost = create(1), create(2)
    step(*healthy, seed=1)
    step(*lost, seed=9)
    transports = TransportPair(state_of(*lost))
    transports.transfer(state_of(*healthy))
    for pair in (healthy, lost):
        step(*pair, seed=5)
    for expected, received in zip(
        healthy[0].state_dict().values(), lost[0].state_dict().values(), strict=True
    ):
        assert torch.equal(expected, received)


LOCAL_KEYS = ("both", "mine", "nested")


def local_state() -> dict[str, Any]:
    return {
        "both": torch.zeros(2),
        "mine": torch.full((2,), 7.0),
        "nested": {"a": torch.zeros(2), "name": "old", "mine": "kept"},
    }


LENIENT = {
    "theirs": torch.ones(5),
    "both": torch.ones(2),
    "nested": {"a": torch.full((2,), 2.0), "name": "new", "theirs": 3},
}


def test_by_default_a_path_that_only_one_side_has_is_a_mismatch() -> None:
    local = local_state()
    with pytest.raises(StateMismatch) as raised:
        TransportPair(local).transfer(LENIENT)
    assert [(m.path, m.incoming == "nothing", m.local == "nothing") for m in raised.value.mismatches] == [
        ("theirs", False, True),
        ("nested.theirs", False, True),
        ("mine", True, False),
        ("nested.mine", True, False),
    ]
    assert local["both"].tolist() == [0, 0]


def test_without_strict_matching_paths_are_written_and_others_are_unchanged() -> None:
    local = local_state()
    transports = TransportPair(local, strict=False)
    received = transports.transfer(LENIENT)
    assert list(received) == list(local)
    assert received["both"] is local["both"]
    assert received["both"].tolist() == [1, 1]
    assert received["mine"] is local["mine"]
    assert received["mine"].tolist() == [7, 7]
    assert received["nested"]["a"] is local["nested"]["a"]
    assert received["nested"]["a"].tolist() == [2, 2]
    assert received["nested"]["name"] == "new"
    assert received["nested"]["mine"] == "kept"
    assert "theirs" not in received["nested"]
    assert transports.mailboxes.unread() == 0


def test_without_strict_a_common_path_must_still_match() -> None:
    local = {"w": torch.zeros(3), "mine": 1}
    with pytest.raises(StateMismatch, match=r"w: shape: incoming \[2\], local \[3\]"):
        TransportPair(local, strict=False).transfer({"w": torch.ones(2), "theirs": 2})
    assert local["w"].tolist() == [0, 0, 0]  # type: ignore[attr-defined]


def test_without_strict_an_unsendable_local_value_is_kept() -> None:
    hook = len
    received = TransportPair({"w": torch.zeros(2), "hook": hook}, strict=False).transfer({"w": torch.ones(2)})
    assert received["hook"] is hook
    assert received["w"].tolist() == [1, 1]


@pytest.mark.parametrize("length", [0, -1, -(2**63), 1001, 2**62])
def test_an_invalid_length_of_metadata_is_rejected_before_memory_is_allocated(length: int) -> None:
    transports = TransportPair(max_metadata_bytes=1000)
    transports.sender.send_checkpoint([1], {"a": 1})
    (first, *_) = transports.mailboxes.boxes.values()
    first[0].fill_(length)
    with pytest.raises(BadManifest, match=f"announces {length} bytes of metadata; 1 to 1000") as raised:
        transports.receiver.recv_checkpoint(0)
    assert (raised.value.peer, raised.value.phase) == (0, "receive metadata")
    assert [nbytes for _, nbytes in transports.group.received_into] == [8], (
        "more than the length was received"
    )


def test_metadata_of_exactly_the_allowed_length_is_accepted() -> None:
    transports = TransportPair()
    transports.transfer({"a": 1})
    assert transports.receiver.last_report is not None
    size = transports.receiver.last_report.metadata_bytes
    assert TransportPair(max_metadata_bytes=size, sender={"max_metadata_bytes": size}).transfer({"a": 1}) == {
        "a": 1
    }
    with pytest.raises(BadManifest, match="max_metadata_bytes"):
        TransportPair(max_metadata_bytes=size - 1).transfer({"a": 1})
    with pytest.raises(Unsendable, match="max_metadata_bytes"):
        TransportPair(sender={"max_metadata_bytes": size - 1}).transfer({"a": 1})


def test_a_report_has_the_bytes_the_messages_and_the_duration_of_each_phase() -> None:
    assert TransportPair().sender.last_report is None
    transports = TransportPair()
    transports.transfer(STATE)
    sent, received = transports.sender.last_report, transports.receiver.last_report
    assert sent is not None
    assert received is not None
    assert (sent.peers, received.peers) == ((1,), (0,))
    assert sent.payload_bytes == received.payload_bytes == 24 + 24
    assert sent.messages == received.messages == 2
    assert sent.metadata_bytes == received.metadata_bytes > 0
    assert list(sent.phases_s) == ["describe", "send tensors"]
    assert list(received.phases_s) == [
        "describe",
        "wait",
        "receive metadata",
        "compare",
        "receive tensors",
        "assemble",
    ]
    assert sent.seconds == sum(sent.phases_s.values()) > 0


def test_a_failed_transfer_clears_the_last_report() -> None:
    transports = TransportPair()
    transports.transfer(STATE)
    assert None not in (transports.sender.last_report, transports.receiver.last_report)
    with pytest.raises(Unsendable):
        transports.sender.send_checkpoint([1], {"f": len})
    assert transports.sender.last_report is None
    with pytest.raises(PeerGaveUp):
        transports.receiver.recv_checkpoint(0)
    assert transports.receiver.last_report is None
    transports.sender.send_checkpoint([1], STATE)
    with pytest.raises(StepMismatch):
        transports.receiver.recv_checkpoint(0, step=1)
    assert transports.receiver.last_report is None


def test_phases_are_logged_at_debug_only(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        TransportPair().transfer(STATE)
    records = [record for record in caplog.records if record.name.startswith("torchferry")]
    assert {record.levelno for record in records} == {logging.DEBUG}
    for phase in ("send: describe", "send: send tensors", "receive: compare", "receive: assemble"):
        assert [r.getMessage() for r in records if r.getMessage() == f"{phase} started"]
        assert [r.getMessage() for r in records if r.getMessage().startswith(f"{phase} complete after ")]


def test_a_failed_phase_is_logged_at_debug_only(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG), pytest.raises(StateMismatch):
        TransportPair({"w": torch.zeros(1)}).transfer(STATE)
    records = [record for record in caplog.records if record.name.startswith("torchferry")]
    assert {record.levelno for record in records} == {logging.DEBUG}
    assert [r for r in records if r.getMessage().startswith("receive: compare failed after ")]


def test_no_tensor_of_a_state_is_sent_if_a_leaf_is_unsendable() -> None:
    transports = TransportPair()
    with pytest.raises(Unsendable, match=r"^model\.hook: a value of type builtins\.function"):
        transports.sender.send_checkpoint([1], {"model": {"w": torch.ones(2), "hook": lambda: 1}})
    with pytest.raises(PeerGaveUp, match=r"rank 0 refused to send its state.*: model\.hook: a value of"):
        transports.receiver.recv_checkpoint(0)
    assert transports.mailboxes.unread() == 0
    assert transports.transfer(STATE)["lr"] == 0.5, "the group is not usable"


def test_a_state_is_sent_to_several_ranks() -> None:
    transports = TransportPair()
    transports.sender.send_checkpoint([1, 2], STATE)
    other = PGTransport(Group(transports.mailboxes, 2), 10, "cpu")
    for receiver in (transports.receiver, other):
        received: Any = receiver.recv_checkpoint(0)
        assert torch.equal(received["w"], STATE["w"])
    assert transports.mailboxes.unread() == 0


def test_the_error_of_an_unanswered_call_names_the_call_that_the_peer_must_make(pair: Cluster) -> None:
    sent, received = pair.run(call_without_a_peer)
    assert "Is rank 1 in recv_checkpoint, on the same group? The timeout was 0.3 s" in sent
    assert "Is rank 0 in send_checkpoint, with this rank in dst_ranks, on the same group?" in received


def call_without_a_peer(rank: int) -> str:
    """Rank 0 sends on one group, rank 1 receives on another."""
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    transport = PGTransport(groups[rank], 0.3, "cpu")
    state = {"w": torch.ones(3)}
    calls: list[Callable[[], object]] = [
        lambda: transport.send_checkpoint([1], state),
        lambda: transport.recv_checkpoint(0),
    ]
    with pytest.raises(TimeoutError) as raised:
        calls[rank]()
    return str(raised.value)


def test_a_receiver_skips_an_earlier_abort_of_another_step() -> None:
    transports = TransportPair()
    for step in (1, 2):
        with pytest.raises(Unsendable):
            transports.sender.send_checkpoint([1], {"f": len}, step=step)
    transports.sender.send_checkpoint([1], STATE, step=3)
    received: Any = transports.receiver.recv_checkpoint(0, step=3)
    assert received["lr"] == 0.5
    assert transports.mailboxes.unread() == 0


def wait_for_a_late_sender(rank: int, late_s: float) -> dict[str, Any]:
    """Rank 0 sends after `late_s`; rank 1 has a `stall_timeout` that is far shorter."""
    here = PGTransport(dist.group.WORLD, 20, "cpu", stall_timeout=0.3)
    if rank == 0:
        time.sleep(late_s)
        here.send_checkpoint([1], {"w": torch.ones(1 << 20)}, step=41)
    else:
        here.recv_checkpoint(0)
    report = here.last_report
    assert report is not None
    return {
        "step": report.step,
        "phases": report.phases_s,
        "rate": report.bytes_per_second,
        "text": str(report),
    }


def test_waiting_for_the_sender_is_not_a_stall_and_does_not_count_for_the_rate(
    pair: Cluster,
) -> None:
    late_s = 1.0
    sent, received = pair.run(wait_for_a_late_sender, late_s)
    assert sent["step"] == received["step"] == 41
    assert "(step 41)" in received["text"]
    assert received["phases"]["wait"] > late_s / 2
    assert sum(seconds for name, seconds in received["phases"].items() if name != "wait") < late_s / 2
    assert received["rate"] > (4 << 20) / late_s, "the rate includes the wait"


def receive_without_a_sender(rank: int) -> tuple[float, str, str]:
    group = dist.new_group([0, 1])
    here = PGTransport(group, 1.0, "cpu", stall_timeout=0.2)
    start = time.monotonic()
    if rank == 0:
        return 0.0, "", ""
    with pytest.raises(LinkTimeout) as raised:
        here.recv_checkpoint(0)
    return time.monotonic() - start, type(raised.value).__name__, str(raised.value.phase)


def test_the_timeout_runs_from_the_call(pair: Cluster) -> None:
    _, (seconds, name, phase) = pair.run(receive_without_a_sender)
    assert (name, phase) == ("LinkTimeout", "wait")
    assert 1.0 <= seconds < 1.6


def send_to_three(rank: int, relay: dict[str, bool]) -> tuple[Any, ...]:
    here = PGTransport(dist.group.WORLD, 20, "cpu", **relay)  # type: ignore[arg-type]
    if rank == 0:
        here.send_checkpoint([1, 2, 3], {"w": torch.ones(64 << 20, dtype=torch.uint8)})
    else:
        here.recv_checkpoint(0)
    report = here.last_report
    assert report is not None
    return report.forwarded_by, report.forwarded_to


def test_receivers_forward_to_each_other_only_with_relay(quad: Cluster) -> None:
    assert quad.run(send_to_three, {}) == [(None, None)] * 4
    assert quad.run(send_to_three, {"relay": True}) == [(None, None), (None, 2), (1, 3), (2, None)]


def test_consecutive_transfers_are_not_mixed_up() -> None:
    transports = TransportPair()
    for n in range(3):
        transports.sender.send_checkpoint([1], {"n": n, "w": torch.full((n + 1,), n)})
    for n in range(3):
        received: Any = transports.receiver.recv_checkpoint(0)
        assert received["n"] == n
        assert received["w"].tolist() == [n] * (n + 1)


# With real processes: only there does a send wait for its receiver, so that the test sees the sender finish.


def sent_state() -> dict[str, Any]:
    tensors = {f"t{n}": torch.full((1000,), float(n)) for n in range(50)}
    return {**tensors, "shape": torch.ones(3), "dtype": torch.ones(3), "theirs": torch.ones(3), "ok": 1}


def receive_with_a_mismatch(rank: int) -> Any:
    here = PGTransport(dist.group.WORLD, 10, "cpu", mismatched_local_state if rank else None)
    if rank == 0:
        here.send_checkpoint([1], sent_state())
        assert here.last_report is not None
        return here.last_report.messages
    with pytest.raises(StateMismatch) as raised:
        here.recv_checkpoint(0)
    untouched = all(value.eq(-1).all() for value in local_tensors.values() if isinstance(value, torch.Tensor))
    return raised.value, untouched


local_tensors: dict[str, Any] = {}


def mismatched_local_state() -> dict[str, Any]:
    local: dict[str, Any] = {f"t{n}": torch.full((1000,), -1.0) for n in range(50)}
    local |= {"shape": torch.full((4,), -1.0), "dtype": torch.full((3,), -1), "mine": torch.full((2,), -1.0)}
    local["ok"] = torch.full((1,), -1.0)
    local_tensors.update(local)
    return local


def test_a_mismatch_lists_every_path_and_changes_nothing_and_the_sender_finishes(pair: Cluster) -> None:
    messages, (error, untouched) = pair.run(receive_with_a_mismatch)
    assert messages == 53
    assert untouched
    assert {str(m) for m in error.mismatches} == {
        "theirs: no such path here: incoming tensor float32[3], local nothing",
        "mine: the peer has no such path: incoming nothing, local tensor float32[2]",
        "shape: shape: incoming [3], local [4]",
        "dtype: dtype: incoming float32, local int64",
        "ok: kind: incoming a value, local tensor float32[1]",
    }
    for mismatch in error.mismatches:
        assert str(mismatch) in str(error)
    assert (error.peer, error.phase) == (0, "compare")
    # The group is usable: the next transfer works.
    assert pair.run(transfer_once) == [None, [1.0, 1.0]]


def transfer_once(rank: int) -> list[float] | None:
    here = PGTransport(dist.group.WORLD, 10, "cpu")
    if rank == 0:
        here.send_checkpoint([1], {"w": torch.ones(2)})
        return None
    received: Any = here.recv_checkpoint(0)
    values: list[float] = received["w"].tolist()
    return values


def reject_twice_and_receive(rank: int) -> tuple[str, bool]:
    """Rank 1 rejects two states and accepts a third; rank 0 must finish all three sends."""
    here = PGTransport(dist.group.WORLD, 10, "cpu")
    trusting = PGTransport(dist.group.WORLD, 10, "cpu", allow_pickle=True)
    if rank == 0:
        here.send_checkpoint([1], {"w": torch.zeros(1 << 20)}, step=3)
        trusting.send_checkpoint([1], {"w": torch.zeros(1 << 20), "f": len})
        here.send_checkpoint([1], {"w": torch.ones(2)})
        return "", True
    names = []
    for step in (4, None):
        try:
            here.recv_checkpoint(0, step=step)
        except Exception as error:
            names.append(type(error).__name__)
    received: Any = here.recv_checkpoint(0)
    return ", ".join(names), received["w"].tolist() == [1, 1]


def test_the_sender_finishes_if_the_receiver_rejects_the_step_or_a_pickle(pair: Cluster) -> None:
    assert pair.run(reject_twice_and_receive) == [("", True), ("StepMismatch, PickleRefused", True)]


def test_unknown_types_are_rejected_in_the_phase_compare() -> None:
    from dataclasses import make_dataclass

    from torchferry import register
    from torchferry.tensors import registry

    passing = register(make_dataclass("Passing", ["x"], namespace={"__module__": __name__}))
    transports = TransportPair()
    transports.sender.send_checkpoint([1], {"at": passing(1), "w": torch.ones(2)})
    del registry._types[f"{__name__}.Passing"]
    with pytest.raises(UnknownType) as raised:
        transports.receiver.recv_checkpoint(0)
    assert (raised.value.peer, raised.value.phase) == (0, "compare")
    assert transports.mailboxes.unread() == 0
