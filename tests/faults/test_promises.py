"""Promises besides the matrix: deadlines, damage, rejected states, other traffic on the same group."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torchferry
from tests.faults.controller import (
    assert_error_matches_state,
    wait_for_timestamp,
    wait_until_blocked_in_send,
    wait_until_stopped,
)
from tests.faults.jobs import (
    FRAME,
    LAYER_BYTES,
    LAYERS,
    LENGTH,
    PATHS,
    CallbackError,
    DelayedWork,
    Fault,
    Interceptor,
    Post,
    RepeatableWork,
    Role,
    TransferResult,
    contents_by_path,
    current_session,
    inspect_after_failure,
    intercepted,
    keep_alive,
    message,
    new_group,
    new_state,
    old_state,
    run_transfer,
    transfer_again,
    unique_name,
    write_timestamp,
)
from tests.faults.promise import promises
from tests.support.cluster import Cluster, Outcome
from tests.support.processes import without_gloo
from torchferry import PGTransport
from torchferry.engine.source import ChunkSource
from torchferry.errors import (
    BadManifest,
    Corrupted,
    GroupBroken,
    LinkBroken,
    LinkStalled,
    LinkTimeout,
    PeerGaveUp,
    SendLate,
    StateChanged,
    StateMismatch,
    TargetTorn,
    TornAndBroken,
    TornAndLate,
    UnknownType,
    Unsendable,
)

ROOT = Path(__file__).parents[2]
SMALL = 4096
"""The bytes of a layer in a state whose frame has all digests."""
FAR_S = 10.0
PROMPT_S = 1.0
LATE_S = 0.5

ALL_NEW = dict.fromkeys(PATHS, "new")
ALL_OLD = dict.fromkeys(PATHS, "old")


def values(outcomes: list[Outcome]) -> list[Any]:
    """Return the workers' values; none of them died or raised."""
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    assert errors == []
    return [outcome.value for outcome in outcomes]


def run_intercepted(rank: int, role: Role, make: Callable[..., Interceptor], *args: Any) -> TransferResult:
    """Run a transfer with an interceptor in the link."""
    with intercepted("send" if role.direction == "send" else "recv", make(*args)):
        return run_transfer(rank, role)


def run_both(
    cluster: Cluster,
    send: Role,
    receive: Role,
    *interception: Any,
    intercepted_side: str = "send",
) -> tuple[TransferResult, TransferResult]:
    """Let rank 0 send to rank 1, with an interceptor on one side."""
    jobs: list[Any] = [
        (run_transfer, (send,)),
        (run_transfer, (receive,)),
        *[None] * (cluster.world_size - 2),
    ]
    if interception:
        rank, role = (0, send) if intercepted_side == "send" else (1, receive)
        jobs[rank] = (run_intercepted, (role, *interception))
    sender, receiver, *_ = values(cluster.start(jobs).outcomes())
    return sender, receiver


def roles(timeout_s: float = FAR_S, **fields: Any) -> tuple[Role, Role]:
    """Return the roles of a sender and a receiver in one group."""
    name = unique_name()
    return (
        Role(name, (0, 1), "send", timeout_s, **fields),
        Role(name, (0, 1), "receive", timeout_s, **fields),
    )


WAYS = pytest.mark.parametrize(
    "way",
    [
        {"layer_bytes": SMALL},
        {"layer_bytes": LAYER_BYTES},
        {"layer_bytes": LAYER_BYTES, "same_host": True},
    ],
    ids=["small", "large", "by_memory"],
)
"""What a state has, and how it is sent, as fields of `Role`."""
BY_GROUP_AND_MEMORY = pytest.mark.parametrize("same_host", [False, True], ids=["by_group", "by_memory"])


# One deadline


def join_and_stay_silent(rank: int, role: Role) -> None:
    """Join the group, and neither send nor receive."""
    keep_alive(new_group(rank, role.ranks, role.name))


@promises(
    "the peer never calls `send_checkpoint` or `recv_checkpoint`; `timeout` is 1 s, the group's is 30 s",
    "`LinkTimeout` after 1 s, + 0.5 s at most; then `GroupBroken`, which asks for a new group",
    rows=(2, 23),
)
@pytest.mark.parametrize("direction", ["send", "receive"])
@pytest.mark.slow
def test_a_wait_for_a_silent_peer_ends_at_the_timeout_and_not_at_the_group_timeout(
    direction: str, trio: Cluster
) -> None:
    send, receive = roles(1.0)
    waiting, silent = (0, 1) if direction == "send" else (1, 0)
    jobs: list[Any] = [(run_transfer, (send,)), (run_transfer, (receive,)), None]
    jobs[silent] = (join_and_stay_silent, (send,))
    result: TransferResult = values(trio.start(jobs).outcomes())[waiting]
    error = result.error
    assert type(error) is LinkTimeout
    assert 1.0 <= result.seconds < 1.0 + LATE_S
    assert error.peer == silent
    assert error.phase == ("send tensors" if direction == "send" else "wait")
    jobs = [None, None, None]
    jobs[waiting] = (inspect_after_failure, (LATE_S,))
    after = values(trio.start(jobs).outcomes())[waiting]
    assert isinstance(after.error, GroupBroken)
    assert "create a new group" in str(after.error)
    assert after.lanes_ended_s is not None
    assert result.contents in ({}, ALL_OLD)


def delay_each_message(pause_s: float) -> Interceptor:
    """Delay each message: each one is in time, all together are late.

    The pause is part of the wait for a message. While a lane waits, it finds that its peer is gone.
    """

    def intercept(position: int, buffer: torch.Tensor, post: Post, before: list[RepeatableWork]) -> Any:
        return DelayedWork(post, buffer, pause_s)

    return intercept


@promises(
    "every message is quick, but all together take longer than `timeout`",
    "the transfer fails at its one deadline, + 0.5 s at most; the peer raises a `ConnectionError`",
    rows=(3,),
)
@BY_GROUP_AND_MEMORY
@pytest.mark.parametrize("slow", ["send", "receive"])
@pytest.mark.slow
def test_slow_messages_do_not_extend_the_deadline(slow: str, same_host: bool, trio: Cluster) -> None:
    send, receive = roles(1.0, same_host=same_host)
    if slow == "send":
        send = dataclasses.replace(send, timeout_s=FAR_S)
    else:
        receive = dataclasses.replace(receive, timeout_s=FAR_S)
    sender, receiver = run_both(trio, send, receive, delay_each_message, 0.3, intercepted_side=slow)
    late, other = (receiver, sender) if slow == "send" else (sender, receiver)
    assert isinstance(late.error, TimeoutError)
    assert 1.0 <= late.seconds < 1.0 + LATE_S
    assert isinstance(other.error, ConnectionError)
    assert other.ended_s - late.ended_s < PROMPT_S
    assert_error_matches_state(receiver)


@promises(
    "no message completes for `stall_timeout`, long before `timeout`",
    "`LinkStalled` after `stall_timeout`, + 0.5 s at most; in place, `TornAndLate` caused by `LinkStalled`",
)
@BY_GROUP_AND_MEMORY
@pytest.mark.parametrize("stopped", ["sender", "receiver"])
def test_a_stall_raises_an_error_before_the_deadline(
    stopped: str, same_host: bool, trio: Cluster, tmp_path: Path
) -> None:
    stall_s = 0.7
    fault = Fault("stop", message(4), str(tmp_path / "fault"))
    send, receive = roles(stall_s=stall_s, same_host=same_host, end_timestamp_file=str(tmp_path / "ended"))
    victim = 0 if stopped == "sender" else 1
    both = [send, receive]
    both[victim] = dataclasses.replace(both[victim], fault=fault, end_timestamp_file=None)
    pending = trio.start([(run_transfer, (both[0],)), (run_transfer, (both[1],)), None])
    stopped_s = wait_for_timestamp(tmp_path / "fault")
    wait_until_stopped(trio.pids[victim])
    wait_for_timestamp(tmp_path / "ended")
    trio.kill(victim, signal.SIGCONT)
    result: TransferResult = values(pending.outcomes())[1 - victim]
    stalled = result.cause if stopped == "sender" else result.error
    assert type(stalled) is LinkStalled
    assert stopped == "receiver" or type(result.error) is TornAndLate
    assert result.ended_s - stopped_s < stall_s + LATE_S
    assert result.seconds >= stall_s


# Damage


def flip(position: int, byte: int = 100) -> Interceptor:
    """Change one bit of one message after the sender has hashed it."""

    def intercept(at: int, buffer: torch.Tensor, post: Post, before: list[RepeatableWork]) -> Any:
        if at != position:
            return post(buffer)
        damaged = buffer.clone()
        damaged.view(torch.uint8)[byte] ^= 16
        return post(damaged)

    return intercept


def swap(one: int, two: int) -> Interceptor:
    """Exchange the bytes of two layers."""

    def intercept(at: int, buffer: torch.Tensor, post: Post, before: list[RepeatableWork]) -> Any:
        layers = list(current_session().source["model"].values())
        other = {message(one): two, message(two): one}.get(at)
        return post(buffer if other is None else layers[other].view(torch.uint8))

    return intercept


def truncate(position: int) -> Interceptor:
    """Send a message without its last byte; gloo accepts that."""

    def intercept(at: int, buffer: torch.Tensor, post: Post, before: list[RepeatableWork]) -> Any:
        return post(buffer[:-1].clone() if at == position else buffer)

    return intercept


class UnsentWork:
    """A work that reports success without sending a message."""

    def wait(self, timeout_s: float) -> None:
        """Return at once."""


def drop(position: int) -> Interceptor:
    """Drop one message."""

    def intercept(at: int, buffer: torch.Tensor, post: Post, before: list[RepeatableWork]) -> Any:
        return UnsentWork() if at == position else post(buffer)

    return intercept


SIZES = pytest.mark.parametrize("layer_bytes", [SMALL, LAYER_BYTES], ids=["small", "large"])


@promises(
    "a bit is flipped, a message is truncated, or two messages are swapped in transit",
    "`TargetTorn`, caused by `Corrupted`, names exactly the damaged paths, all others are whole; the group "
    "stays usable, and sending again on it repairs the state",
    rows=(25,),
)
@WAYS
@pytest.mark.parametrize(
    ("damage", "damaged"),
    [((flip, message(3)), [3]), ((truncate, message(LAYERS - 1)), [LAYERS - 1]), ((swap, 2, 5), [2, 5])],
    ids=["flipped", "truncated", "swapped"],
)
def test_damage_in_transit_is_detected_and_its_paths_are_named(
    way: dict[str, Any], damage: Any, damaged: list[int], trio: Cluster
) -> None:
    sender, receiver = run_both(trio, *roles(**way), *damage)
    paths = tuple(PATHS[n] for n in damaged)
    assert sender.error is None
    assert isinstance(receiver.cause, Corrupted)
    assert receiver.cause.paths == paths
    assert type(receiver.error) is TargetTorn
    assert receiver.error.torn == paths
    assert receiver.error.whole == tuple(path for path in PATHS if path not in paths)
    assert (receiver.error.peer, receiver.error.path) == (0, paths[0])
    assert_error_matches_damaged_state(receiver)
    sender, receiver, _ = values(trio.start([(transfer_again, ()), (transfer_again, ()), None]).outcomes())
    assert sender.error is receiver.error is None
    assert receiver.contents == ALL_NEW


def assert_error_matches_damaged_state(result: TransferResult) -> None:
    assert isinstance(result.error, TargetTorn)
    assert {result.contents[path] for path in result.error.whole} <= {"new"}
    assert {result.contents[path] for path in result.error.untouched} <= {"old"}
    assert "new" not in {result.contents[path] for path in result.error.torn}


@promises("the same, with `verify=False`", "the damage is not detected", rows=(25,))
@WAYS
def test_damage_is_not_detected_without_verification(way: dict[str, Any], trio: Cluster) -> None:
    both = roles(**way, verify=False)
    sender, receiver = run_both(trio, *both, flip, message(3))
    assert sender.error is receiver.error is None
    assert receiver.contents == {**ALL_NEW, PATHS[3]: "neither"}


@promises(
    "a message is never sent",
    "`TornAndLate` at the deadline, which names the missing path",
    rows=(25,),
)
@SIZES
def test_the_path_of_a_missing_message_is_named(layer_bytes: int, trio: Cluster) -> None:
    send, receive = roles(layer_bytes=layer_bytes)
    receive = dataclasses.replace(receive, timeout_s=1.0)
    _, receiver = run_both(trio, send, receive, drop, message(3))
    assert type(receiver.error) is TornAndLate
    assert receiver.error.path == PATHS[3]
    assert 1.0 <= receiver.seconds < 1.0 + LATE_S
    assert receiver.contents[PATHS[3]] == "old"
    assert_error_matches_state(receiver)


@promises(
    "the metadata is damaged in transit",
    "`BadManifest`, no tensor is changed; the sender raises `LinkBroken` within 1 s",
    rows=(7, 25),
)
def test_damaged_metadata_is_rejected_and_the_sender_raises(trio: Cluster) -> None:
    sender, receiver = run_both(trio, *roles(), flip, FRAME)
    assert type(receiver.error) is BadManifest
    assert receiver.contents == ALL_OLD
    assert isinstance(sender.error, LinkBroken)
    assert sender.ended_s - receiver.ended_s < PROMPT_S


def announce(nbytes: int) -> Interceptor:
    """Announce a wrong length of the metadata."""

    def intercept(at: int, buffer: torch.Tensor, post: Post, before: list[RepeatableWork]) -> Any:
        return post(torch.tensor([nbytes], dtype=torch.int64) if at == LENGTH else buffer)

    return intercept


@promises(
    "the peer announces an invalid length of the metadata",
    "`BadManifest` before memory is allocated; the sender raises `LinkBroken` within 1 s",
    rows=(24,),
)
@pytest.mark.parametrize("nbytes", [-1, 0, 1 << 60])
def test_an_invalid_length_is_rejected(nbytes: int, trio: Cluster) -> None:
    sender, receiver = run_both(trio, *roles(), announce, nbytes)
    assert type(receiver.error) is BadManifest
    assert receiver.contents == ALL_OLD
    assert isinstance(sender.error, LinkBroken)
    assert sender.ended_s - receiver.ended_s < PROMPT_S


# Changes of the sender's state


CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "by_torch": lambda tensor: tensor.add_(1),
    "by_data": lambda tensor: tensor.data.add_(1),
    "by_numpy": lambda tensor: tensor.numpy().__iadd__(1),
}


def change_at(position: int, layer: int, how: str = "by_torch") -> Interceptor:
    """Change a layer in another thread just before a message is sent."""

    def intercept(at: int, buffer: torch.Tensor, post: Post, before: list[RepeatableWork]) -> Any:
        if at == position:
            for earlier in before:
                earlier.wait(FAR_S)
            tensor = current_session().source["model"][f"layer{layer}"]
            other = threading.Thread(target=CHANGES[how], args=(tensor,))
            other.start()
            other.join()
        return post(buffer)

    return intercept


@promises(
    "another thread changes a tensor during the send",
    "the sender raises `StateChanged`, which names the tensor; a receiver raises `TargetTorn` rather than "
    "accept a mixed state",
    rows=(26,),
)
@WAYS
@pytest.mark.parametrize("layer", [1, 4, 6], ids=["sent_before", "being_sent", "sent_after"])
def test_a_state_that_changes_during_the_send_is_rejected(
    way: dict[str, Any], layer: int, trio: Cluster
) -> None:
    sender, receiver = run_both(trio, *roles(**way), change_at, message(4), layer)
    assert isinstance(sender.error, StateChanged)
    assert sender.error.paths == (PATHS[layer],)
    if way["layer_bytes"] == SMALL and layer == 1:
        # All bytes were hashed before the change: the receiver has the state from before the change.
        assert receiver.error is None
        assert receiver.contents == ALL_NEW
    else:
        assert isinstance(receiver.error, TargetTorn)
        assert isinstance(receiver.cause, (Corrupted, PeerGaveUp))


@promises(
    "the same, through `.data` or an ndarray, which torch does not count as a change",
    "the same, if the change includes the first or last bytes of one of the tensor's messages",
    rows=(26,),
)
@BY_GROUP_AND_MEMORY
@pytest.mark.parametrize("layer", [1, 4, 6], ids=["sent_before", "being_sent", "sent_after"])
@pytest.mark.parametrize("how", ["by_data", pytest.param("by_numpy", marks=pytest.mark.slow)])
def test_a_change_that_torch_does_not_count_is_detected(
    how: str, layer: int, same_host: bool, trio: Cluster
) -> None:
    changes = change_at, message(4), layer, how
    sender, receiver = run_both(trio, *roles(same_host=same_host), *changes)
    assert isinstance(sender.error, StateChanged)
    assert sender.error.paths == (PATHS[layer],)
    assert isinstance(receiver.error, TargetTorn)


def run_with_a_failing_read(rank: int, role: Role, number: int) -> TransferResult:
    """Send, and fail to read the state at one message."""
    read = ChunkSource.read

    def fail(source: ChunkSource, message: Any) -> torch.Tensor:
        if message.number == number:
            raise CallbackError("the memory can't be read")
        return read(source, message)

    ChunkSource.read = fail  # type: ignore[method-assign, assignment]
    try:
        return run_transfer(rank, role)
    finally:
        ChunkSource.read = read  # type: ignore[method-assign]


@promises(
    "the sender fails to read its own state half-way",
    "the sender raises that error; the receiver raises `PeerGaveUp` within 1 s, or `TargetTorn` caused by it",
    rows=(7,),
)
@pytest.mark.parametrize(
    "number",
    [
        pytest.param(0, marks=pytest.mark.slow),
        LAYERS // 2,
        pytest.param(LAYERS - 1, marks=pytest.mark.slow),
    ],
)
@BY_GROUP_AND_MEMORY
@pytest.mark.parametrize("receivers", [1, 3])
def test_a_sender_that_fails_half_way_aborts_its_receivers(
    number: int, receivers: int, same_host: bool, quartet: Cluster
) -> None:
    name, ranks = unique_name(), tuple(range(receivers + 1))
    send, receive = (
        Role(name, ranks, direction, FAR_S, same_host=same_host) for direction in ("send", "receive")
    )
    jobs: list[Any] = [(run_with_a_failing_read, (send, number)), *[(run_transfer, (receive,))] * receivers]
    sender, *receiving = values(quartet.start([*jobs, *[None] * (3 - receivers)]).outcomes())[: receivers + 1]
    assert isinstance(sender.error, CallbackError)
    for receiver in receiving:
        error = receiver.cause if isinstance(receiver.error, TargetTorn) else receiver.error
        assert isinstance(error, PeerGaveUp), receiver.error
        assert receiver.ended_s - sender.ended_s < PROMPT_S
        assert not isinstance(receiver.error, TargetTorn) or receiver.error.whole == ()
        assert "neither" not in {receiver.contents[path] for path in PATHS[number + 1 :]}


# Rejected states


def send_an_unsendable_state_and_then_a_valid_one(
    rank: int, role: Role, peers: list[int]
) -> tuple[Any, float, float]:
    transport = PGTransport(new_group(rank, role.ranks, role.name), role.timeout_s, "cpu")
    error: Exception | None = None
    started_s = time.monotonic()
    try:
        transport.send_checkpoint(peers, {"model": {"lock": threading.Lock()}})
    except Exception as raised:
        error = raised
    refused_s = time.monotonic()
    transport.send_checkpoint(peers, new_state(), step=8)
    return error, started_s, refused_s


def receive_an_abort_and_then_a_state(
    rank: int, role: Role, late_s: float
) -> tuple[Any, float, dict[str, str]]:
    target = old_state()
    transport = PGTransport(new_group(rank, role.ranks, role.name), role.timeout_s, "cpu", lambda: target)
    # A late receiver calls after the sender has rejected its state and stopped waiting for receivers.
    time.sleep(late_s)
    error: Exception | None = None
    try:
        transport.recv_checkpoint(0)
    except Exception as raised:
        error = raised
    raised_s = time.monotonic()
    assert contents_by_path(target, LAYER_BYTES) == ALL_OLD
    transport.recv_checkpoint(0, step=8)
    return error, raised_s, contents_by_path(target, LAYER_BYTES)


@promises(
    "the state has a leaf that can't be sent",
    "the sender raises `Unsendable`, which names the path; every receiver raises `PeerGaveUp` with the "
    "reason, within 1 s or as soon as it calls `recv_checkpoint`; the group stays usable, and a corrected "
    "state arrives on it",
    rows=(7,),
)
@pytest.mark.parametrize("late_s", [0.0, 1.0], ids=["receivers_wait", "receivers_are_late"])
@pytest.mark.parametrize("receivers", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_sender_of_an_unsendable_state_aborts_its_receivers(
    receivers: int, late_s: float, quartet: Cluster
) -> None:
    name, peers = unique_name(), [*range(1, receivers + 1)]
    send, receive = (Role(name, (0, *peers), direction, FAR_S) for direction in ("send", "receive"))
    jobs: list[Any] = [(send_an_unsendable_state_and_then_a_valid_one, (send, peers))]
    jobs += [(receive_an_abort_and_then_a_state, (receive, late_s))] * receivers
    sender, *receiving = values(quartet.start([*jobs, *[None] * (3 - receivers)]).outcomes())[: receivers + 1]
    error, started_s, refused_s = sender
    assert isinstance(error, Unsendable)
    assert error.path == "model.lock"
    assert refused_s - started_s < PROMPT_S
    for refusal, raised_s, contents in receiving:
        assert type(refusal) is PeerGaveUp
        assert (refusal.peer, refusal.failed_rank) == (0, 0)
        assert "model.lock: a value of type _thread.lock can't be sent" in str(refusal)
        assert raised_s - started_s < late_s + PROMPT_S
        assert contents == ALL_NEW


SEND_WITHOUT_A_RECEIVER = """
import os, sys, torch.distributed as dist
from torchferry import PGTransport, Unsendable
rank, port = int(sys.argv[1]), int(sys.argv[2])
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
store = dist.TCPStore("127.0.0.1", port, is_master=False)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
for _ in range(3 if rank == 0 else 0):
    try:
        PGTransport(dist.group.WORLD, 20, "cpu").send_checkpoint([1], {"f": len})
    except Unsendable:
        print("unsendable", flush=True)
dist.barrier()
dist.destroy_process_group()
"""


@promises(
    "the sender refuses to send its state three times, no rank receives, and both processes end",
    "`Unsendable` each time; the group stays usable, and both processes exit with code 0",
)
@pytest.mark.slow
def test_a_process_exits_after_an_abort_that_no_receiver_read() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SEND_WITHOUT_A_RECEIVER, str(rank), str(store.port)],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        outputs = [process.communicate(timeout=60)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0]
    assert outputs[0].count("unsendable") == 3


def reject_and_exit(rank: int, role: Role) -> None:
    transport = PGTransport(new_group(rank, role.ranks, role.name), role.timeout_s, "cpu")
    with contextlib.suppress(Unsendable):
        transport.send_checkpoint([1], {"model": {"lock": threading.Lock()}})
    os._exit(1)


@promises(
    "the sender refuses to send its state, and its process ends",
    "the receiver still raises `PeerGaveUp` with the reason, within 1 s",
)
def test_a_sender_that_rejects_its_state_and_exits_has_aborted_its_receiver(doomed: Cluster) -> None:
    send, receive = roles()
    sent, received = doomed.start([(reject_and_exit, (send,)), (run_transfer, (receive,))]).outcomes()
    assert sent.error is not None
    result: TransferResult = received.value
    assert type(result.error) is PeerGaveUp
    assert "model.lock" in str(result.error)
    assert result.seconds < PROMPT_S + LATE_S


@torchferry.register
@dataclasses.dataclass
class RegisteredBySender:
    """A type that the receiver does not know."""

    value: int


def send_twice(rank: int, role: Role, extra: object) -> tuple[float, float]:
    transport = PGTransport(new_group(rank, role.ranks, role.name), role.timeout_s, "cpu")
    state: dict[str, Any] = new_state()
    transport.send_checkpoint([1], {**state, **({} if extra is None else {"extra": extra})})
    first_s = time.monotonic()
    transport.send_checkpoint([1], state)
    return first_s, time.monotonic()


def reject_then_accept(rank: int, role: Role, why: str) -> tuple[Any, dict[str, str], dict[str, str]]:
    """Reject one state, then accept one, on the same group."""
    target: Any = old_state()
    error: Exception | None = None

    def local_state() -> Any:
        if why == "callback" and error is None:
            raise CallbackError("a callback failed")
        if why == "mismatch" and error is None:
            return {"model": {**target["model"], "layer3": torch.zeros(3), "layer6": torch.zeros(2)}}
        return target

    transport = PGTransport(new_group(rank, role.ranks, role.name), role.timeout_s, "cpu", local_state)
    types = torchferry.tensors.registry._types
    registered = dict(types)
    if why == "unknown type":
        types.clear()
    try:
        transport.recv_checkpoint(0)
    except Exception as raised:
        error = raised
    finally:
        types.update(registered)
    between = contents_by_path(target, LAYER_BYTES)
    transport.recv_checkpoint(0)
    return error, between, contents_by_path(target, LAYER_BYTES)


@promises(
    "the receiver rejects the state: mismatch, unknown type, or its `state_dict()` raises",
    "no tensor is changed, every mismatched path is listed; the sender finishes, and the group stays usable",
    rows=(7, 8),
)
@pytest.mark.parametrize(
    ("why", "expected"),
    [("mismatch", StateMismatch), ("unknown type", UnknownType), ("callback", CallbackError)],
    ids=["mismatch", "unknown_type", "callback"],
)
def test_a_sender_finishes_when_the_receiver_rejects_the_state(
    why: str, expected: type[Exception], trio: Cluster
) -> None:
    send, receive = roles(5.0)
    extra = RegisteredBySender(1) if why == "unknown type" else None
    jobs = [(send_twice, (send, extra)), (reject_then_accept, (receive, why)), None]
    _, (error, between, after), _ = values(trio.start(jobs).outcomes())
    assert type(error) is expected
    assert between == ALL_OLD
    assert after == ALL_NEW
    if isinstance(error, StateMismatch):
        assert {mismatch.path for mismatch in error.mismatches} == {PATHS[3], PATHS[6]}


# Several receivers


@promises(
    "one of three receivers is too slow for the deadline",
    "the others finish before the deadline; the sender raises `SendLate`, a `SendFailed`, with the ranks in "
    "`delivered` and `failed`",
    rows=(21, 22),
)
@BY_GROUP_AND_MEMORY
def test_a_slow_receiver_does_not_delay_the_others(same_host: bool, quartet: Cluster) -> None:
    name, ranks = unique_name(), (0, 1, 2, 3)
    receive = Role(name, ranks, "receive", FAR_S, same_host=same_host)
    jobs: list[Any] = [
        (run_transfer, (Role(name, ranks, "send", 2.0, same_host=same_host),)),
        *[(run_transfer, (receive,))] * 3,
    ]
    jobs[2] = (run_intercepted, (receive, delay_each_message, 0.5))
    sender, one, slow, three = values(quartet.start(jobs).outcomes())
    assert type(sender.error) is SendLate
    assert sender.error.delivered == (1, 3)
    assert [type(error) for error in sender.error.failed.values()] == [LinkTimeout]
    assert list(sender.error.failed) == [2]
    assert 2.0 <= sender.seconds < 2.0 + LATE_S
    for punctual in (one, three):
        assert punctual.error is None
        assert punctual.contents == ALL_NEW
        assert punctual.ended_s < sender.ended_s
    assert isinstance(slow.error, TornAndBroken)
    assert slow.ended_s - sender.ended_s < PROMPT_S
    assert_error_matches_state(slow)


# Exit


@promises(
    "a transfer has failed in the middle of a message, and the process ends 60 s before the deadline",
    "the interpreter exits with code 0 within 10 s, although gloo still blocks a thread",
)
@pytest.mark.slow
def test_a_process_exits_after_a_failure(tmp_path: Path) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    timestamp_file = tmp_path / "fault"
    command = [sys.executable, "-m", "tests.faults.fail_and_exit"]
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(store.port), str(timestamp_file)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    _, receiver = processes
    try:
        assert receiver.stdout is not None
        assert next(without_gloo(receiver.stdout)).strip() == "TornAndLate"
        assert receiver.wait(10.0) == 0
    finally:
        for process in processes:
            process.kill()
            process.communicate()


# Other traffic on the same group

ROUNDS = 10
OWN_TAGS = range(8)


class Wrapper:
    """A wrapper of a torch group, as other libraries have."""

    def __init__(self, group: Any) -> None:
        self.rank, self.size = group.rank, group.size
        self.send, self.recv = group.send, group.recv


def transfer_in_threads(rank: int, role: Role, rounds: int, how: str) -> list[str]:
    """Send or receive two states at once in two threads; `how` may add the user's own messages."""
    group: Any = new_group(rank, role.ranks, role.name)
    if how == "wrapped":
        group = Wrapper(group)
    found: list[str] = []

    def send(seed: int) -> None:
        transport = PGTransport(group, role.timeout_s, "cpu")
        for _ in range(rounds):
            transport.send_checkpoint([1], {"seed": seed, **new_state(SMALL if seed else 1 << 20, seed)})

    def receive(_: int) -> None:
        transport = PGTransport(group, role.timeout_s, "cpu")
        for _ in range(rounds):
            state: Any = transport.recv_checkpoint(0)
            seed = state.pop("seed")
            expected = new_state(SMALL if seed else 1 << 20, seed)["model"]
            same = all(torch.equal(state["model"][name], expected[name]) for name in expected)
            found.append(f"{seed} {'exact' if same else 'wrong'}")

    def exchange_own_messages(_: int) -> None:
        for number in range(rounds):
            for tag in OWN_TAGS:
                expected = torch.full((64,), number * 100 + tag)
                if role.direction == "send":
                    group.send([expected], 1, tag).wait()
                else:
                    received = torch.zeros(64, dtype=torch.int64)
                    group.recv([received], 0, tag).wait()
                    found.append("own exact" if torch.equal(received, expected) else "own wrong")

    errors: list[BaseException] = []

    def run_and_record(task: Callable[[int], None], seed: int) -> None:
        try:
            task(seed)
        except BaseException as error:
            errors.append(error)

    work = [(send if role.direction == "send" else receive, seed) for seed in (0, 1)]
    if how == "beside_own_messages":
        work.append((exchange_own_messages, 0))
    threads = [threading.Thread(target=run_and_record, args=each) for each in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sorted(found) + [repr(error) for error in errors]


@promises(
    "two transfers at once between the same ranks, in two threads, each with its own transport; alone, with "
    "the user's own messages, on a wrapped group",
    "each state arrives exactly; no message is mistaken for another",
    rows=(24,),
)
@pytest.mark.parametrize("how", ["alone", "beside_own_messages", "wrapped"])
def test_simultaneous_transfers_keep_their_messages_apart(how: str, trio: Cluster) -> None:
    send, receive = roles()
    jobs = [(transfer_in_threads, (role, ROUNDS, how)) for role in (send, receive)]
    sent, received, _ = values(trio.start([*jobs, None]).outcomes())
    assert sent == []
    own = ["own exact"] * (ROUNDS * len(OWN_TAGS)) if how == "beside_own_messages" else []
    assert received == ["0 exact"] * ROUNDS + ["1 exact"] * ROUNDS + own


def send_and_receive_at_once(rank: int, role: Role) -> str:
    """Send and receive at once, each in its own thread."""
    group = new_group(rank, role.ranks, role.name)
    peer = 1 - rank
    errors: list[str] = []

    def send() -> None:
        transport = PGTransport(group, role.timeout_s, "cpu")
        with recorded(errors):
            for _ in range(ROUNDS):
                transport.send_checkpoint([peer], new_state(1 << 20, seed=rank))

    sending = threading.Thread(target=send)
    sending.start()
    transport = PGTransport(group, role.timeout_s, "cpu")
    with recorded(errors):
        for _ in range(ROUNDS):
            state: Any = transport.recv_checkpoint(peer)
            expected = new_state(1 << 20, seed=peer)["model"]
            assert all(torch.equal(state["model"][name], expected[name]) for name in expected)
    sending.join()
    return "; ".join(errors)


@contextlib.contextmanager
def recorded(errors: list[str]) -> Any:
    try:
        yield
    except BaseException as error:
        errors.append(repr(error))


@promises("both ranks send to each other at once", "each state arrives exactly", rows=(24,))
def test_simultaneous_transfers_in_both_directions_succeed(trio: Cluster) -> None:
    send, _ = roles()
    jobs = [(send_and_receive_at_once, (send,))] * 2
    assert values(trio.start([*jobs, None]).outcomes())[:2] == ["", ""]


# Ctrl-C


def wait_for_ctrl_c(rank: int, role: Role, timestamp_file: str) -> tuple[str, float]:
    """Transfer with a silent peer until Ctrl-C interrupts."""

    def intercept(at: int, buffer: torch.Tensor, post: Post, before: list[RepeatableWork]) -> Any:
        work = post(buffer)
        if at == LENGTH:
            write_timestamp(timestamp_file)
        return work

    previous_handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with intercepted("send" if role.direction == "send" else "recv", intercept):
            result = run_transfer(rank, role)
        return repr(result.error), result.ended_s
    except KeyboardInterrupt as interrupt:
        ended_s = time.monotonic()
        return " ".join(["KeyboardInterrupt", *getattr(interrupt, "__notes__", ())]), ended_s
    finally:
        signal.signal(signal.SIGINT, previous_handler)


@promises(
    "Ctrl-C while waiting for a silent peer",
    "`KeyboardInterrupt` within 1 s; the next call raises `GroupBroken`, and no thread of the transfer runs",
)
@pytest.mark.parametrize("direction", ["send", "receive"])
def test_ctrl_c_ends_a_wait_for_a_silent_peer(direction: str, trio: Cluster, tmp_path: Path) -> None:
    send, receive = roles()
    waiting = 0 if direction == "send" else 1
    jobs: list[Any] = [(join_and_stay_silent, (send,))] * 2
    jobs[waiting] = (wait_for_ctrl_c, ([send, receive][waiting], str(tmp_path / "posted")))
    pending = trio.start([*jobs, None])
    wait_for_timestamp(tmp_path / "posted")
    pressed_s = time.monotonic()
    os.kill(trio.pids[waiting], signal.SIGINT)
    ending, ended_s = values(pending.outcomes())[waiting]
    assert ending == "KeyboardInterrupt"
    assert ended_s - pressed_s < PROMPT_S
    jobs = [None, None, None]
    jobs[waiting] = (inspect_after_failure, (LATE_S,))
    after = values(trio.start(jobs).outcomes())[waiting]
    assert isinstance(after.error, GroupBroken)
    assert after.lanes_ended_s is not None


@promises(
    "Ctrl-C in the middle of a message, with a stopped peer",
    "`KeyboardInterrupt` within 1 s, although gloo still blocks on the message; for a receiver in place, a "
    "note on the exception describes the local state",
)
@BY_GROUP_AND_MEMORY
@pytest.mark.parametrize("direction", ["send", "receive"])
def test_ctrl_c_ends_a_wait_in_the_middle_of_a_message(
    direction: str, same_host: bool, trio: Cluster, tmp_path: Path
) -> None:
    send, receive = roles(small_socket_buffers=True, same_host=same_host)
    # The receiver stops in the middle of a message. To interrupt the receiver, stop the sender instead.
    cut = Fault("cut", message(4), str(tmp_path / "fault"))
    waiting = 0 if direction == "send" else 1
    pending = trio.start(
        [
            (wait_for_ctrl_c, (send, str(tmp_path / "posted"))),
            (wait_for_ctrl_c, (dataclasses.replace(receive, fault=cut), str(tmp_path / "asked"))),
            None,
        ]
    )
    wait_for_timestamp(tmp_path / "fault")
    wait_until_stopped(trio.pids[1])
    if same_host:
        time.sleep(LATE_S)  # until the ring is full
    else:
        wait_until_blocked_in_send(trio.pids[0])
    if direction == "receive":
        trio.kill(0, signal.SIGSTOP)
        wait_until_stopped(trio.pids[0])
        trio.kill(1, signal.SIGCONT)
        time.sleep(LATE_S)
    pressed_s = time.monotonic()
    os.kill(trio.pids[waiting], signal.SIGINT)
    time.sleep(PROMPT_S)
    trio.kill(1 - waiting, signal.SIGCONT)
    ending, ended_s = values(pending.outcomes())[waiting]
    assert ending.startswith("KeyboardInterrupt")
    assert ended_s - pressed_s < PROMPT_S
    assert direction == "send" or "the local state is torn" in ending
