"""The states that the benchmark sends, and how it checks what a receiver has.

A state is described by a few numbers (`StateSpec`), so that every process can build the same bits.
`digest_leaves` shares no code with torchferry, which is under test.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
import xxhash
from torch import Tensor

State = dict[str, object]
# By path.
LeafDigests = dict[str, str]

_SEED = 20240501
_FLOAT_BYTES = 4
# No builder, allocator or cleared page leaves this pattern.
_POISON = 0xA5


class StateSpec(Protocol):
    """How to build a state. `state_bytes` counts shared memory once."""

    @property
    def tensors(self) -> int: ...

    @property
    def state_bytes(self) -> int: ...

    def build(self) -> State:
        """Build the state: the same bits in every process, every page written."""
        ...


@dataclass(frozen=True)
class Uniform:
    """`tensors` tensors of one size, each with its own storage, or as views that cover one storage.

    >>> Uniform(3, 64).state_bytes
    192
    """

    tensors: int
    tensor_bytes: int
    views: bool = False

    @property
    def state_bytes(self) -> int:
        return self.tensors * self.tensor_bytes

    def build(self) -> State:
        generator = _generator()
        if self.views:
            tensors = _random(self.state_bytes, generator).chunk(self.tensors)
        else:
            tensors = tuple(_random(self.tensor_bytes, generator) for _ in range(self.tensors))
        return {f"tensor{i:06}": tensor for i, tensor in enumerate(tensors)}


@dataclass(frozen=True)
class Gpt:
    """The state dicts of a model with GPT-2's shapes and of its AdamW optimizer.

    The output layer shares the input embedding's storage, as in GPT-2.
    """

    layers: int
    width: int
    vocabulary: int
    context: int

    @property
    def tensors(self) -> int:
        # Weight, step and two moments for each parameter, and the second name of the embedding.
        return 4 * len(self._shapes()) + 1

    @property
    def state_bytes(self) -> int:
        parameters = [torch.Size(shape).numel() for shape in self._shapes().values()]
        return _FLOAT_BYTES * (3 * sum(parameters) + len(parameters))

    def build(self) -> State:
        generator = _generator()
        shapes = self._shapes()

        def filled(shape: tuple[int, ...]) -> Tensor:
            return _random(torch.Size(shape).numel() * _FLOAT_BYTES, generator).view(shape)

        model = {name: filled(shape) for name, shape in shapes.items()}
        model["lm_head.weight"] = model["transformer.wte.weight"].detach()
        moments = {
            number: {"step": torch.tensor(1000.0), "exp_avg": filled(shape), "exp_avg_sq": filled(shape)}
            for number, shape in enumerate(shapes.values())
        }
        group = {"lr": 6e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
        groups = [{**group, "params": list(range(len(shapes)))}]
        return {"model": model, "optimizer": {"state": moments, "param_groups": groups}}

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        width = self.width
        block = {f"{norm}.{part}": (width,) for norm in ("ln_1", "ln_2") for part in ("weight", "bias")}
        linears = {"attn.c_attn": (1, 3), "attn.c_proj": (1, 1), "mlp.c_fc": (1, 4), "mlp.c_proj": (4, 1)}
        shapes: dict[str, tuple[int, ...]] = {
            "transformer.wte.weight": (self.vocabulary, width),
            "transformer.wpe.weight": (self.context, width),
        }
        for layer in range(self.layers):
            prefix = f"transformer.h.{layer}"
            shapes |= {f"{prefix}.{name}": shape for name, shape in block.items()}
            for name, (rows, columns) in linears.items():
                shapes[f"{prefix}.{name}.weight"] = (rows * width, columns * width)
                shapes[f"{prefix}.{name}.bias"] = (columns * width,)
        return shapes | {"transformer.ln_f.weight": (width,), "transformer.ln_f.bias": (width,)}


def digest_leaves(state: object) -> LeafDigests:
    """Digest every leaf: dtype, shape and bits (128-bit XXH3) of a tensor, the repr of anything else.

    >>> digest_leaves({"a": 1, "b": [True, None]})
    {'a': '1', 'b.0': 'True', 'b.1': 'None'}
    """
    return {path: _digest(leaf) for path, leaf in leaves(state)}


def differing_paths(sent: LeafDigests, received: LeafDigests) -> list[str]:
    """List the paths at which two states differ.

    >>> differing_paths({"a": "1", "b": "2"}, {"a": "1", "b": "3", "c": "4"})
    ['b', 'c']
    """
    return [path for path in {**sent, **received} if sent.get(path) != received.get(path)]


def poison(state: object) -> None:
    """Overwrite every tensor, so that a transfer that writes nothing is detected."""
    for storage in storages(state):
        storage.fill_(_POISON)


def storages(state: object) -> Iterator[Tensor]:
    """Yield the bytes of each storage of a state, once."""
    seen = set()
    for _, leaf in leaves(state):
        if isinstance(leaf, Tensor) and (start := leaf.untyped_storage().data_ptr()) not in seen:
            seen.add(start)
            yield torch.empty(0, dtype=torch.uint8).set_(leaf.untyped_storage())


def leaves(state: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Walk the dicts, lists and tuples of a state.

    >>> list(leaves({"a": {"b": 1}, "c": (2, 3)}))
    [('a.b', 1), ('c.0', 2), ('c.1', 3)]
    """
    if isinstance(state, dict):
        children = [(str(key), value) for key, value in state.items()]
    elif isinstance(state, (list, tuple)):
        children = [(str(number), value) for number, value in enumerate(state)]
    else:
        yield path, state
        return
    for name, value in children:
        yield from leaves(value, f"{path}.{name}" if path else name)


def _digest(leaf: object) -> str:
    if not isinstance(leaf, Tensor):
        return repr(leaf)
    whole = leaf.detach().contiguous()
    raw = (ctypes.c_char * whole.nbytes).from_address(whole.data_ptr()) if whole.nbytes else b""
    return f"{leaf.dtype} {tuple(leaf.shape)} {xxhash.xxh3_128_hexdigest(raw)}"


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(_SEED)


def _random(size_bytes: int, generator: torch.Generator) -> Tensor:
    # Random bits, not random numbers: NaNs and denormals must arrive unchanged too.
    dtype, item_bytes = (torch.int64, 8) if size_bytes % 8 == 0 else (torch.int32, 4)
    return torch.empty(size_bytes // item_bytes, dtype=dtype).random_(generator=generator).view(torch.float32)
