"""The chunks of a transfer, in order. Both sides compute the same plan from the manifest and two sizes.

Chunks follow the order of the tensors in the state, and not that of their addresses. So views of one buffer
and clones of these views have equal chunks, unless the views overlap.
"""

from typing import NamedTuple

from msgspec import Struct

from torchferry.core.extents import Extent, split, uses_of
from torchferry.core.manifest import Manifest

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
"""The fewest small extents that are packed. PGTransport promises one message per tensor of smaller states."""
PACKED_BYTES = 1 << 20
"""The size of a packed chunk: it fits into the cache of one core."""

SAMPLE_BYTES = 4 << 10
"""The bytes at each end of a chunk that are read again to detect changes."""

MAX_CHUNKS = 1 << 18
"""The most chunks of a plan: 2 TiB in chunks of CHUNK_BYTES. A hostile manifest could ask for any number."""


class TooManyChunks(ValueError):
    """The state needs more than MAX_CHUNKS chunks."""


class Piece(Extent, frozen=True, gc=False):
    """A piece of extent number `extent`, or all of it. `position` is its start, in bytes without gaps."""

    extent: int = 0
    position: int = 0


class Chunk(Struct, frozen=True, gc=False):
    """The bytes that are moved and verified as one: a piece of a large extent, or many small extents."""

    number: int
    pieces: tuple[Piece, ...]
    nbytes: int

    @property
    def is_one_run(self) -> bool:
        """Whether its bytes lie in memory as they are moved: one piece without gaps."""
        return len(self.pieces) == 1 and not self.pieces[0].repeats


class Plan(NamedTuple):
    """The extents of a state by storage and offset, and its chunks in the order in which they are sent."""

    extents: tuple[Extent, ...]
    chunks: tuple[Chunk, ...]
    payload_bytes: int
    chunk_bytes: int
    pack_bytes: int


def make_plan(
    manifest: Manifest,
    chunk_bytes: int = CHUNK_BYTES,
    pack_bytes: int | None = None,
    *,
    pack_from: int = PACK_FROM,
) -> Plan:
    """Plan the transfer of a state: extents below `pack_bytes` are packed, those above a chunk are split.

    The receiver passes the sender's `pack_bytes`. The sender passes None, and packs if there are at least
    `pack_from` small extents. Raises TooIrregular or TooManyChunks.
    """
    uses = uses_of(manifest.tensors)
    extents = tuple(use.extent for use in uses)
    sizes = [extent.nbytes for extent in extents]
    # Each number is that of an extent. Extents of the same tensor stay in the order of their offsets.
    order = sorted(range(len(uses)), key=[use.tensor for use in uses].__getitem__)
    if pack_bytes is None:
        pack_bytes = min(PACK_BYTES, chunk_bytes)
        if sum(size < pack_bytes for size in sizes) < pack_from:
            pack_bytes = 0
    chunks: list[Chunk] = []
    packed: list[Piece] = []
    nbytes, max_bytes = 0, max(min(PACKED_BYTES, chunk_bytes), pack_bytes)
    for number in order:
        if (size := sizes[number]) < pack_bytes:
            if nbytes + size > max_bytes:
                chunks.append(Chunk(len(chunks), tuple(packed), nbytes))
                packed, nbytes = [], 0
            packed.append(_piece(extents[number], number))
            nbytes += size
    if packed:
        chunks.append(Chunk(len(chunks), tuple(packed), nbytes))
    large = [number for number in order if sizes[number] >= pack_bytes]
    # There are at least so many. This rejects a hostile manifest before its chunks are listed.
    _check_count(len(chunks) + sum(-(-sizes[number] // chunk_bytes) for number in large), chunk_bytes)
    for number in large:
        position = 0
        for part in split(extents[number], chunk_bytes, uses[number].item_bytes):
            chunks.append(Chunk(len(chunks), (_piece(part, number, position),), part.nbytes))
            position += part.nbytes
            _check_count(len(chunks), chunk_bytes)
    return Plan(extents, tuple(chunks), sum(sizes), chunk_bytes, pack_bytes)


def _piece(part: Extent, extent: int, position: int = 0) -> Piece:
    return Piece(part.storage, part.offset, part.run_bytes, part.repeats, extent, position)


def samples_of(first: Extent, last: Extent) -> tuple[Extent, Extent]:
    """Return the samples of a chunk, given its first and its last piece: at most SAMPLE_BYTES at each end.

    >>> [(sample.offset, sample.run_bytes) for sample in samples_of(Extent(0, 0, 8), Extent(0, 8, 10_000))]
    [(0, 8), (5912, 4096)]
    """
    head, tail = min(first.run_bytes, SAMPLE_BYTES), min(last.run_bytes, SAMPLE_BYTES)
    return Extent(first.storage, first.offset, head), Extent(last.storage, last.end - tail, tail)


def _check_count(chunks: int, chunk_bytes: int) -> None:
    if chunks > MAX_CHUNKS:
        raise TooManyChunks(
            f"the state needs {chunks:,} chunks of up to {chunk_bytes:,} bytes; the limit is {MAX_CHUNKS:,}"
        )
