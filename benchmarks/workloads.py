"""The workloads: which states are sent, how, to how many receivers, by which systems, with which targets.

`workloads(size)` lists those for one machine, `cluster_workloads(size, hosts)` those for hosts. Targets apply
to size "full"; "small" is a quick run of minutes; "smoke" shows in seconds that everything works.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from fnmatch import fnmatchcase

from benchmarks.results import BenchmarkError, Figure, Metric, Target
from benchmarks.states import Gpt, StateSpec, Uniform

KIB = 2**10
MIB = 2**20
MAX_HOSTS = 7

FERRY = "torchferry"
UNVERIFIED = "torchferry-unverified"
GLOO = "torchferry-gloo"
FETCH_MEMORY = "fetch-memory"
FETCH_MEMORY_UNVERIFIED = "fetch-memory-unverified"
FETCH_MEMORY_LIVE = "fetch-memory-live"
FETCH_TCP = "fetch-tcp"
FETCH_TCP_UNVERIFIED = "fetch-tcp-unverified"
FETCH_RESHARE = "fetch-reshare"
PUBLISH = "publish"
PUBLISH_LIVE_MEMORY = "publish-live-memory"
PUBLISH_LIVE_TCP = "publish-live-tcp"
METADATA = "torchferry-metadata"
TORCH = "torch-pg"
TORCHFT = "torchft-pg"
HTTP = "torchft-http"
SAVE = "torch-save"
DCP = "dcp"
RAW = "raw"
MEMCPY = "memcpy"
PUSHES = (FERRY, UNVERIFIED, GLOO)
FETCHES = (FETCH_MEMORY, FETCH_MEMORY_UNVERIFIED, FETCH_MEMORY_LIVE, FETCH_TCP, FETCH_TCP_UNVERIFIED)
OTHERS = (TORCH, TORCHFT, HTTP, SAVE, DCP, RAW, MEMCPY)
ALL_SYSTEMS = (*PUSHES, *FETCHES, *OTHERS)

# Two runs of the same transfer differ by up to 10 %.
_NO_SLOWER = 1.1
# Headers, names, digests and TCP retransmissions are allowed; a second copy is not.
_SENT_ONCE = 1.02
# The last of six receivers in a chain gets its first chunk five hops later than the first.
_FAN_OUT_OVERHEAD = 1.15
# What one of six receivers had not passed on when it died comes from the source again.
_DEATH_OVERHEAD = 1.4
# If one link is slower than this, the machine was busy, and no ratio to one link counts.
_LINE_RATE = 1.1
# What 1 Gbit/s carries, without the headers of Ethernet, IP and TCP.
_PAYLOAD_BYTES_PER_S = 1e9 / 8 * 1448 / 1514


class Size(StrEnum):
    """How large the states are."""

    SMOKE = "smoke"
    SMALL = "small"
    FULL = "full"

    @property
    def repeats(self) -> int:
        return self.pick(1, 5, 9)

    @property
    def cluster_repeats(self) -> int:
        return self.pick(1, 3, 5)

    def pick(self, smoke: int, small: int, full: int) -> int:
        """Return one of three numbers."""
        return {Size.SMOKE: smoke, Size.SMALL: small, Size.FULL: full}[self]


@dataclass(frozen=True)
class Case:
    """One transfer to measure. The first `sources` ranks have the state, the next `receivers` ranks get it.

    With `relay`, receivers may forward to each other. `timed` are the ranks whose time counts; all, if empty.
    With `cached`, a system may reuse what it keeps from earlier transfers of the same state. With
    `unchanged`, receivers have the state already, and it is not overwritten before a round.

    The last receiver may be disturbed: it sleeps for `asleep_s` before it receives, or its process is stopped
    for `stopped_s` while it receives, or a process in its place is `killed` when it has half of the state.
    """

    name: str
    state: StateSpec
    systems: tuple[str, ...] = ALL_SYSTEMS
    in_place: bool = False
    sources: int = 1
    receivers: int = 1
    asleep_s: float = 0.0
    stopped_s: float = 0.0
    killed: bool = False
    relay: bool = False
    timed: tuple[int, ...] = ()
    cached: bool = True
    unchanged: bool = False
    x: float | None = None

    @property
    def ranks(self) -> int:
        """The number of processes."""
        return self.sources + self.receivers

    @property
    def last(self) -> int:
        """The rank of the last receiver."""
        return self.ranks - 1

    @property
    def timed_receivers(self) -> int:
        """The number of receivers whose time counts; of all receivers, if only the sender's time counts."""
        return sum(not self.sends(rank) for rank in self.timed) or self.receivers

    def sends(self, rank: int) -> bool:
        """Whether a rank is a source."""
        return rank < self.sources


@dataclass(frozen=True)
class Workload:
    """Cases that answer one question, and their targets.

    If the cases are points of a curve, `axis` is the unit of their `x`: "tensors", "receivers" or "bytes".
    Otherwise `shows` is what the bar plot shows: "rate", "time", "wire" or "memory".

    If targets compare cases, the cases are `interleaved`: each round has a transfer of every case. On a
    cluster, `source_mbit` limits what each source can send.
    """

    name: str
    title: str
    cases: tuple[Case, ...]
    targets: tuple[Target, ...] = ()
    axis: str | None = None
    shows: str = "rate"
    interleaved: bool = False
    source_mbit: int | None = None

    @property
    def ranks(self) -> int:
        """The number of processes that the largest case needs."""
        return max(case.ranks for case in self.cases)


def workloads(size: Size) -> list[Workload]:
    """List all workloads for one machine."""
    return [
        # First, in new processes: memory that another workload has freed would be reused.
        _memory(size),
        *_small(size),
        _metadata(size),
        *_big(size),
        _unchanged(size),
        _publish(size),
        _views(size),
        _gpt(size),
        _sleeper(size, "sleeper", ("sleeper-awake", "sleeper-asleep"), 3, "all awake", "on one machine"),
        _tensors(size),
        _receivers(size),
        _tensor_size(size),
    ]


def cluster_workloads(size: Size, hosts: int = MAX_HOSTS) -> list[Workload]:
    """List the workloads for a cluster, as far as there are enough hosts.

    >>> [case.name for workload in cluster_workloads(Size.FULL, hosts=3) for case in workload.cases]
    ['fan-out-1', 'fan-out-2', 'fan-out-2-direct', 'fan-out-2-killed', 'unchanged-link']
    """
    names = "fan-out-absent", "fan-out-asleep"
    every = (
        _fan_out(size, hosts),
        _sleeper(size, "fan-out-sleeper", names, 2, "those two alone", "links of 1 Gbit/s"),
        _stopped(size),
        _unchanged_link(size),
        _sources(size),
    )
    return [one for one in every if one.ranks <= hosts]


def choose(patterns: Sequence[str], known: Sequence[str], what: str) -> tuple[str, ...]:
    """Return the known names that match a pattern; all without patterns.

    Raises:
        BenchmarkError: a pattern matches nothing.

    >>> choose(["big-*"], ["big-fresh", "big-in-place", "views"], "workload")
    ('big-fresh', 'big-in-place')
    """
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in known):
            raise BenchmarkError(f"there is no {what} {pattern!r}; choose from: {', '.join(known)}")
    return tuple(
        name for name in known if not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)
    )


def _memory(size: Size) -> Workload:
    state = Uniform(size.pick(4, 8, 64), size.pick(4 * MIB, 32 * MIB, 64 * MIB))
    title = f"memory beyond the state, in place, {state.state_bytes / 2**30:.2g} GiB"
    # A source that publishes in every round: the memory of publishing counts too.
    ours = (FERRY, PUBLISH_LIVE_MEMORY, PUBLISH_LIVE_TCP)
    case = Case("memory", state, (*ours, TORCH), in_place=True)
    targets = [
        Target(
            f"{title}: {system}, each side",
            Figure("memory", system, Metric.PEAK_BYTES),
            float(MIB),
            64.0,
            unit=" MiB",
        )
        for system in ours
    ]
    return Workload("memory", title, (case,), tuple(targets), shows="memory")


def _speed(
    name: str,
    title: str,
    state: StateSpec,
    speedups: dict[str, float],
    systems: tuple[str, ...] = ALL_SYSTEMS,
    *,
    unchanged: bool = False,
) -> Workload:
    """Return a workload of one case. Its targets are the speedups of systems over torch's PGTransport."""
    case = Case(name, state, systems, in_place=not name.endswith("-fresh"), unchanged=unchanged)
    targets = [
        Target(
            f"{title}: speed of {system} vs torch",
            Figure(name, TORCH),
            Figure(name, system),
            speedup,
            at_least=True,
        )
        for system, speedup in speedups.items()
    ]
    return Workload(name, title, (case,), tuple(targets))


def _small(size: Size) -> list[Workload]:
    state = Uniform(size.pick(20, 500, 2000), 4 * KIB)
    what = f"{state.tensors:,} tensors of 4 KiB"
    return [
        _speed("small-fresh", f"{what}, fresh", state, {FERRY: 15.0, FETCH_MEMORY: 15.0}),
        _speed("small-in-place", f"{what}, in place", state, {FERRY: 12.0, FETCH_MEMORY: 12.0}),
    ]


def _metadata(size: Size) -> Workload:
    state = Uniform(size.pick(80, 500, 2000), 4 * KIB)
    title = f"metadata of {state.tensors:,} tensors: describe, encode, decode, rebuild"
    fresh = Case("metadata-fresh", state, (METADATA,), timed=(0,))
    in_place = replace(fresh, name="metadata-in-place", in_place=True)
    cases = {
        "fresh": fresh,
        "in place": in_place,
        "fresh, first transfer": replace(fresh, name="metadata-fresh-first", cached=False),
        "in place, first transfer": replace(in_place, name="metadata-in-place-first", cached=False),
    }
    targets = [
        Target(f"{title}; {how}", Figure(case.name, METADATA), 1e-3, 10.0, unit=" ms")
        for how, case in cases.items()
    ]
    return Workload("metadata", title, tuple(cases.values()), tuple(targets), shows="time")


def _big_state(size: Size) -> tuple[Uniform, str]:
    state = Uniform(size.pick(2, 4, 8), size.pick(MIB, 16 * MIB, 64 * MIB))
    return state, f"{state.tensors} × {state.tensor_bytes // MIB} MiB"


def _big(size: Size) -> list[Workload]:
    state, what = _big_state(size)
    in_place = {
        FERRY: 1.8,
        FETCH_MEMORY: 2.5,
        FETCH_MEMORY_UNVERIFIED: 3.0,
        FETCH_MEMORY_LIVE: 2.0,
        FETCH_TCP: 1.3,
        FETCH_TCP_UNVERIFIED: 1.8,
    }
    return [
        _speed("big-fresh", f"{what}, fresh", state, {FERRY: 1.5}),
        _speed("big-in-place", f"{what}, in place", state, in_place),
    ]


def _unchanged(size: Size) -> Workload:
    state, what = _big_state(size)
    systems = (FETCH_MEMORY, FETCH_TCP, TORCH)
    return _speed(
        "unchanged", f"{what} that the receiver has", state, {FETCH_MEMORY: 3.0}, systems, unchanged=True
    )


def _publish(size: Size) -> Workload:
    state, what = _big_state(size)
    title = f"publish of {what} with a snapshot, after the first"
    publish = Case("publish", state, (PUBLISH,), in_place=True, timed=(0,))
    memcpy = Case("publish-memcpy", state, (MEMCPY,))
    figures = Figure(memcpy.name, MEMCPY), Figure(publish.name, PUBLISH)
    target = Target(f"{title}: rate vs memcpy, one core", *figures, 0.7, at_least=True)
    return Workload("publish", title, (publish, memcpy), (target,), interleaved=True)


def _views(size: Size) -> Workload:
    state = Uniform(size.pick(10, 100, 1000), 40_000, views=True)
    title = f"{state.tensors:,} views of one storage of {state.state_bytes / 1e6:g} MB"
    # In place: a fresh receive by torch's PGTransport allocates the storage once for each view, 40 GB.
    case = Case("views", state, (FERRY, GLOO, FETCH_MEMORY, TORCH, SAVE), in_place=True)
    sent = Figure("views", GLOO, Metric.WIRE_BYTES)
    target = Target(f"{title}: bytes sent vs bytes of the state", sent, float(state.state_bytes), _SENT_ONCE)
    return Workload("views", title, (case,), (target,), shows="wire")


def _gpt(size: Size) -> Workload:
    state = {
        Size.SMOKE: Gpt(layers=2, width=64, vocabulary=512, context=64),
        Size.SMALL: Gpt(layers=4, width=256, vocabulary=8192, context=256),
        Size.FULL: Gpt(layers=12, width=768, vocabulary=50257, context=1024),
    }[size]
    title = f"GPT-2 with AdamW state ({state.state_bytes / 1e9:.2g} GB, tied embedding), in place"
    sent, baseline = (Figure("gpt2", system, Metric.WIRE_BYTES) for system in (GLOO, TORCH))
    # Each system that serves a snapshot needs memory for one, so not all of them fit.
    systems = (*PUSHES, FETCH_MEMORY, FETCH_TCP, *OTHERS)
    workload = _speed("gpt2", title, state, {FERRY: 1.8, FETCH_MEMORY: 1.8}, systems)
    # The tied embedding is a tenth of the state. torch's PGTransport sends it twice.
    bytes_sent = Target(f"{title}: bytes sent vs torch", sent, baseline, 0.99)
    return replace(workload, targets=(*workload.targets, bytes_sent))


def _sleeper(
    size: Size, name: str, names: tuple[str, str], receivers: int, versus: str, where: str
) -> Workload:
    """Compare three receivers, of which the last sleeps, with `receivers` receivers that are awake."""
    # Several tensors: torch's PGTransport posts the sends of one tensor to all receivers before it waits.
    state = Uniform(16, size.pick(64 * KIB, MIB, 4 * MIB))
    asleep_s = size.pick(3, 10, 30) / 10
    mebibytes = state.state_bytes // MIB
    title = f"{mebibytes} MiB to 3 receivers without relays, one asleep for {asleep_s:g} s, {where}"
    awake = Case(names[0], state, (FERRY, TORCH), in_place=True, receivers=receivers, timed=(1, 2))
    asleep = replace(awake, name=names[1], receivers=3, asleep_s=asleep_s)
    figures = Figure(asleep.name, FERRY), Figure(awake.name, FERRY)
    target = Target(f"{title}: time of the other two vs {versus}", *figures, _NO_SLOWER)
    return Workload(name, title, (awake, asleep), (target,), shows="time")


def _tensors(size: Size) -> Workload:
    counts = {
        Size.SMOKE: (10, 20, 100),
        Size.SMALL: (100, 1000, 2000, 10_000),
        Size.FULL: (100, 1000, 2000, 10_000, 100_000),
    }[size]
    systems = (FERRY, FETCH_MEMORY, TORCH, SAVE, RAW)
    cases = [Case(f"tensors-{n}", Uniform(n, KIB), systems, x=n) for n in counts]
    few, most = counts[1 if size is Size.SMOKE else 2], counts[-1]
    targets = [
        Target(
            f"{most:,} tensors of 1 KiB: time of {system} per tensor vs {few:,} tensors",
            Figure(f"tensors-{most}", system, Metric.SECONDS_PER_TENSOR),
            Figure(f"tensors-{few}", system, Metric.SECONDS_PER_TENSOR),
            1.3,
        )
        for system in (FERRY, FETCH_MEMORY)
    ]
    title = "time by number of tensors of 1 KiB, fresh"
    return Workload("tensors", title, tuple(cases), tuple(targets), "tensors")


def _receivers(size: Size) -> Workload:
    state = Uniform(size.pick(4, 16, 16), size.pick(64 * KIB, MIB, 4 * MIB))
    cases = [
        Case(f"receivers-{n}", state, (FERRY, FETCH_MEMORY, TORCH, SAVE, RAW), True, receivers=n, x=n)
        for n in (1, 2, 4, 8)[: size.pick(2, 4, 4)]
    ]
    title = f"time by number of receivers, {state.state_bytes / MIB:g} MiB each, in place"
    return Workload("receivers", title, tuple(cases), axis="receivers")


def _tensor_size(size: Size) -> Workload:
    total = size.pick(MIB, 16 * MIB, 64 * MIB)
    systems = (FERRY, UNVERIFIED, FETCH_MEMORY, FETCH_TCP, TORCH, SAVE, RAW)
    cases = [
        Case(f"tensor-size-{each // KIB}k", Uniform(total // each, each), systems, in_place=True, x=each)
        for each in (4 * KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB)
        if each <= total
    ]
    title = f"rate by tensor size, {total // MIB} MiB in total, in place"
    return Workload("tensor-size", title, tuple(cases), axis="bytes")


def _fan_out(size: Size, hosts: int) -> Workload:
    state = Uniform(32, size.pick(64 * KIB, MIB, 4 * MIB))
    sent = f"{state.state_bytes // MIB} MiB"
    cases = [
        Case(
            f"fan-out-{n}",
            state,
            (FERRY, FETCH_RESHARE, TORCH),
            in_place=True,
            receivers=n,
            relay=n > 1,
            # The sender may be done earlier; the transfer ends when every receiver has the state.
            timed=tuple(range(1, n + 1)),
            x=n,
        )
        for n in (1, 2, 4, MAX_HOSTS - 1)
        if n < hosts
    ]
    cases[0] = replace(cases[0], systems=(FERRY, FETCH_TCP, FETCH_RESHARE, TORCH))
    most = cases[-1]
    direct = replace(most, name=f"{most.name}-direct", systems=(FERRY,), relay=False, x=None)
    # The last receiver is killed. The time of the others counts.
    killed = replace(
        most,
        name=f"{most.name}-killed",
        systems=(FETCH_RESHARE,),
        killed=True,
        timed=tuple(range(1, most.last)),
        x=None,
    )
    one_link = {FERRY: Figure("fan-out-1", FERRY), FETCH_RESHARE: Figure("fan-out-1", FETCH_TCP)}
    line_rate_s = state.state_bytes / _PAYLOAD_BYTES_PER_S
    targets = [
        Target(
            f"{sent} to {most.receivers} receivers, {hosts} hosts with 1 Gbit/s links: "
            f"time of {system} vs one receiver",
            Figure(most.name, system),
            one,
            _FAN_OUT_OVERHEAD,
        )
        for system, one in one_link.items()
    ]
    targets += [
        Target(f"{sent} to one receiver: time of {one.system} vs line rate", one, line_rate_s, _LINE_RATE)
        for one in one_link.values()
    ]
    cases.append(direct)
    if killed.timed:
        cases.append(killed)
        targets.append(
            Target(
                f"{sent} to {most.receivers} receivers, one killed half-way: "
                f"time of {FETCH_RESHARE} to the others vs one receiver",
                Figure(killed.name, FETCH_RESHARE),
                one_link[FETCH_RESHARE],
                _DEATH_OVERHEAD,
            )
        )
    title = f"{sent} over links of 1 Gbit/s"
    return Workload("fan-out", title, tuple(cases), tuple(targets), axis="receivers")


def _stopped(size: Size) -> Workload:
    """Compare four receivers, of which the last is stopped, with the other three alone."""
    state = Uniform(16, size.pick(64 * KIB, MIB, 4 * MIB))
    stopped_s = size.pick(3, 10, 30) / 10
    title = f"{state.state_bytes // MIB} MiB to 4 receivers, one stopped for {stopped_s:g} s"
    systems = (FETCH_TCP, FETCH_RESHARE, TORCH)
    alone = Case("stopped-absent", state, systems, in_place=True, receivers=3, timed=(1, 2, 3))
    stopped = replace(alone, name="stopped", receivers=4, stopped_s=stopped_s)
    targets = [
        Target(
            f"{title}: time of {system} to the other three vs those three alone",
            Figure(stopped.name, system),
            Figure(alone.name, system),
            _NO_SLOWER,
        )
        for system in (FETCH_TCP, FETCH_RESHARE)
    ]
    return Workload("stopped", title, (alone, stopped), tuple(targets), shows="time")


def _unchanged_link(size: Size) -> Workload:
    state = Uniform(32, size.pick(64 * KIB, MIB, 4 * MIB))
    title = f"{state.state_bytes // MIB} MiB that the receiver has, over a link of 1 Gbit/s"
    workload = _speed("unchanged-link", title, state, {FETCH_TCP: 20.0}, (FETCH_TCP, TORCH), unchanged=True)
    return replace(workload, shows="time")


def _sources(size: Size) -> Workload:
    state = Uniform(32, size.pick(64 * KIB, MIB, 4 * MIB))
    title = f"{state.state_bytes // MIB} MiB from sources of 250 Mbit/s to a receiver of 1 Gbit/s"
    one = Case("sources-1", state, (FETCH_TCP,), in_place=True)
    four = replace(one, name="sources-4", sources=4)
    figures = Figure(one.name, FETCH_TCP), Figure(four.name, FETCH_TCP)
    target = Target(f"{title}: rate of 4 sources vs one", *figures, 3.5, at_least=True)
    return Workload("sources", title, (one, four), (target,), source_mbit=250)
