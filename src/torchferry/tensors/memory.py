"""The bytes behind a storage, and views of them.

Everything that reads or writes payload goes through integer views of the storage, never through the
tensors themselves: so it is bit-exact for every dtype, needs no kernel for the rare ones, and autograd
does not see it.
"""

from __future__ import annotations

import ctypes
import os
from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from math import gcd
from operator import add, gt

import torch
from msgspec import Struct

from torchferry.core.extents import Extent
from torchferry.core.manifest import TensorSpec
from torchferry.core.text import show
from torchferry.errors import BadManifest, StateError
from torchferry.torch_internals import neg_view

CPU = torch.device("cpu")

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

RAW = {**_WORDS, 16: torch.complex128}
"""For each size of item, a dtype in which it can be copied as it is."""

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}
"""Every dtype by the name under which it travels."""


def dtype_name(dtype: torch.dtype) -> str:
    """Give the name under which a dtype travels.

    >>> dtype_name(torch.bfloat16)
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


class Memory(Struct, frozen=True, gc=False):
    """A storage, seen from the manifest: its byte 0 is byte `base` of the torch storage.

    The device of what lies in the CPU's memory is the very object `CPU`, which is quickly told.
    """

    storage: torch.UntypedStorage
    base: int
    device: torch.device

    def at(self, delta: int) -> Memory:
        """See the same storage from `delta` bytes further on."""
        return Memory(self.storage, self.base + delta, self.device) if delta else self


def check_room(nbytes: int, what: str) -> None:
    """Check that this machine could hold so many bytes at all, before any memory is set aside.

    Memory that is asked for is often given whether or not it is there, and the process killed when it is
    used. A peer that claims what can't be, or spreads a few bytes over a span that can't be, is told so here.

    Raises:
        StateError: it has less memory than that.
    """
    has = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if nbytes > has:
        raise StateError(
            f"no memory for the {nbytes} bytes of {what}: this machine has {has}. If its tensors are views "
            "that lie far apart in a large storage, clone() them at the sender"
        )


def new_memory(nbytes: int, device: torch.device) -> Memory:
    """Set aside memory for one storage, not filled."""
    storage = torch.empty(nbytes, dtype=torch.uint8, device=device).untyped_storage()
    return Memory(storage, 0, device)


def memory_at(address: int, nbytes: int) -> Memory:
    """See memory of this process as a storage. The caller keeps its owner alive."""
    if nbytes == 0:
        return new_memory(0, CPU)
    block = (ctypes.c_uint8 * nbytes).from_address(address)
    storage = torch.frombuffer(block, dtype=torch.uint8).untyped_storage()
    return Memory(storage, 0, CPU)


def strided(
    memory: Memory,
    dtype: torch.dtype,
    offset: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
) -> torch.Tensor:
    """View memory as a tensor; the offset counts bytes, strides count items."""
    empty = torch.empty(0, dtype=dtype, device=memory.device)
    return empty.set_(memory.storage, (memory.base + offset) // dtype.itemsize, shape, stride)


def tensor_over(memory: Memory, spec: TensorSpec) -> torch.Tensor:
    """Make the tensor that a spec describes, over its storage's memory."""
    tensor = strided(memory, DTYPES[spec.dtype], spec.offset, spec.shape, spec.stride)
    return with_bits(tensor, spec)


def with_bits(tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """Give a tensor the spec's conj and neg bits, which say how its bytes are to be read."""
    if spec.conj:
        tensor = tensor.conj()
    if spec.neg:
        tensor = neg_view(tensor)
    return tensor


def raw_over(memory: Memory, spec: TensorSpec) -> torch.Tensor:
    """Make that tensor in a dtype that can be copied, which not every dtype can."""
    return strided(memory, RAW[spec.itemsize], spec.offset, spec.shape, spec.stride)


def reread(raw: torch.Tensor, spec: TensorSpec, reader: TensorSpec) -> torch.Tensor:
    """Give raw items in which `reader`, with its conj and neg bits, reads what `spec` reads in these.

    Sign bits are turned round, and nothing is computed: not every dtype that can be conjugated has a kernel
    for it, and arithmetic promises nothing of a NaN.
    """
    neg, conj = spec.neg != reader.neg, spec.conj != reader.conj
    if not (neg or conj):
        return raw
    # A complex number is two words, and conjugation turns the sign of the second.
    words = 2 if DTYPES[spec.dtype].is_complex else 1
    word = _WORDS[spec.itemsize // words]
    turned = raw.clone(memory_format=torch.contiguous_format)
    parts = turned.view(-1).view(word).view(-1, words)
    sign = 0x80 if word is torch.uint8 else torch.iinfo(word).min
    for part, turn in enumerate((neg, neg != conj)[:words]):
        if turn:
            parts[:, part] ^= sign
    return turned


def check_dtype(spec: TensorSpec) -> None:
    """Check that a dtype is known here and has the size that the peer says.

    Raises:
        BadManifest: it is not, or has not.
    """
    dtype = DTYPES.get(spec.dtype)
    if dtype is None or spec.dtype.startswith("q"):
        raise BadManifest(f"this torch has no dtype {show(spec.dtype)} that can be held as bytes")
    if dtype.itemsize != spec.itemsize:
        raise BadManifest(f"{spec.dtype} has {dtype.itemsize} bytes, not {spec.itemsize}")
    if spec.conj and not dtype.is_complex:
        raise BadManifest(f"{spec.dtype} can't be conjugated")
    if spec.neg and not (dtype.is_floating_point or dtype.is_complex):
        raise BadManifest(f"{spec.dtype} has no sign bit that could be turned round")


def run_of(memory: Memory, piece: Extent) -> torch.Tensor:
    """Give a plain piece as the bytes in memory themselves.

    Raises:
        StateError: they are not there any more.
    """
    check_held(memory.storage, memory.base + piece.end)
    return strided(memory, torch.uint8, piece.offset, (piece.run_bytes,), (1,))


def peek(memory: Memory, piece: Extent) -> bytes:
    """Copy a short plain piece.

    Raises:
        StateError: it is not there any more.
    """
    if memory.device is not CPU:
        return bytes(run_of(memory, piece).tolist())
    check_held(memory.storage, memory.base + piece.end)
    return ctypes.string_at(memory.storage.data_ptr() + memory.base + piece.offset, piece.run_bytes)


def gather(memories: Sequence[Memory], pieces: Sequence[Extent], buffer: torch.Tensor) -> None:
    """Copy pieces of memory into a flat buffer, one after the other."""
    _copy(memories, pieces, buffer, into_buffer=True)


def scatter(memories: Sequence[Memory], pieces: Sequence[Extent], buffer: torch.Tensor) -> None:
    """Copy a flat buffer to pieces of memory, one after the other; what lies between is left alone."""
    _copy(memories, pieces, buffer, into_buffer=False)


def _copy(
    memories: Sequence[Memory], pieces: Sequence[Extent], buffer: torch.Tensor, *, into_buffer: bool
) -> None:
    """Copy every piece, all at once if they are plain."""
    plain = _addresses(memories, pieces, buffer)
    if plain is not None:
        here, there, sizes = plain
        to, origin = (there, here) if into_buffer else (here, there)
        _exhaust(map(_copy_bytes, to, origin, sizes))
        return
    copy_one = load if into_buffer else store
    position = 0
    for memory, piece in zip(memories, pieces, strict=True):
        nbytes = piece.nbytes
        copy_one(memory, piece, buffer[position : position + nbytes])
        position += nbytes


_copy_bytes = ctypes.PYFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0
)
"""Copies small pieces: a call of torch's takes several times as long as that, and so does letting go of the
interpreter lock and taking it again."""

_exhaust = deque[None](maxlen=0).extend


def _addresses(
    memories: Sequence[Memory], pieces: Sequence[Extent], buffer: torch.Tensor
) -> tuple[list[int], list[int], list[int]] | None:
    """Give where pieces are in memory and in the buffer, and their sizes; None if they can't just be copied.

    They can if each is a short run in the CPU's memory, and still there: a storage may have been freed.
    """
    count = len(pieces)
    if count == 1 or buffer.device != CPU or [memory.device for memory in memories].count(CPU) < count:
        return None
    if [piece.repeats for piece in pieces].count(()) < count:
        return None
    sizes = [piece.run_bytes for piece in pieces]
    starts = [memory.base + piece.offset for memory, piece in zip(memories, pieces, strict=True)]
    if any(map(gt, map(add, starts, sizes), [memory.storage.nbytes() for memory in memories])):
        return None
    here = list(map(add, starts, [memory.storage.data_ptr() for memory in memories]))
    there = list(accumulate(sizes, initial=buffer.data_ptr()))[:-1]
    return here, there, sizes


def load(memory: Memory, piece: Extent, buffer: torch.Tensor) -> None:
    """Copy a piece's bytes, without the gaps, into a flat buffer."""
    pattern = _pattern(memory, piece, buffer)
    _flat(buffer, pattern).copy_(pattern)


def store(memory: Memory, piece: Extent, buffer: torch.Tensor) -> None:
    """Copy a flat buffer into a piece's bytes; what lies in the gaps is left alone."""
    pattern = _pattern(memory, piece, buffer)
    pattern.copy_(_flat(buffer, pattern))


def _pattern(memory: Memory, piece: Extent, buffer: torch.Tensor) -> torch.Tensor:
    """View a piece as a tensor of the widest words that fit all its numbers.

    The buffer's start is one of them: it may be some local tensor's memory, and lie anywhere.

    Raises:
        StateError: the piece is not there any more.
    """
    check_held(memory.storage, memory.base + piece.end)
    steps = [step for _, step in piece.repeats]
    word = gcd(8, memory.base + piece.offset, int(buffer.storage_offset()), piece.run_bytes, *steps)
    shape = (*(count for count, _ in piece.repeats), piece.run_bytes // word)
    stride = (*(step // word for step in steps), 1)
    return strided(memory, _WORDS[word], piece.offset, shape, stride)


def check_held(storage: torch.UntypedStorage, end: int) -> None:
    """Check that a storage has so many bytes, and was not freed: torch would quietly give it new memory.

    Raises:
        StateError: it has not.
    """
    if end > storage.nbytes():
        raise StateError(
            f"the memory of a tensor was freed during the transfer: its storage holds "
            f"{storage.nbytes()} bytes of the {end} that are used"
        )


def _flat(buffer: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return buffer.view(like.dtype).view(like.shape)
