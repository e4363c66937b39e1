"""Who shares memory with whom: the storages behind a state's tensors.

Rules of this file:
- Memory is memory. Two torch storages that lie in the same bytes (an ndarray and the tensor made from it)
  are one storage here.
- A storage starts at the first byte that some tensor uses and ends at the last, so that a small view of a
  large storage does not cost its size, here or at the receiver. Where ndarrays may lie in it, whose items are
  entered as bytes but want to be aligned too, it starts up to 15 bytes before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat
from operator import add, gt, le
from typing import cast

import torch
from msgspec import Struct

from torchferry.core.extents import ITEM_BYTES
from torchferry.core.last import Last
from torchferry.core.manifest import TensorSpec
from torchferry.errors import Unsendable
from torchferry.tensors.looks import Look, Looks, OddTensor, Sight, joined
from torchferry.tensors.memory import CPU, Memory, memory_at
from torchferry.tensors.sendable import check_dense
from torchferry.torch_internals import storage_id


class Traces:
    """What was worked out for the last state that was described, in terms that hold for any state like it.

    Sights are of tensors that were entered together, and of those in between. `apart` and `sharing` follow
    from where the storages lie, and `specs` from that and what was seen. No tensor is kept alive by it.
    """

    def __init__(self) -> None:
        self.together: list[Sight] = []
        self.between: list[Sight] = []
        self.apart: Last[bool] = Last()
        self.sharing: Last[Sharing] = Last()
        self.specs: Last[tuple[TensorSpec, ...]] = Last()
        self.sizes: Last[tuple[int, ...]] = Last()


class _Block(Struct, frozen=True, gc=False):
    """One torch storage as it lies in memory, and the first tensor that has it."""

    address: int
    nbytes: int
    on_cpu: bool
    first: int


class _Place(Struct, frozen=True, gc=False):
    """Memory that tensors lie in: the torch storage of a tensor, or else so many bytes from an address on."""

    tensor: int | None
    address: int = 0
    nbytes: int = 0


class _Home(Struct, frozen=True, gc=False):
    """Where a block lies: `shift` bytes into a place that may be cut at multiples of `unit`."""

    place: int
    shift: int
    unit: int


class Sharing(Struct, frozen=True):
    """Who shares memory with whom.

    Each tensor's storage and where it begins in it; each storage's size, and of its bytes, in which place
    they lie and where they begin.
    """

    numbers: list[int]
    offsets: list[int]
    sizes: list[int]
    places: list[_Place]
    bases: list[int]


class Storages(Struct, frozen=True):
    """Tensors in terms of storages: a spec for each tensor, and the memory and size of each storage."""

    specs: tuple[TensorSpec, ...]
    memories: tuple[Memory, ...]
    sizes: tuple[int, ...]


class StorageTable:
    """Collects tensors, then says what they are in terms of as few storages as there are.

    Nearly always there is nothing wrong with any of them, and to find that out of all at once takes a
    fraction of what it takes one by one. With `careful`, each is looked at when it is entered, so that it
    is known which.
    """

    def __init__(self, traces: Traces, *, careful: bool) -> None:
        self.tensors: list[torch.Tensor] = []
        self._traces = traces
        self._careful = careful
        self._seen: list[tuple[int, Looks]] = []

    @property
    def sight(self) -> Sight:
        """What was last seen where the next tensors are that are entered together."""
        return _nth(self._traces.together, len(self._seen))

    def enter(self, tensor: torch.Tensor) -> int:
        """Enter a strided tensor and give its number.

        Raises:
            Unsendable: it is not its bytes and nothing more.
        """
        if self._careful:
            check_dense(tensor)
        self.tensors.append(tensor)
        return len(self.tensors) - 1

    def enter_many(self, tensors: Sequence[torch.Tensor], looks: Looks) -> range:
        """Enter strided tensors all at once that were looked at, and give their numbers."""
        first = len(self.tensors)
        self._seen.append((first, looks))
        self.tensors += tensors
        return range(first, len(self.tensors))

    def __len__(self) -> int:
        return len(self.tensors)

    def forget(self, count: int) -> None:
        """Take back all but the first so many tensors."""
        del self.tensors[count:]

    def finish(self) -> Storages:
        """Say what was entered.

        Raises:
            OddTensor: a tensor was entered that can't travel.
        """
        try:
            return self._finish()
        except (Unsendable, RuntimeError) as error:
            if self._careful:
                raise
            raise OddTensor from error

    def _finish(self) -> Storages:
        # What is not strided has no strides or no storage, and torch says so.
        tensors, seen = self.tensors, self._look()
        looks = seen.looks
        if False in seen.on_cpu or True in seen.negs:
            self._look_closely()
        storages = list(map(torch.Tensor.untyped_storage, tensors))
        held = list(map(torch.UntypedStorage.nbytes, storages))
        spans = [look.span for look in looks]
        places = cast(list[int], list(map(torch.Tensor.storage_offset, tensors)))
        ends = spans
        if any(places):
            places = [place * look.form[1] for place, look in zip(places, looks, strict=True)]
            ends = [place + span if span else 0 for place, span in zip(places, spans, strict=True)]
        if any(map(gt, ends, held)):
            self._look_closely()
        addresses = list(map(torch.UntypedStorage.data_ptr, storages))
        if self._traces.apart.of((addresses, held), lambda: _all_apart(addresses, held)):
            # Each is alone, and its storage begins where it does.
            numbers: Sequence[int] = range(len(tensors))
            offsets: list[int] | None = None
            devices: Iterable[torch.device] = repeat(CPU)
            if False in seen.on_cpu:
                devices = [CPU if tensor.is_cpu else tensor.device for tensor in tensors]
            memories: list[Memory] = list(map(Memory, storages, places, devices))
            sizes = spans
        else:
            owners = list(map(storage_id, storages))
            sharing = self._traces.sharing.of(
                (owners, addresses, held, seen.on_cpu, looks, places),
                lambda: _shared(*_blocks(owners, addresses, held, seen.on_cpu), looks, places),
            )
            numbers, offsets, sizes = sharing.numbers, sharing.offsets, sharing.sizes
            memories = [self._memory(*each) for each in zip(sharing.places, sharing.bases, strict=True)]
        specs = self._traces.specs.of((seen, numbers, offsets), lambda: _specs(seen, numbers, offsets))
        return Storages(specs, tuple(memories), self._traces.sizes.of(sizes, lambda: tuple(sizes)))

    def _look(self) -> Looks:
        """Look at all tensors that were not yet seen, and put together what all look like."""
        parts: list[Looks] = []
        end = between = 0
        for start, looks in [*self._seen, (len(self.tensors), None)]:
            if start > end:
                sight, some = _nth(self._traces.between, between), self.tensors[end:start]
                parts.append(sight.look(some))
                between += 1
            if looks is not None:
                parts.append(looks)
                end = start + len(looks.looks)
        # Places that there are no more.
        del self._traces.together[len(self._seen) :], self._traces.between[between:]
        return joined(parts)

    def _look_closely(self) -> None:
        """Look at each tensor, because something is not as it nearly always is.

        Raises:
            Unsendable: one can't travel.
        """
        for tensor in self.tensors:
            check_dense(tensor)

    def _memory(self, place: _Place, base: int) -> Memory:
        if place.tensor is None:
            return memory_at(place.address, place.nbytes).at(base)
        tensor = self.tensors[place.tensor]
        return Memory(tensor.untyped_storage(), base, CPU if tensor.is_cpu else tensor.device)


def _nth(sights: list[Sight], number: int) -> Sight:
    if number == len(sights):
        sights.append(Sight())
    return sights[number]


def _specs(seen: Looks, numbers: Sequence[int], offsets: list[int] | None) -> tuple[TensorSpec, ...]:
    """Say of each tensor what it is; without offsets they are 0."""
    if not seen.looks:
        return ()
    forms = zip(*[look.form for look in seen.looks], strict=True)
    rest = numbers, offsets or repeat(0), seen.conjs or repeat(False), seen.negs
    return tuple(map(TensorSpec, *forms, *rest))


def _all_apart(addresses: list[int], held: list[int]) -> bool:
    """Say whether each tensor has memory of its own: no two have the same storage, or overlap."""
    # Without torch's sort, which would be done wherever the user has torch do things by default.
    size_at = dict(zip(addresses, held, strict=True))
    # Some that have no memory are all at 0, and are told apart one by one.
    if len(size_at) < len(addresses):
        return False
    starts = sorted(addresses)
    return all(map(le, map(add, starts, map(size_at.__getitem__, starts)), starts[1:]))


def _blocks(
    owners: list[int], addresses: list[int], held: list[int], on_cpu: list[bool]
) -> tuple[list[_Block], list[int]]:
    """List the torch storages, each once, and for each tensor which one is its own."""
    blocks: list[_Block] = []
    known: dict[int, int] = {}
    block_of: list[int] = []
    for tensor, owner in enumerate(owners):
        block = known.setdefault(owner, len(blocks))
        if block == len(blocks):
            blocks.append(_Block(addresses[tensor], held[tensor], on_cpu[tensor], tensor))
        block_of.append(block)
    return blocks, block_of


def _shared(blocks: list[_Block], block_of: list[int], looks: list[Look], starts: list[int]) -> Sharing:
    """Find out who shares memory. Each tensor starts somewhere in its block."""
    homes, places = _homes(blocks, block_of, [look.form[1] for look in looks])
    numbers: dict[int, int] = {}
    units: list[int] = []
    lows: list[int] = []
    highs: list[int] = []
    found: list[tuple[int, int]] = []
    for block, look, start in zip(block_of, looks, starts, strict=True):
        home = homes[block]
        number = numbers.setdefault(home.place, len(units))
        at = start + home.shift if look.span else _NOWHERE
        if number == len(units):
            units.append(home.unit)
            lows.append(at)
            highs.append(0)
        if look.span:
            lows[number] = min(lows[number], at)
            highs[number] = max(highs[number], at + look.span)
        found.append((number, at))
    bases = [low // unit * unit if low < _NOWHERE else 0 for low, unit in zip(lows, units, strict=True)]
    return Sharing(
        [number for number, _ in found],
        [at - bases[number] if at < _NOWHERE else 0 for number, at in found],
        [max(high - base, 0) for high, base in zip(highs, bases, strict=True)],
        [places[place] for place in numbers],
        bases,
    )


_NOWHERE = 1 << 64


def _homes(
    blocks: list[_Block], block_of: list[int], itemsizes: list[int]
) -> tuple[list[_Home], list[_Place]]:
    """Find a home for each block: in the same place for blocks in the same memory."""
    widest = [1] * len(blocks)
    for number, itemsize in zip(block_of, itemsizes, strict=True):
        widest[number] = max(widest[number], itemsize)
    places = [_Place(block.first) for block in blocks]
    homes = [_Home(number, 0, unit) for number, unit in enumerate(widest)]
    cluster: list[int] = []
    end = 0
    for number in sorted(range(len(blocks)), key=lambda n: blocks[n].address):
        block = blocks[number]
        if not block.nbytes or not block.on_cpu:
            continue
        if block.address >= end:
            _share(blocks, widest, cluster, homes, places)
            cluster = []
        cluster.append(number)
        end = max(end, block.address + block.nbytes)
    _share(blocks, widest, cluster, homes, places)
    return homes, places


def _share(
    blocks: list[_Block], widest: list[int], cluster: list[int], homes: list[_Home], places: list[_Place]
) -> None:
    """Give blocks that overlap, in order of address, one home: or as few as their items allow."""
    while len(cluster) > 1:
        # Items must lie at multiples of their size from the storage's start, or no tensor could see them. So
        # it starts at a multiple of ITEM_BYTES, unless the widest items are not aligned themselves.
        leader = max(cluster, key=lambda n: widest[n])
        astray = blocks[leader].address % widest[leader]
        group = [n for n in cluster if (blocks[n].address - astray) % widest[n] == 0]
        cluster = [n for n in cluster if (blocks[n].address - astray) % widest[n]]
        if len(group) < 2:
            continue
        first = blocks[group[0]].address
        start = first - (first - astray) % ITEM_BYTES
        # What lies before the first block is only counted from, and never read or written.
        end = max(blocks[n].address + blocks[n].nbytes for n in group)
        places.append(_Place(None, start, end - start))
        for number in group:
            homes[number] = _Home(len(places) - 1, blocks[number].address - start, ITEM_BYTES)
