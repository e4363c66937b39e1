"""A source: the chunks of a described state, their digests, and whether the state changed."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from xxhash import xxh3_64_intdigest

from torchferry.core.outcome import paths_of
from torchferry.core.plan import Message, Plan, samples_of
from torchferry.engine.workspace import Staging
from torchferry.errors import StateError
from torchferry.tensors.describe import Description
from torchferry.tensors.memory import check_held, gather, peek, run_of

NOT_HASHED = -1


def digest_pieces(buffer: torch.Tensor, sizes: Sequence[int]) -> list[int]:
    """Return the XXH3 digests of consecutive pieces of a flat buffer; raises StateError if it was freed.

    xxhash releases the GIL while it hashes.
    """
    host = buffer.cpu()
    view = _view(host)
    ends = accumulate(sizes)
    return [xxh3_64_intdigest(view[end - size : end]) for size, end in zip(sizes, ends, strict=True)]


def first_bytes(buffer: torch.Tensor, nbytes: int) -> bytes:
    """Return up to `nbytes` first bytes of a flat buffer; raises StateError if it was freed."""
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
        self._changed: set[int] = set()

    def must_stage(self, message: Message) -> bool:
        """Return whether a message must be copied: it is packed, has gaps, or the link can't read it."""
        piece = self.plan.chunks[message.first].piece
        if message.end - message.first > 1 or piece.repeats:
            return True
        return not self.can_access(self.description.memories[piece.storage].device)

    def read(self, message: Message) -> torch.Tensor:
        """Return the bytes of a message: a staging buffer, or the memory of the state itself."""
        memories = self.description.memories
        pieces = [chunk.piece for chunk in self.plan.chunks_of(message)]
        if not self.must_stage(message):
            return run_of(memories[pieces[0].storage], pieces[0])
        buffer = self.staging.take(message.nbytes, pinned=self._pinned)
        gather([memories[piece.storage] for piece in pieces], pieces, buffer)
        return buffer

    def done_with(self, message: Message, buffer: torch.Tensor) -> None:
        """Take back the buffer of a message that was read."""
        if self.must_stage(message):
            self.staging.give_back(buffer)

    def hash(self, message: Message, buffer: torch.Tensor) -> None:
        """Hash the chunks of a message, unless that was done."""
        if self.digests[message.first] == NOT_HASHED:
            sizes = [chunk.nbytes for chunk in self.plan.chunks_of(message)]
            self.digests[message.first : message.end] = digest_pieces(buffer, sizes)

    def hash_all(self) -> None:
        """Hash every chunk."""
        for message in self.plan.messages:
            self.digests[message.first : message.end] = self._read_and_hash(message)

    def _read_and_hash(self, message: Message) -> list[int]:
        buffer = self.read(message)
        digests = digest_pieces(buffer, [chunk.nbytes for chunk in self.plan.chunks_of(message)])
        self.done_with(message, buffer)
        return digests

    def take_samples(self) -> None:
        """Hash a few bytes of every message, so that `find_changes` can compare them later."""
        self._samples = [self._sample(message) for message in self.plan.messages]

    def _sample(self, message: Message) -> list[int]:
        """Hash a few bytes at both ends of a message; return nothing if its memory was freed."""
        ends = samples_of(self.plan.chunks[message.first].piece, self.plan.chunks[message.end - 1].piece)
        try:
            return [xxh3_64_intdigest(peek(self.description.memories[end.storage], end)) for end in ends]
        except (RuntimeError, StateError):
            return []

    def find_changes(self, *, read_all: bool = False) -> bool:
        """Look for changes since the state was described, and return whether there are any.

        Torch counts its own writes. Writes that bypass the counters (`.data`, an ndarray over the same
        memory) show in the samples. Tensors without a counter are read and hashed again, and with `read_all`
        all are.
        """
        tensors = self.description.manifest.tensors
        if written := {tensors[number].storage for number in self.description.changed_tensors()}:
            chunks = enumerate(self.plan.chunks)
            self._changed |= {number for number, chunk in chunks if chunk.piece.storage in written}
        for message, sample in zip(self.plan.messages, self._samples, strict=False):
            if sample != self._sample(message):
                self._changed |= {message.first, message.end - 1}
        uncounted = {tensors[number].storage for number in self.description.uncounted}
        for message in self.plan.messages if uncounted or read_all else ():
            storages = (chunk.piece.storage for chunk in self.plan.chunks_of(message))
            if read_all or not uncounted.isdisjoint(storages):
                self._changed |= self._differing(message)
        return bool(self._changed)

    def _differing(self, message: Message) -> set[int]:
        """Return the chunks of a message whose bytes, read again, have another digest than before."""
        before = self.digests[message.first : message.end]
        if NOT_HASHED in before:
            return set()
        try:
            now = self._read_and_hash(message)
        except StateError:
            return set(range(message.first, message.end))
        return {
            message.first + n for n, pair in enumerate(zip(before, now, strict=True)) if pair[0] != pair[1]
        }

    def changed_paths(self) -> list[str]:
        """Return the paths of the leaves that `find_changes` found changed."""
        return paths_of(self.description.manifest, self.plan, self._changed)
