"""The process group link converts the exceptions of a backend."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.cluster import Cluster, WorkerDied
from torchferry.errors import LinkBroken, LinkError, LinkTimeout
from torchferry.links.process_group import ProcessGroupLink

BUFFER = torch.zeros(4, dtype=torch.uint8)


class FailingGroup:
    """A fake process group whose calls raise a given error."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        raise self._error

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        error = self._error

        class Work:
            def wait(self, timeout: object) -> None:
                raise error

        return Work()


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (RuntimeError("Timed out waiting 99ms for recv operation"), LinkTimeout),
        (RuntimeError("Application timeout caused pair closure"), LinkBroken),
        (RuntimeError("Connection closed by peer"), LinkBroken),
        (ConnectionResetError("reset"), LinkBroken),
        (RuntimeError(""), LinkBroken),
    ],
)
def test_an_exception_of_the_backend_becomes_a_link_error_that_names_the_peer(
    raised: Exception, expected: type[LinkError]
) -> None:
    link = ProcessGroupLink(FailingGroup(raised), torch.device("cpu"))
    with pytest.raises(expected) as sent:
        link.send(BUFFER, 3, 1)
    with pytest.raises(expected) as received:
        link.recv(BUFFER, 3, 1).wait(1.0)
    assert sent.value.peer == received.value.peer == 3
    assert sent.value.__cause__ is raised


def receive_without_a_sender(rank: int, timeout_s: float) -> tuple[str, float]:
    link = ProcessGroupLink(dist.new_group([0, 1]), torch.device("cpu"))
    start = time.monotonic()
    if rank == 1:
        return "", 0.0
    try:
        link.recv(BUFFER.clone(), 1, 1).wait(timeout_s)
    except LinkTimeout as error:
        return type(error).__name__, time.monotonic() - start
    return "nothing raised", time.monotonic() - start


@pytest.mark.parametrize("timeout_s", [0.3, 0.0004, 0.0])
def test_a_wait_ends_at_its_own_timeout_and_not_at_the_group_timeout(timeout_s: float, pair: Cluster) -> None:
    (name, seconds), _ = pair.run(receive_without_a_sender, timeout_s)
    assert name == "LinkTimeout"
    assert timeout_s - 0.05 < seconds < 5


def die_or_wait(rank: int) -> str:
    link = ProcessGroupLink(dist.group.WORLD, torch.device("cpu"))
    if rank == 1:
        link.send(torch.ones(4, dtype=torch.uint8), 0, 1).wait(10)
        os.kill(os.getpid(), signal.SIGKILL)
    # The first message shows that the connection stood before the peer died.
    link.recv(BUFFER.clone(), 1, 1).wait(10)
    with pytest.raises(LinkBroken) as raised:
        link.recv(BUFFER.clone(), 1, 2).wait(10)
    return str(raised.value)


def test_a_peer_that_died_is_reported_as_a_broken_link(doomed: Cluster) -> None:
    survivor, dead = doomed.start([(die_or_wait, ()), (die_or_wait, ())]).outcomes()
    assert isinstance(dead.error, WorkerDied)
    assert survivor.error is None
    assert "rank 1" in survivor.value
    assert "create a new process group without rank" in survivor.value
