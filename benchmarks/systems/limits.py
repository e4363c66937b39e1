"""Upper limits: plain sends by gloo, and a copy in memory.

Both move the bytes of the state from and to one contiguous block of memory that has been used before, without
metadata, verification or allocation.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.states import storages
from benchmarks.systems.session import SENDER, Session, Setup, System
from benchmarks.workloads import MEMCPY, RAW

# gloo is fastest at this size: larger messages are slower, and each message has a fixed cost.
_MESSAGE_BYTES = 8 * 2**20


def _open_raw(setup: Setup) -> Session:
    memory = _contiguous(setup)
    messages = memory.split(_MESSAGE_BYTES)

    def send() -> None:
        _wait([dist.isend(one, group=setup.group, group_dst=r) for one in messages for r in setup.receivers])

    def receive() -> object:
        _wait([dist.irecv(one, group=setup.group, group_src=SENDER) for one in messages])
        return {"bytes": memory}

    return _session(setup, memory, send, receive)


def _open_memcpy(setup: Setup) -> Session:
    memory = _contiguous(setup)
    # Each receiver copies the state from its own memory. The sender does nothing.
    original = memory if setup.sends else _joined(setup.case.state.build())

    def receive() -> object:
        memory.copy_(original)
        return {"bytes": memory}

    return _session(setup, memory, lambda: None, receive)


def _session(
    setup: Setup, memory: Tensor, send: Callable[[], None], receive: Callable[[], object]
) -> Session:
    whole = {"bytes": memory}
    return Session(send, receive, whole if setup.sends else None, None if setup.sends else whole)


def _contiguous(setup: Setup) -> Tensor:
    size_bytes = setup.case.state.state_bytes
    memory = _joined(setup.source) if setup.sends else torch.zeros(size_bytes, dtype=torch.uint8)
    assert memory.nbytes == size_bytes, f"the state has {memory.nbytes} bytes, its spec says {size_bytes}"
    return memory


def _joined(state: object) -> Tensor:
    return torch.cat(list(storages(state)))


def _wait(works: list[dist.Work | None]) -> None:
    for work in works:
        assert work is not None, "every rank of a case is a member of its group"
        work.wait()


SYSTEMS = (
    System(RAW, "plain gloo sends", "limit", _open_raw),
    System(MEMCPY, "memcpy, one core", "limit", _open_memcpy, wired=False),
)
