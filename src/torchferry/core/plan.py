"""The ordered messages of a transfer, derived from the manifest by one pure function.

Source and target call `make_plan` with the same manifest and the same two sizes, and get the same messages in
the same order; so nothing about the plan is sent but those two numbers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import repeat
from typing import NamedTuple

from msgspec import Struct

from torchferry.core.extents import Extent, extents_of, split
from torchferry.core.manifest import Manifest
from torchferry.core.push import DigestBlock

MAX_MESSAGES = 1 << 18
"""The most messages of a plan: 2 TiB in chunks. Listing more would take a hostile manifest's word for it."""

CHUNK_BYTES = 8 << 20
"""Larger extents are cut into chunks of this size. Of 0.5 to 64 MiB, those from 4 MiB on are the fastest
through gloo, hashed or not: smaller ones cost more calls. A chunk is what staging has to hold, so it bounds
memory too, and it is what damage is told by."""

RELAY_CHUNK_BYTES = 1 << 20
"""The same where receivers forward: the last of six has its first byte five chunks after the first has. Half
of it was measured, and is slower: seven processes on two cores have enough to do with these."""

MAX_CHUNK_BYTES = 1 << 30
"""The largest chunk that a peer may ask for: staging has to hold one."""

WINDOW_BYTES = 32 << 20
"""How much may be staged at once: enough to keep the link busy while the oldest is waited for."""

IN_PLACE_WINDOW_BYTES = 1 << 30
"""How much may be under way at once from and to where it belongs, which takes no memory: the more the link
knows of beforehand, the less it waits."""

PACK_BYTES = 128 << 10
"""Smaller extents are packed: a message of its own costs more than copying so much, twice."""

PACK_FROM = 64
"""So many small extents make packing worth while. Fewer are a message each, as the contract counts them."""

PACKED_BYTES = 1 << 20
"""Packed messages are up to this long: they are filled and emptied in the cache of one core."""


SAMPLE_BYTES = 4 << 10
"""What is read again at each end of a message, to find out whether it was changed: next to nothing."""

SEAL_MESSAGES = 64
"""Messages between seals: half a gigabyte in chunks. Often enough to find damage early, and seldom enough: a
seal has to wait for gloo, which holds a lock while it copies, and all that time nothing is hashed."""

SEAL_CHUNKS = 1 << 14
"""The same in chunks, of which packed messages have many: a seal has eight bytes for each."""

SEAL_LAG = 8
"""A seal comes so many messages later: it can't be made before its messages were sent and then hashed, and
the link must have something to do meanwhile."""


class TooManyMessages(ValueError):
    """A state that needs more messages than may be listed."""


class Chunk(Struct, frozen=True, gc=False):
    """A piece of one extent that moves and is verified as one.

    `position` is where the piece starts in the extent's bytes, gaps not counted.
    """

    extent: int
    piece: Extent
    position: int
    nbytes: int


class Message(Struct, frozen=True, gc=False):
    """What the link carries at once: the chunks from `first` to `end`, one after the other."""

    number: int
    first: int
    end: int
    nbytes: int


class Plan(NamedTuple):
    """All messages of a transfer, in the order in which both ends take them."""

    extents: tuple[Extent, ...]
    chunks: tuple[Chunk, ...]
    messages: tuple[Message, ...]
    payload_bytes: int
    chunk_bytes: int
    pack_bytes: int

    @property
    def sizes(self) -> tuple[int, int]:
        """What the plan depends on beside the manifest."""
        return self.chunk_bytes, self.pack_bytes

    def unpacked_storages(self) -> set[int]:
        """Give the storages of messages that carry one chunk, and may go straight where it belongs."""
        alone = [message.first for message in self.messages if message.end - message.first == 1]
        return {self.chunks[number].piece.storage for number in alone}

    def chunks_of(self, message: Message) -> tuple[Chunk, ...]:
        """Give the chunks that a message carries."""
        return self.chunks[message.first : message.end]

    def sequence(self, *, sealed: bool) -> list[Message | DigestBlock]:
        """List what follows the frame on the link, in order: messages, and their seals if they have any."""
        if not sealed:
            return list(self.messages)
        found: list[Message | DigestBlock] = []
        due: deque[tuple[int, DigestBlock]] = deque()
        sealed_messages = sealed_chunks = 0
        for message in self.messages:
            found.append(message)
            if due and due[0][0] == message.number:
                found.append(due.popleft()[1])
            sent, last = message.number + 1, message.number + 1 == len(self.messages)
            is_full = sent - sealed_messages == SEAL_MESSAGES or message.end - sealed_chunks >= SEAL_CHUNKS
            if last or is_full:
                due.append((message.number + SEAL_LAG, DigestBlock(sealed_chunks, message.end, last)))
                sealed_messages, sealed_chunks = sent, message.end
        return [*found, *(seal for _, seal in due)]


def make_plan(
    manifest: Manifest,
    chunk_bytes: int = CHUNK_BYTES,
    pack_bytes: int | None = None,
    pack_from: int = PACK_FROM,
) -> Plan:
    """Plan the transfer of a state: small extents packed, others a message each, or several if large.

    `pack_bytes` says below which size extents are packed, 0 for none. A receiver is told; a sender leaves it
    open, and packs if there are `pack_from` of them; the plan says what was decided.

    Raises:
        TooIntricate: views overlap in a pattern too irregular to list.
        TooManyMessages: more than MAX_MESSAGES.
    """
    extents = extents_of(manifest.tensors)
    sizes = [extent.nbytes if extent.repeats else extent.run_bytes for extent in extents]
    if pack_bytes is None:
        pack_bytes = min(PACK_BYTES, chunk_bytes)
        if sum(size < pack_bytes for size in sizes) < pack_from:
            pack_bytes = 0
    plan = _Listing(extents, sizes, chunk_bytes, pack_bytes)
    plan.list_packed()
    plan.list_others()
    return Plan(tuple(extents), tuple(plan.chunks), tuple(plan.messages), sum(sizes), chunk_bytes, pack_bytes)


def samples_of(first: Extent, last: Extent) -> tuple[Extent, Extent]:
    """Give the first few bytes of one piece, and the last few of another.

    >>> [(sample.offset, sample.run_bytes) for sample in samples_of(Extent(0, 0, 8), Extent(0, 8, 10_000))]
    [(0, 8), (5912, 4096)]
    """
    head, tail = min(first.run_bytes, SAMPLE_BYTES), min(last.run_bytes, SAMPLE_BYTES)
    return Extent(first.storage, first.offset, head), Extent(last.storage, last.end - tail, tail)


class _Listing:
    """The chunks and messages of a plan, while they are being listed."""

    def __init__(
        self, extents: Sequence[Extent], sizes: Sequence[int], chunk_bytes: int, pack_bytes: int
    ) -> None:
        self.chunks: list[Chunk] = []
        self.messages: list[Message] = []
        self._extents = extents
        self._sizes = sizes
        self._chunk_bytes = chunk_bytes
        self._pack_bytes = pack_bytes

    def list_packed(self) -> None:
        """List what is packed, as long as possible."""
        most_bytes = max(min(PACKED_BYTES, self._chunk_bytes), self._pack_bytes)
        numbers = [number for number, size in enumerate(self._sizes) if size < self._pack_bytes]
        extents, sizes = self._extents, self._sizes
        if len(numbers) < len(sizes):
            extents, sizes = [extents[number] for number in numbers], [sizes[number] for number in numbers]
        self.chunks += map(Chunk, numbers, extents, repeat(0), sizes)
        nbytes = 0
        for place, size in enumerate(sizes):
            if nbytes + size > most_bytes:
                self._end_message(place, nbytes)
                nbytes = 0
            nbytes += size
        if nbytes:
            self._end_message(len(sizes), nbytes)

    def list_others(self) -> None:
        """List the rest, a chunk a message."""
        # At least so many: known at once, where listing what a hostile manifest asks for takes seconds.
        others = sum(-(-size // self._chunk_bytes) for size in self._sizes if size >= self._pack_bytes)
        self._check_count(len(self.messages) + others)
        for number, size in enumerate(self._sizes):
            if size < self._pack_bytes:
                continue
            position = 0
            for piece in split(self._extents[number], self._chunk_bytes):
                nbytes = piece.nbytes
                self.chunks.append(Chunk(number, piece, position, nbytes))
                self._end_message(len(self.chunks), nbytes)
                position += nbytes

    def _end_message(self, end: int, nbytes: int) -> None:
        self._check_count(len(self.messages) + 1)
        first = self.messages[-1].end if self.messages else 0
        self.messages.append(Message(len(self.messages), first, end, nbytes))

    def _check_count(self, messages: int) -> None:
        if messages > MAX_MESSAGES:
            raise TooManyMessages(
                f"a state that needs more than {MAX_MESSAGES} messages of {self._chunk_bytes} bytes"
            )
