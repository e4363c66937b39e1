"""Files on tmpfs, so that no disk slows them down: torch.save with torch.load, and DCP."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.systems.session import SENDER, Session, Setup, System, copy_into
from benchmarks.workloads import DCP, SAVE, Case


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
    for work in [dist.isend(byte, group=setup.group, group_dst=rank) for rank in setup.receivers]:
        assert work is not None, "the sender is a member of the group"
        work.wait()


def _wait_for_file(setup: Setup) -> None:
    dist.recv(torch.zeros(1, dtype=torch.uint8), group=setup.group, group_src=SENDER)


def _remove(path: Path, setup: Setup) -> None:
    if setup.sends and path.is_dir():
        shutil.rmtree(path)
    elif setup.sends:
        path.unlink(missing_ok=True)


def _several_hosts(case: Case, one_host: bool) -> str | None:
    return None if one_host else "the ranks are on several hosts, which share no tmpfs"


SYSTEMS = (
    System(SAVE, "torch.save + torch.load, tmpfs", "files", _open_save, wired=False, refuses=_several_hosts),
    System(DCP, "DCP save + load, tmpfs", "files", _open_dcp, wired=False, refuses=_several_hosts),
)
