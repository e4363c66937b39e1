"""The protocol by the thousand seeds; and proof that the simulation would notice if it were wrong."""

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

from tests.simulation.play import play, stay_on
from torchferry.core import codec, torn, watch
from torchferry.engine import destination, lanes, payload, receiving, relay, sending, window
from torchferry.errors import BadManifest, LinkBroken, SendBroken
from torchferry.testing.simulation import Broken, simulate

SEEDS = int(os.environ.get("SEEDS", "2000"))
ROOT = Path(__file__).parents[2]
FIRST_SEED = int(os.environ.get("FIRST_SEED", "0"))


def cores() -> list[int]:
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]


def play_on_all_cores(first: int, seeds: int) -> Counter[str]:
    """Play seeds in as many processes as there are cores.

    Raises:
        Broken: something did not hold; names the seed.
    """
    share = -(-seeds // len(cores()))
    players = []
    for number, core in enumerate(cores()):
        begin = first + number * share
        count = min(share, first + seeds - begin)
        command = [sys.executable, "-m", "tests.simulation.play", str(begin), str(max(count, 0)), str(core)]
        players.append(subprocess.Popen(command, cwd=ROOT, stdout=PIPE, stderr=PIPE, text=True))
    ends = [player.communicate() for player in players]
    for player, (_, complaints) in zip(players, ends, strict=True):
        if player.returncode:
            raise Broken(complaints)
    return sum((Counter(json.loads(said)) for said, _ in ends), Counter())


def test_what_must_hold_holds_for_every_seed() -> None:
    happened = play_on_all_cores(FIRST_SEED, SEEDS)
    print(f"\n{SEEDS} seeds from {FIRST_SEED}:")
    for ending, count in happened.most_common():
        print(f"  {count:7}  {ending}")
    if SEEDS >= 2000:
        # Every sort of ending has really been played.
        for error in ("done", "Corrupted", "BadManifest", "TargetTorn", "TornAndLate", "StateMismatch"):
            assert happened[f"receiver: {error}"] > 0
        for error in (
            "done",
            "SendLate",
            "SendBroken",
            "LinkBroken",
            "LinkTimeout",
            "StateChanged",
            "Unsendable",
        ):
            assert happened[f"sender: {error}"] > 0


@pytest.mark.parametrize("seed", [3, 85, 116, 1889])
def test_a_seed_replays_exactly(seed: int) -> None:
    assert simulate(seed) == simulate(seed)


def no_digest_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        payload._Receiving, "_compare", lambda self, number, *_: self._meter.verified.add(number)
    )


def no_frame_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "xxh3_64_intdigest", lambda body: 0)


def early_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    def finish(self: window.Window) -> Any:
        return
        yield

    monkeypatch.setattr(window.Window, "finish", finish)


def deadline_for_each_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    def per_wait(rules: watch.Rules, now_s: float, *, waits_s: float, **known: Any) -> watch.Look:
        return watch.look(rules._replace(deadline_s=waits_s + 5.0), now_s, waits_s=waits_s, **known)

    monkeypatch.setattr(lanes, "look", per_wait)
    monkeypatch.setattr(lanes, "Rules", watch.Rules)
    monkeypatch.setattr(sending, "Rules", lambda deadline_s, stall_s: watch.Rules(1e9, stall_s))
    monkeypatch.setattr(receiving, "Rules", lambda deadline_s, stall_s: watch.Rules(1e9, stall_s))


def no_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "PROBE_AFTER_S", 1e9)


def torn_unsaid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiving, "say_torn", lambda *_: None)


def torn_understated(monkeypatch: pytest.MonkeyPatch) -> None:
    def blind(manifest: Any, plan: Any, *, posted: int, **known: Any) -> torn.Truth:
        return torn.truth(manifest, plan, posted=max(posted - 3, 0), **known)

    monkeypatch.setattr(destination, "truth", blind)


def no_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> Any:
        yield from ()
        raise BadManifest("not drained")

    original = payload.Payload.steps

    def only_with_ground(self: payload.Payload, *args: Any) -> Any:
        return original(self, *args) if self.ground._fresh or self.ground._target else refuse()

    monkeypatch.setattr(payload.Payload, "steps", only_with_ground)


def no_window(monkeypatch: pytest.MonkeyPatch) -> None:
    def make_room(self: window.Window, nbytes: int, *, in_place: bool = False) -> Any:
        return
        yield

    monkeypatch.setattr(window.Window, "make_room", make_room)


def one_failure_fails_all(monkeypatch: pytest.MonkeyPatch) -> None:
    original = lanes.Lane.settle

    def settle(self: Any, value: Any, error: Any) -> None:
        original(self, value, error)
        if error is not None and self.link is not None:
            self.link.break_off(self.meter.peer)

    def run_lanes(link: Any, all_lanes: Any, rules: Any, runner: Any) -> None:
        for lane in all_lanes:
            lane.link = link
        lanes.run_lanes(link, all_lanes, rules, runner)

    monkeypatch.setattr(lanes.Lane, "link", None, raising=False)
    monkeypatch.setattr(lanes.Lane, "settle", settle)
    monkeypatch.setattr(sending, "run_lanes", run_lanes)


def everybody_got_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def boast(delivered: Any, failed: Any) -> SendBroken:
        return SendBroken([*delivered, *failed], failed)

    monkeypatch.setattr(sending, "SendBroken", boast)


def a_lost_receiver_is_its_relay_s_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    original = relay.Relay.offer

    def offer(self: relay.Relay, buffer: Any, *, staged: bool) -> None:
        if self._over:
            raise LinkBroken("the next receiver is gone", peer=self._meter.peer)
        original(self, buffer, staged=staged)

    monkeypatch.setattr(relay.Relay, "offer", offer)


def staged_memory_is_never_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window.Window, "__bool__", lambda self: False)


def receivers_are_not_told_of_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "_refuse", lambda *_: None)


MUTATIONS: list[Callable[[pytest.MonkeyPatch], None]] = [
    no_digest_check,
    no_frame_digest,
    early_commit,
    deadline_for_each_wait,
    no_probe,
    torn_unsaid,
    torn_understated,
    no_drain,
    no_window,
    one_failure_fails_all,
    everybody_got_it,
    a_lost_receiver_is_its_relay_s_loss,
    staged_memory_is_never_given_back,
    receivers_are_not_told_of_a_refusal,
]


FROM = {"no_frame_digest": 1200}
"""Where to begin with one that bites seldom: from 0 it takes most of a minute to come to the first."""


@pytest.fixture
def _on_one_core() -> Iterator[None]:
    before = cores()
    stay_on(before[-1])
    yield
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, before)


@pytest.mark.usefixtures("_on_one_core")
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_the_simulation_bites(
    mutation: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutation(monkeypatch)
    with pytest.raises(Broken, match="seed"):
        play(FROM.get(mutation.__name__, 0), 4000)
