"""The channel through memory, between two threads: exact, prompt when a peer ends, and without leaks."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from xxhash import xxh3_64, xxh3_64_intdigest

from torchferry.core.push import NONCE_BYTES, TOKEN_BYTES
from torchferry.errors import LinkBroken, LinkTimeout, PeerGaveUp, StateError
from torchferry.links import memory_channel, ring
from torchferry.links.memory_channel import MemoryChannel, MemoryOffer, ring_bytes, take_offer
from torchferry.links.ring import SLOTS
from torchferry.links.sockets import connect_locally

NONCE = b"n" * NONCE_BYTES
SLOT_BYTES = 4096
FAR_S = 10.0
SOON_S = 0.05


def connected(offer: MemoryOffer, token: bytes) -> tuple[MemoryChannel, MemoryChannel]:
    receiver = take_offer(token, NONCE, sender=0, receiver=1, timeout_s=FAR_S)
    return offer.accept(NONCE), receiver


@contextmanager
def unopened() -> Iterator[tuple[MemoryChannel, MemoryChannel]]:
    token = os.urandom(TOKEN_BYTES)
    offer = MemoryOffer(token, 1)
    ends = connected(offer, token)
    offer.close()
    try:
        yield ends
    finally:
        for end in ends:
            end.close()


def opened(sender: MemoryChannel, receiver: MemoryChannel, nbytes: int = SLOTS * SLOT_BYTES) -> None:
    both(lambda: sender.send_ring(nbytes).wait(FAR_S), lambda: receiver.receive_ring().wait(FAR_S))


def both(send: Callable[[], Any], receive: Callable[[], Any]) -> None:
    with ThreadPoolExecutor(2) as threads:
        for end in [threads.submit(send), threads.submit(receive)]:
            end.result(FAR_S)


def wait_for_all(sender: MemoryChannel, timeout_s: float = FAR_S) -> None:
    for step in sender.flush():
        step.wait(timeout_s)


@pytest.fixture
def ends() -> Iterator[tuple[MemoryChannel, MemoryChannel]]:
    with unopened() as found:
        opened(*found)
        assert found[0].is_open
        assert found[1].is_open
        yield found


def message(nbytes: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (nbytes,), dtype=torch.uint8, generator=generator)


def test_messages_of_all_sizes_arrive_in_order(ends: tuple[MemoryChannel, MemoryChannel]) -> None:
    sender, receiver = ends
    sizes = [1, SLOT_BYTES - 1, SLOT_BYTES, SLOT_BYTES + 1, SLOTS * SLOT_BYTES, 100_003, 40, 1_000_000, 7]
    sent = [message(nbytes, seed) for seed, nbytes in enumerate(sizes)]
    received = [torch.zeros_like(each) for each in sent]

    def send() -> None:
        for each in sent:
            sender.send(each).wait(FAR_S)
        wait_for_all(sender)

    def receive() -> None:
        for each in received:
            receiver.recv(each).wait(FAR_S)

    both(send, receive)
    assert all(torch.equal(one, two) for one, two in zip(sent, received, strict=True))


def test_both_ends_hash_a_message_that_they_copy(ends: tuple[MemoryChannel, MemoryChannel]) -> None:
    sender, receiver = ends
    data = message(3 * SLOTS * SLOT_BYTES + 5)
    sending, receiving = xxh3_64(), xxh3_64()
    both(
        lambda: sender.send(data, sending).wait(FAR_S),
        lambda: receiver.recv(torch.zeros_like(data), receiving).wait(FAR_S),
    )
    assert sending.intdigest() == receiving.intdigest() == xxh3_64_intdigest(data.numpy().tobytes())


def test_a_flush_waits_for_the_receiver(ends: tuple[MemoryChannel, MemoryChannel]) -> None:
    sender, receiver = ends
    sender.send(message(1)).wait(FAR_S)
    with pytest.raises(LinkTimeout):
        wait_for_all(sender, SOON_S)
    receiver.recv(torch.zeros(1, dtype=torch.uint8)).wait(FAR_S)
    wait_for_all(sender)


def test_a_full_ring_and_an_empty_one_end_in_a_timeout(ends: tuple[MemoryChannel, MemoryChannel]) -> None:
    sender, receiver = ends
    with pytest.raises(LinkTimeout, match="rank 0 did not"):
        receiver.recv(torch.zeros(1, dtype=torch.uint8)).wait(SOON_S)
    with pytest.raises(LinkTimeout, match="rank 1 did not"):
        sender.send(message((SLOTS + 1) * SLOT_BYTES)).wait(SOON_S)


def test_what_was_sent_arrives_although_the_sender_is_gone(
    ends: tuple[MemoryChannel, MemoryChannel],
) -> None:
    sender, receiver = ends
    data, found = message(3 * SLOT_BYTES), torch.zeros(3 * SLOT_BYTES, dtype=torch.uint8)
    sender.send(data).wait(FAR_S)
    sender.close()
    receiver.recv(found).wait(FAR_S)
    assert torch.equal(found, data)
    with pytest.raises(LinkBroken, match="rank 0"):
        receiver.recv(found).wait(FAR_S)


def test_a_sender_notices_at_once_that_its_receiver_is_gone(
    ends: tuple[MemoryChannel, MemoryChannel],
) -> None:
    sender, receiver = ends
    receiver.close()
    with pytest.raises(LinkBroken, match="rank 1"):
        sender.send(message((SLOTS + 1) * SLOT_BYTES)).wait(FAR_S)


def test_an_abort_arrives_after_the_bytes_before_it(ends: tuple[MemoryChannel, MemoryChannel]) -> None:
    sender, receiver = ends
    data, found = message(SLOTS * SLOT_BYTES), torch.zeros(SLOTS * SLOT_BYTES, dtype=torch.uint8)
    sender.send(data).wait(FAR_S)
    for step in sender.send_abort(258, []):
        step.wait(FAR_S)
    receiver.recv(found).wait(FAR_S)
    assert torch.equal(found, data)
    for _ in range(2):
        with pytest.raises(PeerGaveUp) as raised:
            receiver.recv(found).wait(FAR_S)
        assert (raised.value.failed_rank, raised.value.peer) == (258, 0)


@pytest.mark.parametrize("end", ["close", "stop"])
def test_a_wait_ends_when_the_channel_is_closed_and_nothing_is_copied_afterwards(
    end: str, ends: tuple[MemoryChannel, MemoryChannel]
) -> None:
    _, receiver = ends
    found = torch.zeros(2, dtype=torch.uint8)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(receiver.recv(found).wait, FAR_S)
        time.sleep(SOON_S)
        getattr(receiver, end)()
        with pytest.raises(LinkBroken):
            waiting.result(1.0)
    with pytest.raises(LinkBroken):
        receiver.recv(found).wait(FAR_S)
    assert found.tolist() == [0, 0]


def test_memory_that_was_freed_raises_an_error(ends: tuple[MemoryChannel, MemoryChannel]) -> None:
    buffer = message(SLOT_BYTES)
    step = ends[0].send(buffer)
    buffer.untyped_storage().resize_(0)
    with pytest.raises(StateError, match="was freed"):
        step.wait(FAR_S)


def refuse_memory(nbytes: int) -> None:
    raise OSError("no memory")


@pytest.mark.parametrize("refused", ["SharedBlock", "map_received"])
def test_without_memory_both_ends_know_that_the_channel_is_not_open(
    refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ring, refused, refuse_memory)
    with unopened() as ends:
        opened(*ends)
        assert [end.is_open for end in ends] == [False, False]


def test_only_a_connection_with_the_nonce_is_accepted() -> None:
    token = os.urandom(TOKEN_BYTES)
    offer = MemoryOffer(token, 1)
    strangers = [socket.socket(socket.AF_UNIX) for _ in range(3)]
    for stranger, data in zip(strangers, (b"", b"x" * NONCE_BYTES, NONCE[:-1]), strict=True):
        connect_locally(stranger, f"{token.hex()}-1")
        stranger.sendall(data)
    ends = connected(offer, token)
    opened(*ends)
    assert all(end.is_open for end in ends)
    with pytest.raises(LinkBroken, match="did not connect"):
        offer.accept(NONCE)
    for end in (*ends, offer, *strangers):
        end.close()  # type: ignore[attr-defined]


def test_a_connection_of_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    token = os.urandom(TOKEN_BYTES)
    offer = MemoryOffer(token, 1)
    monkeypatch.setattr(memory_channel, "user_of", lambda sock: os.geteuid() + 1)
    receiver = take_offer(token, NONCE, sender=0, receiver=1, timeout_s=FAR_S)
    with pytest.raises(LinkBroken, match="did not connect"):
        offer.accept(NONCE)
    offer.close()
    with pytest.raises(LinkBroken):
        receiver.receive_ring().wait(FAR_S)
    receiver.close()


def test_an_offer_of_another_machine_can_t_be_taken() -> None:
    with pytest.raises(ConnectionError, match="another host"):
        take_offer(os.urandom(TOKEN_BYTES), NONCE, sender=0, receiver=1, timeout_s=FAR_S)


def test_a_ring_that_is_not_sealed_is_not_used() -> None:
    with unopened() as (sender, receiver):
        descriptor = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, SLOTS * SLOT_BYTES)
        socket.send_fds(sender._sock, [b"\x01"], [descriptor])
        receiver.receive_ring().wait(FAR_S)
        os.close(descriptor)
        assert not receiver.is_open


def test_no_descriptor_of_a_sender_without_a_ring_is_kept() -> None:
    with unopened() as (sender, receiver):
        before = len(os.listdir("/proc/self/fd"))
        socket.send_fds(sender._sock, [b"\x02"], [0])
        receiver.receive_ring().wait(FAR_S)
        assert not receiver.is_open
        assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("data", [b"", b"\x01", b"\x07"], ids=["closed", "no descriptor", "unknown"])
def test_a_sender_that_breaks_the_protocol_is_an_error(data: bytes) -> None:
    with unopened() as (sender, receiver):
        sender._sock.setblocking(True)
        if data:
            sender._sock.send(data)
        else:
            sender.close()
        with pytest.raises(LinkBroken):
            receiver.receive_ring().wait(FAR_S)


def test_nothing_is_left() -> None:
    def left() -> tuple[int, int, int]:
        with open("/proc/self/maps") as maps:
            rings = sum("torchferry" in line for line in maps)
        return len(os.listdir("/proc/self/fd")), rings, threading.active_count()

    before = left()
    for _ in range(20):
        with unopened() as ends:
            opened(*ends)
            ends[0].send(message(SLOT_BYTES)).wait(FAR_S)
    del ends
    assert left() == before


def test_a_forked_child_does_not_keep_the_channel(ends: tuple[MemoryChannel, MemoryChannel]) -> None:
    sender, receiver = ends
    child = os.fork()
    if child == 0:
        time.sleep(FAR_S)
        os._exit(0)
    try:
        sender.close()
        with pytest.raises(LinkBroken):
            receiver.recv(torch.zeros(1, dtype=torch.uint8)).wait(1.0)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.parametrize("receivers", [1, 2, 8, 9, 100, 1000])
def test_the_rings_of_all_receivers_are_bounded(receivers: int) -> None:
    each = ring_bytes(1 << 40, receivers)
    assert each % (SLOTS * 4096) == 0
    assert each * receivers <= 32 << 20
