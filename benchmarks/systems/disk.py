"""The way through files, on tmpfs, so that no disk is slower than it must be: torch.save, and DCP."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.systems.base import SENDER, Session, Site, System
from benchmarks.systems.peers import copied_into
from benchmarks.works import DCP, SAVE, Case


def _open_save(site: Site) -> Session:
    file = site.folder / "state.pt"

    def send() -> None:
        torch.save(site.source, file)
        _tell(site)

    def receive() -> object:
        _hear(site)
        received = torch.load(file, weights_only=True)
        return received if site.target is None else copied_into(site.target, received)

    return Session(send, receive, site.source, site.target, settle=lambda: _remove(file, site))


def _open_dcp(site: Site) -> Session:
    import torch.distributed.checkpoint as dcp

    folder = site.folder / "dcp"

    def send() -> None:
        assert site.source is not None, "the sender has a source"
        dcp.save(site.source, checkpoint_id=folder, no_dist=True)
        _tell(site)

    def receive() -> object:
        _hear(site)
        state = _allocated(folder) if site.target is None else site.target
        dcp.load(state, checkpoint_id=folder, no_dist=True)
        return state

    return Session(send, receive, site.source, site.target, settle=lambda: _remove(folder, site))


def _allocated(folder: Path) -> dict[str, object]:
    """Make empty tensors for all that a checkpoint holds: DCP only ever loads in place."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    described = FileSystemReader(folder).read_metadata().state_dict_metadata
    return {
        name: torch.empty(one.size, dtype=one.properties.dtype)
        for name, one in described.items()
        if isinstance(one, TensorStorageMetadata)
    }


def _tell(site: Site) -> None:
    """Let the receivers know that the file is whole; how they would otherwise learn it is not counted."""
    word = torch.zeros(1, dtype=torch.uint8)
    for work in [dist.isend(word, group=site.group, group_dst=rank) for rank in site.receivers]:
        assert work is not None, "the sender is a member of the group"
        work.wait()


def _hear(site: Site) -> None:
    dist.recv(torch.zeros(1, dtype=torch.uint8), group=site.group, group_src=SENDER)


def _remove(path: Path, site: Site) -> None:
    if not site.sends:
        return
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _apart(case: Case, one_host: bool) -> str | None:
    return None if one_host else "the ranks are on several hosts, which share no tmpfs"


SYSTEMS = (
    System(SAVE, "torch.save + torch.load, tmpfs", "disk", _open_save, wired=False, refuses=_apart),
    System(DCP, "DCP save + load, tmpfs", "disk", _open_dcp, wired=False, refuses=_apart),
)
