"""An attack: bytes that a hostile peer sends as metadata, and the error that the receiver must raise.

To add an attack, write a function in the module of its family that returns the frame, describe the attack in
its docstring, and decorate it. `tests/hostile/test_attacks.py` runs all attacks.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from xxhash import xxh3_64_intdigest

from torchferry.core.codec import MAGIC, VERSION, Frame, encode, encode_value
from torchferry.core.manifest import Branch, Leaf, Manifest, Special, TensorSpec
from torchferry.errors import BadManifest, FerryError

CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Attack:
    """A hostile frame, followed by its `payload`. With `error` None, the frame may also be accepted."""

    family: str
    name: str
    build: Callable[[], bytes]
    error: type[FerryError] | None
    payload: Sequence[bytes]

    def __str__(self) -> str:
        return f"{self.family}-{self.name}"


ATTACKS: list[Attack] = []


def attack(
    error: type[FerryError] | None = BadManifest, *, payload: Sequence[bytes] = ()
) -> Callable[[Callable[[], bytes]], Callable[[], bytes]]:
    """Register a function that builds a frame as an attack."""

    def register(build: Callable[[], bytes]) -> Callable[[], bytes]:
        family = build.__module__.rpartition(".")[2]
        ATTACKS.append(Attack(family, build.__name__, build, error, payload))
        return build

    return register


def attacks(
    family: str, frames: dict[str, Callable[[], bytes]], error: type[FerryError] = BadManifest
) -> None:
    """Register many attacks of one family."""
    ATTACKS.extend(Attack(family, name, build, error, ()) for name, build in frames.items())


def frame_of(manifest: Manifest, chunk_bytes: int = CHUNK_BYTES, **fields: Any) -> bytes:
    """Encode a manifest as torchferry's sender does, without checks."""
    return encode(Frame(manifest, chunk_bytes, **fields))


def framed(body: bytes) -> bytes:
    """Put magic, version and the right digest before any bytes."""
    return struct.pack("<4sBQ", MAGIC, VERSION, xxh3_64_intdigest(body)) + body


def raw(envelope: object) -> bytes:
    """Encode any object as MessagePack, with magic, version and digest."""
    return framed(encode_value(envelope))


def one_value(traits: object, kind: str = "value") -> Manifest:
    """Return the manifest of a state that is one value."""
    return Manifest(-1, (Branch("list", (0,)),), (Leaf(kind, traits=traits),), (), ())  # type: ignore[arg-type]


def value(special: Special | object) -> bytes:
    """Return the frame of a state that is one value."""
    return frame_of(one_value(special))


def container(branch: Branch) -> bytes:
    """Return the frame of a state that is one container."""
    return frame_of(Manifest(-1, (branch,), (Leaf("value"),), (), ()))


def spec(
    shape: tuple[int, ...] = (4,),
    stride: tuple[int, ...] = (1,),
    *,
    dtype: str = "float32",
    itemsize: int = 4,
    storage: int = 0,
    offset: int = 0,
    **bits: bool,
) -> TensorSpec:
    """Describe a tensor; the defaults are valid."""
    return TensorSpec(dtype, itemsize, shape, stride, storage, offset, **bits)


def tensors(*specs: TensorSpec, storages: tuple[int, ...] | None = None, **fields: Any) -> bytes:
    """Return the frame of a list of tensors; by default, storages are just large enough."""
    if storages is None:
        ends = [0] * (1 + max(spec.storage for spec in specs))
        for each in specs:
            last = sum((n - 1) * step for n, step in zip(each.shape, each.stride, strict=True))
            end = each.offset + (last + 1) * each.itemsize if 0 not in each.shape else 0
            ends[each.storage] = max(ends[each.storage], end)
        storages = tuple(ends)
    leaves = tuple(Leaf("tensor", (number,)) for number in range(len(specs)))
    root = Branch("list", tuple(range(len(specs))))
    return frame_of(Manifest(-1, (root,), leaves, specs, storages), **fields)
