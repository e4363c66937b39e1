"""Simulates one transfer with faults chosen by a seed, and checks the result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import torch

from torchferry.core.push import BLOCK_CHUNKS
from torchferry.engine.push import ReceiveOptions, SendOptions, receive_state, send_state
from torchferry.errors import FerryError, PeerGaveUp, SendFailed, StateMismatch, TargetTorn, Unsendable
from torchferry.testing.simulation.network import Damage, Network, SimulatedRunner
from torchferry.testing.simulation.world import World

_TIMEOUT_S = 5.0
_WINDOW_BYTES = 256
_CHUNK_BYTES = 64
_MAX_METADATA_BYTES = 1 << 20
_DAMAGE = ("flip", "truncate", "extend", "stale", "lose")
_SLACK_S = 0.5
_DETECTION_S = 1.0
_FOREVER_S = 1e6
_NEVER = 1 << 30
_MAX_PACKED = 16
_VERY_SLOW_S = 1.0
_RARELY = 0.05

State = dict[str, Any]


class CheckFailed(AssertionError):
    """A check failed in a simulated transfer."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """The parameters of a simulated transfer, drawn at random from a seed."""

    seed: int
    receivers: int
    relayed: bool
    packed: bool
    in_place: bool
    hashed_first: bool
    max_delay_s: float
    damages: tuple[Damage, ...]
    killed: tuple[int, float] | None
    stopped: tuple[int, float, float] | None
    rejects: bool
    changes_at_s: float | None
    unsendable: bool


def make_scenario(seed: int) -> Scenario:
    """Draw a scenario: mostly with one fault, sometimes with none or two."""
    chance = Random(seed)
    receivers = chance.choice((1, 1, 1, 2, 3, 4))
    faults = set(
        chance.sample(("damage", "kill", "stop", "refuse", "change", "slow"), chance.choice((0, 1, 1, 1, 2)))
    )
    rank = chance.randrange(receivers + 1)
    # The order of these arguments is part of what a seed means: each one draws from the same generator.
    return Scenario(
        seed=seed,
        receivers=receivers,
        relayed=receivers > 1 and chance.random() < 0.6,
        packed=chance.random() < 0.5,
        in_place=chance.random() < 0.6,
        hashed_first=chance.random() < 0.4,
        max_delay_s=_VERY_SLOW_S if "slow" in faults else chance.choice((0.0, 0.001, 0.02, 0.05)),
        damages=_draw_damages(chance) if "damage" in faults else (),
        killed=_draw_kill(chance, rank) if "kill" in faults else None,
        stopped=_draw_stop(chance, rank) if "stop" in faults else None,
        rejects="refuse" in faults,
        changes_at_s=chance.random() * 0.2 if "change" in faults else None,
        # A generator of its own, so that the rest of a seed does not depend on it.
        unsendable=Random(-1 - seed).random() < _RARELY,
    )


def _draw_damages(chance: Random) -> tuple[Damage, ...]:
    return tuple(
        Damage(chance.choice((0, 1, 2, 3, chance.randrange(60))), chance.choice(_DAMAGE))
        for _ in range(chance.choice((1, 1, 2)))
    )


def _draw_kill(chance: Random, rank: int) -> tuple[int, float]:
    return rank, chance.choice((0.0, chance.random() * 0.1, chance.random() * 2))


def _draw_stop(chance: Random, rank: int) -> tuple[int, float, float]:
    return rank, chance.random() * 0.3, chance.choice((0.3, 2.0, _FOREVER_S))


def simulate(seed: int) -> Counter[str]:
    """Run one scenario, check it, and count how its processes ended.

    Raises:
        CheckFailed: a check failed. The message has the seed, which replays the run exactly.
    """
    scenario = make_scenario(seed)
    run = _Run(scenario)
    run.go()
    try:
        run.check()
    except AssertionError as error:
        raise CheckFailed(f"seed {seed}: {error}\n  {scenario}\n  {run.endings()}") from error
    return run.endings()


class _Run:
    """The run of one scenario."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.world = World(scenario.seed)
        delay = scenario.max_delay_s
        self.network = Network(self.world, scenario.damages, lambda: self.world.chance.random() * delay)
        self.source = make_state(scenario.seed)
        self.sent = clone(self.source)
        self.targets = {rank: self._target(rank) for rank in range(1, scenario.receivers + 1)}
        self.before = {rank: clone(target) for rank, target in self.targets.items()}

    def _target(self, rank: int) -> State:
        state = make_state(self.scenario.seed + 1000 * rank)
        if self.scenario.rejects:
            state["w"] = torch.zeros(3, device="cpu")
        return state

    def go(self) -> None:
        scenario, world = self.scenario, self.world
        world.start(0, self._sender)
        for rank in self.targets:
            world.start(rank, self._receiver(rank))
        if scenario.killed is not None:
            rank, at_s = scenario.killed
            world.at(at_s, lambda: self.network.kill(rank))
        if scenario.stopped is not None:
            stopped, from_s, for_s = scenario.stopped
            world.at(from_s, lambda: world.stop(stopped, from_s + for_s))
        if scenario.changes_at_s is not None:
            world.at(scenario.changes_at_s, lambda: self.source["w"].add_(1))
        world.run(until_s=_TIMEOUT_S * 3)

    def _runner(self, rank: int) -> Callable[[], SimulatedRunner]:
        return lambda: SimulatedRunner(self.world, lambda: self.world.processes[rank])

    def _sender(self) -> Any:
        options = SendOptions(
            _TIMEOUT_S,
            _MAX_METADATA_BYTES,
            relay=self.scenario.relayed,
            chunk_bytes=_CHUNK_BYTES,
            pack_from=2 if self.scenario.packed else _NEVER,
            window_bytes=_WINDOW_BYTES,
            in_place_window_bytes=_WINDOW_BYTES,
            hash_first_bytes=1 << 20 if self.scenario.hashed_first else 0,
            runner=self._runner(0),
        )
        state = {**self.source, "hook": _unsendable} if self.scenario.unsendable else self.source
        return send_state(self.network.link(0), list(self.targets), state, options)

    def _receiver(self, rank: int) -> Callable[[], Any]:
        target = self.targets[rank]
        options = ReceiveOptions(
            _TIMEOUT_S,
            _MAX_METADATA_BYTES,
            local_state=(lambda: target) if self.scenario.in_place or self.scenario.rejects else None,
            window_bytes=_WINDOW_BYTES,
            in_place_window_bytes=_WINDOW_BYTES,
            runner=self._runner(rank),
        )
        link = self.network.link(rank)
        link.size = self.scenario.receivers + 1
        return lambda: receive_state(link, 0, options)[0]

    def endings(self) -> Counter[str]:
        """Count how the processes ended."""
        return Counter(
            f"{'sender' if rank == 0 else 'receiver'}: {self._ending(rank)}" for rank in self.world.processes
        )

    def _ending(self, rank: int) -> str:
        process = self.world.processes[rank]
        if process.killed_s is not None and process.ended_s is None:
            return "stopped forever" if self._is_stopped_forever(rank) else "hung"
        if process.killed_s is not None:
            return "killed"
        return "done" if process.error is None else type(process.error).__name__

    def check(self) -> None:
        """Check the rules that hold for every scenario."""
        for rank, process in self.world.processes.items():
            ending = self._ending(rank)
            if ending in ("killed", "stopped forever"):
                continue
            assert ending != "hung", f"rank {rank} hung"
            assert process.error is None or isinstance(process.error, FerryError), repr(process.error)
            self._check_time(rank)
            if rank > 0:
                self._check_receiver(rank)
        self._check_memory()
        self._check_lists()
        self._check_sender()

    def _is_stopped_forever(self, rank: int) -> bool:
        return self.scenario.stopped is not None and self.scenario.stopped[::2] == (rank, _FOREVER_S)

    def _check_time(self, rank: int) -> None:
        process = self.world.processes[rank]
        assert process.ended_s is not None
        stopped = self.scenario.stopped is not None and self.scenario.stopped[0] == rank
        latest_s = _TIMEOUT_S + _SLACK_S
        if stopped and self.scenario.stopped is not None:
            latest_s = max(latest_s, self.scenario.stopped[1] + self.scenario.stopped[2] + _SLACK_S)
        assert process.ended_s <= latest_s, f"rank {rank} ended at {process.ended_s:.2f} s"
        self._check_death_found(rank)

    def _check_death_found(self, rank: int) -> None:
        """A rank that depends on a single dead peer detects the death quickly."""
        scenario, process = self.scenario, self.world.processes[rank]
        if scenario.killed is None or scenario.stopped is not None or scenario.damages:
            return
        dead, at_s = scenario.killed
        if scenario.relayed:
            # An abort is forwarded like a message, and is as slow.
            depends = rank > 0 and dead < rank and scenario.max_delay_s < _VERY_SLOW_S
        else:
            depends = (rank == 0 and scenario.receivers == 1 and dead == 1) or (rank > 0 and dead == 0)
        if depends and self.world.processes[dead].killed_s is not None and process.error is not None:
            assert process.ended_s is not None
            assert process.ended_s <= at_s + _DETECTION_S, (
                f"rank {rank} detected the death at {process.ended_s:.2f} s"
            )

    def _check_receiver(self, rank: int) -> None:
        process, target, before = self.world.processes[rank], self.targets[rank], self.before[rank]
        error = process.error
        if error is None:
            assert same(process.value, self.sent), f"rank {rank} accepted another state"
            assert not self.scenario.rejects, f"rank {rank} accepted a mismatched state"
        elif isinstance(error, TargetTorn):
            assert error.torn or error.whole, "TargetTorn, but no path is torn or whole"
            for name in error.untouched:
                assert same_bits(target[name], before[name]), (
                    f"{name} is listed as untouched, but was changed"
                )
            for name in error.whole:
                # The sender may have changed the tensor before it was sent.
                sent = same_bits(target[name], self.sent[name])
                assert sent or (name == "w" and self.scenario.changes_at_s is not None), (
                    f"{name} is listed as whole, but differs"
                )
        else:
            assert same(target, before), f"rank {rank} was changed, but its error is {error!r}"

    def _check_memory(self) -> None:
        for rank, max_bytes in self.network.max_in_flight_bytes.items():
            # The window, and for each peer one chunk beyond its share and two digest blocks.
            digest_blocks = 2 * 8 * (BLOCK_CHUNKS + _MAX_PACKED)
            allowed = _WINDOW_BYTES + self.scenario.receivers * (_CHUNK_BYTES + digest_blocks)
            if self.scenario.relayed and rank > 0:
                allowed = _WINDOW_BYTES + 2 * (_CHUNK_BYTES + digest_blocks)
            assert max_bytes <= allowed, f"rank {rank} had {max_bytes} bytes in flight"

    def _check_lists(self) -> None:
        """Every receiver is in `delivered` or `failed`, and one dead from the start is not in `delivered`."""
        error = self.world.processes[0].error
        if not isinstance(error, SendFailed):
            return
        assert sorted([*error.delivered, *error.failed]) == list(self.targets), "the lists are not complete"
        for rank in error.delivered:
            early = self.world.processes[rank].killed_s == 0.0
            assert not early, f"rank {rank} is in `delivered`, but was dead from the start"

    def _check_sender(self) -> None:
        """Without faults, the sender succeeds, even if a receiver rejects the state."""
        scenario = self.scenario
        if scenario.unsendable:
            self._check_abort()
            return
        if (
            scenario.changes_at_s is not None
            or scenario.max_delay_s >= _VERY_SLOW_S
            or scenario.damages
            or scenario.stopped
        ):
            return
        if scenario.killed is None:
            assert self.world.processes[0].error is None, repr(self.world.processes[0].error)
            for rank in self.targets:
                error = self.world.processes[rank].error
                assert isinstance(error, StateMismatch) if scenario.rejects else error is None, repr(error)
        elif scenario.killed[0] > 0 and not scenario.rejects:
            self._check_others(scenario.killed[0])

    def _check_abort(self) -> None:
        """A sender of an unsendable state raises at once, and its receivers raise PeerGaveUp."""
        scenario, sender = self.scenario, self.world.processes[0]
        if scenario.killed is not None or scenario.stopped is not None or scenario.damages:
            return
        assert isinstance(sender.error, Unsendable), repr(sender.error)
        assert sender.ended_s is not None
        assert sender.ended_s <= _DETECTION_S, f"the sender raised at {sender.ended_s:.2f} s"
        for rank in self.targets if scenario.max_delay_s < _VERY_SLOW_S else ():
            receiver = self.world.processes[rank]
            assert isinstance(receiver.error, PeerGaveUp), f"rank {rank} raised {receiver.error!r}"
            assert receiver.ended_s is not None
            assert receiver.ended_s <= _DETECTION_S, f"rank {rank} raised at {receiver.ended_s:.2f} s"

    def _check_others(self, dead: int) -> None:
        for rank in self.targets:
            error = self.world.processes[rank].error
            if self.scenario.relayed and rank > dead:
                # If no remaining message is long enough for an abort, the error names only the predecessor.
                named = error is None or f"rank {dead}" in str(error)
                assert named, f"the error of rank {rank} does not name the dead rank {dead}: {error}"
            elif rank != dead:
                assert error is None, f"rank {rank} failed because of the death of rank {dead}: {error}"


def _unsendable() -> None:
    """A function, which can't be sent."""


def make_state(seed: int) -> State:
    """Build a small state with aliases and views, of many chunks."""
    numbers = torch.Generator().manual_seed(seed)
    base = torch.randn(200, generator=numbers, device="cpu")
    return {
        "w": torch.randn(20, 11, generator=numbers, device="cpu"),
        "head": base[:60],
        "tail": base[40:150],
        "column": torch.randn(30, 4, generator=numbers, device="cpu")[:, 1],
        "tiny": torch.tensor(float(seed % 97), device="cpu"),
        **{f"bias{n}": torch.randn(n, generator=numbers, device="cpu") for n in range(1, 8)},
        "step": seed,
        "note": "a value that any damaged bit makes another value, " * 30,
    }


def clone(state: State) -> State:
    """Copy the values of a state."""
    return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in state.items()}


def same(one: State, two: State) -> bool:
    """Compare two states bit for bit."""
    return list(one) == list(two) and all(same_bits(one[key], two[key]) for key in one)


def same_bits(one: object, two: object) -> bool:
    """Compare two leaves bit for bit: to torch.equal, 0.0 is -0.0, and a NaN differs from itself."""
    if not isinstance(one, torch.Tensor) or not isinstance(two, torch.Tensor):
        return type(one) is type(two) and one == two
    same_kind = one.shape == two.shape and one.dtype == two.dtype
    return same_kind and torch.equal(
        *(each.reshape(-1).contiguous().view(torch.uint8) for each in (one, two))
    )
