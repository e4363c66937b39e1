"""Every link passes the kit; and a link that breaks a rule does not."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from tests.support.cluster import Cluster
from torchferry.errors import LinkBroken
from torchferry.links.base import Link, Pending
from torchferry.links.process_group import ProcessGroupLink
from torchferry.testing import MemoryLink, MemoryNetwork, check_link


def run_kit_in_threads(sender: Link, receiver: Link) -> None:
    sending, receiving = check_link(timeout_s=5)
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


class Flipping(MemoryLink):
    """Turns one bit of every large message."""

    def send(self, buffer: torch.Tensor, peer: int, tag: int) -> Pending:
        changed = buffer.clone()
        if changed.numel() > 1000:
            changed[500] ^= 1
        return super().send(changed, peer, tag)


class Mixing(MemoryLink):
    """Ignores tags."""

    def send(self, buffer: torch.Tensor, peer: int, tag: int) -> Pending:
        return super().send(buffer, peer, 0)

    def recv(self, buffer: torch.Tensor, peer: int, tag: int) -> Pending:
        return super().recv(buffer, peer, 0)


class Greedy(MemoryLink):
    """Claims to take any memory."""

    def takes(self, device: torch.device) -> bool:
        return True


class Mourning(MemoryLink):
    """Calls a peer gone that is there."""

    def probe(self, peer: int) -> None:
        raise LinkBroken(f"rank {peer} is gone", peer=peer)


class Boasting(MemoryLink):
    """Says that messages may be short, and fills the whole buffer whatever comes."""

    sends_short = True

    def recv(self, buffer: torch.Tensor, peer: int, tag: int) -> Pending:
        short = buffer[:100] if buffer.numel() == 4096 else buffer
        buffer[-1] = 1
        return super().recv(short, peer, tag)


class Clinging(MemoryLink):
    """Does not know how to end."""

    def break_off(self, peer: int) -> None:
        raise AssertionError("not to be broken off")


@pytest.mark.parametrize(
    ("broken", "complaint"),
    [
        (Flipping, "arrived changed"),
        (Mixing, "another's message"),
        (Greedy, "memory that is none"),
        (Mourning, "called gone"),
        (Boasting, "wrote more than it has"),
        (Clinging, "not to be broken off"),
    ],
)
def test_the_kit_finds_a_link_that_breaks_a_rule(broken: type[MemoryLink], complaint: str) -> None:
    network = MemoryNetwork()
    with pytest.raises(AssertionError, match=complaint):
        run_kit_in_threads(broken(network, 0), broken(network, 1))


def test_whoever_waits_for_a_rank_that_is_gone_is_told() -> None:
    network = MemoryNetwork()
    waiting = network.link(1).recv(torch.zeros(4, dtype=torch.uint8), 0, 5)
    network.close(0)
    with pytest.raises(ConnectionError, match="rank 0 is gone"):
        waiting.wait(30)
    with pytest.raises(ConnectionError, match="rank 0 is gone"):
        network.link(1).send(torch.zeros(4, dtype=torch.uint8), 0, 5)
