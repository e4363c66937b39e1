"""What both ends of a push have: options, a deadline, and a window of messages in flight."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from xxhash import xxh3_64

from torchferry.core.manifest import Manifest
from torchferry.core.outcome import paths_of
from torchferry.core.plan import IN_PLACE_WINDOW_BYTES, WINDOW_BYTES, Chunk, Plan
from torchferry.core.push import DigestBlock
from torchferry.core.watch import Limits
from torchferry.engine.phases import Phases
from torchferry.engine.push.lanes import Lane, Progress, Runner, Steps, run_lanes
from torchferry.engine.workspace import Workspace
from torchferry.errors import (
    Corrupted,
    FerryError,
    LinkError,
    LinkStalled,
    LinkTimeout,
    PeerGaveUp,
)
from torchferry.links.base import Link, Pending


@dataclass(frozen=True)
class TransferOptions:
    """How to transfer a state. `question`, about {peer}, is added to a timeout if the peer never answered.

    With `allow_pickle`, leaves that torchferry can't encode are pickled, and pickles are loaded. With
    `same_host`, a large payload goes through memory if both processes are on one machine.
    """

    timeout_s: float
    max_metadata_bytes: int
    step: int | None = None
    stall_s: float | None = None
    verify: bool = True
    allow_pickle: bool = False
    same_host: bool = True
    window_bytes: int = WINDOW_BYTES
    in_place_window_bytes: int = IN_PLACE_WINDOW_BYTES
    question: str = ""
    runner: Callable[[], Runner] = Runner


T = TypeVar("T")
OptionsT = TypeVar("OptionsT", bound=TransferOptions)


class Transfer(Phases, Generic[OptionsT]):
    """One transfer over a link, with its deadline."""

    def __init__(self, name: str, link: Link, options: OptionsT, workspace: Workspace) -> None:
        super().__init__(name)
        self._link = link
        self._options = options
        self._workspace = workspace
        self._runner = options.runner()
        self._deadline_s = self._runner.now_s() + options.timeout_s
        self._content: tuple[Manifest, Plan] | None = None

    def _left_s(self) -> float:
        return max(self._deadline_s - self._runner.now_s(), 0.0)

    def _run_lanes(self, lanes: Sequence[Lane[Any]]) -> None:
        run_lanes(self._link, lanes, Limits(self._deadline_s, self._options.stall_s), self._runner)

    def _run_lane(self, lane: Lane[T]) -> T:
        self._run_lanes([lane])
        return lane.result()

    def _with_progress(self, error: BaseException, progress: Progress, phase: str) -> BaseException:
        """Return an error with its peer, its phase, and how far the transfer got before the link failed."""
        if not isinstance(error, FerryError):
            return error
        path, more = None, ""
        is_failed_link = isinstance(error, (LinkError, PeerGaveUp)) and not isinstance(error, Corrupted)
        if is_failed_link and self._content is not None:
            manifest, plan = self._content
            more = f"; {progress.bytes_done:,} of {progress.bytes_due:,} bytes done"
            if plan.chunks:
                next_chunk = min(progress.chunks_done, len(plan.chunks) - 1)
                path = next(iter(paths_of(manifest, plan, {next_chunk})), None)
                more += f", last at {path}" if path else ""
            if not progress.contacted:
                more += " (the metadata was not sent)"
        if isinstance(error, LinkTimeout):
            if self._options.question and not progress.contacted:
                more += f". {self._options.question.format(peer=progress.peer)}"
            if not isinstance(error, LinkStalled):
                more += f"{'' if more.endswith('?') else '.'} The timeout was {self._options.timeout_s:g} s"
        return error.with_context(peer=progress.peer, path=path, phase=phase, more=more)


class InFlight(NamedTuple):
    """A message that was started, and its memory: the state's own if `in_place`. A frame has no `item`.

    If the channel hashes the message, `hasher` has its digest when it has completed.
    """

    buffer: torch.Tensor
    item: Chunk | DigestBlock | None = None
    in_place: bool = False
    hasher: xxh3_64 | None = None

    @property
    def staged(self) -> bool:
        """Whether the memory is a buffer of the staging pool."""
        return isinstance(self.item, Chunk) and not self.in_place


@dataclass(eq=False)
class Window:
    """A queue of messages in flight. `completed` is called with each message that completes.

    Messages that are sent from or received into the tensors themselves take no extra memory. So up to
    `max_bytes` may be in flight, but only `max_staged_bytes` that are not in place. With `one_at_a_time`, one
    message is in flight, for a channel that copies it while it is waited for.
    """

    completed: Callable[[InFlight], None]
    max_staged_bytes: int
    max_bytes: int
    one_at_a_time: bool = False
    _entries: deque[tuple[InFlight, Sequence[Pending]]] = field(default_factory=deque)
    _staged_bytes: int = 0
    _bytes: int = 0

    def __len__(self) -> int:
        return len(self._entries)

    def has_room(self, nbytes: int, *, in_place: bool) -> bool:
        """Return whether so many more bytes may be in flight. An empty window takes any message."""
        if not self._entries or self.one_at_a_time:
            return not self._entries
        fits = in_place or self._staged_bytes + nbytes <= self.max_staged_bytes
        return fits and self._bytes + nbytes <= self.max_bytes

    def add(self, message: InFlight, *pending: Pending) -> None:
        """Add a message that was just started."""
        self._entries.append((message, pending))
        self._bytes += message.buffer.nbytes
        self._staged_bytes += 0 if message.in_place else message.buffer.nbytes

    def pop(self) -> Steps[InFlight]:
        """Wait for the oldest message and return it; raises LinkError if it failed."""
        message, pending = self._entries[0]
        yield from pending
        self._entries.popleft()
        self._bytes -= message.buffer.nbytes
        self._staged_bytes -= 0 if message.in_place else message.buffer.nbytes
        return message

    def complete_oldest(self) -> Steps[None]:
        """Wait for the oldest message, and hand it to `completed`."""
        self.completed((yield from self.pop()))

    def make_room(self, nbytes: int, *, in_place: bool) -> Steps[None]:
        """Wait until so many more bytes may be in flight."""
        while not self.has_room(nbytes, in_place=in_place):
            yield from self.complete_oldest()

    def complete_all(self) -> Steps[None]:
        """Wait for all messages."""
        while self:
            yield from self.complete_oldest()
