"""Every link passes the kit, and the kit finds a link that breaks a rule."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from tests.support.cluster import Cluster
from tests.support.links import ShortLink
from torchferry.core.push import TransferId
from torchferry.errors import LinkBroken
from torchferry.links.base import Link, Pending
from torchferry.links.process_group import ProcessGroupLink
from torchferry.testing import MemoryLink, MemoryNetwork, check_link


def run_kit_in_threads(sender: Link, receiver: Link, timeout_s: float = 5) -> None:
    sending, receiving = check_link(timeout_s=timeout_s)
    with ThreadPoolExecutor(2) as threads:
        halves = [threads.submit(sending, sender, 1), threads.submit(receiving, receiver, 0)]
        for half in halves:
            half.result(timeout=30)


@pytest.mark.parametrize("own_buffers", [False, True])
def test_the_link_in_memory_passes(own_buffers: bool) -> None:
    network = MemoryNetwork()
    run_kit_in_threads(network.link(0, own_buffers=own_buffers), network.link(1, own_buffers=own_buffers))


def run_kit_on_gloo(rank: int) -> None:
    # A group of its own: the kit ends with a timeout, after which gloo's pairs are dead.
    group = dist.new_group([0, 1])
    link = ProcessGroupLink(group, torch.device("cpu"))
    check_link(timeout_s=20)[rank](link, 1 - rank)


def test_a_process_group_passes(pair: Cluster) -> None:
    pair.run(run_kit_on_gloo)


@pytest.mark.parametrize("sends_short", [False, True])
def test_a_link_that_accepts_short_messages_passes(sends_short: bool) -> None:
    network = MemoryNetwork()
    run_kit_in_threads(ShortLink(network, 0, sends_short), ShortLink(network, 1, sends_short))


class FlippingLink(MemoryLink):
    """Flips one bit of every large message."""

    def send(self, buffer: torch.Tensor, peer: int, tag: int) -> Pending:
        changed = buffer.clone()
        if changed.numel() > 1000:
            changed[500] ^= 1
        return super().send(changed, peer, tag)


class LinkWithoutTags(MemoryLink):
    """Ignores tags."""

    def send(self, buffer: torch.Tensor, peer: int, tag: int) -> Pending:
        return super().send(buffer, peer, 0)

    def recv(self, buffer: torch.Tensor, peer: int, tag: int) -> Pending:
        return super().recv(buffer, peer, 0)


class LinkForAnyMemory(MemoryLink):
    """Claims to accept any memory."""

    def can_access(self, device: torch.device) -> bool:
        return True


class LinkWithDeadPeers(MemoryLink):
    """Reports a living peer as gone."""

    def check_peer(self, peer: int) -> None:
        raise LinkBroken(f"rank {peer} is gone", peer=peer)


class OverwritingLink(ShortLink):
    """Writes to the whole buffer although the message is short."""

    def recv(self, buffer: torch.Tensor, peer: int, tag: int) -> Pending:
        buffer[-1] = 1
        return super().recv(buffer, peer, tag)


class LinkThatDoesNotClose(MemoryLink):
    """Raises when it is closed."""

    def close(self, peer: int) -> None:
        raise AssertionError("close raised")


class LinkWithoutTimeouts(MemoryLink):
    """Waits as long as it takes."""

    def recv(self, buffer: torch.Tensor, peer: int, tag: int) -> Pending:
        pending = super().recv(buffer, peer, tag)

        class Endless:
            def wait(self, timeout_s: float) -> None:
                pending.wait(60)

        return Endless()


class LinkWithOneTransfer(MemoryLink):
    """Gives all transfers the same identifier."""

    def new_transfer(self) -> TransferId:
        return TransferId(0, 1, bytes(16))


@pytest.mark.parametrize(
    ("broken", "complaint"),
    [
        (FlippingLink, "arrived changed"),
        (LinkWithoutTags, "got a message of the other"),
        (LinkForAnyMemory, "can access the meta device"),
        (LinkWithDeadPeers, "reported as gone"),
        (OverwritingLink, "wrote more than its own bytes"),
        (LinkThatDoesNotClose, "close raised"),
        (LinkWithOneTransfer, "same serial number"),
        (LinkWithoutTimeouts, "did not end within 1 s"),
    ],
)
def test_the_kit_finds_a_link_that_breaks_a_rule(broken: type[MemoryLink], complaint: str) -> None:
    network = MemoryNetwork()
    with pytest.raises(AssertionError, match=complaint):
        run_kit_in_threads(broken(network, 0), broken(network, 1), timeout_s=1)


def test_a_wait_for_a_rank_that_left_the_network_fails() -> None:
    network = MemoryNetwork()
    waiting = network.link(1).recv(torch.zeros(4, dtype=torch.uint8), 0, 5)
    network.close(0)
    with pytest.raises(ConnectionError, match="rank 0 is gone"):
        waiting.wait(30)
    with pytest.raises(ConnectionError, match="rank 0 is gone"):
        network.link(1).send(torch.zeros(4, dtype=torch.uint8), 0, 5)


def test_a_wait_of_a_rank_that_closes_its_link_ends() -> None:
    link = MemoryNetwork().link(1)
    waiting = link.recv(torch.zeros(4, dtype=torch.uint8), 0, 5)
    link.close(0)
    with pytest.raises(ConnectionError, match="rank 1 has closed its link"):
        waiting.wait(30)
