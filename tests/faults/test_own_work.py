"""A receiver that is busy with what has arrived: the peer may leave, the deadline may pass meanwhile."""

from __future__ import annotations

import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from tests.faults.promised import shows
from tests.faults.scene import lanes_gone, new_group, unique_name
from tests.support.cluster import Cluster
from torchferry import PGTransport
from torchferry.core.watch import GONE_AFTER_S, PROBE_AFTER_S
from torchferry.engine import sink
from torchferry.errors import LinkBroken, TargetTorn, TornAndLate
from torchferry.links.process_group import ProcessGroupLink

BUSY_S = 3 * (PROBE_AFTER_S + GONE_AFTER_S)
"""Long enough for whoever watches to ask after the peer, and to give it up."""

PLACES = 12
SIDE = 64


def state_of(fill: int, count: int) -> dict[str, torch.Tensor]:
    """Many small tensors, which come packed."""
    return {f"t{n}": torch.full((256,), fill + n, dtype=torch.int32) for n in range(count)}


def be_busy(monkeypatch: pytest.MonkeyPatch, group: Any) -> None:
    """Take long over the first message that arrives: until the sender is gone, and some more."""
    original = sink.digests  # type: ignore[attr-defined]
    link = ProcessGroupLink(group, torch.device("cpu"))
    begun = threading.Event()

    def slow(*args: Any) -> list[int]:
        if not begun.is_set():
            begun.set()
            try:
                while True:
                    link.check_peer(0)
                    time.sleep(0.01)
            except LinkBroken:
                time.sleep(BUSY_S)
        return original(*args)

    monkeypatch.setattr(sink, "digests", slow)


def leave_or_be_busy(rank: int, name: str, count: int, in_place: bool) -> bool:
    """Send and leave the group at once; or take so long over what arrived that the sender is gone."""
    group = new_group(rank, (0, 1), name)
    new = state_of(1000, count)
    if rank == 0:
        PGTransport(group, 20.0, "cpu").send_checkpoint([1], new)
        del group
        gc.collect()
        return True
    target = state_of(0, count)
    with pytest.MonkeyPatch.context() as patched:
        be_busy(patched, group)
        transport = PGTransport(group, 20.0, "cpu", (lambda: target) if in_place else None)
        received: Any = transport.recv_checkpoint(0)
    return all(torch.equal(received[key], value) for key, value in new.items())


@shows(
    "the sender leaves once its send has returned, while the receiver is busy with what has arrived",
    "the transfer succeeds, however long that takes",
)
@pytest.mark.parametrize("count", [200, 8000], ids=["digests_in_the_frame", "sealed"])
@pytest.mark.parametrize("in_place", [True, False], ids=["in_place", "fresh"])
def test_a_sender_that_has_left_is_not_called_dead(in_place: bool, count: int, trio: Cluster) -> None:
    job = (leave_or_be_busy, (unique_name(), count, in_place))
    assert trio.run_each([job, job, None]) == [True, True, None]


def receive_slowly(rank: int, name: str, verify: bool) -> dict[str, Any]:
    """Receive one tensor under many names into as many tensors of another layout, and be late with it."""
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

    began_s = time.monotonic()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sink, "write_items", slow)
        with pytest.raises(TargetTorn) as raised:
            PGTransport(group, 0.4, "cpu", lambda: target, verify=verify).recv_checkpoint(0)
    seconds = time.monotonic() - began_s
    then = {name: tensor.clone() for name, tensor in target.items()}
    assert lanes_gone(5.0) is not None
    error = raised.value
    return {
        "late": isinstance(error, TornAndLate) and 0.4 <= seconds < 0.9,
        "some was written": 0 < written < PLACES,
        "called whole": [name for name in error.whole if not torch.equal(then[name], weight)],
        "called untouched": [name for name in error.untouched if (then[name] != -1).any()],
        "changed later": [name for name, tensor in target.items() if not torch.equal(tensor, then[name])],
    }


def names() -> list[str]:
    return [f"n{number}" for number in range(PLACES)]


@shows(
    "the deadline passes while the receiver is putting what arrived into its place",
    "`TargetTorn` within 0.5 s; nothing is called whole that is not, and nothing is written any more",
)
@pytest.mark.parametrize("verify", [True, False], ids=["verified", "unverified"])
def test_nothing_is_written_once_the_error_was_raised(verify: bool, trio: Cluster) -> None:
    job = (receive_slowly, (unique_name(), verify))
    assert trio.run_each([job, job, None])[1] == {
        "late": True,
        "some was written": True,
        "called whole": [],
        "called untouched": [],
        "changed later": [],
    }


def exchange_on_both(rank: int, name: str, rounds: int) -> list[list[int]]:
    """Transfer in two threads at once, over the group in one and over its backend in the other."""
    group = new_group(rank, (0, 1), name)
    movers = [group, group._get_backend(torch.device("cpu"))]

    def transfer(mine: int) -> list[int]:
        transport = PGTransport(movers[mine], 20.0, "cpu", verify=mine == 0)
        wrong = []
        for number in range(rounds):
            mark = 2 * number + mine
            if rank == 0:
                state = {f"l{n}": torch.full((1 << 18,), mark, dtype=torch.int32) for n in range(4)}
                # The first to come is the first to be taken, so what arrives says whose it is.
                transport.send_checkpoint([1], {"mark": mark, **state})
            else:
                state = transport.recv_checkpoint(0)  # type: ignore[assignment]
                held = {int(value) for n in range(4) for value in state[f"l{n}"].unique()}
                if held != {state["mark"]}:
                    wrong.append(number)
        return wrong

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(transfer, range(2)))


@shows(
    "two transfers at once on one group, one through the `ProcessGroup`, one through its backend",
    "neither takes the other's messages, verified or not",
)
def test_a_group_and_its_backend_are_one(trio: Cluster) -> None:
    job = (exchange_on_both, (unique_name(), 10))
    assert trio.run_each([job, job, None]) == [[[], []], [[], []], None]
