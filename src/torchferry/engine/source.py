"""A source: the chunks of a described state, their digests, and whether the state changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from torchferry.core.codec import EncodedManifest
from torchferry.core.outcome import paths_of
from torchferry.core.plan import Message, Plan, samples_of
from torchferry.engine.digest import digest, digests
from torchferry.engine.workspace import Staging
from torchferry.errors import StateError
from torchferry.tensors.describe import Description
from torchferry.tensors.memory import CPU, gather, peek, run_of


@dataclass
class Source:
    """Reads the chunks of a described state.

    `digests` has the digest of each chunk that was hashed. Several lanes may read at the same time.
    """

    description: Description
    encoded: EncodedManifest
    plan: Plan
    staging: Staging
    can_access: Callable[[torch.device], bool]

    def __post_init__(self) -> None:
        self.digests: list[int | None] = [None] * len(self.plan.chunks)
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
        """Return the bytes of a message: a staging buffer, or the memory of the state itself.

        Raises:
            StateError: the memory was freed.
        """
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
        """Hash the chunks of a message, unless that was done.

        Raises:
            StateError: the memory was freed.
        """
        if self.digests[message.first] is None:
            sizes = [chunk.nbytes for chunk in self.plan.chunks_of(message)]
            self.digests[message.first : message.end] = digests(buffer, sizes)

    def hash_all(self) -> None:
        """Hash every chunk.

        Raises:
            StateError: the memory was freed.
        """
        for message in self.plan.messages:
            buffer = self.read(message)
            self.hash(message, buffer)
            self.done_with(message, buffer)

    def take_samples(self) -> None:
        """Hash a few bytes of every message, so that `find_changes` can compare them later."""
        self._samples = [self._sample(message) for message in self.plan.messages]

    def _sample(self, message: Message) -> list[int]:
        """Hash a few bytes at both ends of a message; return nothing if its memory was freed."""
        ends = samples_of(self.plan.chunks[message.first].piece, self.plan.chunks[message.end - 1].piece)
        try:
            return [digest(peek(self.description.memories[end.storage], end)) for end in ends]
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
        if read_all:
            uncounted = {chunk.piece.storage for chunk in self.plan.chunks}
        for message in self.plan.messages if uncounted else ():
            if not uncounted.isdisjoint(chunk.piece.storage for chunk in self.plan.chunks_of(message)):
                self._changed |= self._differing(message)
        return bool(self._changed)

    def _differing(self, message: Message) -> set[int]:
        """Return the chunks of a message whose bytes, read again, have another digest than before."""
        known = self.digests[message.first : message.end]
        if None in known:
            return set()
        chunks = self.plan.chunks_of(message)
        buffer = torch.empty(message.nbytes, dtype=torch.uint8, device=CPU)
        pieces = [chunk.piece for chunk in chunks]
        try:
            gather([self.description.memories[piece.storage] for piece in pieces], pieces, buffer)
        except StateError:
            return set(range(message.first, message.end))
        now = digests(buffer, [chunk.nbytes for chunk in chunks])
        pairs = enumerate(zip(known, now, strict=True), message.first)
        return {number for number, (before, after) in pairs if before != after}

    def changed_paths(self) -> list[str]:
        """Return the paths of the leaves that `find_changes` found changed."""
        return paths_of(self.encoded.manifest, self.plan, self._changed)
