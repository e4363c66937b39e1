"""The works that take a cluster: one state to several hosts, against what one link needs for it."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.marks import MIB, Figure, Mark
from benchmarks.recipes import Uniform
from benchmarks.works import FERRY, KIB, TORCH, Case, Size, Work

MOST_HOSTS = 7
ONE_LINK = Figure("fan-out-1", FERRY)

# A chain has to fill: the last of six has its first piece when five others have had it.
_LITTLE_MORE_THAN_ONE_LINK = 1.15
# What two runs of the same thing may differ by here.
_NOT_HELD_UP = 1.1
# Above it, one link itself was held up by whatever else this machine does, and no ratio to it counts. That it
# is reached does not show that the machine was idle: a chain of six takes far more of it than one link does.
_AT_LINE_RATE = 1.1
# What 1 Gbit/s carries of ours, with the headers of Ethernet, IP and TCP taken off.
_PAYLOAD_BYTES_PER_S = 1e9 / 8 * 1448 / 1514
_COUNTS = (1, 2, 4, MOST_HOSTS - 1)


def fanout_works(size: Size, hosts: int = MOST_HOSTS) -> list[Work]:
    """The works, as far as so many hosts can do them.

    >>> [case.name for work in fanout_works(Size.FULL, hosts=3) for case in work.cases]
    ['fan-out-1', 'fan-out-2', 'fan-out-2-direct']
    """
    assert hosts >= 2, "a transfer takes two"
    sleeper = _sleeper(size)
    return [_fan_out(size, hosts), *([sleeper] if hosts > _most_receivers(sleeper) else [])]


def _fan_out(size: Size, hosts: int) -> Work:
    recipe = Uniform(32, size.pick(64 * KIB, MIB, 4 * MIB))
    sent = f"{recipe.needed_bytes // MIB} MiB"
    cases = [_fan_out_to(count, recipe) for count in _COUNTS if count < hosts]
    most = cases[-1]
    marks = (
        Mark(
            f"{sent} to {most.receivers} receivers, {hosts} hosts of 1 Gbit/s: against one link",
            Figure(most.name, FERRY),
            ONE_LINK,
            _LITTLE_MORE_THAN_ONE_LINK,
            at_least=False,
        ),
        Mark(
            f"{sent} over one link, against what the wire can carry",
            ONE_LINK,
            recipe.needed_bytes / _PAYLOAD_BYTES_PER_S,
            _AT_LINE_RATE,
            at_least=False,
        ),
    )
    every = (*cases, _direct(most))
    return Work("fan-out", f"{sent} over links of 1 Gbit/s", every, marks, axis="receivers")


def _direct(case: Case) -> Case:
    """The case without relays, which is what a sender does that is not asked for them."""
    return replace(case, name=f"{case.name}-direct", systems=(FERRY,), relay=False, x=None)


def _fan_out_to(receivers: int, recipe: Uniform) -> Case:
    return Case(
        f"fan-out-{receivers}",
        recipe,
        (FERRY, TORCH),
        in_place=True,
        receivers=receivers,
        relay=receivers > 1,
        # The sender may be done earlier; what counts is that everyone has it.
        timed=tuple(range(1, receivers + 1)),
        x=receivers,
    )


def _sleeper(size: Size) -> Work:
    # Several tensors: with one, torch's PGTransport has posted all there is before it waits for anyone.
    recipe = Uniform(16, size.pick(64 * KIB, MIB, 4 * MIB))
    asleep_s = size.pick(3, 10, 30) / 10
    title = f"{recipe.needed_bytes // MIB} MiB to 3 receivers without relays, one asleep for {asleep_s:g} s"
    systems = (FERRY, TORCH)
    absent = Case("fan-out-absent", recipe, systems, in_place=True, receivers=2, relay=False, timed=(1, 2))
    asleep = replace(absent, name="fan-out-asleep", receivers=3, asleep_s=asleep_s)
    mark = Mark(
        f"{title}: the other two, against those two alone",
        Figure(asleep.name, FERRY),
        Figure(absent.name, FERRY),
        _NOT_HELD_UP,
        at_least=False,
    )
    return Work("fan-out-sleeper", title, (absent, asleep), (mark,))


def _most_receivers(work: Work) -> int:
    return max(case.receivers for case in work.cases)
