"""PGTransport through memory: exact states, offers that are declined, and rejections without the payload."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.faults.jobs import new_group, unique_name, wait_for_lanes
from tests.support.children import wait_until
from tests.support.cluster import Cluster
from tests.support.equality import assert_same
from torchferry import PGTransport
from torchferry.core.push import OFFER_FROM_BYTES
from torchferry.errors import LinkBroken, PeerGaveUp, StateMismatch, StepMismatch
from torchferry.links.memory_channel import MemoryChannel, MemoryOffer
from torchferry.links.process_group import ProcessGroupLink

TIMEOUT_S = 20.0
LARGE = 3 * OFFER_FROM_BYTES // 8


def numbers(count: int, first: int = 0) -> torch.Tensor:
    return torch.arange(first, first + count)


def tied() -> dict[str, Any]:
    weight = numbers(LARGE).view(-1, 16)
    return {"embedding": weight, "head": weight, "row": weight[3], "step": 7}


def strided() -> dict[str, Any]:
    return {"columns": numbers(2 * LARGE).view(-1, 64)[:, 3:35], "transposed": numbers(LARGE).view(-1, 32).T}


def packed() -> dict[str, Any]:
    small = {f"t{n}": numbers(100 + n, n) for n in range(4000)}
    return {**small, "large": numbers(LARGE), "empty": torch.zeros(0, 3), "scalar": torch.tensor(2.5)}


def plain() -> dict[str, Any]:
    return {"a": numbers(LARGE), "b": numbers(5000), "odd": torch.arange(LARGE * 8 % 251, dtype=torch.uint8)}


STATES = {"plain": plain, "tied": tied, "strided": strided, "packed": packed}


def emptied(state: dict[str, Any]) -> dict[str, Any]:
    for value in state.values():
        if isinstance(value, torch.Tensor):
            value.fill_(1)
    return state


def transport(local: Any = None, **options: Any) -> PGTransport:
    state_dict = None if local is None else lambda: local
    return PGTransport(dist.group.WORLD, TIMEOUT_S, "cpu", state_dict, **options)


def via(found: PGTransport) -> str:
    assert found.last_report is not None
    assert found.last_report.via == "" or f" by {found.last_report.via}" in str(found.last_report)
    return found.last_report.via


def transfer(rank: int, name: str, how: str, send: dict[str, Any], receive: dict[str, Any]) -> str:
    """Send to every other rank, and return how the bytes went."""
    dist.barrier()
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    if rank == 0:
        ferry = transport(**send)
        ferry.send_checkpoint(list(range(1, dist.get_world_size())), STATES[name]())
    else:
        local = emptied(STATES[name]()) if how == "in place" else None
        ferry = transport(local, **receive)
        assert_same(ferry.recv_checkpoint(0), STATES[name]())
    # The threads of a transfer end just after it.
    wait_until(lambda: threading.active_count() <= threads)
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= descriptors)
    dist.barrier()
    return via(ferry)


@pytest.mark.parametrize("how", ["fresh", "in place"])
@pytest.mark.parametrize("name", STATES)
def test_a_state_arrives_exactly_through_memory(name: str, how: str, pair: Cluster) -> None:
    assert pair.run(transfer, name, how, {}, {}) == ["memory", "memory"]


@pytest.mark.parametrize("unverified", ["send", "receive"])
def test_a_state_arrives_exactly_without_verification(unverified: str, pair: Cluster) -> None:
    off = {"verify": False}
    send, receive = (off, {}) if unverified == "send" else ({}, off)
    assert pair.run(transfer, "plain", "in place", send, receive) == ["memory", "memory"]


@pytest.mark.parametrize("side", ["send", "receive"])
def test_same_host_switches_it_off_on_either_side(side: str, pair: Cluster) -> None:
    off = {"same_host": False}
    send, receive = (off, {}) if side == "send" else ({}, off)
    assert pair.run(transfer, "plain", "in place", send, receive) == ["group", "group"]


def test_receivers_that_forward_use_the_group(quad: Cluster) -> None:
    assert quad.run(transfer, "plain", "in place", {"relay": True}, {}) == ["group"] * 4


def fail(*args: Any, **options: Any) -> Any:
    raise OSError("not on this machine")


def transfer_without(rank: int, missing: dict[int, str], name: str = "tied") -> str:
    """Transfer while something fails on some ranks."""
    patch = pytest.MonkeyPatch()
    if rank in missing:
        patch.setattr(missing[rank], fail)
    try:
        return transfer(rank, name, "in place", {}, {})
    finally:
        patch.undo()


MISSING = {
    "no socket": {0: "torchferry.links.memory_channel.listen_locally"},
    "another machine": {1: "torchferry.engine.push.receive.take_offer"},
    "another user": {1: "torchferry.links.memory_channel.connect_locally"},
    "no memory for the sender": {0: "torchferry.links.ring.SharedBlock"},
    "no memory for the receiver": {1: "torchferry.links.ring.map_received"},
}


@pytest.mark.parametrize("missing", MISSING.values(), ids=MISSING)
def test_without_shared_memory_the_state_comes_over_the_group(missing: Any, pair: Cluster) -> None:
    assert pair.run(transfer_without, missing) == ["group", "group"]


def test_one_of_three_receivers_declines(quad: Cluster) -> None:
    found = quad.run(transfer_without, {2: "torchferry.engine.push.receive.take_offer"}, "packed")
    assert found == ["memory and group", "memory", "group", "memory"]


def count_messages(rank: int, nbytes: int) -> tuple[list[int], str]:
    """Return the sizes of what this rank sends over the group, and how the payload went."""
    patch, sizes, send = pytest.MonkeyPatch(), [], ProcessGroupLink.send

    def counted(link: ProcessGroupLink, buffer: torch.Tensor, peer: int, tag: int) -> Any:
        sizes.append(buffer.nbytes)
        return send(link, buffer, peer, tag)

    patch.setattr(ProcessGroupLink, "send", counted)
    ferry = transport()
    try:
        if rank == 0:
            ferry.send_checkpoint([1], {"w": torch.ones(nbytes, dtype=torch.uint8)})
        else:
            ferry.recv_checkpoint(0)
    finally:
        patch.undo()
    return sizes, via(ferry)


def test_a_small_state_has_no_offer_and_no_answer(pair: Cluster) -> None:
    (sent, by_sender), (answered, by_receiver) = pair.run(count_messages, OFFER_FROM_BYTES - 1)
    assert (answered, by_sender, by_receiver) == ([], "group", "group")
    assert sum(sent) > OFFER_FROM_BYTES - 1
    (sent, by_sender), (answered, by_receiver) = pair.run(count_messages, OFFER_FROM_BYTES)
    assert (answered, by_sender, by_receiver) == ([24], "memory", "memory")
    assert len(sent) == 2, "the length and the frame"


def reject(rank: int, why: str, same_host: bool) -> tuple[str, int, str]:
    """Reject a state, then accept one on the same group. Return the error and the bytes of the rejected."""
    dist.barrier()
    patch, moved = pytest.MonkeyPatch(), 0
    for owner in (ProcessGroupLink, MemoryChannel):
        method = owner.send

        def counted(self: Any, buffer: torch.Tensor, *args: Any, send: Any = method) -> Any:
            nonlocal moved
            moved += buffer.nbytes
            return send(self, buffer, *args)

        patch.setattr(owner, "send", counted)
    state, error = plain(), ""
    local = emptied(plain())
    if why == "mismatch":
        local["a"] = local["a"][1:]
    try:
        if rank == 0:
            ferry = transport()
            ferry.send_checkpoint([1], state, step=3)
            assert via(ferry) == ""
        else:
            ferry = transport(local, same_host=same_host)
            ferry.recv_checkpoint(0, step=4 if why == "step" else None)
    except (StateMismatch, StepMismatch) as raised:
        error = type(raised).__name__
    finally:
        patch.undo()
    rejected_bytes = moved
    local = emptied(plain())
    ferry = transport(local, same_host=same_host)
    if rank == 0:
        ferry.send_checkpoint([1], state)
    else:
        ferry.recv_checkpoint(0)
        assert_same(local, state)
    return error, rejected_bytes, via(ferry)


@pytest.mark.parametrize("same_host", [True, False], ids=["memory", "group"])
@pytest.mark.parametrize(("why", "error"), [("mismatch", "StateMismatch"), ("step", "StepMismatch")])
def test_a_rejected_state_is_not_sent_and_the_group_stays_usable(
    why: str, error: str, same_host: bool, pair: Cluster
) -> None:
    sent, received = pair.run(reject, why, same_host)
    how = "memory" if same_host else "group"
    assert (sent[0], sent[2]) == ("", how)
    assert received == (error, 24, how)
    assert sent[1] < 4096, "the length and the frame"


def link_of(descriptor: str) -> str:
    with contextlib.suppress(FileNotFoundError):  # that of the listing is closed
        return os.readlink(f"/proc/self/fd/{descriptor}")
    return ""


def left() -> list[str]:
    """Return the threads, sockets and mappings of torchferry in this process."""
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("torchferry")]
    with open("/proc/self/maps") as maps, open("/proc/net/unix") as sockets:
        own = {link_of(fd) for fd in os.listdir("/proc/self/fd")}
        rings = [line for line in maps if "torchferry" in line]
        listed = [line for line in sockets if f"socket:[{line.split()[6]}]" in own and "torchferry" in line]
    return threads + rings + listed


def fail_in_the_middle(rank: int, failing: int, name: str) -> tuple[str, list[str]]:
    """Fail on one rank at the second message, on a group of its own."""
    patch, calls = pytest.MonkeyPatch(), 0
    method = "send" if rank == 0 else "recv"
    original = getattr(MemoryChannel, method)

    def counted(channel: MemoryChannel, buffer: torch.Tensor, hasher: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2 and rank == failing:
            raise MemoryError("a test")
        return original(channel, buffer, hasher)

    patch.setattr(MemoryChannel, method, counted)
    ferry = PGTransport(new_group(rank, (0, 1), name), TIMEOUT_S, "cpu")
    error = ""
    try:
        if rank == 0:
            ferry.send_checkpoint([1], plain())
        else:
            ferry.recv_checkpoint(0)
    except (MemoryError, LinkBroken, PeerGaveUp) as raised:
        error = type(raised).__name__
    finally:
        patch.undo()
    assert calls >= 2
    assert wait_for_lanes(2.0) is not None
    return error, left()


@pytest.mark.parametrize(
    ("failing", "errors"),
    [(0, ["MemoryError", "PeerGaveUp"]), (1, ["LinkBroken", "MemoryError"])],
    ids=["sender", "receiver"],
)
def test_a_failed_transfer_leaves_nothing(failing: int, errors: list[str], pair: Cluster) -> None:
    found = pair.run(fail_in_the_middle, failing, unique_name())
    assert [error for error, _ in found] == errors
    assert [rest for _, rest in found] == [[], []]


def test_an_offer_without_a_receiver_leaves_nothing() -> None:
    before = len(os.listdir("/proc/self/fd"))
    MemoryOffer(os.urandom(16), 1).close()
    assert len(os.listdir("/proc/self/fd")) == before
