"""What transports are compared with: files on tmpfs, and the limits of the machine.

Files: torch.save with torch.load, and DCP. Limits: plain sends by gloo, and a copy in memory. Both move the
bytes of the state from and to one contiguous block of memory that has been used before, without metadata,
verification or allocation.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.states import storages
from benchmarks.systems.session import SENDER, Session, Setup, System, copy_into
from benchmarks.workloads import DCP, MEMCPY, RAW, SAVE, Case

# gloo is fastest at this size: larger messages are slower, and each message has a fixed cost.
_MESSAGE_BYTES = 8 * 2**20


def _open_save(setup: Setup) -> Session:
    file = setup.folder / "state.pt"

    def send() -> None:
        torch.save(setup.source, file)
        _notify(setup)

    def receive() -> object:
        _wait_for_file(setup)
        return copy_into(setup.target, torch.load(file, weights_only=True))

    return Session(send, receive, setup.source, setup.target, settle=lambda: _remove(file, setup))


def _open_dcp(setup: Setup) -> Session:
    import torch.distributed.checkpoint as dcp

    folder = setup.folder / "dcp"

    def send() -> None:
        assert setup.source is not None, "the sender has a source"
        dcp.save(setup.source, checkpoint_id=folder, no_dist=True)
        _notify(setup)

    def receive() -> object:
        _wait_for_file(setup)
        state = _allocate(folder) if setup.target is None else setup.target
        dcp.load(state, checkpoint_id=folder, no_dist=True)
        return state

    return Session(send, receive, setup.source, setup.target, settle=lambda: _remove(folder, setup))


def _allocate(folder: Path) -> dict[str, object]:
    """Allocate the tensors of a checkpoint: DCP loads only in place."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    described = FileSystemReader(folder).read_metadata().state_dict_metadata
    return {
        name: torch.empty(one.size, dtype=one.properties.dtype)
        for name, one in described.items()
        if isinstance(one, TensorStorageMetadata)
    }


def _notify(setup: Setup) -> None:
    """Tell the receivers that the file is complete."""
    byte = torch.zeros(1, dtype=torch.uint8)
    _wait([dist.isend(byte, group=setup.group, group_dst=rank) for rank in setup.receivers])


def _wait_for_file(setup: Setup) -> None:
    dist.recv(torch.zeros(1, dtype=torch.uint8), group=setup.group, group_src=SENDER)


def _remove(path: Path, setup: Setup) -> None:
    if setup.sends and path.is_dir():
        shutil.rmtree(path)
    elif setup.sends:
        path.unlink(missing_ok=True)


def _several_hosts(case: Case, one_host: bool) -> str | None:
    return None if one_host else "the ranks are on several hosts, which share no tmpfs"


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


def _wait(requests: list[dist.Work | None]) -> None:
    for request in requests:
        assert request is not None, "every rank of a case is a member of its group"
        request.wait()


SYSTEMS = (
    System(SAVE, "torch.save + torch.load, tmpfs", "files", _open_save, wired=False, refuses=_several_hosts),
    System(DCP, "DCP save + load, tmpfs", "files", _open_dcp, wired=False, refuses=_several_hosts),
    System(RAW, "plain gloo sends", "limit", _open_raw),
    System(MEMCPY, "memcpy, one core", "limit", _open_memcpy, wired=False),
)
