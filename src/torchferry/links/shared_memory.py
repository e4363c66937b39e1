"""Memory that processes of one machine share: anonymous files, passed as descriptors over Unix sockets.

Such a file has no name that could be left behind. It disappears with its last descriptor and mapping. It is
sealed: it can't shrink under a reader, and only the process that created it can write.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import time
import weakref
from contextlib import suppress

import torch

from torchferry.links.lifecycle import close_after_fork

_NAME = "torchferry"  # of the files, as /proc shows them

_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034
_SEALS = 0x1 | 0x2 | 0x4 | 0x10  # no more seals, no shrinking, no growing, no new writers
_MADV_DONTFORK = 10
_MADV_POPULATE_READ, _MADV_POPULATE_WRITE, _MADV_COLLAPSE = 22, 23, 25
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000

_HUGE_PAGE_BYTES = 2 << 20

_MIN_HUGE_BYTES = 4 * _HUGE_PAGE_BYTES
"""Smaller blocks get no huge pages."""

_SLOW_PAGE_S = 0.002
"""If a huge page takes longer, the kernel compacts memory for it. A free one takes about 0.2 ms."""

_MAX_SLOW_S = 1.0
"""How long slow huge pages may take in all, for one block. The rest of the block gets small pages."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_FAILED = ctypes.c_void_p(-1).value


class Mapping:
    """A file in the memory of this process, from `address` on, as long as this object exists.

    Forked children do not inherit it. Python's own `mmap` keeps a descriptor, which they would inherit.
    """

    def __init__(self, descriptor: int, nbytes: int, *, writable: bool = False) -> None:
        """Raise OSError if there is no room for it."""
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        address = _reserve(nbytes)
        try:
            _map(address, nbytes, access, mmap.MAP_SHARED | _MAP_FIXED, descriptor)
        except OSError:
            _libc.munmap(address, nbytes)
            raise
        _libc.madvise(address, nbytes, _MADV_DONTFORK)
        self.address: int = address
        self.nbytes = nbytes
        weakref.finalize(self, _unmap, address, nbytes, os.getpid()).atexit = False


def _map(where: int | None, nbytes: int, access: int, flags: int, descriptor: int) -> int:
    address: int = _libc.mmap(where, nbytes, access, flags, descriptor, 0)
    if address == _FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return address


def _reserve(nbytes: int) -> int:
    """Reserve addresses, aligned to huge pages: otherwise the kernel can't map huge pages there."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    first = _map(None, nbytes + _HUGE_PAGE_BYTES, 0, flags, -1)
    before = -first % _HUGE_PAGE_BYTES
    # Unmap what is not needed before and after them, in whole pages.
    end = first + before + -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    if before:
        _libc.munmap(first, before)
    _libc.munmap(end, _HUGE_PAGE_BYTES - before)
    return first + before


def populate(address: int, nbytes: int, *, writable: bool) -> None:
    """Map all pages of a range now, which takes less time than a fault for each. Linux before 5.14 can't."""
    _libc.madvise(address, nbytes, _MADV_POPULATE_WRITE if writable else _MADV_POPULATE_READ)


def _unmap(address: int, nbytes: int, process: int) -> None:
    # A forked child may have something else at this address.
    if os.getpid() == process:
        _libc.munmap(address, nbytes)


class SharedBlock:
    """Memory of this process that others may read or map. `tensor` views it as bytes, and keeps it mapped.

    The file is open as long as this object exists. Raises OSError if there is not enough memory.
    """

    def __init__(self, nbytes: int) -> None:
        # The OOM killer might kill processes in vain: shared memory is freed only when no process has it.
        if nbytes > (available := _available_bytes()):
            raise OSError(
                errno.ENOMEM, f"{nbytes} bytes of shared memory are needed, {available} are available"
            )
        self.descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._close = weakref.finalize(self, os.close, self.descriptor)
        self._close.atexit = False
        close_after_fork(self)  # before what takes long, as another thread may fork meanwhile
        os.ftruncate(self.descriptor, nbytes)
        mapping = Mapping(self.descriptor, nbytes, writable=True)
        _use_huge_pages(self.descriptor, mapping)
        # Without this, a lack of memory would end the process with SIGBUS when it first writes.
        os.posix_fallocate(self.descriptor, 0, nbytes)
        fcntl.fcntl(self.descriptor, _F_ADD_SEALS, _SEALS)
        self.address, self.nbytes = mapping.address, nbytes
        block = (ctypes.c_uint8 * nbytes).from_address(mapping.address)
        block.mapping = mapping  # type: ignore[attr-defined]  # the tensor keeps the block, and so the mapping
        with torch.inference_mode(False):
            self.tensor = torch.frombuffer(block, dtype=torch.uint8)

    def close_inherited(self) -> None:
        """Close the descriptor in a forked child."""
        with suppress(OSError):  # `close_memfds` may have closed it
            self._close()


def _use_huge_pages(descriptor: int, mapping: Mapping) -> None:
    """Give a new file huge pages, where they are available and fast.

    Their bytes are copied faster, and they are allocated in a fifth of the time. But the kernel may have to
    compact memory first, and a virtual machine may have to get them from its host.
    """
    if mapping.nbytes < _MIN_HUGE_BYTES:
        return
    slow_s = 0.0
    for start in range(0, mapping.nbytes - _HUGE_PAGE_BYTES + 1, _HUGE_PAGE_BYTES):
        if slow_s >= _MAX_SLOW_S:
            return
        began_s = time.monotonic()
        # MADV_COLLAPSE needs at least one page in the range.
        os.pwrite(descriptor, b"\0", start)
        # Linux before 6.1, or without a free huge page, returns an error. The block then has small pages.
        if _libc.madvise(mapping.address + start, _HUGE_PAGE_BYTES, _MADV_COLLAPSE):
            return
        took_s = time.monotonic() - began_s
        slow_s += took_s if took_s > _SLOW_PAGE_S else 0.0


def _available_bytes() -> int:
    """Return how much memory the kernel can give out, as it estimates."""
    with open("/proc/meminfo", encoding="ascii") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))


def sealed_bytes(descriptor: int) -> int:
    """Return the size of a file in memory that a peer sent; raises OSError if it is not sealed."""
    if fcntl.fcntl(descriptor, _F_GET_SEALS) & _SEALS != _SEALS:
        raise OSError("the peer's memory is not sealed, so it could disappear while it is read")
    return os.fstat(descriptor).st_size


def map_received(descriptor: int) -> Mapping:
    """Map a file that a peer sent, for reading; raises OSError if that fails or it is not sealed."""
    return Mapping(descriptor, sealed_bytes(descriptor))


def close_memfds() -> None:
    """Close all shared memory of torchferry, in a forked child.

    A thread of the parent may have received a descriptor just before the fork, and not noted it anywhere.
    """
    with suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                if os.readlink(f"/proc/self/fd/{name}").startswith(f"/memfd:{_NAME}"):
                    os.close(int(name))


def close_all(descriptors: list[int]) -> None:
    """Close descriptors that a peer sent."""
    for descriptor in descriptors:
        with suppress(OSError):
            os.close(descriptor)
