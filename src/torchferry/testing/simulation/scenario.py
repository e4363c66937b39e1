"""One run of the protocol, as a seed decides, and what must hold in every run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import torch

from torchferry.core.plan import BLOCK_MESSAGES
from torchferry.engine import ReceiveOptions, SendOptions, receive_state, send_state
from torchferry.errors import FerryError, PeerGaveUp, SendFailed, StateMismatch, TargetTorn, Unsendable
from torchferry.testing.simulation.network import Harm, Network, SimulatedRunner
from torchferry.testing.simulation.world import World

_TIMEOUT_S = 5.0
_WINDOW_BYTES = 256
_CHUNK_BYTES = 64
_MOST_METADATA_BYTES = 1 << 20
_DAMAGE = ("flip", "truncate", "extend", "stale", "lose")
_SLACK_S = 0.5
_FOUND_S = 1.0
_FOR_GOOD_S = 1e6
_NEVER = 1 << 30
_MOST_PACKED = 16
_CRAWL_S = 1.0
_SELDOM = 0.05

State = dict[str, Any]


class Broken(AssertionError):
    """A run in which something did not hold that must hold in all of them."""


@dataclass(frozen=True)
class Play:
    """What a seed decides before anything moves."""

    seed: int
    receivers: int
    relayed: bool
    packed: bool
    in_place: bool
    ahead: bool
    slowness_s: float
    harms: tuple[Harm, ...]
    killed: tuple[int, float] | None
    stopped: tuple[int, float, float] | None
    refuses: bool
    changes_at_s: float | None
    unsendable: bool


def plan_play(seed: int) -> Play:
    """Decide on a run: mostly one trouble, sometimes none, sometimes two."""
    chance = Random(seed)
    receivers = chance.choice((1, 1, 1, 2, 3, 4))
    troubles = set(
        chance.sample(("harm", "kill", "stop", "refuse", "change", "crawl"), chance.choice((0, 1, 1, 1, 2)))
    )
    rank = chance.randrange(receivers + 1)
    return Play(
        seed,
        receivers,
        receivers > 1 and chance.random() < 0.6,
        chance.random() < 0.5,
        chance.random() < 0.6,
        chance.random() < 0.4,
        _CRAWL_S if "crawl" in troubles else chance.choice((0.0, 0.001, 0.02, 0.05)),
        tuple(
            Harm(chance.choice((0, 1, 2, 3, chance.randrange(60))), chance.choice(_DAMAGE))
            for _ in range(chance.choice((1, 1, 2)))
        )
        if "harm" in troubles
        else (),
        (rank, chance.choice((0.0, chance.random() * 0.1, chance.random() * 2)))
        if "kill" in troubles
        else None,
        (rank, chance.random() * 0.3, chance.choice((0.3, 2.0, _FOR_GOOD_S))) if "stop" in troubles else None,
        "refuse" in troubles,
        chance.random() * 0.2 if "change" in troubles else None,
        # By chance of its own, so that all else of a seed is as it was before there was this.
        Random(-1 - seed).random() < _SELDOM,
    )


def simulate(seed: int) -> Counter[str]:
    """Play one run and check it. Gives what happened, to be counted.

    Raises:
        Broken: with the seed, which replays the run exactly.
    """
    play = plan_play(seed)
    run = _Run(play)
    run.go()
    try:
        run.check()
    except AssertionError as error:
        raise Broken(f"seed {seed}: {error}\n  {play}\n  {run.happened()}") from error
    return run.happened()


class _Run:
    """One world, from a play to its outcomes."""

    def __init__(self, play: Play) -> None:
        self.play = play
        self.world = World(play.seed)
        delay = play.slowness_s
        self.network = Network(self.world, play.harms, lambda: self.world.chance.random() * delay)
        self.source = make_state(play.seed)
        self.sent = clone(self.source)
        self.targets = {rank: self._target(rank) for rank in range(1, play.receivers + 1)}
        self.before = {rank: clone(target) for rank, target in self.targets.items()}

    def _target(self, rank: int) -> State:
        state = make_state(self.play.seed + 1000 * rank)
        if self.play.refuses:
            state["w"] = torch.zeros(3, device="cpu")
        return state

    def go(self) -> None:
        play, world = self.play, self.world
        world.start(0, self._sender)
        for rank in self.targets:
            world.start(rank, self._receiver(rank))
        if play.killed is not None:
            rank, at_s = play.killed
            world.at(at_s, lambda: self.network.kill(rank))
        if play.stopped is not None:
            stopped, from_s, for_s = play.stopped
            world.at(from_s, lambda: world.stop(stopped, from_s + for_s))
        if play.changes_at_s is not None:
            world.at(play.changes_at_s, lambda: self.source["w"].add_(1))
        world.run(until_s=_TIMEOUT_S * 3)

    def _runner(self, rank: int) -> Callable[[], SimulatedRunner]:
        return lambda: SimulatedRunner(self.world, lambda: self.world.processes[rank])

    def _sender(self) -> Any:
        options = SendOptions(
            _TIMEOUT_S,
            _MOST_METADATA_BYTES,
            relay=self.play.relayed,
            chunk_bytes=_CHUNK_BYTES,
            relay_chunk_bytes=_CHUNK_BYTES,
            pack_from=2 if self.play.packed else _NEVER,
            window_bytes=_WINDOW_BYTES,
            in_place_window_bytes=_WINDOW_BYTES,
            hash_first_bytes=1 << 20 if self.play.ahead else 0,
            runner=self._runner(0),
        )
        state = {**self.source, "hook": _unsendable} if self.play.unsendable else self.source
        return send_state(self.network.link(0), list(self.targets), state, options)

    def _receiver(self, rank: int) -> Callable[[], Any]:
        target = self.targets[rank]
        options = ReceiveOptions(
            _TIMEOUT_S,
            _MOST_METADATA_BYTES,
            rank=rank,
            members=range(self.play.receivers + 1),
            local_state=(lambda: target) if self.play.in_place or self.play.refuses else None,
            window_bytes=_WINDOW_BYTES,
            in_place_window_bytes=_WINDOW_BYTES,
            runner=self._runner(rank),
        )
        return lambda: receive_state(self.network.link(rank), 0, options)[0]

    def happened(self) -> Counter[str]:
        """Say how each process ended."""
        return Counter(
            f"{'sender' if rank == 0 else 'receiver'}: {self._ending(rank)}" for rank in self.world.processes
        )

    def _ending(self, rank: int) -> str:
        process = self.world.processes[rank]
        if process.killed_s is not None and process.ended_s is None:
            return "stopped for good" if self._is_stopped_for_good(rank) else "hung"
        if process.killed_s is not None:
            return "killed"
        return "done" if process.error is None else type(process.error).__name__

    def check(self) -> None:
        """What must hold."""
        for rank, process in self.world.processes.items():
            ending = self._ending(rank)
            if ending in ("killed", "stopped for good"):
                continue
            assert ending != "hung", f"rank {rank} hung"
            assert process.error is None or isinstance(process.error, FerryError), repr(process.error)
            self._check_time(rank)
            if rank > 0:
                self._check_receiver(rank)
        self._check_memory()
        self._check_lists()
        self._check_sender()

    def _is_stopped_for_good(self, rank: int) -> bool:
        return self.play.stopped is not None and self.play.stopped[::2] == (rank, _FOR_GOOD_S)

    def _check_time(self, rank: int) -> None:
        process = self.world.processes[rank]
        assert process.ended_s is not None
        stopped = self.play.stopped is not None and self.play.stopped[0] == rank
        latest_s = _TIMEOUT_S + _SLACK_S
        if stopped and self.play.stopped is not None:
            latest_s = max(latest_s, self.play.stopped[1] + self.play.stopped[2] + _SLACK_S)
        assert process.ended_s <= latest_s, f"rank {rank} ended at {process.ended_s:.2f} s"
        self._check_death_found(rank)

    def _check_death_found(self, rank: int) -> None:
        """A dead peer is found fast, by whoever depends on it alone."""
        play, process = self.play, self.world.processes[rank]
        if play.killed is None or play.stopped is not None or play.harms:
            return
        dead, at_s = play.killed
        if play.relayed:
            # The news is passed on as messages are, and crawls as they do.
            depends = rank > 0 and dead < rank and play.slowness_s < _CRAWL_S
        else:
            depends = (rank == 0 and play.receivers == 1 and dead == 1) or (rank > 0 and dead == 0)
        if depends and self.world.processes[dead].killed_s is not None and process.error is not None:
            assert process.ended_s is not None
            assert process.ended_s <= at_s + _FOUND_S, (
                f"rank {rank} found the death at {process.ended_s:.2f} s"
            )

    def _check_receiver(self, rank: int) -> None:
        process, target, before = self.world.processes[rank], self.targets[rank], self.before[rank]
        error = process.error
        if error is None:
            assert same(process.value, self.sent), f"rank {rank} accepted another state"
            assert not self.play.refuses, f"rank {rank} accepted what does not fit"
        elif isinstance(error, TargetTorn):
            assert error.torn or error.whole, "torn, but nothing was touched"
            for name in error.untouched:
                assert torch.equal(target[name], before[name]), f"{name} is called untouched"
            for name in error.whole:
                # If the sender changed it before it read it, that is what was sent.
                sent = torch.equal(target[name], self.sent[name])
                assert sent or (name == "w" and self.play.changes_at_s), f"{name} is called whole"
        else:
            assert same(target, before), f"rank {rank} was changed, and {error!r} does not say so"

    def _check_memory(self) -> None:
        for rank, most in self.network.most_under_way.items():
            # The window, and for each peer one chunk that is larger than its share, and two seals.
            seals = 2 * 8 * (BLOCK_MESSAGES + _MOST_PACKED)
            allowed = _WINDOW_BYTES + self.play.receivers * (_CHUNK_BYTES + seals)
            if self.play.relayed and rank > 0:
                allowed = _WINDOW_BYTES + 2 * (_CHUNK_BYTES + seals)
            assert most <= allowed, f"rank {rank} had {most} bytes under way"

    def _check_lists(self) -> None:
        """Every receiver is in one of the sender's two lists, and one that died early is not in the first."""
        error = self.world.processes[0].error
        if not isinstance(error, SendFailed):
            return
        assert sorted([*error.delivered, *error.failed]) == list(self.targets), "the lists are not complete"
        for rank in error.delivered:
            early = self.world.processes[rank].killed_s == 0.0
            assert not early, f"rank {rank} is said to have got it, and was dead from the start"

    def _check_sender(self) -> None:
        """Where nothing is wrong but a refusal, the sender does not notice."""
        play = self.play
        if play.unsendable:
            self._check_refusal()
            return
        if play.changes_at_s is not None or play.slowness_s >= _CRAWL_S or play.harms or play.stopped:
            return
        if play.killed is None:
            assert self.world.processes[0].error is None, repr(self.world.processes[0].error)
            for rank in self.targets:
                error = self.world.processes[rank].error
                assert isinstance(error, StateMismatch) if play.refuses else error is None, repr(error)
        elif play.killed[0] > 0 and not play.refuses:
            self._check_others(play.killed[0])

    def _check_refusal(self) -> None:
        """A sender that can't send its state says so at once, and its receivers know if messages arrive."""
        play, sender = self.play, self.world.processes[0]
        if play.killed is not None or play.stopped is not None or play.harms:
            return
        assert isinstance(sender.error, Unsendable), repr(sender.error)
        assert sender.ended_s is not None
        assert sender.ended_s <= _FOUND_S, f"the sender refused at {sender.ended_s:.2f} s"
        for rank in self.targets if play.slowness_s < _CRAWL_S else ():
            receiver = self.world.processes[rank]
            assert isinstance(receiver.error, PeerGaveUp), f"rank {rank} was not told: {receiver.error!r}"
            assert receiver.ended_s is not None
            assert receiver.ended_s <= _FOUND_S, f"rank {rank} was told at {receiver.ended_s:.2f} s"

    def _check_others(self, dead: int) -> None:
        for rank in self.targets:
            error = self.world.processes[rank].error
            if self.play.relayed and rank > dead:
                # Past the last message that a farewell fits in, it is only known who does not forward any
                # more.
                named = error is None or f"rank {dead}" in str(error)
                assert named, f"rank {rank} does not know that it suffers from {dead}'s death: {error}"
            elif rank != dead:
                assert error is None, f"rank {rank} suffered from {dead}'s death"


def _unsendable() -> None:
    """A function, which can't travel."""


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
    return list(one) == list(two) and all(
        torch.equal(one[k], two[k]) if isinstance(one[k], torch.Tensor) else one[k] == two[k] for k in one
    )
