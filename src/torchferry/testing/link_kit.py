"""The kit that every link has to pass, ours and others'.

`check_link` gives two functions, one for each end of a link. Run them at the same time, each in whatever
process or thread its end needs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from torchferry.errors import LinkError, LinkTimeout
from torchferry.links.base import Link

_SIZES = (1, 3, 4096, 1 << 20, (8 << 20) + 1)
_TAG = 7000


def check_link(*, timeout_s: float = 10.0) -> tuple[Callable[[Link, int], None], Callable[[Link, int], None]]:
    """Give the two halves of the kit: (for the sending end, for the receiving end).

    Each takes the link and its peer there, and raises AssertionError if the link breaks a rule.
    """

    def sending(link: Link, peer: int) -> None:
        ask_about_itself(link)
        probe_the_living(link, peer)
        if link.sends_short:
            send_short(link, peer, timeout_s)
        send_sizes(link, peer, timeout_s)
        send_out_of_order(link, peer, timeout_s)
        send_many(link, peer, timeout_s)

    def receiving(link: Link, peer: int) -> None:
        ask_about_itself(link)
        probe_the_living(link, peer)
        if link.sends_short:
            receive_short(link, peer, timeout_s)
        receive_sizes(link, peer, timeout_s)
        receive_by_tag(link, peer, timeout_s)
        receive_many(link, peer, timeout_s)
        receive_nothing(link, peer)
        break_off(link, peer)

    return sending, receiving


def ask_about_itself(link: Link) -> None:
    """It says of any device whether it takes memory there, and whether messages may be short."""
    for device in {link.device, torch.device("cpu"), torch.device("meta")}:
        assert isinstance(link.takes(device), bool), f"takes({device}) does not say yes or no"
    assert not link.takes(torch.device("meta")), "it takes memory that is none"
    assert isinstance(link.sends_short, bool), "sends_short does not say yes or no"


def probe_the_living(link: Link, peer: int) -> None:
    """A peer that is there is not called gone."""
    try:
        link.probe(peer)
    except LinkError as error:
        raise AssertionError(f"a peer that is there was called gone: {error}") from error


def send_short(link: Link, peer: int, timeout_s: float) -> None:
    """Send less than the other end has room for, if the link says that this may be."""
    link.send(_bytes(link, 5, 100), peer, _TAG + 50).wait(timeout_s)


def receive_short(link: Link, peer: int, timeout_s: float) -> None:
    """What is shorter than its buffer fills the beginning of it, and nothing else."""
    buffer = torch.zeros(4096, dtype=torch.uint8, device=link.device)
    link.recv(buffer, peer, _TAG + 50).wait(timeout_s)
    assert torch.equal(buffer[:100], _bytes(link, 5, 100)), "a short message arrived changed"
    assert not buffer[100:].any(), "a short message wrote more than it has"


def send_sizes(link: Link, peer: int, timeout_s: float) -> None:
    """Send one message of each size, from the odd to the large."""
    for number, nbytes in enumerate(_SIZES):
        link.send(_bytes(link, number, nbytes), peer, _TAG + number).wait(timeout_s)


def receive_sizes(link: Link, peer: int, timeout_s: float) -> None:
    """Every byte of every size arrives as it was."""
    for number, nbytes in enumerate(_SIZES):
        buffer = torch.zeros(nbytes, dtype=torch.uint8, device=link.device)
        link.recv(buffer, peer, _TAG + number).wait(timeout_s)
        assert torch.equal(buffer, _bytes(link, number, nbytes)), f"{nbytes} bytes arrived changed"


def send_out_of_order(link: Link, peer: int, timeout_s: float) -> None:
    """Send two messages whose tags the other end takes the other way round."""
    pending = [link.send(_bytes(link, tag, 100), peer, _TAG + 100 + tag) for tag in (0, 1)]
    for each in pending:
        each.wait(timeout_s)


def receive_by_tag(link: Link, peer: int, timeout_s: float) -> None:
    """A message goes to the receive with its tag, whichever was posted first."""
    buffers = [torch.zeros(100, dtype=torch.uint8, device=link.device) for _ in (0, 1)]
    pending = {tag: link.recv(buffers[tag], peer, _TAG + 100 + tag) for tag in (1, 0)}
    for tag in (1, 0):
        pending[tag].wait(timeout_s)
        assert torch.equal(buffers[tag], _bytes(link, tag, 100)), f"tag {tag} got another's message"


def send_many(link: Link, peer: int, timeout_s: float) -> None:
    """Have many messages under way at once."""
    pending = [link.send(_bytes(link, n, 1000 + n), peer, _TAG + 1000 + n) for n in range(200)]
    for each in pending:
        each.wait(timeout_s)


def receive_many(link: Link, peer: int, timeout_s: float) -> None:
    """Many receives under way at once all get their own message."""
    buffers = [torch.zeros(1000 + n, dtype=torch.uint8, device=link.device) for n in range(200)]
    pending = [link.recv(buffer, peer, _TAG + 1000 + n) for n, buffer in enumerate(buffers)]
    for each in pending:
        each.wait(timeout_s)
    for n, buffer in enumerate(buffers):
        assert torch.equal(buffer, _bytes(link, n, 1000 + n)), f"message {n} of many arrived changed"


def receive_nothing(link: Link, peer: int) -> None:
    """A wait for what never comes ends in time, as a LinkTimeout. It may break the link."""
    buffer = torch.zeros(10, dtype=torch.uint8, device=link.device)
    try:
        link.recv(buffer, peer, _TAG + 9999).wait(0.2)
    except LinkTimeout:
        return
    raise AssertionError("a receive that nobody answers did not raise LinkTimeout")


def break_off(link: Link, peer: int) -> None:
    """Breaking off raises nothing, whatever has happened before, and however often. Last."""
    link.break_off(peer)
    link.break_off(peer)


def _bytes(link: Link, seed: int, nbytes: int) -> torch.Tensor:
    numbers = torch.arange(nbytes, dtype=torch.int64, device="cpu") * 2654435761 + seed * 97
    return (numbers >> 7).to(torch.uint8).to(link.device)
