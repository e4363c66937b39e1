"""Decides which chunks a fetch needs: those that differ from what the local tensors hold."""

import time
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Literal

from torchferry.core.outcome import ChunkState
from torchferry.core.plan import Chunk
from torchferry.engine.pull.history import history
from torchferry.engine.sink import Sink
from torchferry.engine.workspace import Staging
from torchferry.errors import LinkTimeout

_DIFFERING = 4
"""If this many chunks in a row differ in a tensor that was overwritten since the last fetch, the rest of the
tensor is fetched without comparing it. The same holds for the small tensors that are packed into chunks."""


def differing_chunks(
    sink: Sink,
    digests: Sequence[int],
    compare: bool | Literal["auto"],
    staging: Staging,
    deadline_s: float,
) -> list[int]:
    """List the chunks to fetch. Chunks that the local state holds already are marked as EQUAL.

    With "auto", only tensors that an earlier fetch has written are compared. Raises LinkTimeout if comparing
    takes longer than until the deadline.
    """
    needed = [chunk for chunk in sink.plan.chunks if sink.needs(chunk)]

    def differs(chunk: Chunk, known: Collection[int] | None = None) -> bool:
        if time.monotonic() >= deadline_s:
            raise LinkTimeout("comparing the states took longer than the timeout")
        if sink.digest(chunk, staging, known) != digests[chunk.number]:
            return True
        sink.mark(chunk.number, chunk.number + 1, ChunkState.EQUAL)
        return False

    if sink.local is not None and compare is True:
        needed = [chunk for chunk in needed if differs(chunk)]
    elif sink.local is not None and compare == "auto":
        known, changed = history.of(sink.local)
        in_a_row: Counter[int | None] = Counter()  # differing chunks: by storage, or None for packed ones
        chunks, needed = needed, []
        for chunk in chunks:
            storages = sink.storages_of(chunk)
            storage = storages[0] if len(chunk.pieces) == 1 else None
            is_changed = all(each in changed for each in storages)
            # It was probably overwritten as a whole.
            is_overwritten = is_changed and in_a_row[storage] >= _DIFFERING
            if is_overwritten or differs(chunk, known):
                needed.append(chunk)
                in_a_row[storage] += 1
            else:
                in_a_row[storage] = 0
    return [chunk.number for chunk in needed]
