"""The conformance kit that every link passes, also links of other packages.

`check_link` returns two functions, one for each end of a link. Run them at the same time, in two processes or
threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from torchferry.core.push import ABORT_BYTES, NONCE_BYTES, TransferId
from torchferry.errors import LinkError, LinkTimeout, PeerGaveUp
from torchferry.links.base import Channel, Link

_SIZES = (1, 3, 4096, 1 << 20, (8 << 20) + 1)
_COUNT = 200
_NONCE = bytes(range(NONCE_BYTES))


def check_link(*, timeout_s: float = 10.0) -> tuple[Callable[[Link, int], None], Callable[[Link, int], None]]:
    """Return the two halves of the kit: (for the sending end, for the receiving end).

    Each takes the link and its peer, and raises AssertionError if the link breaks a rule.
    """

    def sending(link: Link, peer: int) -> None:
        check_properties(link)
        check_living_peer(link, peer)
        send_frames(link, peer, timeout_s)
        send_sizes(link, peer, timeout_s)
        send_two_transfers(link, peer, timeout_s)
        send_many(link, peer, timeout_s)
        send_abort(link, peer, timeout_s)

    def receiving(link: Link, peer: int) -> None:
        check_properties(link)
        check_living_peer(link, peer)
        receive_frames(link, peer, timeout_s)
        receive_sizes(link, peer, timeout_s)
        receive_two_transfers(link, peer, timeout_s)
        receive_many(link, peer, timeout_s)
        receive_abort(link, peer, timeout_s)
        receive_nothing(link, peer, timeout_s)
        close(link, peer)

    return sending, receiving


def check_properties(link: Link) -> None:
    """`can_access` returns a bool for every device, and every transfer gets a new identifier."""
    for device in {link.device, torch.device("cpu"), torch.device("meta")}:
        assert isinstance(link.can_access(device), bool), f"can_access({device}) does not return a bool"
    assert not link.can_access(torch.device("meta")), (
        "the link can access the meta device, which has no memory"
    )
    one, two = link.new_transfer(), link.new_transfer()
    assert one.serial != two.serial, "two transfers have the same serial number"
    assert one.nonce != two.nonce, "two transfers have the same nonce"
    assert len(one.nonce) == NONCE_BYTES, f"the nonce has {len(one.nonce)} bytes"


def check_living_peer(link: Link, peer: int) -> None:
    """A peer that is alive is not reported as gone."""
    try:
        link.check_peer(peer)
    except LinkError as error:
        raise AssertionError(f"a living peer was reported as gone: {error}") from error


def _channel(link: Link, peer: int, serial: int) -> Channel:
    return link.channel(peer, TransferId(0, serial, _NONCE))


def send_frames(link: Link, peer: int, timeout_s: float) -> None:
    """Send two pairs of a length and a frame."""
    for number in (0, 1):
        with link.frames(peer, "send", timeout_s) as frames:
            for nbytes in (8, 100):
                frames.send(_bytes(link, number, nbytes)).wait(timeout_s)


def receive_frames(link: Link, peer: int, timeout_s: float) -> None:
    """Frames arrive in order, each behind its length."""
    for number in (0, 1):
        with link.frames(peer, "receive", timeout_s) as frames:
            for nbytes in (8, 100):
                _check_arrives(link, frames, number, nbytes, timeout_s)


def send_sizes(link: Link, peer: int, timeout_s: float) -> None:
    """Send one message of each size."""
    channel = _channel(link, peer, 1)
    for number, nbytes in enumerate(_SIZES):
        channel.send(_bytes(link, number, nbytes)).wait(timeout_s)


def receive_sizes(link: Link, peer: int, timeout_s: float) -> None:
    """Every byte of every size arrives unchanged."""
    channel = _channel(link, peer, 1)
    for number, nbytes in enumerate(_SIZES):
        _check_arrives(link, channel, number, nbytes, timeout_s)


def send_two_transfers(link: Link, peer: int, timeout_s: float) -> None:
    """Send one message in each of two transfers."""
    pending = [_channel(link, peer, 2 + n).send(_bytes(link, n, 100)) for n in (0, 1)]
    for each in pending:
        each.wait(timeout_s)


def receive_two_transfers(link: Link, peer: int, timeout_s: float) -> None:
    """A message goes to its own transfer, although the receives are posted in the other order."""
    buffers = [torch.zeros(100, dtype=torch.uint8, device=link.device) for _ in (0, 1)]
    pending = {n: _channel(link, peer, 2 + n).recv(buffers[n]) for n in (1, 0)}
    for n in (1, 0):
        pending[n].wait(timeout_s)
        assert torch.equal(buffers[n], _bytes(link, n, 100)), f"transfer {n} got a message of the other"


def send_many(link: Link, peer: int, timeout_s: float) -> None:
    """Send many messages at once."""
    channel = _channel(link, peer, 4)
    pending = [channel.send(_bytes(link, n, 1000 + n)) for n in range(_COUNT)]
    for each in pending:
        each.wait(timeout_s)


def receive_many(link: Link, peer: int, timeout_s: float) -> None:
    """Many messages of one channel arrive in order."""
    channel = _channel(link, peer, 4)
    buffers = [torch.zeros(1000 + n, dtype=torch.uint8, device=link.device) for n in range(_COUNT)]
    pending = [channel.recv(buffer) for buffer in buffers]
    for each in pending:
        each.wait(timeout_s)
    for n, buffer in enumerate(buffers):
        assert torch.equal(buffer, _bytes(link, n, 1000 + n)), f"message {n} of {_COUNT} arrived changed"


def send_abort(link: Link, peer: int, timeout_s: float) -> None:
    """Abort a transfer whose next message is too short for an abort. If the link has no aborts, send it."""
    channel = _channel(link, peer, 5)
    pending = channel.send_abort(7, [4, 4096])
    for each in pending or [channel.send(_bytes(link, 5, 4)), channel.send(_bytes(link, 5, 4096))]:
        each.wait(timeout_s)


def receive_abort(link: Link, peer: int, timeout_s: float) -> None:
    """An abort names the failed rank. A message is not taken for an abort."""
    channel = _channel(link, peer, 5)
    buffers = [torch.zeros(nbytes, dtype=torch.uint8, device=link.device) for nbytes in (4, 4096)]
    for buffer in buffers:
        channel.recv(buffer).wait(timeout_s)
    channel.raise_if_aborted(bytes(buffers[0].tolist()))
    failed_rank: int | None = None
    try:
        channel.raise_if_aborted(bytes(buffers[1][:ABORT_BYTES].tolist()))
    except PeerGaveUp as error:
        failed_rank = error.failed_rank
    if failed_rank is None:
        assert torch.equal(buffers[1], _bytes(link, 5, 4096)), "a message arrived changed"
        return
    assert failed_rank == 7, f"the abort names rank {failed_rank}"
    assert not buffers[1][ABORT_BYTES:].any(), "an abort wrote more than its own bytes"


def receive_nothing(link: Link, peer: int, timeout_s: float) -> None:
    """A wait for a message that is never sent raises LinkTimeout in time. It may break the link."""
    buffer = torch.zeros(10, dtype=torch.uint8, device=link.device)
    pending = _channel(link, peer, 6).recv(buffer)
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            pending.wait(0.2)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=wait, name="link-kit-wait", daemon=True)
    thread.start()
    thread.join(timeout_s)
    assert not thread.is_alive(), f"a wait with a timeout of 0.2 s did not end within {timeout_s:g} s"
    assert raised, "a receive that is never answered did not raise LinkTimeout"
    assert isinstance(raised[0], LinkTimeout), (
        f"a receive that is never answered raised {raised[0]!r}, not LinkTimeout"
    )


def close(link: Link, peer: int) -> None:
    """Closing raises nothing, however often. This check is the last."""
    link.close(peer)
    link.close(peer)


def _check_arrives(link: Link, channel: Channel, seed: int, nbytes: int, timeout_s: float) -> None:
    buffer = torch.zeros(nbytes, dtype=torch.uint8, device=link.device)
    channel.recv(buffer).wait(timeout_s)
    assert torch.equal(buffer, _bytes(link, seed, nbytes)), f"{nbytes} bytes arrived changed"


def _bytes(link: Link, seed: int, nbytes: int) -> torch.Tensor:
    numbers = torch.arange(1, nbytes + 1, dtype=torch.int64, device="cpu") * 2654435761 + seed * 97
    return (numbers >> 7).to(torch.uint8).to(link.device)
