"""A source: the chunks of a described state, their digests, and whether the state changed."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import torch
from xxhash import xxh3_64_intdigest

from torchferry.core.plan import Chunk, Plan, samples_of
from torchferry.core.tree import format_path, occurrences
from torchferry.engine.workspace import Staging
from torchferry.errors import StateError
from torchferry.tensors.describe import Description
from torchferry.tensors.memory import check_held, gather, peek, run_of

NOT_HASHED = -1


def digest(buffer: torch.Tensor) -> int:
    """Return the XXH3 digest of a flat buffer; raises StateError if it was freed.

    xxhash releases the GIL while it hashes.
    """
    host = buffer.cpu()
    return xxh3_64_intdigest(_view(host))


def first_bytes(buffer: torch.Tensor, nbytes: int) -> bytes:
    """Return the first `nbytes` bytes of a flat buffer, or all it has; raises StateError if it was freed."""
    host = buffer if buffer.is_cpu else buffer[:nbytes].cpu()
    return bytes(_view(host)[:nbytes])


def _view(host: torch.Tensor) -> memoryview:
    """View a flat CPU buffer of bytes. The caller must keep the buffer alive."""
    check_held(host.untyped_storage(), int(host.storage_offset()) + host.nbytes)
    return memoryview((ctypes.c_char * host.nbytes).from_address(host.data_ptr()) if host.nbytes else b"")


@dataclass
class Source:
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
        self._samples: list[list[int]] = []
        self._changed: set[int] = set()  # storages

    def must_stage(self, chunk: Chunk) -> bool:
        """Return whether a chunk must be copied: it is packed, has gaps, or the link can't read it."""
        piece = chunk.pieces[0]
        if len(chunk.pieces) > 1 or piece.repeats:
            return True
        return not self.can_access(self.description.memories[piece.storage].device)

    def read(self, chunk: Chunk) -> torch.Tensor:
        """Return the bytes of a chunk: a staging buffer, or the memory of the state itself."""
        memories = self.description.memories
        if not self.must_stage(chunk):
            return run_of(memories[chunk.pieces[0].storage], chunk.pieces[0])
        buffer = self.staging.take(chunk.nbytes, pinned=self._pinned)
        gather([memories[piece.storage] for piece in chunk.pieces], chunk.pieces, buffer)
        return buffer

    def release(self, chunk: Chunk, buffer: torch.Tensor) -> None:
        """Return the buffer of a chunk that was read to the staging pool, if it is from there."""
        if self.must_stage(chunk):
            self.staging.give_back(buffer)

    def hash(self, chunk: Chunk, buffer: torch.Tensor) -> None:
        """Hash a chunk that was read, unless its digest is known."""
        if self.digests[chunk.number] == NOT_HASHED:
            self.digests[chunk.number] = digest(buffer)

    def hash_all(self) -> None:
        """Hash every chunk."""
        self.digests = [self._read_and_hash(chunk) for chunk in self.plan.chunks]

    def _read_and_hash(self, chunk: Chunk) -> int:
        buffer = self.read(chunk)
        found = digest(buffer)
        self.release(chunk, buffer)
        return found

    def take_samples(self) -> None:
        """Hash a few bytes of every chunk, so that `find_changes` can compare them later."""
        self._samples = [self._sample(chunk) for chunk in self.plan.chunks]

    def _sample(self, chunk: Chunk) -> list[int]:
        """Hash a few bytes at both ends of a chunk; return an empty list if its memory was freed."""
        ends = samples_of(chunk.pieces[0], chunk.pieces[-1])
        try:
            return [xxh3_64_intdigest(peek(self.description.memories[end.storage], end)) for end in ends]
        except (RuntimeError, StateError):
            return []

    def find_changes(self, *, read_all: bool = False) -> bool:
        """Look for changes since the state was described, and return whether there are any.

        Torch counts its own writes. A write that bypasses the counters (`.data`, an ndarray over the same
        memory) is found if it changes a sampled byte. Tensors without a counter are read and hashed again;
        with `read_all`, all tensors are.
        """
        tensors = self.description.manifest.tensors
        self._changed |= {tensors[number].storage for number in self.description.changed_tensors()}
        # Without `take_samples`, there are none.
        for chunk, sample in zip(self.plan.chunks, self._samples, strict=False):
            if sample != self._sample(chunk):
                self._changed |= {chunk.pieces[0].storage, chunk.pieces[-1].storage}
        uncounted = {tensors[number].storage for number in self.description.uncounted}
        for chunk in self.plan.chunks if uncounted or read_all else ():
            storages = {piece.storage for piece in chunk.pieces}
            unsure = storages if read_all else storages & uncounted
            if unsure and self._differs(chunk):
                self._changed |= unsure
        return bool(self._changed)

    def _differs(self, chunk: Chunk) -> bool:
        """Return whether the bytes of a chunk, read again, have another digest than before."""
        before = self.digests[chunk.number]
        try:
            return before != NOT_HASHED and before != self._read_and_hash(chunk)
        except StateError:
            return True

    def changed_paths(self) -> list[str]:
        """Return the paths of the leaves in storages that `find_changes` found changed."""
        manifest = self.description.manifest
        changed = {n for n, spec in enumerate(manifest.tensors) if spec.storage in self._changed}
        found = occurrences(manifest) if changed else ()
        return [
            format_path(path) for path, leaf in found if not changed.isdisjoint(manifest.leaves[leaf].parts)
        ]
