"""sync and broadcast_state: every rank of a process group calls them, and ranks that are behind catch up."""

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch.distributed as dist
from msgspec import structs

from torchferry import arguments
from torchferry.arguments import Timeout
from torchferry.core.agreement import (
    Finished,
    Inventory,
    Join,
    RankAssignment,
    RankBundle,
    Refusal,
    TargetVersion,
)
from torchferry.core.codec import decode_manifest, encode_value
from torchferry.core.manifest import OPAQUE, VALUE, Leaf
from torchferry.core.report import FetchReport
from torchferry.core.text import show_error
from torchferry.core.tree import format_path, occurrences
from torchferry.engine.deadlines import left_s
from torchferry.engine.pull.published import digest_leaves
from torchferry.engine.sync.bundles import IncomingBundle, bundle_keys, receive_bundles
from torchferry.engine.sync.coordination import CALLED, LATE_S, Coordinator, Member
from torchferry.errors import BadArgument, FerryError, LinkBroken, LinkTimeout
from torchferry.links.address import own_host, parse_address
from torchferry.serving import Source
from torchferry.tensors.describe import Description, describe, describe_target
from torchferry.tensors.objects import read_objects, rules_of
from torchferry.tensors.rng import RNG
from torchferry.torch_internals import store_of

T = TypeVar("T")

Role = Literal["source", "receiver", "idle"]

_MAX_SOURCES = 16
"""The most ranks from which one rank fetches a bundle at the same time."""

_STORE_S = 5.0
"""How long to wait for one answer of the group's store."""


@dataclass(frozen=True)
class Synced:
    """What `sync` did on this rank.

    `role` is "receiver" if this rank fetched something, "source" if it only served, and "idle" otherwise.
    `report` describes the fetch of a receiver; it is None on other ranks. `failed` maps each rank that was
    lost or failed to the reason.
    """

    version: int
    role: Role
    state: Any
    report: FetchReport | None
    failed: dict[int, str]


def sync(
    state: Any,
    version: int | None,
    *,
    group: Any = None,
    timeout: Timeout = 300.0,
    atomic: bool = False,
    trust: int | None = None,
    per_rank: str | Sequence[str] = (),
    host: str | None = None,
) -> Synced:
    """Bring all ranks of a process group to the highest version that a rank has. Every rank calls this.

    Ranks that have the highest version serve their state, and all others fetch it from all of them at once,
    in place. A rank takes each shard of a DTensor from a rank that holds the same shard. This returns when
    all ranks that were behind have confirmed. The state must not change meanwhile. All ranks here are ranks
    in the group, not global ranks.

    Args:
        state: the state of this rank, as for `serve` and `fetch`.
        version: which version this rank has, normally its training step; None if it has nothing.
        group: the process group; the default group if None. Only its store is used, not its collectives.
        timeout: the time limit; a timedelta, or seconds.
        atomic: receive into separate memory, and write when everything is verified, as in `fetch`.
        trust: if ranks that have the highest version differ, take the values of this rank.
        per_rank: paths, such as "loader", that are not compared between ranks. A rank that is behind takes
            the values at these paths from the lowest rank that has the highest version.
        host: the address, host name or interface to listen on. By default the interface of
            GLOO_SOCKET_IFNAME, or else the machine's address on the route to MASTER_ADDR, or else loopback.

    Raises:
        BadArgument: an argument is invalid, the ranks made different calls, the trusted rank does not have
            the highest version, or the ranks run versions of torchferry that do not fit.
        NoSuchVersion: no rank has a version (also a LookupError).
        ReplicasDiffer: ranks that have the highest version differ; lists ranks and paths.
        PartsLost: no rank has some part of a tensor; lists every part (also a LookupError).
        LinkTimeout: a rank did not call this, or describe or serve its state, in time (also a TimeoutError).
            If a rank does not finish receiving in time, the others return, and `failed` names it.
        LinkBroken: the group's store failed, or no other rank can be reached (also a ConnectionError).
        Unsendable: something in this rank's state can't be sent.
        FerryError: what `fetch` raises, on a rank whose fetch failed. The others list it in `failed`.
    """
    if version is not None:
        version = arguments.check_int(version, "version")
    given: Any = (per_rank,) if isinstance(per_rank, str) else per_rank
    paths = tuple(given) if isinstance(given, Iterable) else (None,)
    arguments.require(all(isinstance(each, str) for each in paths), "per_rank", "a list of paths", per_rank)
    return _Call(state, version, group, timeout, atomic, trust, paths, host, f"sync(trust={trust})").run()


def broadcast_state(
    state: Any,
    source: int = 0,
    group: Any = None,
    *,
    timeout: Timeout = 300.0,
    atomic: bool = False,
    host: str | None = None,
) -> Synced:
    """Copy the state of one rank to all other ranks of a process group. Every rank calls this.

    This is `sync` with a given source, whatever versions the ranks have. The result has version 0.

    Raises what `sync` raises.
    """
    group = _resolve(group)
    source = arguments.check_int(source, "source", low=0, high=group.size() - 1)
    version = 0 if group.rank() == source else None
    called = f"broadcast_state(source={source})"
    return _Call(state, version, group, timeout, atomic, None, (), host, called).run()


def _resolve(group: Any) -> Any:
    if group is None:
        if not dist.is_initialized():
            raise BadArgument(
                "there is no process group: call init_process_group first, or use serve and fetch, which need"
                " none"
            )
        group = dist.group.WORLD
    if not hasattr(group, "rank"):
        raise BadArgument("this process is not in the group: call this only on its ranks")
    return group


class _Call:
    """One call of `sync` on one rank."""

    def __init__(
        self,
        state: Any,
        version: int | None,
        group: Any,
        timeout: Timeout,
        atomic: bool,
        trust: int | None,
        per_rank: tuple[str, ...],
        host: str | None,
        called: str,
    ) -> None:
        group = _resolve(group)
        self._rank, self._size = group.rank(), group.size()
        self._state, self._version, self._per_rank = state, version, per_rank
        self._deadline_s = time.monotonic() + arguments.seconds(timeout, "timeout")
        self._atomic = arguments.check_bool(atomic, "atomic")
        if trust is not None:
            trust = arguments.check_int(trust, "trust", low=0, high=self._size - 1)
        self._trust, self._called = trust, called
        self._store = store_of(group)
        if self._store is None:
            raise BadArgument(
                "the group has no store: pass a group that init_process_group or new_group returned"
            )
        self._source = Source(
            own_host(os.environ.get("MASTER_ADDR")) if host is None else arguments.check_str(host, "host")
        )
        self._target = 0
        self._described: Description | None = None

    def run(self) -> Synced:
        coordinator = Coordinator(
            self._rank, self._size, self._look_up, self._deadline_s, self._source.is_connected
        )
        member = Member(self._rank, self._size, self._look_up, coordinator, self._deadline_s)
        address = self._source.attach(coordinator)
        reason = "it ended its call"
        try:
            self._ask_store(lambda: self._store.set(_key(self._rank), address))
            return self._take_steps(member, address)
        except BaseException as error:
            reason = show_error(error)
            coordinator.close(reason)
            with suppress(FerryError):
                member.report_failure(reason)
            raise
        finally:
            member.close()
            with suppress(FerryError):
                self._ask_store(lambda: self._forget(member, address), 1.0, late_s=0.05)
            coordinator.close(reason)
            self._source.close(timeout=0.01)

    def _take_steps(self, member: Member, address: str) -> Synced:
        """Take the step that each answer of the coordinator asks for, until the sync is finished.

        If the coordinator is lost, the next one may ask for the same steps again.
        """
        global_rank = dist.get_rank() if dist.is_initialized() else self._rank
        own = Join(global_rank, self._version, self._called, self._trust, address, self._source.address)
        assignment, state, report, has_served = RankAssignment(-1), self._state, None, False
        answer = member.post(join=own)
        while not isinstance(answer, Finished):
            if isinstance(answer, Refusal):
                raise answer.error()
            if isinstance(answer, TargetVersion):
                member.set_addresses(answer.ranks)
                self._target = answer.version
                answer = member.post(inventory=self._describe())
            elif isinstance(answer, RankAssignment):
                assignment = answer
                self._serve(assignment.serves)
                # If the coordinator is lost when all have received, the next assignment has nothing to serve.
                has_served = has_served or bool(assignment.serves)
                answer = member.post(ready=assignment.coordinator)
            else:
                if assignment.receives and not member.has_received:
                    state, report = self._receive(assignment, member)
                    member.has_received = True
                try:
                    answer = member.post(done=True)
                except LinkTimeout as error:
                    # This rank has all that it needs. Only the coordinator did not say so in time.
                    answer = Finished({member.coordinator: error.what})
        role: Role = "receiver" if member.has_received else "source" if has_served else "idle"
        return Synced(self._target, role, state, report, answer.failed)

    def _describe(self) -> Inventory:
        """Describe the state of this rank, and hash it if this rank has the version."""
        digests = b""
        if self._version == self._target:
            described = describe(self._state, objects=read_objects(self._state))
            digests = b"".join(digest_leaves(described, self._source.workspace))
        else:
            described = describe_target(self._state, read_objects(self._state, is_target=True))
        self._described = described
        rules, paths = rules_of(described.objects), [path for path, _ in occurrences(described.manifest)]
        generators = [path for path, read in described.objects.items() if isinstance(read.value, RNG)]
        # Other ranks need only the path of a value that can't be sent. The comparison here needs the reason.
        leaves = [Leaf(VALUE) if leaf.kind == OPAQUE else leaf for leaf in described.manifest.leaves]
        return Inventory(
            self._target,
            encode_value(structs.replace(described.manifest, leaves=tuple(leaves))),
            digests,
            per_rank=(*self._per_rank, *map(format_path, generators)),
            optional=tuple(format_path(path) for path in paths if rules(path) == "varies"),
        )

    def _serve(self, bundles: Sequence[RankBundle]) -> None:
        assert self._described is not None, "a rank describes its state before it gets an assignment"
        found, values = occurrences(self._described.manifest), self._described.values
        for bundle in bundles:
            paths, leaves = zip(*(found[number] for number in bundle.numbers), strict=True)
            state = {key: values[leaf] for key, leaf in zip(bundle_keys(paths), leaves, strict=True)}
            self._source.publish(state, self._target, bundle.name, snapshot=False)

    def _receive(self, assignment: RankAssignment, member: Member) -> tuple[Any, FetchReport]:
        assert self._described is not None, "a rank describes its state before it gets an assignment"
        tree = decode_manifest(assignment.tree) if assignment.tree else self._described.manifest
        paths = [path for path, _ in occurrences(tree)]
        bundles = []
        for bundle in assignment.receives:
            # With more sources than that, each receiver begins at another one, which spreads the load.
            first = bundle.receivers.index(self._rank) * _MAX_SOURCES % len(bundle.sources)
            chosen = (*bundle.sources[first:], *bundle.sources[:first])[:_MAX_SOURCES]
            addresses = [parse_address(member.ranks[rank].source) for rank in chosen]
            taken = [paths[number] for number in bundle.numbers]
            bundles.append(IncomingBundle(bundle.name, addresses, taken, len(bundle.receivers) > 1))
        timeout_s = left_s(self._deadline_s)
        return receive_bundles(self._described, tree, bundles, self._target, timeout_s, atomic=self._atomic)

    # The group's store.

    def _look_up(self, rank: int) -> str | None:
        # Unlike `get`, `compare_set` does not wait until the key exists.
        found: bytes = self._ask_store(lambda: self._store.compare_set(_key(rank), "", ""))
        return found.decode() or None

    def _forget(self, member: Member, address: str) -> None:
        # A rank that was killed can't remove its own address. Ranks whose time limit passes a little later
        # must not report this rank as absent. If the store answers late, the addresses may be of later calls.
        for rank, lost in member.lost_addresses.items():
            self._store.compare_set(_key(rank), lost, CALLED)
        self._store.compare_set(_key(self._rank), address, "" if member.ranks else CALLED)

    def _ask_store(self, ask: Callable[[], T], timeout_s: float = _STORE_S, late_s: float = LATE_S) -> T:
        """Return what `ask` returns; raises LinkBroken if the store fails, and LinkTimeout if it is too slow.

        It runs in a thread, because a store whose process is stopped never answers. It may answer up to
        `late_s` after the deadline; later, it is not waited for.
        """
        timeout_s = min(timeout_s, left_s(self._deadline_s) + late_s)
        found: list[T | Exception] = []

        def run() -> None:
            try:
                found.append(ask())
            except Exception as error:
                found.append(error)

        thread = threading.Thread(target=run, name="torchferry-store", daemon=True)
        thread.start()
        thread.join(timeout_s)
        if not found:
            raise LinkTimeout(f"the store of the process group did not answer for {timeout_s:.1f} s")
        result = found[0]
        if isinstance(result, Exception):
            what = str(result).partition("\n")[0]
            raise LinkBroken(f"the store of the process group failed: {what}. Create a new group") from result
        return result


def _key(rank: int) -> str:
    return f"torchferry/sync/{rank}"
