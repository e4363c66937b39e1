"""A published version: its manifest, its digests, and its chunks, in a copy or in the state itself."""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from xxhash import xxh3_128

from torchferry.core.codec import EncodedManifest
from torchferry.core.extents import TooIrregular
from torchferry.core.plan import Chunk, Plan, TooManyChunks
from torchferry.core.pull import MAX_PULL_CHUNK_BYTES, PULL_CHUNK_BYTES, encode_digests, metadata_digest
from torchferry.core.root import leaf_digests, root_of
from torchferry.engine import metadata, threads
from torchferry.engine.source import ChunkSource, digest, view
from torchferry.engine.workspace import Workspace
from torchferry.errors import StateChanged, StateError, Unsendable
from torchferry.links.shared_memory import SharedBlock
from torchferry.tensors.describe import Description, describe
from torchferry.tensors.memory import check_room, new_block
from torchferry.tensors.objects import read_objects

_READ_BYTES = 4 << 20
"""A snapshot is read in pieces of this size."""

_TWO_THREADS_BYTES = 32 << 20
"""A CPU state of this size or more is hashed, and for a snapshot copied, by two threads on two cores."""


class SnapshotBlock(NamedTuple):
    """The memory of a snapshot, which receivers on this machine can read if it is `shared`."""

    tensor: torch.Tensor
    shared: SharedBlock | None = None


class SnapshotMemory:
    """The memory of one name's snapshots, which one version leaves to the next. At most one block is kept."""

    def __init__(self) -> None:
        self._kept: SnapshotBlock | None = None
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> SnapshotBlock:
        """Return a block of exactly this size; raises StateError if there is not enough memory."""
        with self._lock:
            kept, self._kept = self._kept, None
        if kept is not None and kept.tensor.nbytes == nbytes:
            return kept
        del kept  # before the next block is allocated
        check_room(nbytes, "the snapshot")
        # The kernel may have no memfd, or limit its size. Then receivers on this machine use TCP.
        with suppress(OSError):
            shared = SharedBlock(nbytes)
            return SnapshotBlock(shared.tensor, shared)
        return SnapshotBlock(new_block(nbytes, "the snapshot"))

    def give_back(self, block: SnapshotBlock) -> None:
        """Keep a block for the next version."""
        with self._lock:
            self._kept = block


@dataclass(eq=False)
class Published:
    """One version of a state. Its chunks are in `block` if they were copied, or else read from `source`.

    If it `is_abandoned`, a reader whose lease was lost or dropped may still read its memory, which is not
    used again.
    """

    version: int
    encoded: EncodedManifest
    plan: Plan
    digests: Sequence[int]
    root: str
    source: ChunkSource | None
    block: SnapshotBlock | None
    memory: SnapshotMemory
    is_abandoned: bool = False

    def __post_init__(self) -> None:
        self._ends = list(accumulate(chunk.nbytes for chunk in self.plan.chunks))
        self.is_copy = self.block is not None
        self.nbytes = self.plan.payload_bytes
        self.encoded_digests = encode_digests(self.digests)
        self.metadata = metadata_digest(self.encoded.data, self.encoded_digests, self.version, self.root)

    def start(self, chunk: int) -> int:
        """Return where a chunk begins in a snapshot, in bytes."""
        return self._ends[chunk - 1] if chunk else 0

    def size(self, first: int, end: int) -> int:
        """Return the size of the chunks from `first` to `end` in bytes."""
        return self.start(end) - self.start(first)

    def read(self, first: int, end: int) -> Iterator[memoryview]:
        """Yield the bytes of the chunks from `first` to `end`, in order."""
        if self.block is not None:
            yield from map(view, self.block.tensor[self.start(first) : self.start(end)].split(_READ_BYTES))
            return
        for chunk in self.plan.chunks[first:end]:
            if self.source is not None:
                try:
                    buffer = self.source.read(chunk)
                except StateError:
                    # Its memory was freed. The next request is answered with CHANGED.
                    self.source.note_change(chunk)
                    raise
                yield view(buffer)
                self.source.release(chunk, buffer)

    def changed_paths(self, chunk: int | None = None) -> list[str]:
        """Return the paths of a live state that changed since publishing, by version counters and one chunk.

        A snapshot can't change: always [].
        """
        if self.source is None:
            return []
        self.source.find_changes(also=() if chunk is None else (self.plan.chunks[chunk],))
        return self.source.changed_paths()

    def free(self) -> None:
        """Give the memory back, when nobody reads it any more."""
        self.source = None
        if self.block is not None and not self.is_abandoned:
            self.memory.give_back(self.block)
        self.block = None


def publish(
    state: object,
    version: int,
    workspace: Workspace,
    memory: SnapshotMemory,
    *,
    snapshot: bool,
    copy_up_to: int = 0,
) -> Published:
    """Describe and hash a state, and copy it if `snapshot`, or else its tensors of up to `copy_up_to` bytes.

    Raises Unsendable if it can't be sent, StateChanged if it changed meanwhile, and StateError if there is no
    memory for the copy.
    """
    # All tensors are read here, after the work that the current streams of accelerators still have to do. So
    # other threads, with other streams, need no event to read them later.
    described = describe(state, objects=read_objects(state))
    if copy_up_to and not snapshot:
        described = described.with_copies(copy_up_to)
    encoded = metadata.encode(described.manifest, workspace.cache)
    # Larger chunks only if there would be too many of 1 MiB.
    sizes = [PULL_CHUNK_BYTES << shift for shift in (0, 2, 4, 6)]
    plan = metadata.plan_outgoing(encoded, workspace.cache, sizes, pack_from=1)
    source = ChunkSource(described, plan, workspace.staging, lambda device: device.type == "cpu")
    block = memory.take(plan.payload_bytes) if snapshot else None
    known = {} if snapshot else workspace.digests
    starts = [0, *accumulate(chunk.nbytes for chunk in plan.chunks)]

    def copy_and_hash(chunk: Chunk) -> int:
        if known and (found := known.get((source.address(chunk), chunk.nbytes))) is not None:
            return found
        if block is not None:
            copy = block.tensor[starts[chunk.number] : starts[chunk.number + 1]]
            source.copy(chunk, copy)
            return digest(copy)
        buffer = source.read(chunk)
        found = digest(buffer)
        source.release(chunk, buffer)
        return found

    is_large = described.is_all_cpu and plan.payload_bytes >= _TWO_THREADS_BYTES
    digests = source.digests = _map_chunks(copy_and_hash, plan.chunks, parallel=is_large)
    if described.changed_tensors():
        source.find_changes()
        raise StateChanged(source.changed_paths())
    try:
        root = root_of(encoded.manifest, plan, digests)
    except TooIrregular as error:
        raise metadata.too_irregular(error) from None
    return Published(version, encoded, plan, digests, root, None if snapshot else source, block, memory)


def _map_chunks(work: Callable[[Chunk], int], chunks: Sequence[Chunk], *, parallel: bool) -> list[int]:
    """Return the results of `work` for all chunks; if `parallel`, by two threads, if there are two cores."""
    if not parallel or len(os.sched_getaffinity(0)) < 2:
        return [*map(work, chunks)]
    half = len(chunks) // 2
    others: list[int] = []
    errors: list[BaseException] = []
    is_cancelled = False

    def work_on_others() -> None:
        try:
            for chunk in chunks[half:]:
                if is_cancelled:
                    return
                others.append(work(chunk))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work_on_others, name="torchferry-publish", daemon=True)
    try:
        try:
            threads.start(thread)
        except StateError:
            return [*map(work, chunks)]
        found = [*map(work, chunks[:half])]
        thread.join()
    except BaseException:
        # If Ctrl-C arrives while the thread is being started, it may begin later, and sees this.
        is_cancelled = True
        with suppress(RuntimeError):  # it was not started
            thread.join()
        raise
    if errors:
        raise errors.pop()  # a reference to it here would be a cycle
    return found + others


def digest_leaves(described: Description, workspace: Workspace) -> list[bytes]:
    """Return the digest of each leaf of a state; raises Unsendable if its views are too irregular.

    The workspace keeps the digests of blocks that `publish` would hash again.
    """
    encoded = metadata.encode(described.manifest, workspace.cache)
    try:
        # Without packing, every extent has chunks of its own, in order.
        plan = metadata.plan(encoded, workspace.cache, MAX_PULL_CHUNK_BYTES, 0)
        source = ChunkSource(described, plan, workspace.staging, lambda device: device.type == "cpu")
        hashers = [xxh3_128() for _ in plan.extents]
        for chunk in plan.chunks:
            buffer, address = source.read(chunk), source.address(chunk)
            for start, block in enumerate(buffer.split(PULL_CHUNK_BYTES)):
                found = digest(block)
                hashers[chunk.pieces[0].extent].update(found.to_bytes(8, "little"))
                if address is not None:
                    workspace.digests[address + start * PULL_CHUNK_BYTES, block.nbytes] = found
            source.release(chunk, buffer)
        return leaf_digests(described.manifest, plan.extents, [hasher.digest() for hasher in hashers])
    except TooIrregular as error:
        raise metadata.too_irregular(error) from None
    except TooManyChunks as error:
        raise Unsendable(f"{error}: pass the state in parts") from None
