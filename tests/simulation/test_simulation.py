"""The protocol in the simulation, for many seeds; and mutations of it, which the simulation must detect."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest

from tests.simulation.run_seeds import pin_to_core, run_seeds
from tests.support.sizes import count
from torchferry.core import codec, push, watch
from torchferry.core.outcome import ChunkState, Outcome
from torchferry.core.plan import Chunk
from torchferry.engine.push import lanes, receive, relay, send, transfer
from torchferry.engine.sink import Sink
from torchferry.errors import LinkBroken, SendBroken
from torchferry.testing.simulation import CheckFailed, simulate

SEEDS = count("SEEDS", full=2000, quick=300)
ROOT = Path(__file__).parents[2]
FIRST_SEED = int(os.environ.get("FIRST_SEED", "0"))


def cores() -> list[int]:
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]


def simulate_on_all_cores(first: int, seeds: int) -> Counter[str]:
    """Simulate seeds in as many processes as there are cores.

    Raises:
        CheckFailed: a check failed. The message has the seed.
    """
    share = -(-seeds // len(cores()))
    processes = []
    for number, core in enumerate(cores()):
        begin = first + number * share
        own_seeds = min(share, first + seeds - begin)
        command = [
            sys.executable,
            "-m",
            "tests.simulation.run_seeds",
            str(begin),
            str(max(own_seeds, 0)),
            str(core),
        ]
        processes.append(subprocess.Popen(command, cwd=ROOT, stdout=PIPE, stderr=PIPE, text=True))
    outputs = [process.communicate() for process in processes]
    for process, (_, errors) in zip(processes, outputs, strict=True):
        if process.returncode:
            raise CheckFailed(errors)
    return sum((Counter(json.loads(output)) for output, _ in outputs), Counter())


def test_all_checks_hold_for_every_seed() -> None:
    endings = simulate_on_all_cores(FIRST_SEED, SEEDS)
    print(f"\n{SEEDS} seeds from {FIRST_SEED}:")
    for ending, times in endings.most_common():
        print(f"  {times:7}  {ending}")
    if SEEDS >= 2000:
        # Every kind of ending occurred.
        for error in ("done", "Corrupted", "BadManifest", "TargetTorn", "TornAndLate", "StateMismatch"):
            assert endings[f"receiver: {error}"] > 0
        for error in (
            "done",
            "SendLate",
            "SendBroken",
            "LinkBroken",
            "LinkTimeout",
            "StateChanged",
            "Unsendable",
        ):
            assert endings[f"sender: {error}"] > 0


@pytest.mark.parametrize("seed", [3, 85, 116, 1889])
def test_a_seed_replays_exactly(seed: int) -> None:
    assert simulate(seed) == simulate(seed)


def no_digest_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def accept(self: Sink) -> None:
        for number in self._digests.keys() & self._expected.keys():
            self._digests.pop(number)
            self._settle(number, ChunkState.WHOLE)

    monkeypatch.setattr(Sink, "verify", accept)


def no_frame_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "xxh3_64_intdigest", lambda body: 0)


def the_last_messages_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer.Window, "__len__", lambda self: 0)


def a_deadline_for_each_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    def per_wait(limits: watch.Limits, now_s: float, *, waiting_since_s: float | None, **known: Any) -> Any:
        deadline_s = limits.deadline_s if waiting_since_s is None else waiting_since_s + 5.0
        limits = limits._replace(deadline_s=deadline_s)
        return watch.next_action(limits, now_s, waiting_since_s=waiting_since_s, **known)

    monkeypatch.setattr(lanes, "next_action", per_wait)
    monkeypatch.setattr(transfer, "Limits", lambda deadline_s, stall_s: watch.Limits(1e9, stall_s))


def no_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "PROBE_AFTER_S", 1e9)


def torn_state_is_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sink, "outcome", lambda self: Outcome((), (), ()))


def mark_written_as(state: ChunkState, monkeypatch: pytest.MonkeyPatch) -> None:
    def mark(self: Sink, chunk: Chunk) -> None:
        self._states[chunk.number] = state

    monkeypatch.setattr(Sink, "_mark_written", mark)


def written_chunks_count_as_untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    mark_written_as(ChunkState.UNTOUCHED, monkeypatch)


def unverified_chunks_count_as_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    mark_written_as(ChunkState.WHOLE, monkeypatch)


def rejected_messages_are_not_drained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receive._Receive, "_reject", lambda self, *_: None)


def no_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer.Window, "has_room", lambda self, nbytes, **_: True)


def one_failure_fails_all(monkeypatch: pytest.MonkeyPatch) -> None:
    original = lanes.Lane.settle

    def settle(self: Any, value: Any, error: Any) -> None:
        original(self, value, error)
        if error is not None and self.link is not None:
            self.link.close(self.progress.peer)

    def run_lanes(link: Any, all_lanes: Any, limits: Any, runner: Any) -> None:
        for lane in all_lanes:
            lane.link = link if link.rank == 0 else None
        lanes.run_lanes(link, all_lanes, limits, runner)

    monkeypatch.setattr(lanes.Lane, "link", None, raising=False)
    monkeypatch.setattr(lanes.Lane, "settle", settle)
    monkeypatch.setattr(transfer, "run_lanes", run_lanes)


def failed_receivers_count_as_delivered(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong_lists(delivered: Any, failed: Any) -> SendBroken:
        return SendBroken([*delivered, *failed], failed)

    monkeypatch.setattr(send, "send_failed", wrong_lists)


def a_lost_next_receiver_fails_the_relay(monkeypatch: pytest.MonkeyPatch) -> None:
    original = relay.Relay.offer

    def offer(self: relay.Relay, message: Any) -> None:
        if self._over:
            raise LinkBroken("the next receiver is gone", peer=self.progress.peer)
        original(self, message)

    monkeypatch.setattr(relay.Relay, "offer", offer)


def a_relay_keeps_staged_memory_until_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    class EmptyWindow(transfer.Window):
        """A window that reports no messages, so that the relay does not wait for any."""

        def __len__(self) -> int:
            return 0

    monkeypatch.setattr(relay, "Window", EmptyWindow)


def no_abort_is_sent_for_an_unsendable_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(send._Send, "_refuse", lambda *_: None)


def the_receiver_skips_a_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine checks every change of state against the table."""
    monkeypatch.setattr(push.ReceiverState.RECEIVING, "following", ("assembling",))


SLOW = {
    no_probe,
    one_failure_fails_all,
    failed_receivers_count_as_delivered,
    a_lost_next_receiver_fails_the_relay,
    a_relay_keeps_staged_memory_until_the_end,
}
"""Mutations that only the full set tries: the first seed that detects them comes late."""

MUTATIONS: list[Callable[[pytest.MonkeyPatch], None]] = [
    no_digest_check,
    no_frame_digest,
    the_last_messages_are_not_waited_for,
    a_deadline_for_each_wait,
    no_probe,
    torn_state_is_not_reported,
    written_chunks_count_as_untouched,
    unverified_chunks_count_as_whole,
    rejected_messages_are_not_drained,
    no_window,
    one_failure_fails_all,
    failed_receivers_count_as_delivered,
    a_lost_next_receiver_fails_the_relay,
    a_relay_keeps_staged_memory_until_the_end,
    no_abort_is_sent_for_an_unsendable_state,
    the_receiver_skips_a_state,
]


FIRST_SEED_OF = {"no_frame_digest": 1200}
"""The first seed for a mutation that few seeds detect."""


@pytest.fixture
def _on_one_core() -> Iterator[None]:
    before = cores()
    pin_to_core(before[-1])
    yield
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, before)


@pytest.mark.usefixtures("_on_one_core")
@pytest.mark.parametrize(
    "mutation",
    [
        pytest.param(mutation, id=mutation.__name__, marks=[pytest.mark.slow] if mutation in SLOW else [])
        for mutation in MUTATIONS
    ],
)
def test_the_simulation_detects_a_mutation(
    mutation: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutation(monkeypatch)
    with pytest.raises(CheckFailed, match="seed"):
        run_seeds(FIRST_SEED_OF.get(mutation.__name__, 0), 4000)
