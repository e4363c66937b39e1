"""The messages of a transfer, in order. Both sides compute the same plan from the manifest and two sizes."""

from __future__ import annotations

from typing import NamedTuple

from msgspec import Struct

from torchferry.core.extents import Extent, extents_of, split
from torchferry.core.manifest import Manifest
from torchferry.core.push import DigestBlock

CHUNK_BYTES = 8 << 20
"""Larger extents are split. Below 4 MiB, chunks are slower through gloo; larger ones need more memory."""
RELAY_CHUNK_BYTES = 1 << 20
"""The same if receivers forward chunks: each receiver delays the next one by a chunk."""
MAX_CHUNK_BYTES = 1 << 30
"""The largest chunk that a peer may ask for: staging memory holds whole chunks."""

WINDOW_BYTES = 32 << 20
"""The most bytes staged at once: enough to keep the link busy while the oldest message completes."""
IN_PLACE_WINDOW_BYTES = 1 << 30
"""The most bytes in flight that need no staging memory. A link is idle less if more messages are posted."""

PACK_BYTES = 128 << 10
"""Smaller extents are packed: copying so few bytes twice costs less than a message."""
PACK_FROM = 64
"""The fewest small extents that are packed. PGTransport's contract counts the messages of smaller states."""
PACKED_BYTES = 1 << 20
"""The size of a packed message: it fits into the cache of one core."""

SAMPLE_BYTES = 4 << 10
"""The bytes at each end of a message that are read again to detect changes."""

BLOCK_MESSAGES = 64
"""The messages per digest block: 512 MiB in chunks. More blocks find damage earlier, but delay hashing."""
BLOCK_CHUNKS = 1 << 14
"""The chunks per digest block, which limits the size of the blocks of packed messages."""
BLOCK_LAG = 8
"""How many messages a digest block is sent after its last message, which is hashed meanwhile."""

MAX_MESSAGES = 1 << 18
"""The most messages of a plan: 2 TiB in chunks. A hostile manifest could ask for any number."""


class TooManyMessages(ValueError):
    """The state needs more than MAX_MESSAGES messages."""


class Chunk(Struct, frozen=True, gc=False):
    """A piece of an extent that is moved and verified as one, at `position` of the extent's bytes."""

    extent: int
    piece: Extent
    position: int
    nbytes: int


class Message(Struct, frozen=True, gc=False):
    """The chunks from `first` to `end`, sent as one message."""

    number: int
    first: int
    end: int
    nbytes: int


class Plan(NamedTuple):
    """The messages of a transfer, in the order in which they are sent."""

    extents: tuple[Extent, ...]
    chunks: tuple[Chunk, ...]
    messages: tuple[Message, ...]
    payload_bytes: int
    chunk_bytes: int
    pack_bytes: int

    def chunks_of(self, message: Message) -> tuple[Chunk, ...]:
        """Return the chunks of a message."""
        return self.chunks[message.first : message.end]

    def unpacked_storages(self) -> set[int]:
        """Return the storages of chunks that are a message of their own, and need no staging memory."""
        unpacked = [message for message in self.messages if message.end - message.first == 1]
        return {self.chunks[message.first].piece.storage for message in unpacked}

    def sequence(self, *, digest_blocks: bool) -> list[Message | DigestBlock]:
        """Return the messages, and with `digest_blocks` also the digest blocks, in order."""
        if not digest_blocks:
            return list(self.messages)
        sequence: list[Message | DigestBlock] = []
        blocks: dict[int, DigestBlock] = {}  # by the number of the message that each follows
        first_message = first_chunk = 0
        for message in self.messages:
            sequence.append(message)
            if message.number in blocks:
                sequence.append(blocks.pop(message.number))
            end, is_last = message.number + 1, message is self.messages[-1]
            if is_last or end - first_message == BLOCK_MESSAGES or message.end - first_chunk >= BLOCK_CHUNKS:
                blocks[message.number + BLOCK_LAG] = DigestBlock(first_chunk, message.end, is_last)
                first_message, first_chunk = end, message.end
        return [*sequence, *blocks.values()]


def make_plan(
    manifest: Manifest,
    chunk_bytes: int = CHUNK_BYTES,
    pack_bytes: int | None = None,
    pack_from: int = PACK_FROM,
) -> Plan:
    """Plan the transfer of a state: extents below `pack_bytes` are packed, those above a chunk are split.

    The receiver passes the sender's `pack_bytes`. The sender passes None, and packs if there are at least
    `pack_from` small extents. Raises TooIrregular or TooManyMessages.
    """
    extents = extents_of(manifest.tensors)
    sizes = [extent.nbytes for extent in extents]
    if pack_bytes is None:
        pack_bytes = min(PACK_BYTES, chunk_bytes)
        if sum(size < pack_bytes for size in sizes) < pack_from:
            pack_bytes = 0
    chunks = [Chunk(n, extents[n], 0, size) for n, size in enumerate(sizes) if size < pack_bytes]
    large = [number for number, size in enumerate(sizes) if size >= pack_bytes]
    messages = _pack(chunks, max(min(PACKED_BYTES, chunk_bytes), pack_bytes))
    # There are at least so many. This rejects a hostile manifest before its chunks are listed.
    _check_count(len(messages) + sum(-(-sizes[number] // chunk_bytes) for number in large), chunk_bytes)
    for number in large:
        position = 0
        for piece in split(extents[number], chunk_bytes):
            nbytes = piece.nbytes
            messages.append(Message(len(messages), len(chunks), len(chunks) + 1, nbytes))
            chunks.append(Chunk(number, piece, position, nbytes))
            position += nbytes
            _check_count(len(messages), chunk_bytes)
    return Plan(tuple(extents), tuple(chunks), tuple(messages), sum(sizes), chunk_bytes, pack_bytes)


def samples_of(first: Extent, last: Extent) -> tuple[Extent, Extent]:
    """Return the first bytes of one piece and the last bytes of another.

    >>> [(sample.offset, sample.run_bytes) for sample in samples_of(Extent(0, 0, 8), Extent(0, 8, 10_000))]
    [(0, 8), (5912, 4096)]
    """
    head, tail = min(first.run_bytes, SAMPLE_BYTES), min(last.run_bytes, SAMPLE_BYTES)
    return Extent(first.storage, first.offset, head), Extent(last.storage, last.end - tail, tail)


def _pack(chunks: list[Chunk], max_bytes: int) -> list[Message]:
    """Pack consecutive chunks into messages of at most `max_bytes`."""
    messages: list[Message] = []
    first = nbytes = 0
    for number, chunk in enumerate(chunks):
        if nbytes + chunk.nbytes > max_bytes:
            messages.append(Message(len(messages), first, number, nbytes))
            first, nbytes = number, 0
        nbytes += chunk.nbytes
    if nbytes:
        messages.append(Message(len(messages), first, len(chunks), nbytes))
    return messages


def _check_count(messages: int, chunk_bytes: int) -> None:
    if messages > MAX_MESSAGES:
        raise TooManyMessages(f"the state needs more than {MAX_MESSAGES} messages of {chunk_bytes} bytes")
