"""The bytes behind a storage: allocating, viewing and copying them.

Payload is read and written through views of the storage in another dtype, never through the user's tensors.
So copies are bit-exact for every dtype, need no kernel for rare dtypes, and are invisible to autograd.
"""

import ctypes
import os
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import gcd
from operator import add, gt, mul
from typing import Any

import torch
from msgspec import Struct

from torchferry.core.extents import Extent, check_held, count_items_below, memory_order, split_into_boxes
from torchferry.core.manifest import TensorSpec
from torchferry.core.plan import Piece
from torchferry.core.text import show
from torchferry.errors import BadManifest, StateError
from torchferry.torch_internals import neg_view

CPU = torch.device("cpu")

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_RAW = {**_WORDS, 16: torch.complex128}
"""For each item size, a dtype that copies items bit for bit."""


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in a manifest, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


DTYPES = {dtype_name(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


class Memory(Struct, frozen=True, gc=False):
    """The memory of a storage of a manifest: its byte 0 is byte `base` of the torch storage.

    CPU memory has the object `CPU` as its device, because comparing identity is fast. `block` is the bytes
    object that has the memory, if there is one.
    """

    storage: torch.UntypedStorage
    base: int
    device: torch.device
    block: bytes | None = None

    @property
    def address(self) -> int:
        """The address of byte 0."""
        return self.storage.data_ptr() + self.base

    def at(self, delta: int) -> "Memory":
        """Return the same memory from `delta` bytes further on."""
        return Memory(self.storage, self.base + delta, self.device) if delta else self


def check_room(nbytes: int, what: str) -> None:
    """Raise StateError if this exceeds physical memory: Linux overcommits, and kills the process later."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if nbytes > physical:
        raise StateError(
            f"no memory for the {nbytes} bytes of {what}: this machine has {physical} bytes. If the tensors "
            "are views that lie far apart in a large storage, clone() them at the sender"
        )


def new_memory(nbytes: int, as_bytes: bool = False) -> Memory:
    """Allocate memory on the CPU for one storage; raises StateError if that fails.

    With `as_bytes`, it is the memory of a bytes object, which nobody else may see before it is written.
    """
    try:
        if as_bytes:
            return memory_of_bytes(bytes(nbytes))
        return Memory(torch.empty(nbytes, dtype=torch.uint8, device=CPU).untyped_storage(), 0, CPU)
    except (RuntimeError, MemoryError) as error:
        raise StateError(f"no memory for {nbytes} bytes of the incoming state: {error}") from None


def new_block(nbytes: int, what: str) -> torch.Tensor:
    """Allocate a flat buffer of bytes on the CPU; raises StateError if there is not enough memory."""
    check_room(nbytes, what)
    try:
        # Outside of inference mode too, such a buffer is written.
        with torch.inference_mode(False):
            return torch.empty(nbytes, dtype=torch.uint8, device=CPU)
    except (RuntimeError, MemoryError) as error:
        raise StateError(f"no memory for the {nbytes} bytes of {what}: {error}") from None


def memory_at(address: int, nbytes: int, owner: object = None) -> Memory:
    """View memory of this process as a storage, which keeps its owner alive, or else the caller does."""
    if nbytes == 0:
        return new_memory(0)
    block: Any = (ctypes.c_uint8 * nbytes).from_address(address)
    block.owner = owner
    return Memory(torch.frombuffer(block, dtype=torch.uint8).untyped_storage(), 0, CPU)


def memory_of_bytes(value: bytes) -> Memory:
    """View the memory of a bytes object as a storage, which keeps the object alive."""
    address = ctypes.cast(ctypes.c_char_p(value), ctypes.c_void_p).value or 0
    return Memory(memory_at(address, len(value), value).storage, 0, CPU, value)


def strided(
    memory: Memory, dtype: torch.dtype, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]
) -> torch.Tensor:
    """View memory as a tensor. The offset counts bytes, strides count items."""
    empty = torch.empty(0, dtype=dtype, device=memory.device)
    return empty.set_(memory.storage, (memory.base + offset) // dtype.itemsize, shape, stride)


def tensor_over(memory: Memory, spec: TensorSpec) -> torch.Tensor:
    """Create the tensor that a spec describes, over its storage's memory."""
    tensor = strided(memory, DTYPES[spec.dtype], spec.offset, spec.shape, spec.stride)
    if spec.conj:
        tensor = tensor.conj()
    return neg_view(tensor) if spec.neg else tensor


def _raw_over(memory: Memory, spec: TensorSpec) -> torch.Tensor:
    """Create the tensor of a spec with the _RAW dtype of its item size, because torch can't copy every dtype.

    Expanded dimensions have size one, because torch does not write a tensor whose items repeat.
    """
    shape = tuple(n if step else min(n, 1) for n, step in zip(spec.shape, spec.stride, strict=True))
    return strided(memory, _RAW[spec.itemsize], spec.offset, shape, spec.stride)


def _reread(raw: torch.Tensor, spec: TensorSpec, reader: TensorSpec) -> torch.Tensor:
    """Convert raw items from the conj and neg bits of `spec` to those of `reader`, keeping their values.

    Sign bits are flipped directly: torch can't negate every dtype, and may change a NaN's bits.
    """
    neg, conj = spec.neg != reader.neg, spec.conj != reader.conj
    if not (neg or conj):
        return raw
    # A complex number is two words, and conjugation flips the sign of the second.
    words = 2 if DTYPES[spec.dtype].is_complex else 1
    word = _WORDS[spec.itemsize // words]
    flipped = raw.clone(memory_format=torch.contiguous_format)
    parts = flipped.view(-1).view(word).view(-1, words)
    sign = 0x80 if word is torch.uint8 else torch.iinfo(word).min
    for part, flip in enumerate((neg, neg != conj)[:words]):
        if flip:
            parts[:, part] ^= sign
    return flipped


def check_dtype(spec: TensorSpec) -> None:
    """Raise BadManifest if torch lacks a spec's dtype, or its item size, conj or neg bit does not fit it."""
    dtype = DTYPES.get(spec.dtype)
    if dtype is None or spec.dtype.startswith("q"):
        raise BadManifest(f"torch {torch.__version__} has no dtype {show(spec.dtype)} that can be received")
    if dtype.itemsize != spec.itemsize:
        raise BadManifest(f"an item of {spec.dtype} has {dtype.itemsize} bytes here, not {spec.itemsize}")
    if spec.conj and not dtype.is_complex:
        raise BadManifest(f"a {spec.dtype} tensor has the conj bit set, but is not complex")
    if spec.neg and not (dtype.is_floating_point or dtype.is_complex):
        raise BadManifest(f"a {spec.dtype} tensor has the neg bit set, but is neither floating nor complex")


def run_of(memory: Memory, piece: Extent) -> torch.Tensor:
    """View a piece without gaps as bytes; raises StateError if its memory was freed."""
    check_held(memory.storage.nbytes(), memory.base + piece.end)
    return strided(memory, torch.uint8, piece.offset, (piece.run_bytes,), (1,))


def view_of(memory: Memory, piece: Extent) -> memoryview:
    """View a piece without gaps in CPU memory as bytes. The caller has called `check_held`."""
    at_piece = (ctypes.c_char * piece.run_bytes).from_address(memory.address + piece.offset)
    return memoryview(at_piece).cast("B")


def gather(memories: Sequence[Memory], pieces: Sequence[Extent], buffer: torch.Tensor) -> None:
    """Copy pieces of memory into a flat buffer, one after the other; raises StateError if one was freed."""
    _copy_pieces(memories, pieces, buffer, into_buffer=True)


def scatter(memories: Sequence[Memory], pieces: Sequence[Extent], buffer: torch.Tensor) -> None:
    """Copy a flat buffer to pieces of memory, but not to their gaps; raises StateError if one was freed."""
    _copy_pieces(memories, pieces, buffer, into_buffer=False)


def _copy_pieces(
    memories: Sequence[Memory], pieces: Sequence[Extent], buffer: torch.Tensor, *, into_buffer: bool
) -> None:
    if len(pieces) > 1 and _copy_by_address(memories, pieces, buffer, into_buffer=into_buffer):
        return
    start = 0
    for memory, piece in zip(memories, pieces, strict=True):
        check_held(memory.storage.nbytes(), memory.base + piece.end)
        flat = buffer[start : start + piece.nbytes]
        start += piece.nbytes
        # Views of the piece and of the buffer, in the widest words that both are aligned to.
        steps = [step for _, step in piece.repeats]
        word = gcd(8, memory.base + piece.offset, int(flat.storage_offset()), piece.run_bytes, *steps)
        shape = (*(count for count, _ in piece.repeats), piece.run_bytes // word)
        stride = (*(step // word for step in steps), 1)
        in_memory = strided(memory, _WORDS[word], piece.offset, shape, stride)
        in_buffer = flat.view(_WORDS[word]).view(shape)
        if into_buffer:
            in_buffer.copy_(in_memory)
        else:
            in_memory.copy_(in_buffer)


_memmove = ctypes.PYFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0
)
"""memmove that keeps the interpreter lock: releasing it takes longer than copying a small piece."""


def _copy_by_address(
    memories: Sequence[Memory], pieces: Sequence[Extent], buffer: torch.Tensor, *, into_buffer: bool
) -> bool:
    """Copy pieces of CPU memory without gaps by memmove. Returns False if a piece needs the general path."""
    if buffer.device != CPU or [memory.device for memory in memories].count(CPU) < len(memories):
        return False
    sizes = [piece.run_bytes for piece in pieces]
    starts = [memory.base + piece.offset for memory, piece in zip(memories, pieces, strict=True)]
    is_freed = any(map(gt, map(add, starts, sizes), [memory.storage.nbytes() for memory in memories]))
    if is_freed or any(piece.repeats for piece in pieces):
        return False
    in_memory = map(add, starts, [memory.storage.data_ptr() for memory in memories])
    in_buffer = accumulate(sizes[:-1], initial=buffer.data_ptr())
    targets, sources = (in_buffer, in_memory) if into_buffer else (in_memory, in_buffer)
    deque(map(_memmove, targets, sources, sizes), maxlen=0)  # a loop in C
    return True


def copy_items(received: Memory, theirs: TensorSpec, memory: Memory, ours: TensorSpec) -> None:
    """Copy a whole tensor that was received to the local tensor in `memory`."""
    _raw_over(memory, ours).copy_(_reread(_raw_over(received, theirs), theirs, ours))


def write_items(
    buffer: torch.Tensor, piece: Piece, theirs: TensorSpec, memory: Memory, ours: TensorSpec, *, covers: bool
) -> None:
    """Write one piece of an incoming tensor into a local tensor of another layout.

    With `covers`, the tensor is the whole extent, so the piece's position in it tells which items the piece
    holds. Otherwise their addresses do.
    """
    for items, local in _boxes_of(buffer, piece, theirs, memory, ours, covers=covers)[1]:
        local.copy_(_reread(items, theirs, ours))


def read_items(
    buffer: torch.Tensor, piece: Piece, theirs: TensorSpec, memory: Memory, ours: TensorSpec
) -> None:
    """Read a piece, of a tensor that is the whole extent, from a local tensor of another layout."""
    copied, boxes = _boxes_of(buffer, piece, theirs, memory, ours, covers=True)
    for items, local in boxes:
        items.copy_(_reread(local, ours, theirs))
    buffer.copy_(copied)


def _boxes_of(
    buffer: torch.Tensor, piece: Piece, theirs: TensorSpec, memory: Memory, ours: TensorSpec, *, covers: bool
) -> tuple[torch.Tensor, Iterator[tuple[torch.Tensor, torch.Tensor]]]:
    """Return a copy of a piece's bytes, and its items there and in a local tensor of another layout.

    Items arrive in the order of their addresses at the sender. A piece's range of items is split into a few
    boxes, and each box is one strided copy.
    """
    dims = memory_order(theirs)
    assert dims is not None, "a tensor whose items have no order in memory is not written item by item"
    size = theirs.itemsize
    shape = [theirs.shape[d] for d in dims]
    stride = tuple(theirs.stride[d] for d in dims)
    piece_start, piece_end, tensor_start = piece.offset, piece.end, theirs.offset
    if covers:
        # The piece holds only items, without gaps.
        stride = torch.empty(shape, dtype=torch.uint8, device="meta").stride()
        piece_start, piece_end, tensor_start = piece.position, piece.position + piece.nbytes, 0
    levels = [(count, step * size) for count, step in zip(shape, stride, strict=True)]
    first = count_items_below(piece_start - tensor_start, levels)
    end = count_items_below(piece_end - tensor_start, levels)
    # A tensor can view items only at multiples of their size, and the piece may begin between two items, with
    # bytes of other tensors. Also, the buffer may be memory that is written here. A copy takes little time.
    misaligned = piece_start % size
    copied = torch.empty(misaligned + buffer.numel(), dtype=torch.uint8, device=buffer.device)
    copied[misaligned:].copy_(buffer)
    source = Memory(copied.untyped_storage(), misaligned, buffer.device)
    last_item = sum((n - 1) * step for n, step in zip(ours.shape, ours.stride, strict=True))
    check_held(memory.storage.nbytes(), memory.base + ours.offset + (last_item + 1) * size)
    # Dimensions of size one and expanded dimensions have no items of their own.
    others = [d for d in range(len(theirs.shape)) if d not in dims]
    target = _raw_over(memory, ours).permute((*dims, *others))

    def boxes() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for start, lengths in split_into_boxes(shape, first, end):
            box = tuple(slice(at, at + length) for at, length in zip(start, lengths, strict=True))
            offset = tensor_start + size * sum(map(mul, start, stride)) - piece_start
            items = strided(source, _RAW[size], offset, lengths, stride)
            yield items[(..., *[None] * len(others))], target[box]

    return copied[misaligned:], boxes()
