"""What is promised when things go wrong, beside the matrix: deadlines, damage, refusals, neighbours."""

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
from tests.faults import scene
from tests.faults.directing import assert_truthful, wait_for_mark, wait_until_stopped, wait_until_stuck
from tests.faults.promised import shows
from tests.faults.scene import (
    FRAME,
    LAYER_BYTES,
    LAYERS,
    LENGTH,
    PATHS,
    Boom,
    Fault,
    Meddle,
    Part,
    Post,
    Settled,
    Sight,
    act,
    fates_of,
    look_around,
    meddled,
    message,
    new_group,
    new_state,
    old_state,
    perform,
    put_mark,
    unique_name,
)
from tests.support.cluster import Cluster, Outcome
from tests.support.processes import without_gloo
from torchferry import PGTransport
from torchferry.engine.source import Source
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
"""Bytes of a layer in a state whose digests all fit in its frame."""
FAR_S = 10.0
PROMPT_S = 1.0
LATE_S = 0.5

ALL_NEW = dict.fromkeys(PATHS, "new")
ALL_OLD = dict.fromkeys(PATHS, "old")


def values(outcomes: list[Outcome]) -> list[Any]:
    """What the actors returned; none of them may have died or raised."""
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    assert errors == []
    return [outcome.value for outcome in outcomes]


def perform_meddled(rank: int, part: Part, make: Callable[..., Meddle], *args: Any) -> Sight:
    """Perform with one's link meddled with."""
    with meddled("send" if part.way == "send" else "recv", make(*args)):
        return perform(rank, part)


def perform_both(
    cluster: Cluster,
    send: Part,
    receive: Part,
    *meddling: Any,
    slow: str = "send",
) -> tuple[Sight, Sight]:
    """Let rank 0 send to rank 1, with one of them meddled with."""
    jobs: list[Any] = [(perform, (send,)), (perform, (receive,)), *[None] * (cluster.world_size - 2)]
    if meddling:
        who, part = (0, send) if slow == "send" else (1, receive)
        jobs[who] = (perform_meddled, (part, *meddling))
    sender, receiver, *_ = values(cluster.start(jobs).outcomes())
    return sender, receiver


def parts(timeout_s: float = FAR_S, **fields: Any) -> tuple[Part, Part]:
    """Give a sender's and a receiver's part in one group."""
    name = unique_name()
    return (
        Part(name, (0, 1), "send", timeout_s, **fields),
        Part(name, (0, 1), "receive", timeout_s, **fields),
    )


# One deadline


def sit_still(rank: int, part: Part) -> None:
    """Join the group, and never be heard of again."""
    scene.keep(new_group(rank, part.ranks, part.name))


@shows(
    "the peer never calls; `timeout` is 1 s, the group's is 30 s",
    "`LinkTimeout` at 1 s, + 0.5 s at most; then `GroupBroken`, which says to make a new group",
    rows=(2, 23),
)
@pytest.mark.parametrize("way", ["send", "receive"])
def test_a_silent_peer_is_given_up_at_the_timeout_and_not_at_the_group_s(way: str, trio: Cluster) -> None:
    send, receive = parts(1.0)
    waits, silent = (0, 1) if way == "send" else (1, 0)
    jobs: list[Any] = [(perform, (send,)), (perform, (receive,)), None]
    jobs[silent] = (sit_still, (send,))
    sight: Sight = values(trio.start(jobs).outcomes())[waits]
    error = sight.error
    assert type(error) is LinkTimeout
    assert 1.0 <= sight.seconds < 1.0 + LATE_S
    assert error.peer == silent
    assert error.phase == ("send tensors" if way == "send" else "wait")
    jobs = [None, None, None]
    jobs[waits] = (look_around, (LATE_S,))
    after = values(trio.start(jobs).outcomes())[waits]
    assert isinstance(after.error, GroupBroken)
    assert "make a new group" in str(after.error)
    assert after.lanes_gone_s is not None
    assert sight.fates in ({}, ALL_OLD)


def trickle(pause_s: float) -> Meddle:
    """Take a little time before each message: each is quick enough, the whole is not."""

    def meddle(place: int, buffer: torch.Tensor, post: Post, before: list[Settled]) -> Any:
        for earlier in before:
            earlier.wait(FAR_S)
        time.sleep(pause_s)
        return post(buffer, 0)

    return meddle


@shows(
    "every message comes quickly, but all together take longer than `timeout`",
    "the transfer fails at its one deadline, + 0.5 s at most; the peer is told",
    rows=(3,),
)
@pytest.mark.parametrize("slow", ["send", "receive"])
def test_messages_that_trickle_in_do_not_put_off_the_deadline(slow: str, trio: Cluster) -> None:
    send, receive = parts(1.0)
    if slow == "send":
        send = dataclasses.replace(send, timeout_s=FAR_S)
    else:
        receive = dataclasses.replace(receive, timeout_s=FAR_S)
    sender, receiver = perform_both(trio, send, receive, trickle, 0.3, slow=slow)
    hasty, other = (receiver, sender) if slow == "send" else (sender, receiver)
    assert isinstance(hasty.error, TimeoutError)
    assert 1.0 <= hasty.seconds < 1.0 + LATE_S
    assert isinstance(other.error, ConnectionError)
    assert other.ended_s - hasty.ended_s < PROMPT_S
    assert_truthful(receiver)


@shows(
    "no message completes for `stall_timeout`, with `timeout` far off",
    "`LinkStalled` (for a receiver in place the cause of `TornAndLate`), + 0.5 s at most",
)
@pytest.mark.parametrize("stopped", ["sender", "receiver"])
def test_a_stall_is_noticed_long_before_the_deadline(stopped: str, trio: Cluster, tmp_path: Path) -> None:
    stall_s = 0.7
    fault = Fault("stop", message(4), str(tmp_path / "fault"))
    send, receive = parts(stall_s=stall_s, ended=str(tmp_path / "ended"))
    victim = 0 if stopped == "sender" else 1
    roles = [send, receive]
    roles[victim] = dataclasses.replace(roles[victim], fault=fault, ended=None)
    pending = trio.start([(perform, (roles[0],)), (perform, (roles[1],)), None])
    at_s = wait_for_mark(tmp_path / "fault")
    wait_until_stopped(trio.pids[victim])
    wait_for_mark(tmp_path / "ended")
    trio.kill(victim, signal.SIGCONT)
    sight: Sight = values(pending.outcomes())[1 - victim]
    stalled = sight.cause if stopped == "sender" else sight.error
    assert type(stalled) is LinkStalled
    assert stopped == "receiver" or type(sight.error) is TornAndLate
    assert sight.ended_s - at_s < stall_s + LATE_S
    assert sight.seconds >= stall_s


# Damage


def flip(place: int, byte: int = 100) -> Meddle:
    """Change one bit of one message after the sender has read it."""

    def meddle(at: int, buffer: torch.Tensor, post: Post, before: list[Settled]) -> Any:
        if at != place:
            return post(buffer, 0)
        damaged = buffer.clone()
        damaged.view(torch.uint8)[byte] ^= 16
        return post(damaged, 0)

    return meddle


def swap(one: int, two: int) -> Meddle:
    """Send the bytes of two layers in each other's place."""

    def meddle(at: int, buffer: torch.Tensor, post: Post, before: list[Settled]) -> Any:
        layers = list(scene.now().source["model"].values())
        other = {message(one): two, message(two): one}.get(at)
        return post(buffer if other is None else layers[other].view(torch.uint8), 0)

    return meddle


def cut_short(place: int) -> Meddle:
    """Leave off the last byte of a message; gloo does not mind."""

    def meddle(at: int, buffer: torch.Tensor, post: Post, before: list[Settled]) -> Any:
        return post(buffer[:-1].clone() if at == place else buffer, 0)

    return meddle


class Nowhere:
    """A message that was never sent, but says it was."""

    def wait(self, timeout_s: float) -> None:
        """Be done."""


def withhold(place: int) -> Meddle:
    """Leave out one message."""

    def meddle(at: int, buffer: torch.Tensor, post: Post, before: list[Settled]) -> Any:
        return Nowhere() if at == place else post(buffer, 0)

    return meddle


SIZES = pytest.mark.parametrize("layer_bytes", [SMALL, LAYER_BYTES], ids=["small", "large"])


@shows(
    "a bit is flipped, a message is cut short, or two are swapped on the way",
    "`TargetTorn`, caused by `Corrupted`, names exactly the paths hit, all others are whole; the group stays "
    "good, and sending again on it heals the state",
    rows=(25,),
)
@SIZES
@pytest.mark.parametrize(
    ("damage", "hit"),
    [((flip, message(3)), [3]), ((cut_short, message(LAYERS - 1)), [LAYERS - 1]), ((swap, 2, 5), [2, 5])],
    ids=["flipped", "cut_short", "swapped"],
)
def test_damage_on_the_way_is_found_and_named(
    layer_bytes: int, damage: Any, hit: list[int], trio: Cluster
) -> None:
    sender, receiver = perform_both(trio, *parts(layer_bytes=layer_bytes), *damage)
    paths = tuple(PATHS[n] for n in hit)
    assert sender.error is None
    assert isinstance(receiver.cause, Corrupted)
    assert receiver.cause.paths == paths
    assert type(receiver.error) is TargetTorn
    assert receiver.error.torn == paths
    assert receiver.error.whole == tuple(path for path in PATHS if path not in paths)
    assert (receiver.error.peer, receiver.error.path) == (0, paths[0])
    assert_truthful_but_for_damage(receiver)
    sender, receiver, _ = values(trio.start([(act, ()), (act, ()), None]).outcomes())
    assert sender.error is receiver.error is None
    assert receiver.fates == ALL_NEW


def assert_truthful_but_for_damage(sight: Sight) -> None:
    assert isinstance(sight.error, TargetTorn)
    assert {sight.fates[path] for path in sight.error.whole} <= {"new"}
    assert {sight.fates[path] for path in sight.error.untouched} <= {"old"}
    assert "new" not in {sight.fates[path] for path in sight.error.torn}


@shows("the same, with `verify=False`", "it goes unseen: that is what was asked for", rows=(25,))
@SIZES
def test_without_verifying_damage_goes_unseen(layer_bytes: int, trio: Cluster) -> None:
    both = parts(layer_bytes=layer_bytes, verify=False)
    sender, receiver = perform_both(trio, *both, flip, message(3))
    assert sender.error is receiver.error is None
    assert receiver.fates == {**ALL_NEW, PATHS[3]: "neither"}


@shows(
    "a message never comes",
    "`TornAndLate` at the deadline, naming the path that is missing",
    rows=(25,),
)
@SIZES
def test_a_missing_message_is_named(layer_bytes: int, trio: Cluster) -> None:
    send, receive = parts(layer_bytes=layer_bytes)
    receive = dataclasses.replace(receive, timeout_s=1.0)
    _, receiver = perform_both(trio, send, receive, withhold, message(3))
    assert type(receiver.error) is TornAndLate
    assert receiver.error.path == PATHS[3]
    assert 1.0 <= receiver.seconds < 1.0 + LATE_S
    assert receiver.fates[PATHS[3]] == "old"
    assert_truthful(receiver)


@shows(
    "the metadata is damaged on the way",
    "`BadManifest`, nothing is touched; the sender is told within 1 s (`LinkBroken`)",
    rows=(7, 25),
)
def test_damaged_metadata_is_refused_and_the_sender_is_told(trio: Cluster) -> None:
    sender, receiver = perform_both(trio, *parts(), flip, FRAME)
    assert type(receiver.error) is BadManifest
    assert receiver.fates == ALL_OLD
    assert isinstance(sender.error, LinkBroken)
    assert sender.ended_s - receiver.ended_s < PROMPT_S


def announce(nbytes: int) -> Meddle:
    """Lie about the length of the metadata."""

    def meddle(at: int, buffer: torch.Tensor, post: Post, before: list[Settled]) -> Any:
        return post(torch.tensor([nbytes], dtype=torch.int64) if at == LENGTH else buffer, 0)

    return meddle


@shows(
    "the peer announces metadata of no possible length",
    "`BadManifest` before any memory is set aside; the sender is told within 1 s",
    rows=(24,),
)
@pytest.mark.parametrize("nbytes", [-1, 0, 1 << 60])
def test_a_length_that_can_t_be_is_refused(nbytes: int, trio: Cluster) -> None:
    sender, receiver = perform_both(trio, *parts(), announce, nbytes)
    assert type(receiver.error) is BadManifest
    assert receiver.fates == ALL_OLD
    assert isinstance(sender.error, LinkBroken)
    assert sender.ended_s - receiver.ended_s < PROMPT_S


# The sender's own state


CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "by_torch": lambda tensor: tensor.add_(1),
    "by_data": lambda tensor: tensor.data.add_(1),
    "by_numpy": lambda tensor: tensor.numpy().__iadd__(1),
}


def change_at(place: int, layer: int, how: str = "by_torch") -> Meddle:
    """Let another thread change a layer just before a message is sent."""

    def meddle(at: int, buffer: torch.Tensor, post: Post, before: list[Settled]) -> Any:
        if at == place:
            for earlier in before:
                earlier.wait(FAR_S)
            tensor = scene.now().source["model"][f"layer{layer}"]
            other = threading.Thread(target=CHANGES[how], args=(tensor,))
            other.start()
            other.join()
        return post(buffer, 0)

    return meddle


@shows(
    "a tensor is changed by another thread during the send",
    "`StateChanged` at the sender names it; a receiver never accepts a mixture (`TargetTorn`)",
    rows=(26,),
)
@SIZES
@pytest.mark.parametrize("layer", [1, 4, 6], ids=["sent_before", "being_sent", "sent_after"])
def test_a_state_that_changes_during_the_send_is_refused(layer_bytes: int, layer: int, trio: Cluster) -> None:
    sender, receiver = perform_both(trio, *parts(layer_bytes=layer_bytes), change_at, message(4), layer)
    assert isinstance(sender.error, StateChanged)
    assert sender.error.paths == (PATHS[layer],)
    if layer_bytes == SMALL and layer == 1:
        # All that was sent was hashed before: the receiver has no mixture, but the state as it was.
        assert receiver.error is None
        assert receiver.fates == ALL_NEW
    else:
        assert isinstance(receiver.error, TargetTorn)
        assert isinstance(receiver.cause, (Corrupted, PeerGaveUp))


@shows(
    "the same behind torch's back, through `.data` or an ndarray over its memory",
    "the same, for changes that reach an end of one of the messages that carry the tensor",
    rows=(26,),
)
@pytest.mark.parametrize("layer", [1, 4, 6], ids=["sent_before", "being_sent", "sent_after"])
@pytest.mark.parametrize("how", ["by_data", "by_numpy"])
def test_a_change_behind_torch_s_back_is_noticed(how: str, layer: int, trio: Cluster) -> None:
    changes = change_at, message(4), layer, how
    sender, receiver = perform_both(trio, *parts(), *changes)
    assert isinstance(sender.error, StateChanged)
    assert sender.error.paths == (PATHS[layer],)
    assert isinstance(receiver.error, TargetTorn)


def perform_with_a_bad_read(rank: int, part: Part, number: int) -> Sight:
    """Send, and fail to read one's own state at some message."""
    read = Source.read

    def fail(source: Source, message: Any) -> torch.Tensor:
        if message.number == number:
            raise Boom("the memory can't be read")
        return read(source, message)

    Source.read = fail  # type: ignore[method-assign, assignment]
    try:
        return perform(rank, part)
    finally:
        Source.read = read  # type: ignore[method-assign]


@shows(
    "the sender fails to read its own state half-way",
    "it raises that very error; the receiver gets `PeerGaveUp` within 1 s, or `TargetTorn` caused by it",
    rows=(7,),
)
@pytest.mark.parametrize("number", [0, LAYERS // 2, LAYERS - 1])
@pytest.mark.parametrize("receivers", [1, 3])
def test_a_sender_that_fails_half_way_says_so(number: int, receivers: int, quartet: Cluster) -> None:
    name, ranks = unique_name(), tuple(range(receivers + 1))
    send, receive = (Part(name, ranks, way, FAR_S) for way in ("send", "receive"))
    jobs: list[Any] = [(perform_with_a_bad_read, (send, number)), *[(perform, (receive,))] * receivers]
    sender, *told = values(quartet.start([*jobs, *[None] * (3 - receivers)]).outcomes())[: receivers + 1]
    assert isinstance(sender.error, Boom)
    for receiver in told:
        known = receiver.cause if isinstance(receiver.error, TargetTorn) else receiver.error
        assert isinstance(known, PeerGaveUp), receiver.error
        assert receiver.ended_s - sender.ended_s < PROMPT_S
        assert not isinstance(receiver.error, TargetTorn) or receiver.error.whole == ()
        assert "neither" not in {receiver.fates[path] for path in PATHS[number + 1 :]}


# Refusals


def send_what_can_t_travel_and_then_what_can(
    rank: int, part: Part, peers: list[int]
) -> tuple[Any, float, float]:
    transport = PGTransport(new_group(rank, part.ranks, part.name), part.timeout_s, "cpu")
    error: Exception | None = None
    began_s = time.monotonic()
    try:
        transport.send_checkpoint(peers, {"model": {"lock": threading.Lock()}})
    except Exception as raised:
        error = raised
    refused_s = time.monotonic()
    transport.send_checkpoint(peers, new_state(), step=8)
    return error, began_s, refused_s


def receive_a_refusal_and_then_a_state(
    rank: int, part: Part, late_s: float
) -> tuple[Any, float, dict[str, str]]:
    target = old_state()
    transport = PGTransport(new_group(rank, part.ranks, part.name), part.timeout_s, "cpu", lambda: target)
    # Late means: not there when the sender refuses, and for as long as it waits for that to be taken.
    time.sleep(late_s)
    error: Exception | None = None
    try:
        transport.recv_checkpoint(0)
    except Exception as raised:
        error = raised
    told_s = time.monotonic()
    assert fates_of(target, LAYER_BYTES) == ALL_OLD
    transport.recv_checkpoint(0, step=8)
    return error, told_s, fates_of(target, LAYER_BYTES)


@shows(
    "the state has a leaf that can't travel",
    "`Unsendable` names its path; every receiver raises `PeerGaveUp` with the reason, within a second or as "
    "soon as it comes, and the group is in order: the mended state follows on it",
    rows=(7,),
)
@pytest.mark.parametrize("late_s", [0.0, 1.0], ids=["who waits already", "who comes late"])
@pytest.mark.parametrize("receivers", [1, 3])
def test_a_sender_that_refuses_tells_its_receivers(receivers: int, late_s: float, quartet: Cluster) -> None:
    name, peers = unique_name(), [*range(1, receivers + 1)]
    send, receive = (Part(name, (0, *peers), way, FAR_S) for way in ("send", "receive"))
    jobs: list[Any] = [(send_what_can_t_travel_and_then_what_can, (send, peers))]
    jobs += [(receive_a_refusal_and_then_a_state, (receive, late_s))] * receivers
    sender, *told = values(quartet.start([*jobs, *[None] * (3 - receivers)]).outcomes())[: receivers + 1]
    error, began_s, refused_s = sender
    assert isinstance(error, Unsendable)
    assert error.path == "model.lock"
    assert refused_s - began_s < PROMPT_S
    for refusal, told_s, fates in told:
        assert type(refusal) is PeerGaveUp
        assert (refusal.peer, refusal.failed_rank) == (0, 0)
        assert "model.lock: a value of type _thread.lock can't be sent" in str(refusal)
        assert told_s - began_s < late_s + PROMPT_S
        assert fates == ALL_NEW


NOBODY_RECEIVES = """
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
        print("refused", flush=True)
dist.barrier()
dist.destroy_process_group()
"""


@shows(
    "the sender refuses its state several times, nobody receives, and both processes end",
    "`Unsendable` each time; the group works, and both exit with 0",
)
def test_a_process_can_leave_after_a_refusal_that_nobody_took() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    ends = [
        subprocess.Popen(
            [sys.executable, "-c", NOBODY_RECEIVES, str(rank), str(store.port)],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        said = [end.communicate(timeout=60)[0] for end in ends]
    finally:
        for end in ends:
            end.kill()
    assert [end.returncode for end in ends] == [0, 0]
    assert said[0].count("refused") == 3


def leave_after_a_refusal(rank: int, part: Part) -> None:
    transport = PGTransport(new_group(rank, part.ranks, part.name), part.timeout_s, "cpu")
    with contextlib.suppress(Unsendable):
        transport.send_checkpoint([1], {"model": {"lock": threading.Lock()}})
    os._exit(1)


@shows(
    "the sender refuses its state and ends",
    "`PeerGaveUp` with the reason at the receiver all the same, within a second",
)
def test_a_sender_that_refuses_and_ends_has_told_its_receiver(doomed: Cluster) -> None:
    send, receive = parts()
    sent, received = doomed.start([(leave_after_a_refusal, (send,)), (perform, (receive,))]).outcomes()
    assert sent.error is not None
    sight: Sight = received.value
    assert type(sight.error) is PeerGaveUp
    assert "model.lock" in str(sight.error)
    assert sight.seconds < PROMPT_S + LATE_S


@torchferry.register
@dataclasses.dataclass
class Known:
    """A type that the receiver forgets."""

    value: int


def send_twice(rank: int, part: Part, extra: object) -> tuple[float, float]:
    transport = PGTransport(new_group(rank, part.ranks, part.name), part.timeout_s, "cpu")
    state: dict[str, Any] = new_state()
    transport.send_checkpoint([1], {**state, **({} if extra is None else {"extra": extra})})
    first_s = time.monotonic()
    transport.send_checkpoint([1], state)
    return first_s, time.monotonic()


def refuse_then_accept(rank: int, part: Part, why: str) -> tuple[Any, dict[str, str], dict[str, str]]:
    """Receive once in a way that is refused, and once as it should be, on the same group."""
    target: Any = old_state()
    error: Exception | None = None

    def give_target() -> Any:
        if why == "callback" and error is None:
            raise Boom("a callback failed")
        if why == "mismatch" and error is None:
            return {"model": {**target["model"], "layer3": torch.zeros(3), "layer6": torch.zeros(2)}}
        return target

    transport = PGTransport(new_group(rank, part.ranks, part.name), part.timeout_s, "cpu", give_target)
    forgotten = torchferry.tensors.registry._types
    kept = dict(forgotten)
    if why == "unknown type":
        forgotten.clear()
    try:
        transport.recv_checkpoint(0)
    except Exception as raised:
        error = raised
    finally:
        forgotten.update(kept)
    between = fates_of(target, LAYER_BYTES)
    transport.recv_checkpoint(0)
    return error, between, fates_of(target, LAYER_BYTES)


@shows(
    "the receiver refuses: mismatch, a type it does not know, or its `state_dict()` raises",
    "nothing is touched, every path at fault is listed; the sender finishes, and the group is as good as new",
    rows=(7, 8),
)
@pytest.mark.parametrize(
    ("why", "expected"),
    [("mismatch", StateMismatch), ("unknown type", UnknownType), ("callback", Boom)],
    ids=["mismatch", "unknown_type", "callback"],
)
def test_a_receiver_that_refuses_leaves_nobody_hanging(
    why: str, expected: type[Exception], trio: Cluster
) -> None:
    send, receive = parts(5.0)
    extra = Known(1) if why == "unknown type" else None
    jobs = [(send_twice, (send, extra)), (refuse_then_accept, (receive, why)), None]
    _, (error, between, after), _ = values(trio.start(jobs).outcomes())
    assert type(error) is expected
    assert between == ALL_OLD
    assert after == ALL_NEW
    if isinstance(error, StateMismatch):
        assert {mismatch.path for mismatch in error.mismatches} == {PATHS[3], PATHS[6]}


# Several receivers


@shows(
    "one of three receivers is too slow for the deadline",
    "the others finish long before it; `SendLate`, a `SendFailed`, says who got the state and who did not",
    rows=(21, 22),
)
def test_a_slow_receiver_fails_alone(quartet: Cluster) -> None:
    name, ranks = unique_name(), (0, 1, 2, 3)
    receive = Part(name, ranks, "receive", FAR_S)
    jobs: list[Any] = [(perform, (Part(name, ranks, "send", 2.0),)), *[(perform, (receive,))] * 3]
    jobs[2] = (perform_meddled, (receive, trickle, 0.5))
    sender, one, slow, three = values(quartet.start(jobs).outcomes())
    assert type(sender.error) is SendLate
    assert sender.error.delivered == (1, 3)
    assert [type(error) for error in sender.error.failed.values()] == [LinkTimeout]
    assert list(sender.error.failed) == [2]
    assert 2.0 <= sender.seconds < 2.0 + LATE_S
    for quick in (one, three):
        assert quick.error is None
        assert quick.fates == ALL_NEW
        assert quick.ended_s < sender.ended_s
    assert isinstance(slow.error, TornAndBroken)
    assert slow.ended_s - sender.ended_s < PROMPT_S
    assert_truthful(slow)


# Leaving


@shows(
    "a transfer has failed in the middle of a message, and the process ends 60 s before the deadline",
    "the interpreter exits with code 0 within 10 s: what gloo still holds does not hold it up",
)
def test_a_process_can_leave_after_a_failure(tmp_path: Path) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mark = tmp_path / "fault"
    command = [sys.executable, "-m", "tests.faults.leaving"]
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    ends = [
        subprocess.Popen(
            [*command, str(rank), str(store.port), str(mark)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    _, receiver = ends
    try:
        assert receiver.stdout is not None
        assert next(without_gloo(receiver.stdout)).strip() == "TornAndLate"
        assert receiver.wait(10.0) == 0
    finally:
        for end in ends:
            end.kill()
            end.communicate()


# Neighbours on the same group

ROUNDS = 10
OWN_TAGS = range(8)


class Wrapper:
    """A group of another library's, with one of torch's inside."""

    def __init__(self, inside: Any) -> None:
        self.rank, self.size = inside.rank, inside.size
        self.send, self.recv = inside.send, inside.recv


def transfer_in_threads(rank: int, part: Part, rounds: int, how: str) -> list[str]:
    """Send, or receive, two states at once from two threads; if asked, beside messages of one's own."""
    group: Any = new_group(rank, part.ranks, part.name)
    if how == "wrapped":
        group = Wrapper(group)
    found: list[str] = []

    def send(seed: int) -> None:
        transport = PGTransport(group, part.timeout_s, "cpu")
        for _ in range(rounds):
            transport.send_checkpoint([1], {"seed": seed, **new_state(SMALL if seed else 1 << 20, seed)})

    def receive(_: int) -> None:
        transport = PGTransport(group, part.timeout_s, "cpu")
        for _ in range(rounds):
            state: Any = transport.recv_checkpoint(0)
            seed = state.pop("seed")
            due = new_state(SMALL if seed else 1 << 20, seed)["model"]
            same = all(torch.equal(state["model"][name], due[name]) for name in due)
            found.append(f"{seed} {'exact' if same else 'wrong'}")

    def chat(_: int) -> None:
        for number in range(rounds):
            for tag in OWN_TAGS:
                due = torch.full((64,), number * 100 + tag)
                if part.way == "send":
                    group.send([due], 1, tag).wait()
                else:
                    got = torch.zeros(64, dtype=torch.int64)
                    group.recv([got], 0, tag).wait()
                    found.append("own exact" if torch.equal(got, due) else "own wrong")

    errors: list[BaseException] = []

    def guarded(what: Callable[[int], None], seed: int) -> None:
        try:
            what(seed)
        except BaseException as error:
            errors.append(error)

    work = [(send if part.way == "send" else receive, seed) for seed in (0, 1)]
    if how == "beside_own_messages":
        work.append((chat, 0))
    threads = [threading.Thread(target=guarded, args=each) for each in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sorted(found) + [repr(error) for error in errors]


@shows(
    "two transfers at once between the same ranks, from two threads, each with its own transport; beside the "
    "user's own messages; on a group that wraps another",
    "each arrives exact; nothing is mistaken, nobody aborts",
    rows=(24,),
)
@pytest.mark.parametrize("how", ["alone", "beside_own_messages", "wrapped"])
def test_transfers_at_once_are_not_mistaken_for_one_another(how: str, trio: Cluster) -> None:
    send, receive = parts()
    jobs = [(transfer_in_threads, (part, ROUNDS, how)) for part in (send, receive)]
    sent, received, _ = values(trio.start([*jobs, None]).outcomes())
    assert sent == []
    own = ["own exact"] * (ROUNDS * len(OWN_TAGS)) if how == "beside_own_messages" else []
    assert received == ["0 exact"] * ROUNDS + ["1 exact"] * ROUNDS + own


def send_and_receive_at_once(rank: int, part: Part) -> str:
    """Both ways at once, each in a thread of its own."""
    group = new_group(rank, part.ranks, part.name)
    peer = 1 - rank
    errors: list[str] = []

    def send() -> None:
        transport = PGTransport(group, part.timeout_s, "cpu")
        with noted(errors):
            for _ in range(ROUNDS):
                transport.send_checkpoint([peer], new_state(1 << 20, seed=rank))

    sending = threading.Thread(target=send)
    sending.start()
    transport = PGTransport(group, part.timeout_s, "cpu")
    with noted(errors):
        for _ in range(ROUNDS):
            state: Any = transport.recv_checkpoint(peer)
            due = new_state(1 << 20, seed=peer)["model"]
            assert all(torch.equal(state["model"][name], due[name]) for name in due)
    sending.join()
    return "; ".join(errors)


@contextlib.contextmanager
def noted(errors: list[str]) -> Any:
    try:
        yield
    except BaseException as error:
        errors.append(repr(error))


@shows("both ranks send to each other at once", "each arrives exact", rows=(24,))
def test_transfers_both_ways_at_once_do_not_meet(trio: Cluster) -> None:
    send, _ = parts()
    jobs = [(send_and_receive_at_once, (send,))] * 2
    assert values(trio.start([*jobs, None]).outcomes())[:2] == ["", ""]


# Ctrl-C


def wait_for_ctrl_c(rank: int, part: Part, mark: str) -> tuple[str, float]:
    """Transfer with a peer that is silent, until someone presses Ctrl-C."""

    def meddle(at: int, buffer: torch.Tensor, post: Post, before: list[Settled]) -> Any:
        work = post(buffer, 0)
        if at == LENGTH:
            put_mark(mark)
        return work

    was = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with meddled("send" if part.way == "send" else "recv", meddle):
            sight = perform(rank, part)
        return repr(sight.error), sight.ended_s
    except KeyboardInterrupt as interrupt:
        ended_s = time.monotonic()
        return " ".join(["KeyboardInterrupt", *getattr(interrupt, "__notes__", ())]), ended_s
    finally:
        signal.signal(signal.SIGINT, was)


@shows(
    "Ctrl-C while waiting for a silent peer",
    "`KeyboardInterrupt` within 1 s; then `GroupBroken`, and no thread is left",
)
@pytest.mark.parametrize("way", ["send", "receive"])
def test_ctrl_c_ends_a_wait_for_a_silent_peer(way: str, trio: Cluster, tmp_path: Path) -> None:
    send, receive = parts()
    waits = 0 if way == "send" else 1
    jobs: list[Any] = [(sit_still, (send,))] * 2
    jobs[waits] = (wait_for_ctrl_c, ([send, receive][waits], str(tmp_path / "posted")))
    pending = trio.start([*jobs, None])
    wait_for_mark(tmp_path / "posted")
    pressed_s = time.monotonic()
    os.kill(trio.pids[waits], signal.SIGINT)
    ending, ended_s = values(pending.outcomes())[waits]
    assert ending == "KeyboardInterrupt"
    assert ended_s - pressed_s < PROMPT_S
    jobs = [None, None, None]
    jobs[waits] = (look_around, (LATE_S,))
    after = values(trio.start(jobs).outcomes())[waits]
    assert isinstance(after.error, GroupBroken)
    assert after.lanes_gone_s is not None


@shows(
    "Ctrl-C in the middle of a message, with a peer that has stopped",
    "`KeyboardInterrupt` within 1 s, although gloo still holds the message; a receiver in place is told in a "
    "note to it what became of its state",
)
@pytest.mark.parametrize("way", ["send", "receive"])
def test_ctrl_c_ends_a_wait_in_the_middle_of_a_message(way: str, trio: Cluster, tmp_path: Path) -> None:
    send, receive = parts(narrow=True)
    # A message is cut by letting its receiver stop in it; then it is the sender that stops.
    cut = Fault("cut", message(4), str(tmp_path / "fault"))
    waits = 0 if way == "send" else 1
    pending = trio.start(
        [
            (wait_for_ctrl_c, (send, str(tmp_path / "posted"))),
            (wait_for_ctrl_c, (dataclasses.replace(receive, fault=cut), str(tmp_path / "asked"))),
            None,
        ]
    )
    wait_for_mark(tmp_path / "fault")
    wait_until_stopped(trio.pids[1])
    wait_until_stuck(trio.pids[0])
    if way == "receive":
        trio.kill(0, signal.SIGSTOP)
        wait_until_stopped(trio.pids[0])
        trio.kill(1, signal.SIGCONT)
        time.sleep(LATE_S)
    pressed_s = time.monotonic()
    os.kill(trio.pids[waits], signal.SIGINT)
    time.sleep(PROMPT_S)
    trio.kill(1 - waits, signal.SIGCONT)
    ending, ended_s = values(pending.outcomes())[waits]
    assert ending.startswith("KeyboardInterrupt")
    assert ended_s - pressed_s < PROMPT_S
    assert way == "send" or "the local state is torn" in ending
