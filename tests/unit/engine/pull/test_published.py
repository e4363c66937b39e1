"""Published versions: large ones are copied and hashed by two threads, with the same result."""

from __future__ import annotations

import threading
import time
from typing import NoReturn

import pytest
import torch

from torchferry.core.plan import Chunk
from torchferry.engine.pull import published
from torchferry.engine.pull.published import Published, SnapshotMemory, publish
from torchferry.engine.source import ChunkSource
from torchferry.engine.workspace import Workspace
from torchferry.errors import StateError
from torchferry.tensors.memory import CPU

LARGE = published._TWO_THREADS_BYTES


def state() -> dict[str, torch.Tensor]:
    """Return a large state: two whole tensors of odd sizes, a transposed one, and many small ones."""
    generator = torch.Generator().manual_seed(7)
    small = {f"small{n}": torch.rand(1 + n, generator=generator) for n in range(300)}
    large = torch.rand(LARGE // 8 + 77, generator=generator)
    return {"a": large, "t": torch.rand(1000, 999, generator=generator).T, **small, "b": large + 1}


def publish_now(snapshot: bool) -> Published:
    return publish(state(), 1, Workspace(CPU), SnapshotMemory(), snapshot=snapshot)


@pytest.mark.parametrize("snapshot", [True, False])
def test_two_threads_have_the_result_of_one(monkeypatch: pytest.MonkeyPatch, snapshot: bool) -> None:
    shared = publish_now(snapshot)
    monkeypatch.setattr(published, "_TWO_THREADS_BYTES", 1 << 40)
    alone = publish_now(snapshot)
    assert shared.nbytes >= LARGE
    assert shared.digests == alone.digests
    assert shared.root == alone.root
    chunks = len(shared.plan.chunks)
    assert b"".join(shared.read(0, chunks)) == b"".join(alone.read(0, chunks))
    assert not any(thread.name.startswith("torchferry-publish") for thread in threading.enumerate())


def test_a_large_state_is_published_although_no_thread_can_be_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = publish_now(snapshot=True).root

    def start(_: threading.Thread) -> NoReturn:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    assert publish_now(snapshot=True).root == expected


@pytest.mark.parametrize("name", ["a", "b"])
def test_an_error_in_either_thread_is_raised(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    large = state()
    address = large[name].data_ptr()
    original = ChunkSource.copy

    def copy(self: ChunkSource, chunk: Chunk, buffer: torch.Tensor) -> None:
        if self.address(chunk) == address:
            raise StateError("its memory was freed")
        original(self, chunk, buffer)

    monkeypatch.setattr(ChunkSource, "copy", copy)
    with pytest.raises(StateError, match="its memory was freed"):
        publish(large, 1, Workspace(CPU), SnapshotMemory(), snapshot=True)


def test_ctrl_c_in_one_thread_stops_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    has_begun = threading.Event()
    original = ChunkSource.copy

    def copy(self: ChunkSource, chunk: Chunk, buffer: torch.Tensor) -> None:
        if threading.current_thread() is threading.main_thread():
            has_begun.wait(10)
            raise KeyboardInterrupt
        copied.append(chunk.number)
        has_begun.set()
        time.sleep(0.02)
        original(self, chunk, buffer)

    monkeypatch.setattr(ChunkSource, "copy", copy)
    with pytest.raises(KeyboardInterrupt):
        publish_now(snapshot=True)
    assert 1 <= len(copied) < 8, "of about 16"
    assert not any(thread.name.startswith("torchferry-publish") for thread in threading.enumerate())
