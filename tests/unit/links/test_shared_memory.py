"""Memory that processes share: how long it lives, who can write, and what a receiver accepts."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import gc
import os
from pathlib import Path

import pytest
import torch

from torchferry.links import shared_memory
from torchferry.links.shared_memory import Mapping, SharedBlock, close_all, map_received

F_ADD_SEALS, F_GET_SEALS = 1033, 1034


def is_open(descriptor: int) -> bool:
    return Path(f"/proc/self/fd/{descriptor}").exists()


def is_mapped(address: int) -> bool:
    return f"{address:x}-" in Path("/proc/self/maps").read_text()


def huge_bytes(address: int) -> int:
    """Return how many bytes of a mapping are in huge pages, as /proc/self/smaps shows them."""
    _, _, found = Path("/proc/self/smaps").read_text().partition(f"\n{address:x}-")
    return int(found.partition("ShmemPmdMapped:")[2].split()[0]) << 10


def content(mapping: Mapping) -> bytes:
    return ctypes.string_at(mapping.address, mapping.nbytes)


@pytest.mark.parametrize("nbytes", [1, 4095, 4096, 4097, 1 << 20])
def test_what_is_written_to_a_block_is_in_every_mapping_of_it(nbytes: int) -> None:
    block = SharedBlock(nbytes)
    assert (block.tensor.dtype, block.tensor.shape) == (torch.uint8, (nbytes,))
    assert not block.tensor.any()
    mapping = map_received(block.descriptor)
    assert mapping.nbytes == nbytes
    block.tensor.fill_(7)
    assert content(mapping) == bytes([7]) * nbytes


HUGE = 2 << 20

with_huge_pages = pytest.mark.skipif(
    tuple(map(int, os.uname().release.split(".")[:2])) < (6, 1)
    or not Path("/sys/kernel/mm/transparent_hugepage").exists(),
    reason="the kernel can't give huge pages to a file in memory",
)


@with_huge_pages
@pytest.mark.parametrize("nbytes", [4 * HUGE - 1, 4 * HUGE, 5 * HUGE + 4097])
def test_a_large_block_has_huge_pages_and_the_right_content(
    nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory, "_MAX_SLOW_S", 60.0)
    block = SharedBlock(nbytes)
    assert not block.tensor.any()
    assert huge_bytes(block.address) == (nbytes // HUGE * HUGE if nbytes >= 4 * HUGE else 0)
    assert os.fstat(block.descriptor).st_size == nbytes
    block.tensor.copy_(torch.arange(nbytes, dtype=torch.int32) % 251)
    received = map_received(block.descriptor)
    assert content(received) == bytes(block.tensor.tolist())


@with_huge_pages
def test_a_block_stops_to_wait_for_huge_pages_if_they_are_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "_SLOW_PAGE_S", 0.0)
    monkeypatch.setattr(shared_memory, "_MAX_SLOW_S", 1e-9)
    block = SharedBlock(8 * HUGE)
    assert huge_bytes(block.address) == HUGE
    block.tensor.fill_(7)
    assert content(map_received(block.descriptor)) == bytes([7]) * (8 * HUGE)


def test_a_kernel_without_huge_pages_gives_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "_MADV_COLLAPSE", 9999)
    block = SharedBlock(8 * HUGE)
    assert huge_bytes(block.address) == 0
    block.tensor.fill_(7)
    assert content(map_received(block.descriptor)) == bytes([7]) * (8 * HUGE)


def test_a_block_is_closed_with_its_last_reference_and_unmapped_with_its_tensor() -> None:
    block = SharedBlock(4096)
    descriptor, tensor = block.descriptor, block.tensor
    address = tensor.data_ptr()
    del block
    gc.collect()
    assert not is_open(descriptor)
    tensor.fill_(3)
    assert tensor.unique().tolist() == [3]
    view = tensor[5:10]
    del tensor
    assert view.tolist() == [3] * 5
    del view
    gc.collect()
    assert not is_mapped(address)


def test_a_mapping_outlives_the_block_and_is_gone_with_its_object() -> None:
    block = SharedBlock(4096)
    block.tensor.fill_(9)
    mapping = map_received(block.descriptor)
    del block
    gc.collect()
    assert content(mapping) == bytes([9]) * 4096
    address = mapping.address
    del mapping
    assert not is_mapped(address)


def test_a_block_made_in_inference_mode_can_be_written_outside_of_it() -> None:
    with torch.inference_mode():
        block = SharedBlock(16)
    assert not block.tensor.is_inference()
    block.tensor.add_(1)


@pytest.mark.parametrize("nbytes", [0, -1])
def test_a_size_that_can_t_be_leaves_no_descriptor(nbytes: int) -> None:
    gc.collect()
    before = sorted(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="Invalid argument"):
        SharedBlock(nbytes)
    gc.collect()
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_memory_that_is_not_available_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel would end other processes: such memory counts for none, so this one is not the largest."""

    def fail(*_: object) -> None:
        raise AssertionError("memory was asked for")

    assert 0 < shared_memory._available_bytes() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # A small size, so that the test does no harm if the check is lost.
    monkeypatch.setattr(shared_memory, "_available_bytes", lambda: (1 << 20) - 1)
    monkeypatch.setattr(os, "posix_fallocate", fail)
    with pytest.raises(OSError, match="1048576 bytes of shared memory are needed, 1048575 are available"):
        SharedBlock(1 << 20)


@pytest.mark.parametrize("step", ["mmap", "seal"])
def test_a_step_that_fails_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EINVAL, "no")

    if step == "seal":
        monkeypatch.setattr(fcntl, "fcntl", fail)
    else:
        monkeypatch.setattr("torchferry.links.shared_memory.Mapping", fail)
    gc.collect()
    before = sorted(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="no"):
        SharedBlock(4096)
    gc.collect()
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_a_block_is_sealed() -> None:
    block = SharedBlock(4096)
    # No more seals, no shrinking, no growing, no new writers.
    assert fcntl.fcntl(block.descriptor, F_GET_SEALS) & 0x17 == 0x17
    assert not os.get_inheritable(block.descriptor)
    for size in (0, 8192):
        with pytest.raises(PermissionError):
            os.ftruncate(block.descriptor, size)
    with pytest.raises(PermissionError):
        Mapping(block.descriptor, 4096, writable=True)
    with pytest.raises(PermissionError):
        os.posix_fallocate(block.descriptor, 0, 8192)


@pytest.mark.parametrize("missing", [0x1, 0x2, 0x4, 0x10])
def test_memory_that_is_not_sealed_is_refused(missing: int) -> None:
    descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, 4096)
        fcntl.fcntl(descriptor, F_ADD_SEALS, 0x17 & ~missing)
        with pytest.raises(OSError, match="not sealed"):
            map_received(descriptor)
    finally:
        os.close(descriptor)


def test_a_forked_child_has_neither_the_descriptor_nor_the_mapping() -> None:
    block = SharedBlock(1 << 20)
    mapping = map_received(block.descriptor)
    pid = os.fork()
    if pid == 0:
        gone = not is_open(block.descriptor)
        gone &= not any(is_mapped(address) for address in (mapping.address, block.tensor.data_ptr()))
        os._exit(0 if gone else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert is_open(block.descriptor)
    block.tensor.fill_(1)
    assert content(mapping) == bytes([1]) * (1 << 20)


def test_an_object_that_a_forked_child_drops_does_not_unmap_what_is_there_in_the_child() -> None:
    block = SharedBlock(1 << 20)
    holder = [map_received(block.descriptor)]
    address = ctypes.c_void_p(holder[0].address)
    pid = os.fork()
    if pid == 0:
        # Something else, at the same address.
        libc = ctypes.CDLL(None)
        libc.mmap.restype = ctypes.c_void_p
        anonymous_fixed, read_write = 0x02 | 0x20 | 0x10, 0x3
        libc.mmap(address, ctypes.c_size_t(1 << 20), read_write, anonymous_fixed, -1, ctypes.c_long(0))
        holder.clear()
        ctypes.memset(address.value or 0, 5, 1 << 20)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_descriptors_that_are_closed_already_are_no_problem() -> None:
    reads, writes = os.pipe()
    close_all([reads, writes])
    close_all([reads, writes])
    assert not is_open(reads)
