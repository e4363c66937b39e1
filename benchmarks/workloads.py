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
METADATA = "torchferry-metadata"
TORCH = "torch-pg"
TORCHFT = "torchft-pg"
HTTP = "torchft-http"
SAVE = "torch-save"
DCP = "dcp"
RAW = "raw"
MEMCPY = "memcpy"
ALL_SYSTEMS = (FERRY, UNVERIFIED, TORCH, TORCHFT, HTTP, SAVE, DCP, RAW, MEMCPY)

# Two runs of the same transfer differ by up to 10 %.
_NO_SLOWER = 1.1
# Headers, names, digests and TCP retransmissions are allowed; a second copy is not.
_SENT_ONCE = 1.02
# The last of six receivers in a chain gets its first chunk five hops later than the first.
_CHAIN_OVERHEAD = 1.15
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
    """One transfer to measure. The last receiver sleeps for `asleep_s` before it receives.

    With `relay`, receivers may forward to each other. `timed` are the ranks whose time counts; all, if empty.
    With `cached`, a system may reuse what it keeps from earlier transfers of the same state.
    """

    name: str
    state: StateSpec
    systems: tuple[str, ...] = ALL_SYSTEMS
    in_place: bool = False
    receivers: int = 1
    asleep_s: float = 0.0
    relay: bool = False
    timed: tuple[int, ...] = ()
    cached: bool = True
    x: float | None = None


@dataclass(frozen=True)
class Workload:
    """Cases that answer one question, and their targets.

    If the cases are points of a curve, `axis` is the unit of their `x`: "tensors", "receivers" or "bytes".
    Otherwise `shows` is what the bar plot shows: "rate", "time", "wire" or "memory".
    """

    name: str
    title: str
    cases: tuple[Case, ...]
    targets: tuple[Target, ...] = ()
    axis: str | None = None
    shows: str = "rate"

    @property
    def ranks(self) -> int:
        """The number of processes that the largest case needs."""
        return 1 + max(case.receivers for case in self.cases)


def workloads(size: Size) -> list[Workload]:
    """List all workloads for one machine."""
    return [
        # First, in new processes: memory that another workload has freed would be reused.
        _memory(size),
        *_small(size),
        _metadata(size),
        *_big(size),
        _views(size),
        _gpt(size),
        _sleeper(size, "sleeper", ("sleeper-awake", "sleeper-asleep"), 3, "all awake"),
        _tensors(size),
        _receivers(size),
        _tensor_size(size),
    ]


def cluster_workloads(size: Size, hosts: int = MAX_HOSTS) -> list[Workload]:
    """List the workloads for a cluster, as far as there are enough hosts.

    >>> [case.name for workload in cluster_workloads(Size.FULL, hosts=3) for case in workload.cases]
    ['fan-out-1', 'fan-out-2', 'fan-out-2-direct']
    """
    names = "fan-out-absent", "fan-out-asleep"
    sleeper = _sleeper(size, "fan-out-sleeper", names, 2, "those two alone")
    return [one for one in (_fan_out(size, hosts), sleeper) if one.ranks <= hosts]


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
    case = Case("memory", state, (FERRY, TORCH), in_place=True)
    peak = Figure("memory", FERRY, Metric.PEAK_BYTES)
    target = Target(f"{title}, each side", peak, float(MIB), 64.0, unit=" MiB")
    return Workload("memory", title, (case,), (target,), shows="memory")


def _speed(name: str, title: str, state: StateSpec, speedups: dict[str, float]) -> Workload:
    """Return a workload of one case. Its targets are the speedups of systems over torch's PGTransport."""
    case = Case(name, state, in_place=not name.endswith("-fresh"))
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
        _speed("small-fresh", f"{what}, fresh", state, {FERRY: 15.0}),
        _speed("small-in-place", f"{what}, in place", state, {FERRY: 12.0}),
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


def _big(size: Size) -> list[Workload]:
    state = Uniform(size.pick(2, 4, 8), size.pick(MIB, 16 * MIB, 64 * MIB))
    what = f"{state.tensors} × {state.tensor_bytes // MIB} MiB"
    return [
        _speed("big-fresh", f"{what}, fresh", state, {FERRY: 1.5}),
        _speed("big-in-place", f"{what}, in place", state, {UNVERIFIED: 1.15, FERRY: 1.0}),
    ]


def _views(size: Size) -> Workload:
    state = Uniform(size.pick(10, 100, 1000), 40_000, views=True)
    title = f"{state.tensors:,} views of one storage of {state.state_bytes / 1e6:g} MB"
    # In place: a fresh receive by torch's PGTransport allocates the storage once for each view, 40 GB.
    case = Case("views", state, (FERRY, TORCH, SAVE), in_place=True)
    sent = Figure("views", FERRY, Metric.WIRE_BYTES)
    target = Target(f"{title}: bytes sent vs bytes of the state", sent, float(state.state_bytes), _SENT_ONCE)
    return Workload("views", title, (case,), (target,), shows="wire")


def _gpt(size: Size) -> Workload:
    state = {
        Size.SMOKE: Gpt(layers=2, width=64, vocabulary=512, context=64),
        Size.SMALL: Gpt(layers=4, width=256, vocabulary=8192, context=256),
        Size.FULL: Gpt(layers=12, width=768, vocabulary=50257, context=1024),
    }[size]
    title = f"GPT-2 with AdamW state ({state.state_bytes / 1e9:.2g} GB, tied embedding), in place"
    sent, baseline = (Figure("gpt2", system, Metric.WIRE_BYTES) for system in (FERRY, TORCH))
    workload = _speed("gpt2", title, state, {FERRY: 1.1})
    # The tied embedding is a tenth of the state. torch's PGTransport sends it twice.
    bytes_sent = Target(f"{title}: bytes sent vs torch", sent, baseline, 0.99)
    return replace(workload, targets=(*workload.targets, bytes_sent))


def _sleeper(size: Size, name: str, names: tuple[str, str], receivers: int, versus: str) -> Workload:
    """Compare three receivers, of which the last sleeps, with `receivers` receivers that are awake."""
    # Several tensors: torch's PGTransport posts the sends of one tensor to all receivers before it waits.
    state = Uniform(16, size.pick(64 * KIB, MIB, 4 * MIB))
    asleep_s = size.pick(3, 10, 30) / 10
    title = f"{state.state_bytes // MIB} MiB to 3 receivers without relays, one asleep for {asleep_s:g} s"
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
    systems = (FERRY, TORCH, SAVE, RAW)
    cases = [Case(f"tensors-{n}", Uniform(n, KIB), systems, x=n) for n in counts]
    few, most = counts[1 if size is Size.SMOKE else 2], counts[-1]
    target = Target(
        f"{most:,} tensors of 1 KiB: time per tensor vs {few:,} tensors",
        Figure(f"tensors-{most}", FERRY, Metric.SECONDS_PER_TENSOR),
        Figure(f"tensors-{few}", FERRY, Metric.SECONDS_PER_TENSOR),
        1.3,
    )
    return Workload(
        "tensors", "time by number of tensors of 1 KiB, fresh", tuple(cases), (target,), "tensors"
    )


def _receivers(size: Size) -> Workload:
    state = Uniform(size.pick(4, 16, 16), size.pick(64 * KIB, MIB, 4 * MIB))
    cases = [
        Case(f"receivers-{n}", state, (FERRY, TORCH, SAVE, RAW), in_place=True, receivers=n, x=n)
        for n in (1, 2, 4, 8)[: size.pick(2, 4, 4)]
    ]
    title = f"time by number of receivers, {state.state_bytes / MIB:g} MiB each, in place"
    return Workload("receivers", title, tuple(cases), axis="receivers")


def _tensor_size(size: Size) -> Workload:
    total = size.pick(MIB, 16 * MIB, 64 * MIB)
    systems = (FERRY, UNVERIFIED, TORCH, SAVE, RAW)
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
            (FERRY, TORCH),
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
    most = cases[-1]
    direct = replace(most, name=f"{most.name}-direct", systems=(FERRY,), relay=False, x=None)
    one_link = Figure("fan-out-1", FERRY)
    targets = (
        Target(
            f"{sent} to {most.receivers} receivers, {hosts} hosts with 1 Gbit/s links: time vs one receiver",
            Figure(most.name, FERRY),
            one_link,
            _CHAIN_OVERHEAD,
        ),
        Target(
            f"{sent} to one receiver: time vs line rate",
            one_link,
            state.state_bytes / _PAYLOAD_BYTES_PER_S,
            _LINE_RATE,
        ),
    )
    return Workload("fan-out", f"{sent} over links of 1 Gbit/s", (*cases, direct), targets, axis="receivers")
