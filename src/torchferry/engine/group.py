"""What transfers on one process group have to know of each other.

Several threads may send and receive on the same group at once, through one transport or several. Serial
numbers keep their messages apart; the locks keep one transfer's length and frame together, for those have
no number yet; and after a failure nothing more is tried, for old messages may still be about. What one
transfer has staged in, and what it has worked out of a description, is left to the next.
"""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

from torchferry.engine.recall import Recall
from torchferry.engine.staging import Staging
from torchferry.errors import GroupBroken, LinkTimeout
from torchferry.links.base import Pending


class Group:
    """The state of one process group, shared by all transports that use it.

    With `lasting=False` failures are not remembered: for objects that may get a new group behind them.
    """

    def __init__(self, *, lasting: bool = True) -> None:
        self._lasting = lasting
        self._lock = threading.Lock()
        self._serial = 0
        self._headers: defaultdict[tuple[str, int], threading.Lock] = defaultdict(threading.Lock)
        self._broken: str | None = None
        self._stagings: dict[tuple[torch.device, bool], Staging] = {}
        self._recalls: dict[str, Recall] = {}
        self._held: defaultdict[int, list[Pending]] = defaultdict(list)

    def staging(self, device: torch.device, *, pinned: bool = False) -> Staging:
        """Give memory to stage in: an earlier transfer's, if that has left any."""
        with self._lock:
            new = Staging(device, pinned=pinned)
            return self._stagings.pop((device, new.pinned), new)

    def keep(self, staging: Staging) -> None:
        """Keep a transfer's staging for the next; one is enough."""
        with self._lock:
            self._stagings[staging.device, staging.pinned] = staging

    def recall(self, way: str) -> Recall:
        """Give what the last transfer that way has left, if there is any, to this one alone."""
        with self._lock:
            return self._recalls.pop(way, None) or Recall()

    def remember(self, way: str, recall: Recall) -> None:
        """Keep what a transfer leaves for the next that way."""
        if recall.is_worth_keeping:
            with self._lock:
                self._recalls[way] = recall

    def hold(self, peer: int, messages: Iterable[Pending]) -> None:
        """Keep messages to a peer that nobody waits for. Gloo loses later ones if they are freed."""
        with self._lock:
            self._held[peer] += messages

    def held(self, peer: int) -> list[Pending]:
        """Hand over the messages that were kept for a peer, to be freed once it has taken a later one."""
        with self._lock:
            return self._held.pop(peer, [])

    def next_serial(self) -> int:
        """Give the number of a new transfer."""
        with self._lock:
            self._serial += 1
            return self._serial

    def check(self) -> None:
        """Refuse to go on after a failure.

        Raises:
            GroupBroken: an earlier transfer failed.
        """
        if self._broken is not None:
            raise GroupBroken(
                "an earlier transfer on this process group failed, and its messages may still be about: "
                "make a new group (torch.distributed.new_group, or init_process_group with a new store "
                f"prefix) and a new PGTransport on it. The earlier failure: {self._broken}"
            )

    def mark_broken(self, why: BaseException) -> None:
        """Remember a failure; the first one counts."""
        with self._lock:
            if self._lasting:
                self._broken = self._broken or f"{type(why).__name__}: {why}".splitlines()[0]

    @contextmanager
    def header(self, way: str, peer: int, left_s: Callable[[], float]) -> Iterator[None]:
        """Keep length and frame of one transfer together, one transfer at a time for each peer.

        Raises:
            LinkTimeout: another transfer's took until the deadline.
        """
        with self._lock:
            lock = self._headers[way, peer]
        if not lock.acquire(timeout=min(left_s(), threading.TIMEOUT_MAX)):
            raise LinkTimeout("another transfer with this peer did not get under way in time", peer=peer)
        try:
            yield
        finally:
            lock.release()


_groups: weakref.WeakKeyDictionary[object, Group] = weakref.WeakKeyDictionary()
_groups_lock = threading.Lock()


def group_of(
    key: object, *, within: Callable[[object], object] = lambda key: key, lasting: bool = True
) -> Group:
    """Give what is known of a process group; something that can't be remembered is new every time.

    One for all transports on that group, or two of them would give their messages the same tags. `within`
    says what moves a group's messages: those in which it is the same object are the same group.
    """
    try:
        with _groups_lock:
            if key not in _groups:
                mover = within(key)
                alike = [group for other, group in _groups.items() if within(other) is mover]
                _groups[key] = alike[0] if alike else Group(lasting=lasting)
            return _groups[key]
    except TypeError:
        return Group(lasting=lasting)
