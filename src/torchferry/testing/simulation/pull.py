"""Simulates fetches from several sources with faults chosen by a seed, and checks the result.

The rules of `core/` run here: `Leases` in the sources; `choose`, `why_not_mixed`, `Schedule` and the states
of a fetch in the receivers. What threads and sockets do in the engine is simulated.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from random import Random

from torchferry.testing.simulation.pull_network import Host, PullWorld, Steps, check
from torchferry.testing.simulation.pull_receiver import CONFIRM_S, SLACK_S, WAIT_S, Receiver
from torchferry.testing.simulation.pull_source import Source
from torchferry.testing.simulation.scenario import CheckFailed

_FOREVER_S = 1e9
_FAULTS = ("kill", "stop", "pause", "reset", "damage", "rotten", "slow", "other root")


def simulate_pull(seed: int) -> Counter[str]:
    """Run one scenario, check it, and count how its fetches and leases ended.

    Raises:
        CheckFailed: a check failed. The message has the seed, which replays the run exactly.
    """
    run = _PullRun(seed)
    try:
        run.world.run()
        run.check()
    except (AssertionError, LookupError, RuntimeError) as error:
        raise CheckFailed(f"seed {seed} at {run.world.now_s:.2f} s: {error!r}\n  {run}") from error
    return run.endings()


class _PullRun:
    """One scenario: sources that publish, receivers that fetch, and at most three faults."""

    def __init__(self, seed: int) -> None:
        self.chance = chance = Random(seed)
        self.world = world = PullWorld(chance, chance.choice((0.001, 0.01, 0.1)))
        self.chunks = chance.choice((1, 5, 20, 40))
        self.sources = [
            Source(world, f"source {number}", self.chunks, chance.choice((0.005, 0.02, 0.1)))
            for number in range(chance.choice((1, 1, 2, 3)))
        ]
        self.told: list[str] = []
        faults = [chance.choice(_FAULTS) for _ in range(chance.choice((0, 0, 1, 1, 2, 3)))]
        verifies = not {"damage", "rotten"}.isdisjoint(faults) or chance.random() < 0.5
        self.receivers = [self._receiver(number, verifies) for number in range(chance.choice((1, 2, 3)))]
        for fault in faults:
            self._plan_fault(fault)
        for source in self.sources:
            world.start(source, self._publish_all(source))
            world.start(source, source.watch())
        for receiver in self.receivers:
            begins_s = chance.choice((0.1, chance.random() * 4))
            world.at(begins_s, partial(world.start, receiver, receiver.run()))

    def _receiver(self, number: int, verifies: bool) -> Receiver:
        chance = self.chance
        needed = list(range(self.chunks))
        if chance.random() < 0.3:
            needed = [chunk for chunk in needed if chance.random() < 0.5]
        sources = self.sources[:]
        chance.shuffle(sources)
        return Receiver(
            self.world,
            f"receiver {number}",
            sources[: chance.choice((1, 3, 3))],
            needed,
            self.chunks,
            newer_than=chance.choice((None, None, None, 1, 2)),
            timeout_s=chance.choice((20.0, 20.0, 90.0)),
            verifies=verifies,
            refuses=chance.random() < 0.05,
            compare_s=chance.choice((0.0, 0.1, 1.0)),
        )

    def _publish_all(self, source: Source) -> Steps:
        """Publish a few versions, and withdraw the state now and then."""
        chance = self.chance
        is_copy = chance.random() < 0.6
        for version in range(1, chance.choice((2, 3, 5, 6))):
            readers, timeout_s = chance.choice(("wait", "wait", "drop")), chance.choice((0.5, 5.0, 60.0))
            yield from source.publish(version, is_copy=is_copy, readers=readers, timeout_s=timeout_s)
            yield chance.choice((0.01, 0.2, 1.0, 3.0))
            if chance.random() < 0.1:
                yield from source.withdraw(readers, timeout_s)
                yield chance.random()

    def _plan_fault(self, fault: str) -> None:
        chance, world = self.chance, self.world
        hosts: list[Host] = [*self.sources]
        if fault in ("kill", "stop", "reset"):
            hosts += self.receivers
        host = chance.choice(hosts)
        host.faults.add(fault)
        begins_s = chance.random() * 5
        self.told.append(f"{fault} of {host.name} at {begins_s:.2f} s")
        if fault == "kill":
            world.at(begins_s, lambda: world.kill(host))
        elif fault == "stop":
            ends_s = begins_s + chance.choice((0.5, 3.0, 40.0, _FOREVER_S))
            world.at(begins_s, lambda: world.stop(host, ends_s))
        elif fault == "pause":
            ends_s = begins_s + chance.choice((0.5, 1.5, 3.0))
            for source in self.sources:
                source.faults.add(fault)
                world.at(begins_s, partial(world.stop, source, ends_s))
        elif fault == "reset":
            world.at(begins_s, lambda: world.close_all(host))
        elif fault == "damage" and isinstance(host, Source):
            host.damages = {chance.randrange(1, 2 * self.chunks + 1) for _ in range(3)}
        elif fault == "rotten" and isinstance(host, Source):
            host.damages = set(range(10_000))
        elif fault == "slow" and isinstance(host, Source):
            host.chunk_s = chance.choice((0.5, 3.0, 6.0))

    def check(self) -> None:
        """Check what holds after a long time: fetches and leases have ended, and memory is free."""
        for receiver in self.receivers:
            if receiver.is_alive and not receiver.faults:
                latest_s = receiver.began_s + WAIT_S + receiver.timeout_s + CONFIRM_S + SLACK_S
                check(0 < receiver.ended_s <= latest_s, f"{receiver.name} ended at {receiver.ended_s:.1f} s")
        for source in self.sources:
            if not source.is_alive or source.stopped_until_s > 100.0:
                continue
            held = [each.version for each in source.held]
            current = [each.version for each in source.leases.current.values()]
            check(held == current, f"{source.name} holds {held}, but serves {current}")
            reading = source.leases.reading(lambda _: True)
            check(not reading, f"{source.name} has {len(reading)} leases at the end")
            done = sum(each.ending == "done" for each in self.receivers)
            dead = sum(bool(each.faults) for each in self.receivers)
            check(source.confirmed.total() <= done + dead, f"{source.name} counts too many confirmations")

    def endings(self) -> Counter[str]:
        """Count how fetches and leases ended."""
        found = Counter(f"fetch: {receiver.ending}" for receiver in self.receivers)
        for source in self.sources:
            found += Counter(f"lease: {lease.machine.state.label}" for lease in source.granted)
        return found

    def __str__(self) -> str:
        lines = [f"{len(self.sources)} sources, {self.chunks} chunks; {', '.join(self.told) or 'no fault'}"]
        lines += [f"  {each.name}: {each.ending}" for each in self.receivers]
        return "\n  ".join(lines)
