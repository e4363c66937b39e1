"""The receiver's own work on received messages, while the sender leaves or the deadline passes."""

from __future__ import annotations

import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from tests.faults.jobs import new_group, unique_name, wait_for_lanes
from tests.faults.promise import promises
from tests.support.cluster import Cluster
from torchferry import PGTransport
from torchferry.core.watch import GONE_AFTER_S, PROBE_AFTER_S
from torchferry.engine import sink
from torchferry.errors import LinkBroken, TargetTorn, TornAndLate
from torchferry.links.process_group import ProcessGroupLink

BUSY_S = 3 * (PROBE_AFTER_S + GONE_AFTER_S)
"""Long enough for a waiting receiver to probe the peer and to declare it gone."""

NAMES = 12
SIDE = 64


def state_of(fill: int, count: int) -> dict[str, torch.Tensor]:
    """Return many small tensors, which are packed into chunks."""
    return {f"t{n}": torch.full((256,), fill + n, dtype=torch.int32) for n in range(count)}


def delay_the_first_digest(monkeypatch: pytest.MonkeyPatch, group: Any) -> None:
    """Block the digest of the first chunk until the sender is gone, and then for BUSY_S."""
    original = sink.digest  # type: ignore[attr-defined]
    link = ProcessGroupLink(group, torch.device("cpu"))
    started = threading.Event()

    def slow(*args: Any) -> int:
        if not started.is_set():
            started.set()
            try:
                while True:
                    link.check_peer(0)
                    time.sleep(0.01)
            except LinkBroken:
                time.sleep(BUSY_S)
        return original(*args)

    monkeypatch.setattr(sink, "digest", slow)


def send_and_leave_or_receive_slowly(rank: int, name: str, count: int, in_place: bool) -> bool:
    """Send and leave the group at once, or receive so slowly that the sender is gone meanwhile."""
    group = new_group(rank, (0, 1), name)
    new = state_of(1000, count)
    if rank == 0:
        PGTransport(group, 20.0, "cpu").send_checkpoint([1], new)
        del group
        gc.collect()
        return True
    target = state_of(0, count)
    with pytest.MonkeyPatch.context() as patched:
        delay_the_first_digest(patched, group)
        transport = PGTransport(group, 20.0, "cpu", (lambda: target) if in_place else None)
        received: Any = transport.recv_checkpoint(0)
    return all(torch.equal(received[key], value) for key, value in new.items())


@promises(
    "the sender leaves after its send has returned, while the receiver still processes received messages",
    "the transfer succeeds, however long the receiver takes",
)
@pytest.mark.parametrize("count", [200, 8000], ids=["digests_in_the_frame", "digest_blocks"])
@pytest.mark.parametrize(
    "in_place", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["in_place", "fresh"]
)
def test_a_transfer_succeeds_when_the_sender_leaves_after_sending(
    in_place: bool, count: int, trio: Cluster
) -> None:
    job = (send_and_leave_or_receive_slowly, (unique_name(), count, in_place))
    assert trio.run_each([job, job, None]) == [True, True, None]


def receive_past_the_deadline(rank: int, name: str, verify: bool) -> dict[str, Any]:
    """Receive one tensor under many names into tensors of another layout, past the deadline."""
    group = new_group(rank, (0, 1), name)
    weight = torch.arange(SIDE * SIDE, dtype=torch.float64).view(SIDE, SIDE)
    if rank == 0:
        PGTransport(group, 20.0, "cpu", verify=verify).send_checkpoint([1], dict.fromkeys(names(), weight))
        return {}
    target = {name: torch.full((SIDE, SIDE), -1.0, dtype=torch.float64).t() for name in names()}
    original = sink.write_items  # type: ignore[attr-defined]
    written = 0

    def slow(*args: Any, **kwargs: Any) -> None:
        nonlocal written
        time.sleep(0.1)
        original(*args, **kwargs)
        written += 1

    started_s = time.monotonic()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sink, "write_items", slow)
        with pytest.raises(TargetTorn) as raised:
            PGTransport(group, 0.4, "cpu", lambda: target, verify=verify).recv_checkpoint(0)
    seconds = time.monotonic() - started_s
    at_the_error = {name: tensor.clone() for name, tensor in target.items()}
    assert wait_for_lanes(5.0) is not None
    error = raised.value
    return {
        "late": isinstance(error, TornAndLate) and 0.4 <= seconds < 0.9,
        "some tensors were written": 0 < written < NAMES,
        "reported whole, but differ": [
            name for name in error.whole if not torch.equal(at_the_error[name], weight)
        ],
        "reported untouched, but differ": [
            name for name in error.untouched if (at_the_error[name] != -1).any()
        ],
        "changed after the error": [
            name for name, tensor in target.items() if not torch.equal(tensor, at_the_error[name])
        ],
    }


def names() -> list[str]:
    return [f"n{number}" for number in range(NAMES)]


@promises(
    "the deadline passes while the receiver copies received items to the local tensors",
    "`TargetTorn` within 0.5 s; every path it lists as whole is whole, and no more bytes are written",
)
@pytest.mark.parametrize("verify", [True, False], ids=["verified", "unverified"])
def test_no_byte_is_written_after_the_error(verify: bool, trio: Cluster) -> None:
    job = (receive_past_the_deadline, (unique_name(), verify))
    assert trio.run_each([job, job, None])[1] == {
        "late": True,
        "some tensors were written": True,
        "reported whole, but differ": [],
        "reported untouched, but differ": [],
        "changed after the error": [],
    }


def transfer_on_group_and_backend(rank: int, name: str, rounds: int) -> list[list[int]]:
    """Transfer in two threads at once: one uses the group, the other its backend."""
    group = new_group(rank, (0, 1), name)
    groups = [group, group._get_backend(torch.device("cpu"))]

    def transfer(index: int) -> list[int]:
        transport = PGTransport(groups[index], 20.0, "cpu", verify=index == 0)
        wrong = []
        for number in range(rounds):
            fill = 2 * number + index
            if rank == 0:
                state = {f"l{n}": torch.full((1 << 18,), fill, dtype=torch.int32) for n in range(4)}
                # Either thread may receive either state, so the state names its fill value.
                transport.send_checkpoint([1], {"fill": fill, **state})
            else:
                state = transport.recv_checkpoint(0)  # type: ignore[assignment]
                held = {int(value) for n in range(4) for value in state[f"l{n}"].unique()}
                if held != {state["fill"]}:
                    wrong.append(number)
        return wrong

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(transfer, range(2)))


@promises(
    "two transfers at once on one group, one through the `ProcessGroup`, one through its backend",
    "neither receives the other's messages, verified or not",
)
def test_transfers_on_a_group_and_on_its_backend_keep_their_messages_apart(trio: Cluster) -> None:
    job = (transfer_on_group_and_backend, (unique_name(), 10))
    assert trio.run_each([job, job, None]) == [[[], []], [[], []], None]
