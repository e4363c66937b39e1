"""A source: the chunks of a described state, their digests, and whether the state changed."""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from xxhash import xxh3_64, xxh3_64_intdigest

from torchferry.core.extents import check_held
from torchferry.core.plan import Chunk, Plan, samples_of
from torchferry.core.tree import format_path, occurrences
from torchferry.engine.workspace import Staging
from torchferry.errors import StateError
from torchferry.tensors.describe import Description
from torchferry.tensors.memory import gather, run_of

NOT_HASHED = -1


def digest(buffer: torch.Tensor) -> int:
    """Return the XXH3 digest of a flat buffer; raises StateError if it was freed.

    xxhash releases the GIL while it hashes.
    """
    host = buffer.cpu()  # the view does not keep it alive
    return xxh3_64_intdigest(view(host))


def first_bytes(buffer: torch.Tensor, nbytes: int) -> bytes:
    """Return the first `nbytes` bytes of a flat buffer, or all it has; raises StateError if it was freed."""
    host = buffer if buffer.is_cpu else buffer[:nbytes].cpu()
    return bytes(view(host)[:nbytes])


def view(host: torch.Tensor) -> memoryview:
    """View a flat CPU buffer of bytes. The caller must keep the buffer alive."""
    check_held(host.untyped_storage().nbytes(), int(host.storage_offset()) + host.nbytes)
    found = (ctypes.c_char * host.nbytes).from_address(host.data_ptr()) if host.nbytes else b""
    return memoryview(found).cast("B")


@dataclass
class ChunkSource:
    """Reads the chunks of a described state.

    `digests` has the digest of each chunk, or NOT_HASHED. Several lanes may read at the same time. Reading
    and hashing raise StateError if memory of the state was freed.
    """

    description: Description
    plan: Plan
    staging: Staging
    can_access: Callable[[torch.device], bool]

    def __post_init__(self) -> None:
        self.digests = [NOT_HASHED] * len(self.plan.chunks)
        self._pinned = not self.description.is_all_cpu
        self._samples: list[list[int | None]] = []
        self._piece_digests: dict[int, list[int]] = {}  # by chunk, where changes are found by reading again
        tensors = self.description.manifest.tensors
        self._uncounted = {tensors[number].storage for number in self.description.uncounted}
        self._changed: set[int] = set()  # storages

    def must_stage(self, chunk: Chunk) -> bool:
        """Return whether a chunk must be copied: it is packed, has gaps, or the link can't read it."""
        device = self.description.memories[chunk.pieces[0].storage].device
        return not (chunk.is_one_run and self.can_access(device))

    def address(self, chunk: Chunk) -> int | None:
        """Return where a chunk begins in memory; None if it has several pieces, or gaps."""
        piece = chunk.pieces[0]
        if not chunk.is_one_run:
            return None
        return run_of(self.description.memories[piece.storage], piece).data_ptr()

    def read(self, chunk: Chunk) -> torch.Tensor:
        """Return the bytes of a chunk: a staging buffer, or the memory of the state itself."""
        if not self.must_stage(chunk):
            return run_of(self.description.memories[chunk.pieces[0].storage], chunk.pieces[0])
        buffer = self.staging.take(chunk.nbytes, pinned=self._pinned)
        self.copy(chunk, buffer)
        return buffer

    def copy(self, chunk: Chunk, buffer: torch.Tensor) -> None:
        """Copy the bytes of a chunk to a flat buffer."""
        gather([self.description.memories[piece.storage] for piece in chunk.pieces], chunk.pieces, buffer)

    def release(self, chunk: Chunk, buffer: torch.Tensor) -> None:
        """Return the buffer of a chunk that was read to the staging pool, if it is from there."""
        if self.must_stage(chunk):
            self.staging.give_back(buffer)

    def hash(
        self, chunk: Chunk, buffer: torch.Tensor, hasher: xxh3_64 | None = None, *, each_piece: bool = False
    ) -> None:
        """Hash a chunk that was read, unless its digest is known. If `hasher` is given, it has hashed it."""
        if self.digests[chunk.number] == NOT_HASHED:
            found = digest(buffer) if hasher is None else hasher.intdigest()
            if each_piece or not self._uncounted.isdisjoint(piece.storage for piece in chunk.pieces):
                self._piece_digests[chunk.number] = digest_pieces(chunk, buffer, found)
            # Set last: another lane that finds the digest of a chunk relies on those of its pieces.
            self.digests[chunk.number] = found

    def hash_all(self) -> None:
        """Hash every chunk, and every piece, so that `find_changes` can tell which piece changed."""
        for chunk in self.plan.chunks:
            buffer = self.read(chunk)
            self.hash(chunk, buffer, each_piece=True)
            self.release(chunk, buffer)

    def take_samples(self) -> None:
        """Hash a few bytes of every chunk, so that `find_changes` can compare them later."""
        self._samples = [self._sample(chunk) for chunk in self.plan.chunks]

    def _sample(self, chunk: Chunk) -> list[int | None]:
        """Hash a few bytes at both ends of a chunk; None where the memory was freed."""
        digests: list[int | None] = []
        for end in samples_of(chunk.pieces[0], chunk.pieces[-1]):
            try:
                digests.append(digest(run_of(self.description.memories[end.storage], end)))
            except (RuntimeError, StateError):
                digests.append(None)
        return digests

    def find_changes(self, *, also: Sequence[Chunk] = ()) -> bool:
        """Look for changes since the state was described, and return whether there are any.

        Torch counts its own writes. A write that bypasses the counters (`.data`, an ndarray over the same
        memory) is found if it changes a sampled byte. Chunks with tensors without a counter are read and
        hashed again; after `hash_all`, all chunks are.
        """
        tensors = self.description.manifest.tensors
        self._changed |= {tensors[number].storage for number in self.description.changed_tensors()}
        # Without `take_samples`, there are none.
        for chunk, before in zip(self.plan.chunks, self._samples, strict=False):
            ends = chunk.pieces[0], chunk.pieces[-1]
            pairs = zip(ends, before, self._sample(chunk), strict=True)
            self._changed |= {piece.storage for piece, earlier, now in pairs if earlier != now}
        for number, digests in self._piece_digests.items():
            self._changed |= self._differing(self.plan.chunks[number], digests)
        for chunk in also:
            buffer = self.read(chunk)
            if digest(buffer) != self.digests[chunk.number]:
                self.note_change(chunk)
            self.release(chunk, buffer)
        return bool(self._changed)

    def note_change(self, chunk: Chunk) -> None:
        """Note that the storages of a chunk changed."""
        self._changed |= {piece.storage for piece in chunk.pieces}

    def _differing(self, chunk: Chunk, before: Sequence[int]) -> set[int]:
        """Return the storages of pieces that, read again, have other digests than before."""
        try:
            buffer = self.read(chunk)
            digests = digest_pieces(chunk, buffer, digest(buffer))
        except StateError:
            return {piece.storage for piece in chunk.pieces}
        self.release(chunk, buffer)
        pairs = zip(chunk.pieces, before, digests, strict=True)
        return {piece.storage for piece, earlier, now in pairs if earlier != now}

    def changed_paths(self) -> list[str]:
        """Return the paths of the leaves in storages that `find_changes` found changed."""
        manifest = self.description.manifest
        changed = {n for n, spec in enumerate(manifest.tensors) if spec.storage in self._changed}
        found = occurrences(manifest) if changed else ()
        return [
            format_path(path) for path, leaf in found if not changed.isdisjoint(manifest.leaves[leaf].parts)
        ]


def digest_pieces(chunk: Chunk, buffer: torch.Tensor, chunk_digest: int) -> list[int]:
    """Return the digest of each piece of a chunk, given the bytes and the digest of the chunk."""
    if len(chunk.pieces) == 1:
        return [chunk_digest]
    return [digest(piece) for piece in buffer.split([piece.nbytes for piece in chunk.pieces])]
