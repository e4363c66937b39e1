"""How the ranks of a sync agree: each posts to one rank, the coordinator, over a connection that stays open.

Any rank can coordinate; the lowest rank that was not lost does. If the coordinator is lost, all other ranks
connect to the next one and repeat everything that they posted. The loss of a rank is noticed at once, because
its connection closes.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from msgspec import msgpack, structs

from torchferry.core.agreement import (
    COORDINATOR_CLOSED,
    OTHER_CALL,
    Answer,
    Finished,
    Inventory,
    Join,
    Post,
    Proceed,
    Refusal,
    TargetVersion,
    answer_decoder,
    assignment_for,
    choose_target,
    late,
    post_decoder,
    refusal_of,
)
from torchferry.core.assignment import Assignment, Table, assign
from torchferry.core.codec import decode_manifest, decode_value
from torchferry.core.pull import OK
from torchferry.engine.deadlines import left_s
from torchferry.errors import (
    FerryError,
    LinkBroken,
    LinkError,
    LinkTimeout,
    PartsLost,
    ReplicasDiffer,
)
from torchferry.links.address import parse_address
from torchferry.links.http_client import HttpConnection
from torchferry.links.server_connection import Request, Response
from torchferry.tensors.kinds import part_of

logger = logging.getLogger(__name__)

_POST = "/v1/sync"

_POLL_S = 0.02
"""How often a rank looks up the address of the coordinator until it can connect."""

_STALE_S = 0.8
"""How long a rank may take to replace an address that refuses connections: that of an earlier call."""

_LOOK_S = 0.2
"""How often a coordinator checks whether a rank that waits for an answer is still connected."""

_DEAD_S = 0.5
"""A rank that can't be connected to for this long is lost. A rank whose call ends removes its address from
the store before it stops listening."""

_LAST_S = 2.0
"""How long a coordinator that closes waits until all other ranks have read their last answer."""

LATE_S = 0.3
"""How long a rank waits for an answer after its deadline, at which the coordinator names who is missing."""

_SHORT_S = 1.0
"""The timeout of requests that are answered at once."""

CALLED = "called"
"""In the store, in place of an address: the rank has called, but its call is over."""

_SAME_VERSION = "Run the same version of torchferry on all ranks"

_LOST = "its connection was lost: the process ended, or can't be reached"


class Coordinator:
    """Collects the posts of all ranks, and answers a step when all have posted it. An HTTP handler.

    `is_connected` returns whether the client of a connection is still there. `look_up` is that of `Member`.
    """

    max_request_bytes = 1 << 30
    idle_s = 1e6
    max_connections = 1 << 20  # each rank has one

    def __init__(
        self,
        rank: int,
        size: int,
        look_up: Callable[[int], str | None],
        deadline_s: float,
        is_connected: Callable[[int], bool],
    ) -> None:
        self._rank, self._size, self._deadline_s = rank, size, deadline_s
        self._look_up, self._is_connected = look_up, is_connected
        self._changed = threading.Condition()
        self._posted: dict[int, Post] = {}  # all fields that each rank has posted
        self._lost_ranks: dict[int, str] = {}  # the ranks that were lost or failed, with the reasons
        self._connections: dict[int, int] = {}  # of each rank
        self._deadlines: dict[int, float] = {}  # of each rank: those that called earlier have earlier ones
        self._answered: set[int] = set()  # the ranks that got their last answer
        # The ranks that wait for an answer, or may not have read their last one.
        self._waiting: set[int] = set()
        self._assignment: Assignment | Refusal | None = None
        self._closed: str | None = None
        self.ranks: Mapping[int, Join] = {}

    def close(self, reason: str) -> None:
        """Stop answering. If this rank has its last answer, first wait until the others have theirs."""
        with self._changed:
            if self._rank in self._answered and self._closed is None:
                others = self._connections.keys() - {self._rank}
                self._changed.wait_for(
                    lambda: not (others & self._waiting & self._connections.keys()),
                    min(_LAST_S, self._left_s(self._rank) + LATE_S),
                )
            self._closed = self._closed or reason
            self._changed.notify_all()

    def disconnected(self, connection: int) -> None:
        """Mark the rank of a connection that was closed as lost, unless it has its last answer."""
        with self._changed:
            for rank in [rank for rank, number in self._connections.items() if number == connection]:
                del self._connections[rank]
                if rank not in self._answered:
                    self._lose(rank, _LOST)
            self._changed.notify_all()

    def _lose(self, rank: int, reason: str) -> None:
        logger.debug("rank %d is gone: %s", rank, reason)
        self._lost_ranks.setdefault(rank, reason)
        self._changed.notify_all()

    def answer(self, request: Request) -> Response:
        """Wait until all ranks have posted the step that this rank posts, and answer it."""
        try:
            post = decode_value(request.body, post_decoder)
        except FerryError as error:
            what = f"the coordinator can't decode what this rank posted: {error.what}. {_SAME_VERSION}"
            return Response(OK, msgpack.encode(Refusal("argument", what)))
        with self._changed:
            is_over = self._closed is not None or self._assignment is not None
            if is_over and post.join is not None and not post.lost:
                return Response(OTHER_CALL)  # this is the coordinator of an earlier call
            if self._closed is None:
                self._note(post, request.connection)
                self._waiting.add(post.rank)
            while self._closed is not None or (answer := self._answer_to(post.rank)) is None:
                if self._closed is not None:
                    return _closed_response(self._closed)
                if not self._is_connected(request.connection):
                    self._lose(post.rank, _LOST)
                    return _closed_response(_LOST)
                self._changed.wait(min(_LOOK_S, self._left_s(post.rank)))
            if isinstance(answer, Refusal):
                self._assignment = answer  # every rank gets it, even if the ranks that caused it leave
            if isinstance(answer, (Finished, Refusal)):
                self._answered.add(post.rank)
            else:
                self._waiting.discard(post.rank)
            return Response(OK, msgpack.encode(answer))

    def _note(self, post: Post, connection: int) -> None:
        rank, known = post.rank, self._posted.get(post.rank, Post(post.rank))
        if rank == self._rank and rank not in self._posted:
            threading.Thread(target=self._find_dead_ranks, name="torchferry-look", daemon=True).start()
        fields = {name: value for name, value in structs.asdict(post).items() if value is not None}
        self._posted[rank] = post if post.join is not None else structs.replace(known, **fields)
        self._connections[rank] = connection
        if post.left_s is not None:
            self._deadlines[rank] = time.monotonic() + post.left_s
        for other, reason in post.lost.items():
            # Keep the reason of a rank that knows why, not that of one that only lost the connection.
            if self._lost_ranks.get(other, _LOST) == _LOST:
                self._lost_ranks[other] = reason
        self._lost_ranks.pop(rank, None)
        if post.failed is not None:
            self._lose(rank, post.failed)
        self._changed.notify_all()

    def _find_dead_ranks(self) -> None:
        """Until all ranks have posted, note those that were killed before they could connect to this one."""
        dead: dict[str, float] = {}  # since when, by address
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: self._closed is not None or not self._missing(), _LOOK_S):
                    return
                missing = self._missing()
            for rank in missing:
                # If an earlier coordinator was lost, all addresses are known, and the store may be lost too.
                known, address = self.ranks.get(rank), None
                with suppress(FerryError):
                    address = self._look_up(rank) if known is None else known.coordinator
                if not address or address == CALLED:
                    continue
                error = _why_unreachable(address)
                if error is None:
                    dead.pop(address, None)
                    continue
                since_s = dead.setdefault(address, time.monotonic())
                # A timeout may be a lost packet. A refusal is certain, unless the address is an old one.
                refuses = not isinstance(error, LinkTimeout)
                if (known is not None and refuses) or time.monotonic() >= since_s + _DEAD_S:
                    with self._changed:
                        if rank in self._missing():
                            self._lose(rank, _LOST)

    def _missing(self) -> list[int]:
        known = self._posted.keys() | self._lost_ranks.keys()
        return [each for each in range(self._size) if each not in known]

    # The rules of each step. Callers hold the lock.

    def _answer_to(self, rank: int) -> Answer | None:
        """Return the answer to the last step that a rank posted; None while it must wait for other ranks."""
        own = self._posted[rank]
        if own.failed is not None:
            return Proceed()
        posts = {each: self._posted.get(each, Post(each)) for each in range(self._size)}
        present = {each: post for each, post in posts.items() if each not in self._lost_ranks}
        if own.done:
            return self._finish(rank, {each for each, post in present.items() if not post.done})
        if isinstance(self._assignment, Refusal):
            return self._assignment
        if absent := {each for each, post in present.items() if post.join is None}:
            return self._late(rank, absent, "join")
        present = {each: post for each, post in present.items() if not post.done}
        if own.ready == self._rank:
            waiting = {each for each, post in present.items() if post.ready != self._rank}
            return self._late(rank, waiting, "ready") if waiting else Proceed()
        return self._assignment_for(rank, present)

    def _assignment_for(self, rank: int, posts: Mapping[int, Post]) -> Answer | None:
        """Answer `join` and `inventory`, given the posts of all ranks that have joined and are not done."""
        kept = [(each, post) for each, post in self._posted.items() if each not in self._lost_ranks]
        if self._assignment is None:
            target = choose_target({each: post.join for each, post in kept if post.join}, self._lost_ranks)
            if isinstance(target, Refusal):
                return target
            described = {
                n: each.inventory
                for n, each in posts.items()
                if each.inventory and each.inventory.version == target.version
            }
            if rank not in described:
                return target
            if waiting := posts.keys() - described.keys():
                return self._late(rank, waiting, "inventory")
            self._assignment = _assign(described, target)
        if isinstance(self._assignment, Refusal):
            return self._assignment
        manifests = {each: post.inventory.manifest for each, post in kept if post.inventory is not None}
        return assignment_for(rank, self._rank, self._assignment, manifests)

    def _finish(self, rank: int, waiting: set[int]) -> Answer | None:
        """Answer `done`, while the ranks in `waiting` are not."""
        if waiting and self._left_s(rank):
            return None
        for each in self._posted.keys() - self._lost_ranks.keys() - waiting - self._answered:
            if not self._is_connected(self._connections.get(each, 0)):
                self._lose(each, _LOST)
        return Finished({**dict.fromkeys(waiting, "it did not confirm in time"), **self._lost_ranks})

    def _late(self, rank: int, waiting: set[int], step: str) -> Refusal | None:
        join = self._posted[rank].join
        return None if self._left_s(rank) else late(waiting, step, "sync" if join is None else join.call)

    def _left_s(self, rank: int) -> float:
        """Return how long a rank can wait for its answer."""
        deadline_s = min(self._deadline_s, self._deadlines.get(rank, self._deadline_s))
        return left_s(deadline_s)


def _assign(described: Mapping[int, Inventory], target: TargetVersion) -> Assignment | Refusal:
    sources: dict[int, Table] = {}
    receivers: dict[int, Table] = {}
    for rank, inventory in described.items():
        join = target.ranks[rank]
        digests = [inventory.digests[start : start + 16] for start in range(0, len(inventory.digests), 16)]
        tables = sources if join.version == target.version else receivers
        try:
            manifest = decode_manifest(inventory.manifest)
        except FerryError as error:
            what = f"the description of rank {rank}'s state can't be decoded: {error.what}"
            return Refusal("argument", f"{what}. {_SAME_VERSION}")
        tables[rank] = Table(join.global_rank, manifest, digests, inventory.per_rank, inventory.optional)
    try:
        return assign(sources, receivers, target.ranks[rank].trust, part_of)
    except (PartsLost, ReplicasDiffer) as error:
        return refusal_of(error)


def _why_unreachable(address: str) -> LinkError | None:
    try:
        HttpConnection(parse_address(address), None, _SHORT_S).close()
    except LinkError as error:
        return error
    return None


def _closed_response(reason: str) -> Response:
    return Response(COORDINATOR_CLOSED, reason.encode())


class Member:
    """One rank's side of the agreement: what it has posted so far, and its connection to the coordinator.

    `look_up` returns the address of a rank's coordinator; None if the rank has not called yet, and CALLED if
    its call is over.
    """

    def __init__(
        self, rank: int, size: int, look_up: Callable[[int], str | None], own: Coordinator, deadline_s: float
    ) -> None:
        self._rank, self._size, self._deadline_s = rank, size, deadline_s
        self._look_up, self._own = look_up, own
        self._posted = Post(rank)
        self._connection: HttpConnection | None = None
        self._lost_ranks: dict[int, str] = {}
        self._address = ""
        self.ranks: Mapping[int, Join] = {}
        self.has_received = False

    @property
    def lost_addresses(self) -> dict[int, str]:
        """The addresses of the ranks that were lost."""
        return {rank: self.ranks[rank].coordinator for rank in self._lost_ranks if rank in self.ranks}

    @property
    def coordinator(self) -> int:
        """The lowest rank that was not lost."""
        return next((rank for rank in range(self._size) if rank not in self._lost_ranks), self._rank)

    def set_addresses(self, ranks: Mapping[int, Join]) -> None:
        """Remember the addresses of all ranks. The store is not needed for them from now on."""
        self.ranks = self._own.ranks = ranks

    def post(self, **fields: Any) -> Answer:
        """Post new fields to the coordinator, and return its answer.

        If the coordinator is lost, all fields are posted to the next one. Raises LinkTimeout if there is no
        answer in time, and LinkBroken if no other rank is left.
        """
        self._posted = structs.replace(self._posted, **fields)
        post = Post(self._rank, **fields)
        while True:
            if self._connection is None:
                self._connection, post = self._connect(), self._posted
            post = structs.replace(post, left_s=left_s(self._deadline_s))
            try:
                head = self._connection.request(
                    "POST", _POST, msgpack.encode(post), timeout_s=left_s(self._deadline_s) + LATE_S
                )
                body = self._connection.read(head.nbytes)
                if head.status == OK:
                    try:
                        answer = decode_value(body, answer_decoder)
                    except FerryError as error:
                        raise error.with_context(peer=self.coordinator, more=f". {_SAME_VERSION}") from None
                    if isinstance(answer, (Finished, Refusal)):
                        self.close()
                    return answer
                reason = body.decode(errors="replace")
                is_lost = head.status == COORDINATOR_CLOSED or bool(self.ranks)
            except LinkTimeout:
                self.close()  # it would not answer when this rank leaves, either
                what = f"rank {self.coordinator}, the coordinator, did not answer in time"
                raise LinkTimeout(what, peer=self.coordinator) from None
            except LinkBroken:
                # If the store has another address by now, this one was of an earlier call.
                reason, is_lost = _LOST, bool(self.ranks) or self._look_up(self.coordinator) == self._address
            self.close()
            if is_lost:
                self._fail_over(reason)
            elif not left_s(self._deadline_s):
                raise self._absent()
            else:
                # The address is of an earlier call. The rank will replace it.
                time.sleep(_POLL_S)

    def report_failure(self, reason: str) -> None:
        """Tell the coordinator why this rank fails. If this rank coordinates, also tell the next one."""
        if self._connection is None:
            return
        post = msgpack.encode(Post(self._rank, failed=reason))
        timeout_s = min(_SHORT_S, left_s(self._deadline_s) + LATE_S)
        self._connection.request("POST", _POST, post, timeout_s=timeout_s)
        if self.coordinator == self._rank and len(self.ranks) > 1:
            self.close()
            self._lost_ranks[self._rank] = reason
            self._connection = self._connect()
            self._connection.request("POST", _POST, post, timeout_s=timeout_s)

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _fail_over(self, reason: str) -> None:
        lost = self.coordinator
        logger.warning("rank %d, the coordinator of the sync, is lost (%s)", lost, reason)
        self._lost_ranks[lost] = reason
        if lost == self._rank or len(self._lost_ranks) == self._size:
            raise LinkBroken(f"rank {lost}, the coordinator, is lost, and no other rank is left")
        # The next coordinator makes a new assignment, for the ranks that have not received anything yet.
        done = self._posted.done and self.has_received
        self._posted = structs.replace(self._posted, ready=None, done=done, lost=dict(self._lost_ranks))

    def _connect(self) -> HttpConnection:
        refused: dict[str, float] = {}  # when each address refused for the first time
        while True:
            rank = self.coordinator
            known = self.ranks.get(rank)
            address = known.coordinator if known is not None else self._look_up(rank)
            if address and address != CALLED:
                self._address = address
                try:
                    return HttpConnection(
                        parse_address(address), None, min(left_s(self._deadline_s) + 0.1, 5.0)
                    )
                except LinkError as error:
                    # It may be an address of an earlier call, which is replaced soon.
                    since_s = refused.setdefault(address, time.monotonic())
                    if known is not None or time.monotonic() > since_s + _STALE_S:
                        self._fail_over(error.what)
                        continue
            if not left_s(self._deadline_s):
                raise self._absent()
            time.sleep(_POLL_S)

    def _absent(self) -> FerryError:
        absent = [rank for rank in range(self._size) if not self._look_up(rank)]
        if absent:
            refusal = late(absent, "join", "" if self._posted.join is None else self._posted.join.call)
            return LinkTimeout(refusal.what, peer=absent[0])
        what = f"the call of rank {self.coordinator} is over; nothing was written. Call again on all ranks"
        return LinkTimeout(what, peer=self.coordinator)
