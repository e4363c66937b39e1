"""Mutated frames: valid frames with changes that pass the first checks of the decoder.

The digest in the preamble would reject any flipped bit, so every mutation changes the body and computes the
digest again. Most mutations keep the type of the value that they change, and most frames are repaired
afterwards (`repair`), so that they reach the later checks.
"""

from __future__ import annotations

import argparse
import array
import collections
import io
import pathlib
import random
import uuid
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from functools import cache
from types import MappingProxyType, SimpleNamespace
from typing import Any
from zoneinfo import ZoneInfo

import msgspec
import numpy as np
import torch
from torch.distributed.tensor import DTensor, Shard

from tests.hostile.attacks import kinds, values
from tests.hostile.attacks.base import framed
from tests.hostile.repair import LISTS, repair
from torchferry.core.codec import Frame, encode
from torchferry.tensors.describe import describe
from torchferry.torch_internals import MeshLayout, make_dtensor, make_mesh

_PREAMBLE_BYTES = 13


def corpus() -> list[bytes]:
    """Return the bodies of valid frames that together have every kind of leaf, container and value."""
    base = torch.arange(64.0)
    mesh = make_mesh(MeshLayout((0,), ((1,),), ((1,),), False, "cpu", None), 0)
    states: list[object] = [
        {
            "w": base.view(8, 8),
            "t": base.view(8, 8).t(),
            "row": base[8:16],
            "n": 3,
            "name": "x",
            "none": None,
        },
        [base[::2], base[1::2], base.view(8, 8)[:, 2], base.expand(3, 64), torch.zeros(0, 4)],
        {
            "values": [2**80, 1.5, 1j, b"b", bytearray(b"c"), range(3), slice(1, 2), ..., "\ud800"],
            ("t", 1): frozenset({1, 2}),
            2: {1, "a"},
        },
        {
            "torch": [
                torch.float32,
                torch.strided,
                torch.Size([1, 2]),
                torch.device("cpu"),
                torch.per_tensor_affine,
            ],
            "numpy": [np.float64(1), np.str_("ab"), np.datetime64(1, "s"), np.zeros((3, 2))[::-1]],
            "fields": np.zeros(2, [("a", "<i4"), ("b", "<f8", (2,))]),
        },
        collections.OrderedDict(
            a=collections.deque([1, 2], 5), b=collections.defaultdict(int, x=1), c=collections.Counter("aab")
        ),
        [torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr(), torch.nn.Parameter(torch.ones(2))],
        [values.Mode.TRAIN, values.Switches(3), values.Point(1, 2)],
        [torch.ones(3, dtype=torch.complex64).conj(), torch.ones(2, dtype=torch.bfloat16)],
        [DTensor.from_local(torch.ones(2), mesh, [Shard(0)], run_check=False)],
        {
            "wrapped": values.Wrapper(base, (64,)),
            "twice": values.Wrapper(values.Wrapper(base[:4], (4,)), (2, 2)),
            "distributed": make_dtensor(values.Wrapper(base, (64,)), mesh, [Shard(0)], (64,), (1,)),
            "quantized": torch.quantize_per_tensor(torch.ones(2, 3), 0.5, 1, torch.qint8),
            "channels": torch.quantize_per_channel(
                torch.ones(2, 3), torch.ones(2), torch.zeros(2), 0, torch.quint8
            ),
            "large": [
                bytes(70_000),
                bytearray(70_000),
                io.BytesIO(bytes(70_000)),
                array.array("d", bytes(80_000)),
            ],
        },
        {
            "paths": [pathlib.PurePosixPath("/a"), uuid.UUID(int=1)],
            "times": [
                datetime(2026, 1, 2, tzinfo=ZoneInfo("UTC")),
                date(2026, 1, 2),
                time(3, tzinfo=UTC),
                timedelta(4),
            ],
            "numbers": [Decimal("1.5"), Fraction(1, 3), torch.finfo(torch.float32), torch.iinfo(torch.int8)],
            "bytes": [
                io.BytesIO(b"abc"),
                array.array("i", [1, 2]),
                np.dtype([("a", "<i4"), ("b", object, 2)], align=True),
                values.Text("a"),
            ],
            values.Point(1, 2): frozenset({values.Point(3, 4)}),
        },
        {
            "containers": [
                argparse.Namespace(a=1),
                SimpleNamespace(b=base),
                MappingProxyType({"c": base[:3]}),
            ],
            "table": values.Table(),
            "result": torch.max(base.view(8, 8), 1),
            "masked": np.ma.array([1.0, 2.0], mask=[True, False]),
        },
    ]
    bodies = [
        encode(Frame(describe(state).manifest, 1 << 20, step, 5, b"n" * 16))[_PREAMBLE_BYTES:]
        for step, state in enumerate(states)
    ]
    bodies += [kinds.leaf(kind, form, *specs)[_PREAMBLE_BYTES:] for kind, form, specs in kinds.VALID.values()]
    return bodies


_NUMBERS = (0, 1, -1, 2, 3, 7, 16, 255, 2**16, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**64 - 1, -(2**63))


_TEXTS = ("", "tensor", "value", "dict", "list", "odict", "float64", "uint8", "torch.int8", "cpu", "Shard")

_CODES = (0, *values.CODES)


@cache
def _decoded(body: bytes) -> Any:
    """Decode a body once for all seeds. Mutations copy what they change."""
    return msgspec.msgpack.decode(body)


def _is_special(node: Any) -> bool:
    return isinstance(node, list) and list(map(type, node)) == [int, bytes]


class Mutator:
    """Creates frames from a corpus, by a seed."""

    def __init__(self, bodies: list[bytes], seed: int) -> None:
        self._bodies = bodies
        self._rng = random.Random(seed)
        self._trees = [_decoded(body) for body in bodies]
        self._damage = [self._flip, self._overwrite, self._splice, self._cut, self._double]

    def next(self) -> bytes:
        """Return a frame with a valid digest."""
        rng = self._rng
        number = rng.randrange(len(self._bodies))
        if rng.random() < 0.1:
            # MessagePack rejects most random changes of bytes.
            return framed(rng.choice(self._damage)(self._bodies[number]))
        tree = self._generated() if rng.random() < 0.15 else self._trees[number]
        for _ in range(rng.choice((1, 1, 1, 2, 3, 5))):
            tree = self._grafted(tree) if rng.random() < 0.3 else self._edited(tree)
        if rng.random() < 0.8:
            tree = repair(tree)
        return framed(msgspec.msgpack.encode(tree))

    def _flip(self, body: bytes) -> bytes:
        changed = bytearray(body or b"\x00")
        for _ in range(self._rng.choice((1, 1, 2, 8))):
            changed[self._rng.randrange(len(changed))] ^= 1 << self._rng.randrange(8)
        return bytes(changed)

    def _overwrite(self, body: bytes) -> bytes:
        at = self._rng.randrange(len(body) + 1)
        return (
            body[:at] + self._rng.randbytes(self._rng.randrange(1, 9)) + body[at + self._rng.randrange(9) :]
        )

    def _splice(self, body: bytes) -> bytes:
        other = self._rng.choice(self._bodies)
        return body[: self._rng.randrange(len(body) + 1)] + other[self._rng.randrange(len(other)) :]

    def _cut(self, body: bytes) -> bytes:
        start, end = sorted((self._rng.randrange(len(body) + 1), self._rng.randrange(len(body) + 1)))
        return body[:start] + body[end:]

    def _double(self, body: bytes) -> bytes:
        start = self._rng.randrange(len(body) + 1)
        piece = body[start : start + self._rng.randrange(1, 20)]
        return body[:start] + piece * self._rng.choice((2, 2, 50)) + body[start:]

    def _grafted(self, tree: Any) -> Any:
        """Insert a branch, leaf, tensor or storage of another frame, or of this frame again."""
        rng = self._rng
        other = rng.choice([tree, *self._trees])
        part = rng.choice(LISTS)
        try:
            manifest, pieces = list(tree[0]), list(tree[0][part])
            piece = rng.choice(other[0][part])
            at = rng.randrange(len(pieces) + 1)
            pieces[at : at + rng.randrange(2)] = [piece] * rng.choice((1, 1, 1, 2, 20))
            manifest[part] = pieces
            return [manifest, *tree[1:]]
        except (LookupError, TypeError):
            return tree

    def _edited(self, node: Any) -> Any:
        """Change one value in a decoded tree, preferably a nested one."""
        rng = self._rng
        if _is_special(node) and rng.random() < 0.95:
            return self._edited_special(node)
        if isinstance(node, list) and node and rng.random() < 0.95:
            inner = [n for n, item in enumerate(node) if isinstance(item, (list, dict)) and item]
            at = rng.choice(inner) if inner and rng.random() < 0.8 else rng.randrange(len(node))
            # A list that begins with a name is a record; other lists may have any length.
            if not inner and not isinstance(node[0], str) and rng.random() < 0.2:
                return rng.choice((node[:at], node[:at] + node, node[::-1], [*node, node[at]]))
            return [*node[:at], self._edited(node[at]), *node[at + 1 :]]
        if isinstance(node, dict) and node and rng.random() < 0.95:
            key = rng.choice(list(node))
            if rng.random() < 0.05:
                return {k: v for k, v in node.items() if k != key}
            return {**node, key: self._edited(node[key])}
        return self._value(2) if rng.random() < 0.02 else self._like(node)

    def _edited_special(self, node: list[Any]) -> list[Any]:
        code, data = node
        if self._rng.random() < 0.2:
            return [self._rng.choice((*_CODES, 99)), data]
        try:
            return [code, msgspec.msgpack.encode(self._edited(msgspec.msgpack.decode(data)))]
        except (msgspec.DecodeError, RecursionError, UnicodeError, TypeError):
            return [code, self._flip(data)]

    def _like(self, node: Any) -> Any:
        """Return another value of the same type: a neighbour, or a boundary value."""
        rng = self._rng
        if isinstance(node, bool):
            return not node
        if isinstance(node, int):
            near = rng.choice((node + 1, node - 1, node * 2, node * 4, ~node))
            wanted = near if rng.random() < 0.7 else rng.choice(_NUMBERS)
            if rng.random() < 0.9:
                return min(abs(wanted), 2**63 - 1)
            return min(max(wanted, -(2**63)), 2**64 - 1)
        if isinstance(node, float):
            return rng.choice((0.0, -0.0, 1.5, 1e308, float("nan"), float("inf")))
        if isinstance(node, str):
            return rng.choice((*_TEXTS, node + "x", node[:-1], node * 30))
        if isinstance(node, bytes):
            return rng.choice((b"", node[:-1], node + b"\0", node[::-1], self._flip(node)))
        if isinstance(node, list):
            return rng.choice((node, [], [rng.choice(_NUMBERS)], [self._value(1)]))
        return rng.choice((node, self._value(2)))

    def _generated(self) -> Any:
        """Create a frame with the right structure and random values."""
        rng = self._rng
        count = rng.randrange(1, 5)
        tensors = [self._tensor() for _ in range(rng.randrange(1, 4))]
        leaves = [
            [
                rng.choice(
                    (
                        "value",
                        "tensor",
                        "sparse",
                        "dtensor",
                        "sharded",
                        "ndarray",
                        "quantized",
                        "subclass",
                        "buffer",
                        "x",
                    )
                ),
                [rng.randrange(len(tensors)) for _ in range(rng.randrange(4))],
                self._value(3),
                self._value(3),
            ]
            for _ in range(count)
        ]
        keys = rng.choice((None, [f"k{n}" for n in range(count)], [self._value(1) for _ in range(count)]))
        kind = rng.choice(
            (
                *(
                    "list",
                    "tuple",
                    "dict",
                    "odict",
                    "deque",
                    "counter",
                    "defaultdict",
                    "namedtuple",
                    "mapping",
                ),
                *("namespace", "simplenamespace", "mappingproxy", "masked", "return_type"),
            )
        )
        storages = [rng.choice((64, 4096, 1 << 20, 2**40, 2**63 - 1)) for _ in range(rng.randrange(1, 3))]
        manifest = [-1, [[kind, list(range(count)), keys, self._value(1)]], leaves, tensors, storages]
        return [manifest, rng.choice((16, 64, 1 << 20)), None, 0, b"", None, rng.random() < 0.5]

    def _tensor(self) -> list[object]:
        rng = self._rng
        dims = rng.randrange(4)
        sizes = (0, 1, 2, 3, 4, 5, 1000, 2**31, 2**62)
        dtype, itemsize = rng.choice(
            (("float32", 4), ("uint8", 1), ("int64", 8), ("complex128", 16), ("bool", 1))
        )
        return [
            dtype,
            itemsize,
            [rng.choice(sizes) for _ in range(dims)],
            [rng.choice((0, 1, 2, 3, 4, 7, 100, 2**40)) for _ in range(dims)],
            0,
            rng.choice((0, 8, 16, 2**40)),
            rng.random() < 0.1,
            rng.random() < 0.1,
        ]

    def _value(self, depth: int) -> Any:
        rng = self._rng
        made = rng.randrange(11 if depth else 7)
        if made == 0:
            return None
        if made == 1:
            return rng.random() < 0.5
        if made == 2:
            return rng.choice(_NUMBERS)
        if made == 3:
            return rng.choice((0.0, -0.0, 1.5, float("nan"), float("inf")))
        if made == 4:
            return rng.choice(
                (
                    "",
                    "a",
                    "grad",
                    "torch.float32",
                    "cpu",
                    "<f8",
                    "tests.hostile.attacks.values.Mode",
                    kinds.WRAPPER,
                )
            )
        if made == 5:
            return rng.randbytes(rng.randrange(9))
        if made == 6:
            return [rng.randrange(-1, 130), rng.randbytes(rng.randrange(9))]
        if made == 7:
            return [self._value(depth - 1) for _ in range(rng.randrange(4))]
        if made == 8:
            names = ("size", "layout", "grad", "coalesced", "shape", "mesh", "dtype")
            return {rng.choice(names): self._value(depth - 1) for _ in range(rng.randrange(4))}
        payload = msgspec.msgpack.encode(self._value(depth - 1))
        return [rng.choice(_CODES), payload]


class MessageMutator(Mutator):
    """Creates messages of the pull protocol from valid ones, by a seed. They have no frame and no digest."""

    def next(self) -> bytes:
        """Return a message that is damaged, or has other values."""
        number = self._rng.randrange(len(self._bodies))
        if self._rng.random() < 0.3:
            return self.damage(self._bodies[number])
        message = self._trees[number]
        for _ in range(self._rng.choice((1, 1, 2, 3))):
            message = self._edited(message)
        return msgspec.msgpack.encode(message)

    def damage(self, data: bytes) -> bytes:
        """Change some bytes."""
        return self._rng.choice(self._damage)(data)
