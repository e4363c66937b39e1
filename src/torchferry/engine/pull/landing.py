"""Where fetched chunks go: to the sink at once, or with `atomic` when all have arrived."""

import threading
from collections.abc import Sequence

import torch

from torchferry.core.plan import Chunk
from torchferry.engine.sink import Sink
from torchferry.engine.source import view
from torchferry.engine.workspace import Staging
from torchferry.tensors.memory import new_block


class Landing:
    """Where lanes put the chunks that they receive. Several lanes may use it at once, for different chunks.

    With `atomic`, chunks are kept in `extra_bytes` of memory until `apply` writes them. Raises StateError if
    there is not enough.
    """

    def __init__(self, sink: Sink, needed: Sequence[int], staging: Staging, *, atomic: bool) -> None:
        self.sink = sink
        self._staging = staging
        self._lock = threading.Lock()
        self._landed = threading.Condition(self._lock)
        self._missing = set(needed)
        self._serves_peers = True
        self._staged: dict[int, torch.Tensor] = {}
        self._atomic_buffers: dict[int, torch.Tensor] = {}
        self.extra_bytes = 0
        if atomic:
            sizes = [sink.plan.chunks[number].nbytes for number in needed]
            self.extra_bytes = sum(sizes)
            block = new_block(self.extra_bytes, "the copy for atomic=True")
            self._atomic_buffers = dict(zip(needed, block.split(sizes), strict=True)) if sizes else {}

    def open(self, chunk: Chunk) -> memoryview:
        """Return the memory that a chunk is received into: that of the state itself where possible."""
        if chunk.number in self._atomic_buffers:
            return view(self._atomic_buffers[chunk.number])
        found = self.sink.open_view(chunk)
        if found is not None:
            return found
        # A chunk that arrived damaged is received again, into the same buffer.
        buffer = self._staged.get(chunk.number)
        if buffer is None:
            buffer = self._staged[chunk.number] = self._staging.take(chunk.nbytes, pinned=self.sink.pinned)
        return view(buffer)

    def write(self, chunks: Sequence[Chunk]) -> None:
        """Accept chunks that were received, and verified unless verify=False: they have landed.

        Staged chunks are copied to their places, or with `atomic` kept for `apply`.
        """
        staged = {chunk.number: self._staged.pop(chunk.number, None) for chunk in chunks}
        with self._lock:
            for chunk in chunks:
                if chunk.number not in self._atomic_buffers:
                    self._write(chunk, staged[chunk.number])
            self._missing.difference_update(staged)
            self._landed.notify_all()
        for buffer in staged.values():
            if buffer is not None:
                self._staging.give_back(buffer)

    def _write(self, chunk: Chunk, buffer: torch.Tensor | None) -> None:
        self.sink.write(chunk, buffer)
        if self.sink.failure is not None:
            raise self.sink.failure
        self.sink.mark_whole(chunk)

    def apply(self) -> None:
        """Write the chunks that were kept because of `atomic`."""
        for number, buffer in self._atomic_buffers.items():
            self._write(self.sink.plan.chunks[number], buffer)
        with self._lock:
            self._atomic_buffers = {}

    # For other receivers, which take chunks from this one.

    def can_read_all(self) -> bool:
        """Return whether every chunk can be read back from the target, so that it can be reshared."""
        return all(map(self.sink.can_read, self.sink.plan.chunks))

    def read(self, chunk: Chunk) -> bytes | None:
        """Wait until a chunk has landed, and return a copy of its bytes; None after `stop_reading`."""
        with self._landed:
            self._landed.wait_for(lambda: chunk.number not in self._missing or not self._serves_peers)
            if not self._serves_peers:
                return None
            kept = self._atomic_buffers.get(chunk.number)
            if kept is not None:
                return bytes(view(kept))
            buffer = self.sink.read(chunk, self._staging)
            try:
                # A copy, made with the interpreter lock held: the user may free the tensor during the send.
                return bytes(view(buffer))
            finally:
                if not chunk.is_one_run:
                    self._staging.give_back(buffer)

    def stop_reading(self) -> None:
        """End `read` in other threads."""
        with self._landed:
            self._serves_peers = False
            self._landed.notify_all()
