"""What the machine can do: plain sends by the backend, and plain copies in memory.

Both move as many bytes as the state needs, from and to memory that lies in one piece and has been used
before. No system that has to describe, check and place what it moves can be faster.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.portrait import memories
from benchmarks.systems.base import SENDER, Session, Site, System
from benchmarks.works import MEMCPY, RAW

# Where gloo is at its best: larger messages are slower, smaller ones cost more each.
_PIECE_BYTES = 8 * 2**20


def _open_raw(site: Site) -> Session:
    memory = _one_piece(site)
    pieces = memory.split(_PIECE_BYTES)

    def send() -> None:
        _wait(
            [dist.isend(one, group=site.group, group_dst=rank) for one in pieces for rank in site.receivers]
        )

    def receive() -> object:
        _wait([dist.irecv(one, group=site.group, group_src=SENDER) for one in pieces])
        return {"bytes": memory}

    return _session(site, memory, send, receive)


def _open_memcpy(site: Site) -> Session:
    memory = _one_piece(site)
    # Every receiver copies what it would have received, and the sender has nothing to do.
    original = memory if site.sends else _joined(site.case.recipe.build(), site.case.recipe.needed_bytes)

    def receive() -> object:
        memory.copy_(original)
        return {"bytes": memory}

    return _session(site, memory, lambda: None, receive)


def _session(site: Site, memory: Tensor, send: Callable[[], None], receive: Callable[[], object]) -> Session:
    whole = {"bytes": memory}
    return Session(send, receive, whole if site.sends else None, None if site.sends else whole)


def _one_piece(site: Site) -> Tensor:
    needed_bytes = site.case.recipe.needed_bytes
    return _joined(site.source, needed_bytes) if site.sends else torch.zeros(needed_bytes, dtype=torch.uint8)


def _joined(state: object, needed_bytes: int) -> Tensor:
    joined = torch.cat(list(memories(state)))
    assert joined.nbytes == needed_bytes, f"{joined.nbytes} bytes where the recipe says {needed_bytes}"
    return joined


def _wait(works: list[dist.Work | None]) -> None:
    for work in works:
        assert work is not None, "every rank of a case is a member of its group"
        work.wait()


SYSTEMS = (
    System(RAW, "plain sends by the backend", "limit", _open_raw),
    System(MEMCPY, "memcpy, one core", "limit", _open_memcpy, wired=False),
)
